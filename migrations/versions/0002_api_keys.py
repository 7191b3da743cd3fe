"""API keys, of which only digests are kept."""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

UPGRADE = [
    """
    create table penstock.api_key (
        id           bigint generated always as identity primary key,
        name         text not null,
        prefix       text not null,
        hash         bytea not null,
        permissions  text[] not null,
        created_at   timestamptz not null default now(),
        expires_at   timestamptz,
        revoked_at   timestamptz,
        last_used_at timestamptz,
        constraint api_key_hash_is_sha256 check (octet_length(hash) = 32),
        constraint api_key_permissions_known check (
            permissions <@ array['enqueue', 'read', 'admin'] and cardinality(permissions) > 0)
    )
    """,
    "create unique index api_key_hash on penstock.api_key (hash)",
    "create unique index api_key_name on penstock.api_key (name) where revoked_at is null",
    "comment on table penstock.api_key is 'Keys of the api; the api reads them every few seconds'",
    "comment on column penstock.api_key.prefix is 'Beginning of the secret, to tell keys apart'",
    "comment on column penstock.api_key.hash is 'SHA-256 of the secret, which itself is nowhere'",
    "comment on column penstock.api_key.last_used_at is 'To the minute or so'",
]

DOWNGRADE = ["drop table penstock.api_key"]


def upgrade() -> None:
    for statement in UPGRADE:
        op.execute(statement)


def downgrade() -> None:
    for statement in DOWNGRADE:
        op.execute(statement)
