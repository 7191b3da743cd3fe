"""Journals of durable steps: an entry for each finished step of a task, and a mark at tasks that have any."""

from __future__ import annotations

from alembic import op

revision = "journal"
down_revision = "settle"
branch_labels = None
depends_on = None


# In the body of penstock.replace_tasks, which is the statement of that name.
_WAITS = "claimed_at is null\n        order by id for no key update"
_HAS_NOT_BEGUN = (
    "claimed_at is null\n          and journal is null  -- finished steps belong to the payload that they ran with"
    "\n        order by id for no key update"
)
_REPLACE = "do $do$ begin execute replace(pg_get_functiondef('penstock.replace_tasks'::regproc), '{}', '{}'); end $do$"


def upgrade() -> None:
    op.execute("""
create table penstock.journal_entry (
    task_id     bigint not null,
    name        text not null,
    repetition  integer not null,
    position    integer not null,
    claim       bigint not null,
    entry       text not null,
    failed      boolean not null,
    began_at    timestamptz,
    seconds     double precision,
    tries       integer not null,
    worker      text,
    recorded_at timestamptz not null default now(),
    primary key (task_id, name, repetition)
)""")
    op.execute("comment on table penstock.journal_entry is 'Finished durable steps of tasks'")
    op.execute("comment on column penstock.journal_entry.entry is 'JSON text, as messages of later attempts carry it'")
    op.execute("comment on column penstock.journal_entry.claim is 'The claim whose worker reported it'")
    op.execute("alter table penstock.task add column journal bigint")
    op.execute(
        "comment on column penstock.task.journal is "
        "'The claim up to which reports of steps are no longer accepted, 0 for none; null: it has no journal'"
    )
    op.execute(_REPLACE.format(_WAITS, _HAS_NOT_BEGUN))


def downgrade() -> None:
    op.execute(_REPLACE.format(_HAS_NOT_BEGUN, _WAITS))
    op.execute("alter table penstock.task drop column journal")
    op.execute("drop table penstock.journal_entry")
