"""Who may do what, and who did: keys, sessions of the dashboard, the record of changes by hand."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Identity, LargeBinary, Table, Text
from sqlalchemy.dialects.postgresql import ARRAY

from penstock.db.tables.schema import instant, metadata

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
    Column("secret", LargeBinary),
    instant("signs_from", default=True),
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
