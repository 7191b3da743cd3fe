"""Workflows: their steps, the edges between them, and the events that move them on."""

from __future__ import annotations

from sqlalchemy import JSON, BigInteger, Boolean, Column, Identity, Integer, LargeBinary, Table, Text, text
from sqlalchemy.dialects.postgresql import ARRAY

from penstock.db.tables.schema import instant, metadata, task_state

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
