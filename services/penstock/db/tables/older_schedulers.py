"""Tables of older schedulers: delayed records, positions in Kafka, and scheduler0's projects and jobs."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    ForeignKey,
    Identity,
    Integer,
    LargeBinary,
    Table,
    Text,
    UniqueConstraint,
    text,
)

from penstock.db.tables.schema import instant, metadata

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
