"""The dashboard: who did what, and who is signed in."""

from __future__ import annotations

from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

UPGRADE = [
    """
    create table penstock.audit (
        id       bigint generated always as identity primary key,
        at       timestamptz not null default now(),
        who      text not null,
        address  text not null,
        door     text not null,
        method   text not null,
        params   text not null,
        outcome  text,
        ended_at timestamptz,
        constraint audit_ends_with_outcome check ((outcome is null) = (ended_at is null))
    )
    """,
    "create index audit_at on penstock.audit (at)",
    """
    create table penstock.dashboard_session (
        token_hash bytea primary key,
        key_hash   bytea not null,
        created_at timestamptz not null default now(),
        expires_at timestamptz not null
    )
    """,
    "create index dashboard_session_expires_at on penstock.dashboard_session (expires_at)",
    "comment on table penstock.audit is 'What was changed by hand: noted before it is done, its outcome afterwards'",
    "comment on column penstock.audit.who is 'Name of the API key; empty where none is asked for'",
    "comment on column penstock.audit.door is 'By which way it came: dashboard or http'",
    "comment on column penstock.audit.params is 'As JSON, payloads left out and long ones cut'",
    "comment on column penstock.audit.outcome is 'ok, or the error; null: under way, or the api died in the middle'",
    "comment on table penstock.dashboard_session is 'Browsers that have signed in, until expires_at'",
    "comment on column penstock.dashboard_session.token_hash is 'SHA-256 of the cookie'",
    "comment on column penstock.dashboard_session.key_hash is 'SHA-256 of the API key that was shown'",
]

DOWNGRADE = ["drop table penstock.dashboard_session, penstock.audit"]


def upgrade() -> None:
    for statement in UPGRADE:
        op.execute(statement)


def downgrade() -> None:
    for statement in DOWNGRADE:
        op.execute(statement)
