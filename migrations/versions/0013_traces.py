"""The trace that a task belongs to."""

from __future__ import annotations

from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

UPGRADE = [
    "alter table penstock.task add column trace text",
    "alter table penstock.task_history add column trace text",
    "comment on column penstock.task.trace is "
    "'Context of its enqueue, as W3C traceparent, a space and tracestate where there is one; null: it is not traced'",
    # Behind penstock_enqueue_many, in the same transaction: only what this very transaction has added.
    """
    create function public.penstock_note_trace(ids bigint[], trace text) returns void
    language sql security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off as $$
        update penstock.task t set trace = $2
        where t.id = any($1) and t.created_at = now() and t.trace is null and length($2) <= 600
          and $2 ~ '^00-[0-9a-f]{32}-[0-9a-f]{16}-'
    $$
    """,
    "revoke all on function public.penstock_note_trace from public",
    "comment on function public.penstock_note_trace is 'Has tasks that this transaction added belong to a trace'",
]

DOWNGRADE = [
    "drop function public.penstock_note_trace",
    "alter table penstock.task_history drop column trace",
    "alter table penstock.task drop column trace",
]


def upgrade() -> None:
    for statement in UPGRADE:
        op.execute(statement)


def downgrade() -> None:
    for statement in DOWNGRADE:
        op.execute(statement)
