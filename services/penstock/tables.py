"""The tables as SQLAlchemy sees them, for the slow paths and for Alembic; a test holds them to the migrations."""

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
        Column("labels", JSONB),
        _instant("expires_at", nullable=True),
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
    _instant("heartbeat_at", nullable=True),
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
    _instant("finished_at"),
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
    _instant("taken_at", default=True),
)

ordering_head = Table(
    "ordering_head",
    metadata,
    Column("key", Text, primary_key=True),
    Column("task_id", BigInteger, nullable=False),
    Column("held", Boolean, nullable=False, server_default=text("false")),
)

wait = Table(
    "wait",
    metadata,
    Column("token", Text, primary_key=True),
    Column("task_id", BigInteger),
    Column("claim", BigInteger),
    _instant("deadline", nullable=True),
    Column("policy", JSONB),
    Column("answer", Text),
    Column("digest", LargeBinary),
    _instant("updated_at", default=True),
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

emptying = Table(
    "emptying",
    metadata,
    Column("what", Text, primary_key=True),
    _instant("upto"),
    Column("step_seconds", Double, nullable=False),
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
    Column("tenant", Text),
)

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
    _instant("refilled_at", nullable=True),
    _instant("updated_at", default=True),
)

gate = Table(
    "gate",
    metadata,
    Column("name", Text, primary_key=True),
    Column("action", Text, nullable=False),
    Column("tokens", Double),
    _instant("refilled_at", nullable=True),
    _instant("next_at", default=True),
    Column("tenant", Text),
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
    _instant("updated_at", default=True),
)

tenant_pace = Table(
    "tenant_pace",
    metadata,
    Column("name", Text, primary_key=True),
    Column("tokens", Double),
    _instant("refilled_at", nullable=True),
)

route = Table(
    "route",
    metadata,
    Column("name", Text, primary_key=True),
    Column("queue", Text, nullable=False),
    Column("actions", ARRAY(Text), nullable=False),
    Column("labels", JSONB, nullable=False, server_default=text("'{}'")),
    Column("position", Integer, nullable=False, server_default="0"),
    _instant("updated_at", default=True),
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
    _instant("created_at", default=True),
    _instant("updated_at", default=True),
    _instant("finished_at", nullable=True),
)

schedule = Table(
    "schedule",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("name", Text, nullable=False, unique=True),
    Column("expression", Text, nullable=False),
    Column("timezone", Text, nullable=False),
    _instant("start_at", nullable=True),
    _instant("end_at", nullable=True),
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
    _instant("created_at", default=True),
    _instant("updated_at", default=True),
    Column("tenant", Text),
)

schedule_clock = Table(
    "schedule_clock",
    metadata,
    Column("schedule_id", BigInteger, primary_key=True, autoincrement=False),
    _instant("next_at", nullable=True),
    _instant("due_at", nullable=True),
    _instant("last_at", nullable=True),
    Column("last_task_id", BigInteger),
    Column("problem", Text),
)

schedule_run = Table(
    "schedule_run",
    metadata,
    Column("schedule_id", BigInteger, primary_key=True, autoincrement=False),
    Column("scheduled_at", DateTime(timezone=True), primary_key=True),
    Column("outcome", Text, nullable=False),
    _instant("fired_at", default=True),
    Column("task_id", BigInteger),
    Column("manual", Boolean, nullable=False, server_default=text("false")),
    _instant("since", nullable=True),
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
    _instant("created_at", default=True),
    _instant("updated_at", default=True),
    _instant("finished_at", nullable=True),
)

schedule_import_part = Table(
    "schedule_import_part",
    metadata,
    Column("import_id", BigInteger, ForeignKey(schedule_import.c.id, ondelete="CASCADE"), primary_key=True,
           autoincrement=False),
    Column("place", Integer, primary_key=True, autoincrement=False),
    Column("entries", Text, nullable=False),
)  # fmt: skip

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
    _instant("created_at", default=True),
    _instant("updated_at", default=True),
    _instant("finished_at", nullable=True),
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

scheduler0_credential = Table(
    "scheduler0_credential",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("api_key", Text, nullable=False, unique=True),
    Column("secret_hash", LargeBinary, nullable=False),
    Column("secret", Text),
    Column("archived", Boolean, nullable=False, server_default=text("false")),
    _instant("created_at", default=True),
)

scheduler0_project = Table(
    "scheduler0_project",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("name", Text, nullable=False, unique=True),
    Column("description", Text, nullable=False),
    _instant("created_at", default=True),
)

scheduler0_request = Table(
    "scheduler0_request",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("request_id", Text, nullable=False, unique=True),
    Column("import_id", BigInteger, nullable=False),
    Column("input", Text, nullable=False),
    Column("output", Text, nullable=False),
    _instant("created_at", default=True),
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
    _instant("start_date", nullable=True),
    _instant("end_date", nullable=True),
    _instant("created_at"),
)

payload_object = Table(
    "payload_object",
    metadata,
    Column("name", Text, primary_key=True),
    Column("task_id", BigInteger, primary_key=True, autoincrement=False),
    _instant("looked_at", default=True),
    Column("doomed", Boolean, nullable=False, server_default=text("false")),
)

armed = Table(
    "armed",
    metadata,
    Column("id", BigInteger, Identity(), primary_key=True),
    Column("source", Text, nullable=False),
    Column("key", LargeBinary, nullable=False),
    Column("variant", LargeBinary, nullable=False, server_default=text("''")),
    _instant("due_at"),
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
    _instant("updated_at", default=True),
)

audit = Table(
    "audit",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    _instant("at", default=True),
    Column("who", Text, nullable=False),
    Column("address", Text, nullable=False),
    Column("door", Text, nullable=False),
    Column("method", Text, nullable=False),
    Column("params", Text, nullable=False),
    Column("outcome", Text),
    _instant("ended_at", nullable=True),
)

dashboard_session = Table(
    "dashboard_session",
    metadata,
    Column("token_hash", LargeBinary, primary_key=True),
    Column("key_hash", LargeBinary, nullable=False),
    _instant("created_at", default=True),
    _instant("expires_at"),
)
