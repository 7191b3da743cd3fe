"""Schedules, their runs and imports."""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    DateTime,
    Double,
    ForeignKey,
    Identity,
    Integer,
    SmallInteger,
    Table,
    Text,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

from penstock.db.tables.schema import instant, metadata

schedule = Table(
    "schedule",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("name", Text, nullable=False, unique=True),
    Column("expression", Text, nullable=False),
    Column("timezone", Text, nullable=False),
    instant("start_at", nullable=True),
    instant("end_at", nullable=True),
    Column("jitter_seconds", Double, nullable=False, server_default="0"),
    Column("missed", Text, nullable=False, server_default="one"),
    Column("max_missed", Integer, nullable=False, server_default="100"),
    Column("max_lateness_seconds", Double),
    Column("overlap", Text, nullable=False, server_default="allow"),
    Column("action", Text, nullable=False),
    Column("payload", JSON, nullable=False),
    Column("priority", SmallInteger, nullable=False, server_default="0"),
    Column("max_attempts", SmallInteger),
    Column("timeout_seconds", Double),
    Column("ordering_key", Text),
    Column("labels", JSONB, nullable=False, server_default=text("'{}'")),
    Column("paused", Boolean, nullable=False, server_default=text("false")),
    instant("created_at", default=True),
    instant("updated_at", default=True),
    Column("tenant", Text),
)

schedule_clock = Table(
    "schedule_clock",
    metadata,
    Column("schedule_id", BigInteger, primary_key=True, autoincrement=False),
    instant("next_at", nullable=True),
    instant("due_at", nullable=True),
    instant("last_at", nullable=True),
    Column("last_task_id", BigInteger),
    Column("problem", Text),
)

schedule_run = Table(
    "schedule_run",
    metadata,
    Column("schedule_id", BigInteger, primary_key=True, autoincrement=False),
    Column("scheduled_at", DateTime(timezone=True), primary_key=True),
    Column("outcome", Text, nullable=False),
    instant("fired_at", default=True),
    Column("task_id", BigInteger),
    Column("manual", Boolean, nullable=False, server_default=text("false")),
    instant("since", nullable=True),
    Column("instants", Integer, nullable=False, server_default="1"),
)

schedule_import = Table(
    "schedule_import",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("replace", Boolean, nullable=False),
    Column("total", Integer, nullable=False),
    Column("seen", Integer, nullable=False, server_default="0"),
    Column("created", Integer, nullable=False, server_default="0"),
    Column("replaced", Integer, nullable=False, server_default="0"),
    Column("refused", Integer, nullable=False, server_default="0"),
    Column("errors", JSONB, nullable=False, server_default=text("'[]'")),
    instant("created_at", default=True),
    instant("updated_at", default=True),
    instant("finished_at", nullable=True),
)

schedule_import_part = Table(
    "schedule_import_part",
    metadata,
    Column("import_id", BigInteger, ForeignKey(schedule_import.c.id, ondelete="CASCADE"), primary_key=True,
           autoincrement=False),
    Column("place", Integer, primary_key=True, autoincrement=False),
    Column("entries", Text, nullable=False),
)  # fmt: skip
