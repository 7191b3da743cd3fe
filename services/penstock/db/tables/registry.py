"""The tables as SQLAlchemy sees them, for Alembic; a test holds them to the migrations."""

from __future__ import annotations

from penstock.db.tables import access, older_schedulers, rules, schedules, tasks, workflows
from penstock.db.tables.schema import SCHEMA, metadata

__all__ = ["SCHEMA", "access", "metadata", "older_schedulers", "rules", "schedules", "tasks", "workflows"]
