"""The tables as SQLAlchemy sees them, for Alembic; a test holds them to the migrations."""

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
    LargeBinary,
    MetaData,
    Sequence,
    SmallInteger,
    Table,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, ENUM, JSONB

from penstock.protocol.task import State

SCHEMA = "penstock"
metadata = MetaData(schema=SCHEMA)

task_state = ENUM(*(state.value for state in State), name="task_state", schema=SCHEMA, metadata=metadata)
task_id_seq = Sequence("task_id_seq", schema=SCHEMA, metadata=metadata)
claim_seq = Sequence("claim_seq", schema=SCHEMA, metadata=metadata)


def instant(name: str, *, nullable: bool = False, default: bool = False) -> Column[object]:
    server_default = text("now()") if default else None
    return Column(name, DateTime(timezone=True), nullable=nullable, server_default=server_default)


# Tasks on their way and settled, and what stands beside them: keys, waits, receipts, rejected messages, objects.


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
    Column("journal", BigInteger),
)

journal_entry = Table(
    "journal_entry",
    metadata,
    Column("task_id", BigInteger, primary_key=True, autoincrement=False),
    Column("name", Text, primary_key=True),
    Column("repetition", Integer, primary_key=True, autoincrement=False),
    Column("position", Integer, nullable=False),
    Column("claim", BigInteger, nullable=False),
    Column("entry", Text, nullable=False),
    Column("failed", Boolean, nullable=False),
    instant("began_at", nullable=True),
    Column("seconds", Double),
    Column("tries", Integer, nullable=False),
    Column("worker", Text),
    instant("recorded_at", default=True),
)

postponed = Table(
    "postponed",
    metadata,
    Column("task_id", BigInteger, primary_key=True, autoincrement=False),
    Column("action", Text, nullable=False),
    Column("snoozes", Integer, nullable=False, server_default=text("0")),
    Column("attempts", Integer, nullable=False),
    instant("unknown_since", nullable=True),
    instant("returned_at", default=True),
)

announced = Table(
    "announced",
    metadata,
    Column("action", Text, primary_key=True),
    Column("worker", Text, primary_key=True),
    Column("version", Text),
    Column("description", Text),
    Column("params", JSON),
    Column("result", JSON),
    instant("since", default=True),
    instant("seen_at", default=True),
)

