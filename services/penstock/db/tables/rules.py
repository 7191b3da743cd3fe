"""Rules for tasks: actions and their limits, gates, tenants, routes; and jobs that change many tasks at once."""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, Double, Identity, Integer, Table, Text, text
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

from penstock.db.tables.schema import instant, metadata

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
