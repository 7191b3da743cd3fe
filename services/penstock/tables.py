"""The tables as SQLAlchemy sees them, for the slow paths and for Alembic; a test holds them to the migrations."""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    DateTime,
    Double,
    Identity,
    LargeBinary,
    MetaData,
    Sequence,
    SmallInteger,
    Table,
    Text,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, ENUM, JSONB

from penstock.tasks import State

SCHEMA = "penstock"
metadata = MetaData(schema=SCHEMA)

task_state = ENUM(*(state.value for state in State), name="task_state", schema=SCHEMA, metadata=metadata)
task_id_seq = Sequence("task_id_seq", schema=SCHEMA, metadata=metadata)
claim_seq = Sequence("claim_seq", schema=SCHEMA, metadata=metadata)


def _instant(name: str, *, nullable: bool = False, default: bool = False) -> Column[object]:
    server_default = text("now()") if default else None
    return Column(name, DateTime(timezone=True), nullable=nullable, server_default=server_default)


def _task_columns() -> list[Column[object]]:
    return [
        Column("state", task_state, nullable=False),
        Column("action", Text, nullable=False),
        Column("payload", JSON, nullable=False),
        Column("priority", SmallInteger, nullable=False),
        _instant("run_at"),
        Column("attempts", SmallInteger, nullable=False, server_default="0"),
        Column("max_attempts", SmallInteger, nullable=False),
        Column("claim", BigInteger, nullable=False, server_default="0"),
        _instant("claimed_at", nullable=True),
        _instant("created_at"),
        _instant("updated_at"),
        Column("timeout_seconds", Double),
        Column("unique_key", Text),
        Column("ordering_key", Text),
        Column("progress", JSON),
        Column("failures", JSONB),
    ]


task = Table(
    "task",
    metadata,
    Column("id", BigInteger, primary_key=True, server_default=text("nextval('penstock.task_id_seq')")),
    *_task_columns(),
    _instant("heartbeat_at", nullable=True),
    Column("suspect", Boolean, nullable=False, server_default=text("false")),
)

task_history = Table(
    "task_history",
    metadata,
    Column("id", BigInteger, nullable=False),
    *_task_columns(),
    _instant("finished_at"),
    Column("result", JSON),
)

unique_key = Table(
    "unique_key",
    metadata,
    Column("action", Text, primary_key=True),
    Column("key", Text, primary_key=True),
    Column("task_id", BigInteger, nullable=False),
)

ordering_head = Table(
    "ordering_head",
    metadata,
    Column("key", Text, primary_key=True),
    Column("task_id", BigInteger, nullable=False),
)

dispatch = Table(
    "dispatch",
    metadata,
    Column("id", BigInteger, primary_key=True, autoincrement=False),
    _instant("claimed_at"),
)

inbound_receipt = Table(
    "inbound_receipt",
    metadata,
    Column("message_id", Text, primary_key=True),
    _instant("received_at", default=True),
)

rejected = Table(
    "rejected",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("source", Text, nullable=False),
    Column("body", LargeBinary, nullable=False),
    Column("reason", Text, nullable=False),
    _instant("at", default=True),
)

tally = Table(
    "tally",
    metadata,
    _instant("at", default=True),
    Column("action", Text, nullable=False),
    Column("event", Text, nullable=False),
    Column("count", BigInteger, nullable=False),
    Column("seconds", Double, nullable=False, server_default="0"),
)

api_key = Table(
    "api_key",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("name", Text, nullable=False),
    Column("prefix", Text, nullable=False),
    Column("hash", LargeBinary, nullable=False),
    Column("permissions", ARRAY(Text), nullable=False),
    _instant("created_at", default=True),
    _instant("expires_at", nullable=True),
    _instant("revoked_at", nullable=True),
    _instant("last_used_at", nullable=True),
)
