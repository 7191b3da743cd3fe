"""Turns: tasks whose ordering key has become theirs, told by the batch that settled those before them."""

from __future__ import annotations

from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

UPGRADE = [
    # One row for many tasks of one priority, with the run_at and the key of each. Turns are put in order by the lowest
    # run_at and id. One lives for a moment, so compressing it would cost more than it saves.
    """
    create table penstock.turn (
        id         bigint generated always as identity primary key,
        priority   smallint not null,
        run_at     timestamptz not null,
        task_id    bigint not null,
        size       int not null,
        task_ids   bigint[] not null,
        run_ats    timestamptz[] not null,
        keys       text[] not null,
        ends_at    timestamptz not null
    ) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 0)
    """,
    "alter table penstock.turn alter task_ids set storage external, alter run_ats set storage external, "
    "alter keys set storage external",
    "create index turn_ends_at on penstock.turn (ends_at)",
]

DOWNGRADE = [
    # What was let go by a turn alone has to be so by its state.
    """
    update penstock.task set state = 'SCHEDULED', updated_at = now()
    where id = any(array(select unnest(task_ids) from penstock.turn)) and state = 'WAITING' and claimed_at is null
    """,
    "drop table penstock.turn",
]


def upgrade() -> None:
    for statement in UPGRADE:
        op.execute(statement)


def downgrade() -> None:
    for statement in DOWNGRADE:
        op.execute(statement)
