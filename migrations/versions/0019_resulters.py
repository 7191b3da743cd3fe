"""Resulters: how far each is behind with what it reads, by which the supervisor judges silence."""

from __future__ import annotations

from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None

UPGRADE = [
    # Each row is written once a second; no column that changes is indexed, so the update is HOT.
    """
    create table penstock.resulter (
        name     text primary key,
        lag      double precision,
        since    timestamptz not null default now(),
        noted_at timestamptz not null default now()
    ) with (fillfactor = 20)
    """,
    "comment on table penstock.resulter is 'How far the results that each resulter reads are behind'",
    "comment on column penstock.resulter.lag is "
    "'Seconds since the oldest result was sent that it holds, or recorded lately; null where the queue does not tell'",
    "comment on column penstock.resulter.since is 'From when on it has read and recorded without interruption'",
]

DOWNGRADE = ["drop table penstock.resulter"]


def upgrade() -> None:
    for statement in UPGRADE:
        op.execute(statement)


def downgrade() -> None:
    for statement in DOWNGRADE:
        op.execute(statement)
