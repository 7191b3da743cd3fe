"""Process: JSON-RPC over HTTP, access, audit, dead letters, long polls for results."""
