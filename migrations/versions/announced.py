"""What workers give back and why: postponed tasks, announced actions, limits that a handler has held."""

from __future__ import annotations

from alembic import op

revision = "announced"
down_revision = "journal"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("""
create table penstock.postponed (
    task_id       bigint primary key,
    action        text not null,
    snoozes       integer not null default 0,
    attempts      integer not null,
    unknown_since timestamptz,
    returned_at   timestamptz not null default now()
)""")
    op.execute(
        "create index postponed_unknown on penstock.postponed (action, returned_at) where unknown_since is not null"
    )
    op.execute("comment on table penstock.postponed is 'Tasks that workers gave back without spending an attempt'")
    op.execute("comment on column penstock.postponed.snoozes is 'How often a handler asked for it'")
    op.execute("comment on column penstock.postponed.attempts is 'Attempts of the task when it was given back last'")
    op.execute(
        "comment on column penstock.postponed.unknown_since is "
        "'Since when workers without a handler give it back; null: its handler did'"
    )
    op.execute("""
create table penstock.announced (
    action      text not null,
    worker      text not null,
    version     text,
    description text,
    params      json,
    result      json,
    since       timestamptz not null default now(),
    seen_at     timestamptz not null default now(),
    primary key (action, worker)
)""")
    op.execute("comment on table penstock.announced is 'The actions that each worker says it runs'")
    op.execute("comment on column penstock.announced.since is 'Of the first announcement without a gap'")
    op.execute("alter table penstock.action add column held_until timestamptz")
    op.execute("comment on column penstock.action.held_until is 'No task is sent before: a handler met a rate limit'")
    op.execute("alter table penstock.gate add column held_until timestamptz")
    op.execute("comment on column penstock.gate.held_until is 'As of an action, for one limit key'")


def downgrade() -> None:
    op.execute("alter table penstock.gate drop column held_until")
    op.execute("alter table penstock.action drop column held_until")
    op.execute("drop table penstock.announced")
    op.execute("drop table penstock.postponed")
