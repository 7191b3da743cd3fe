"""The schema that all tables are in, and what several of them are made of."""

from __future__ import annotations

from sqlalchemy import Column, DateTime, MetaData, Sequence, text
from sqlalchemy.dialects.postgresql import ENUM

from penstock.protocol.task import State

SCHEMA = "penstock"
metadata = MetaData(schema=SCHEMA)

task_state = ENUM(*(state.value for state in State), name="task_state", schema=SCHEMA, metadata=metadata)
task_id_seq = Sequence("task_id_seq", schema=SCHEMA, metadata=metadata)
claim_seq = Sequence("claim_seq", schema=SCHEMA, metadata=metadata)


def instant(name: str, *, nullable: bool = False, default: bool = False) -> Column[object]:
    server_default = text("now()") if default else None
    return Column(name, DateTime(timezone=True), nullable=nullable, server_default=server_default)