task_output = Table(
    "task_output",
    metadata,
    Column("task_id", BigInteger, primary_key=True, autoincrement=False),
    Column("claim", BigInteger, primary_key=True, autoincrement=False),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("entries", Text, nullable=False),
    Column("dropped", Integer, nullable=False),
    Column("worker", Text),
    instant("recorded_at", default=True),
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

# Schedules, their runs and imports.

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

# Workflows: their steps, the edges between them, and the events that move them on.

workflow = Table(
    "workflow",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("key", Text, unique=True),
    Column("name", Text, nullable=False),
    Column("definition", LargeBinary, nullable=False),
    Column("state", Text, nullable=False, server_default="RUNNING"),
    Column("steps", Integer, nullable=False),
    Column("open", Integer, nullable=False),
    Column("reason", Text),
    Column("undo", Text),
    Column("compensated", Boolean, nullable=False, server_default=text("false")),
    instant("created_at", default=True),
    instant("updated_at", default=True),
    instant("finished_at", nullable=True),
    Column("tenant", Text),
)

workflow_step = Table(
    "workflow_step",
    metadata,
    Column("workflow_id", BigInteger, primary_key=True, autoincrement=False),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("name", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("action", Text),
    Column("task_id", BigInteger),
    Column("parent", Integer),
    Column("after", ARRAY(Integer), nullable=False, server_default=text("'{}'")),
    Column("pending", Integer, nullable=False, server_default="0"),
    Column("children", Integer, nullable=False, server_default="0"),
    Column("open_children", Integer, nullable=False, server_default="0"),
    Column("state", task_state, nullable=False, server_default="WAITING"),
    Column("done", Boolean, nullable=False, server_default=text("false")),
    Column("passed", Boolean, nullable=False, server_default=text("false")),
    Column("on_failure", Text, nullable=False, server_default="fail"),
    Column("undo", Text),
    Column("results_as", Text),
    Column("errors_as", Text),
    Column("options", JSON),
    Column("ended", BigInteger),
    Column("reason", Text),
)

workflow_edge = Table(
    "workflow_edge",
    metadata,
    Column("workflow_id", BigInteger, primary_key=True, autoincrement=False),
    Column("predecessor", Integer, primary_key=True, autoincrement=False),
    Column("successor", Integer, primary_key=True, autoincrement=False),
)

workflow_event = Table(
    "workflow_event",
    metadata,
    Column("workflow_id", BigInteger, primary_key=True, autoincrement=False),
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("task_id", BigInteger, nullable=False),
    Column("claim", BigInteger, nullable=False),
    Column("state", task_state, nullable=False),
    Column("children", Text),
)

# Rules for tasks: actions and their limits, gates, tenants, routes; and jobs that change many tasks at once.

action = Table(
    "action",
    metadata,
    Column("name", Text, primary_key=True),
    Column("paused", Boolean, nullable=False, server_default=text("false")),
    Column("max_in_flight", Integer),
    Column("rate", Double),
    Column("burst", Integer),
    Column("key_max_in_flight", Integer),
    Column("key_rate", Double),
    Column("key_burst", Integer),
    Column("tokens", Double),
    instant("refilled_at", nullable=True),
    instant("updated_at", default=True),
    instant("held_until", nullable=True),
)

gate = Table(
    "gate",
    metadata,
    Column("name", Text, primary_key=True),
    Column("action", Text, nullable=False),
    Column("tokens", Double),
    instant("refilled_at", nullable=True),
    instant("next_at", default=True),
    Column("tenant", Text),
    instant("held_until", nullable=True),
)

tenant = Table(
    "tenant",
    metadata,
    Column("name", Text, primary_key=True),
    Column("paused", Boolean, nullable=False, server_default=text("false")),
    Column("own", Boolean, nullable=False, server_default=text("false")),
    Column("max_in_flight", Integer),
    Column("rate", Double),
    Column("burst", Integer),
    instant("updated_at", default=True),
)

tenant_pace = Table(
    "tenant_pace",
    metadata,
    Column("name", Text, primary_key=True),
    Column("tokens", Double),
    instant("refilled_at", nullable=True),
)

route = Table(
    "route",
    metadata,
    Column("name", Text, primary_key=True),
    Column("queue", Text, nullable=False),
    Column("actions", ARRAY(Text), nullable=False),
    Column("labels", JSONB, nullable=False, server_default=text("'{}'")),
    Column("position", Integer, nullable=False, server_default="0"),
    instant("updated_at", default=True),
)

job = Table(
    "job",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("kind", Text, nullable=False),
    Column("params", JSONB, nullable=False),
    Column("state", Text, nullable=False, server_default="RUNNING"),
    Column("cursor", JSONB),
    Column("total", BigInteger),
    Column("seen", BigInteger, nullable=False, server_default="0"),
    Column("changed", BigInteger, nullable=False, server_default="0"),
    Column("refused", BigInteger, nullable=False, server_default="0"),
    Column("errors", JSONB, nullable=False, server_default=text("'[]'")),
    instant("created_at", default=True),
    instant("updated_at", default=True),
    instant("finished_at", nullable=True),
)

# Who may do what, and who did: keys, sessions of the dashboard, the record of changes by hand.

api_key = Table(
    "api_key",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("name", Text, nullable=False),
    Column("prefix", Text, nullable=False),
    Column("hash", LargeBinary, nullable=False),
    Column("permissions", ARRAY(Text), nullable=False),
    instant("created_at", default=True),
    instant("expires_at", nullable=True),
    instant("revoked_at", nullable=True),
    instant("last_used_at", nullable=True),
    Column("tenant", Text),
    Column("actions", ARRAY(Text)),
)

claim_key = Table(
    "claim_key",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("secret", LargeBinary, nullable=False),
    instant("accepted_until", nullable=True),
)

audit = Table(
    "audit",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    instant("at", default=True),
    Column("who", Text, nullable=False),
    Column("address", Text, nullable=False),
    Column("door", Text, nullable=False),
    Column("method", Text, nullable=False),
    Column("params", Text, nullable=False),
    Column("outcome", Text),
    instant("ended_at", nullable=True),
)

dashboard_session = Table(
    "dashboard_session",
    metadata,
    Column("token_hash", LargeBinary, primary_key=True),
    Column("key_hash", LargeBinary, nullable=False),
    instant("created_at", default=True),
    instant("expires_at"),
)

# Tables of older schedulers: delayed records, positions in Kafka, and scheduler0's projects and jobs.

armed = Table(
    "armed",
    metadata,
    Column("id", BigInteger, Identity(), primary_key=True),
    Column("source", Text, nullable=False),
    Column("key", LargeBinary, nullable=False),
    Column("variant", LargeBinary, nullable=False, server_default=text("''")),
    instant("due_at"),
    Column("partition", Integer),
    Column("held", Boolean, nullable=False, server_default=text("false")),
    Column("ordering_key", Text, nullable=False),
    Column("record", Text, nullable=False),
    Column("last", Text),
    UniqueConstraint("source", "key", "variant", name="armed_key"),
)

kafka_position = Table(
    "kafka_position",
    metadata,
    Column("group_id", Text, primary_key=True),
    Column("topic", Text, primary_key=True),
    Column("partition", Integer, primary_key=True, autoincrement=False),
    Column("next_offset", BigInteger, nullable=False),
    Column("complete", Boolean, nullable=False, server_default=text("false")),
    instant("updated_at", default=True),
)

scheduler0_credential = Table(
    "scheduler0_credential",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("api_key", Text, nullable=False, unique=True),
    Column("secret_hash", LargeBinary, nullable=False),
    Column("secret", Text),
    Column("archived", Boolean, nullable=False, server_default=text("false")),
    instant("created_at", default=True),
)

scheduler0_project = Table(
    "scheduler0_project",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("name", Text, nullable=False, unique=True),
    Column("description", Text, nullable=False),
    instant("created_at", default=True),
)

scheduler0_request = Table(
    "scheduler0_request",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("request_id", Text, nullable=False, unique=True),
    Column("import_id", BigInteger, nullable=False),
    Column("input", Text, nullable=False),
    Column("output", Text, nullable=False),
    instant("created_at", default=True),
)

scheduler0_job = Table(
    "scheduler0_job",
    metadata,
    Column("id", BigInteger, Identity(always=False), primary_key=True),
    Column("project_id", BigInteger, ForeignKey(scheduler0_project.c.id), nullable=False),
    Column("import_id", BigInteger, nullable=False),
    Column("spec", Text, nullable=False),
    Column("timezone", Text, nullable=False),
    Column("timezone_offset", BigInteger, nullable=False, server_default="0"),
    Column("callback_url", Text, nullable=False),
    Column("data", Text, nullable=False),
    Column("execution_type", Text, nullable=False),
    instant("start_date", nullable=True),
    instant("end_date", nullable=True),
    instant("created_at"),
)
