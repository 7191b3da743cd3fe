"""Table definitions, which Alembic and a test compare with the schema."""
