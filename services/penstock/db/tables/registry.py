"""The tables as SQLAlchemy sees them, for Alembic; a test holds them to the migrations."""

from __future__ import annotations

from penstock.db.tables import access, older_schedulers, rules, schedules, tasks, workflows
from penstock.db.tables.schema import metadata

MODULES = (access, older_schedulers, rules, schedules, tasks, workflows)
METADATA = metadata
"""With every table: the modules above have declared theirs."""
