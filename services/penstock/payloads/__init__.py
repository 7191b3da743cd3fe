"""Large payloads in S3, and encryption at rest."""
