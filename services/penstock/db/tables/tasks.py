"""Tasks on their way and settled, and what stands beside them: keys, waits, receipts, rejected messages, objects."""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    DateTime,
    Double,
    Identity,
    Integer,
    LargeBinary,
    SmallInteger,
    Table,
    Text,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

from penstock.db.tables.schema import instant, metadata, task_state


def _task_columns() -> list[Column[object]]:
    return [
        Column("state", task_state, nullable=False),
        Column("action", Text, nullable=False),
        Column("payload", JSON, nullable=False),
        Column("priority", SmallInteger, nullable=False),
        instant("run_at"),
        Column("attempts", SmallInteger, nullable=False, server_default="0"),
        Column("max_attempts", SmallInteger, nullable=False),
        Column("claim", BigInteger, nullable=False, server_default="0"),
        instant("claimed_at", nullable=True),
        instant("created_at"),
        instant("updated_at"),
        Column("timeout_seconds", Double),
        Column("unique_key", Text),
        Column("ordering_key", Text),
        Column("progress", JSON),
        Column("failures", JSONB),
        Column("labels", JSONB),
        instant("expires_at", nullable=True),
        Column("limit_key", Text),
        Column("tenant", Text),
        Column("trace", Text),
        Column("worker", Text),
    ]


task = Table(
    "task",
    metadata,
    Column("id", BigInteger, primary_key=True, server_default=text("nextval('penstock.task_id_seq')")),
    *_task_columns(),
    instant("heartbeat_at", nullable=True),
    Column("suspect", Boolean, nullable=False, server_default=text("false")),
    Column("route", Text),
    Column("gate", Text),
    Column("workflow", BigInteger),
)

task_history = Table(
    "task_history",
    metadata,
    Column("id", BigInteger, nullable=False),
    *_task_columns(),
    instant("finished_at"),
    Column("result", JSON),
    Column("reason", Text),
    Column("payload_gone", Boolean),
    Column("result_gone", Boolean),
    Column("workflow", BigInteger),
)

unique_key = Table(
    "unique_key",
    metadata,
    Column("action", Text, primary_key=True),
    Column("key", Text, primary_key=True),
    Column("task_id", BigInteger, nullable=False),
    instant("taken_at", default=True),
)

ordering_head = Table(
    "ordering_head",
    metadata,
    Column("key", Text, primary_key=True),
    Column("task_id", BigInteger, nullable=False),
    Column("held", Boolean, nullable=False, server_default=text("false")),
)

turn = Table(
    "turn",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("priority", SmallInteger, nullable=False),
    instant("run_at"),
    Column("task_id", BigInteger, nullable=False),
    Column("size", Integer, nullable=False),
    Column("task_ids", ARRAY(BigInteger), nullable=False),
    Column("run_ats", ARRAY(DateTime(timezone=True)), nullable=False),
    Column("keys", ARRAY(Text), nullable=False),
    instant("ends_at"),
)

wait = Table(
    "wait",
    metadata,
    Column("token", Text, primary_key=True),
    Column("task_id", BigInteger),
    Column("claim", BigInteger),
    instant("deadline", nullable=True),
    Column("policy", JSONB),
    Column("answer", Text),
    Column("digest", LargeBinary),
    instant("updated_at", default=True),
)

dispatch = Table(
    "dispatch",
    metadata,
    Column("id", BigInteger, primary_key=True, autoincrement=False),
    instant("claimed_at"),
)

inbound_receipt = Table(
    "inbound_receipt",
    metadata,
    Column("message_id", Text, primary_key=True),
    instant("received_at", default=True),
)

rejected = Table(
    "rejected",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("source", Text, nullable=False),
    Column("body", LargeBinary, nullable=False),
    Column("reason", Text, nullable=False),
    instant("at", default=True),
)

tally = Table(
    "tally",
    metadata,
    instant("at", default=True),
    Column("action", Text, nullable=False),
    Column("event", Text, nullable=False),
    Column("count", BigInteger, nullable=False),
    Column("seconds", Double, nullable=False, server_default="0"),
)

payload_object = Table(
    "payload_object",
    metadata,
    Column("name", Text, primary_key=True),
    Column("task_id", BigInteger, primary_key=True, autoincrement=False),
    instant("looked_at", default=True),
    Column("doomed", Boolean, nullable=False, server_default=text("false")),
)

resulter = Table(
    "resulter",
    metadata,
    Column("name", Text, primary_key=True),
    Column("lag", Double),
    instant("since", default=True),
    instant("noted_at", default=True),
)

emptying = Table(
    "emptying",
    metadata,
    Column("what", Text, primary_key=True),
    instant("upto"),
    Column("step_seconds", Double, nullable=False),
)

forgetting = Table(
    "forgetting",
    metadata,
    Column("partition", Text, primary_key=True),
    Column("filenode", BigInteger, nullable=False),
    Column("next_block", BigInteger, nullable=False, server_default=text("0")),
    Column("counts", JSONB, nullable=False, server_default=text("'{}'")),
)

default_move = Table(
    "default_move",
    metadata,
    Column("parent", Text, primary_key=True),
    Column("filenode", BigInteger, nullable=False),
    Column("next_block", BigInteger, nullable=False, server_default=text("0")),
    Column("blocks", BigInteger, nullable=False),
)

default_change = Table(
    "default_change",
    metadata,
    Column("parent", Text, primary_key=True),
    Column("place", BigInteger, Identity(always=True), primary_key=True),
    Column("id", BigInteger, nullable=False),
)
