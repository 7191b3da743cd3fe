"""Output of tasks: what their handlers log and emit."""

from __future__ import annotations

from alembic import op

revision = "output"
down_revision = "announced"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("""
create table penstock.task_output (
    task_id     bigint not null,
    claim       bigint not null,
    number      integer not null,
    entries     text not null,
    dropped     integer not null,
    worker      text,
    recorded_at timestamptz not null default now(),
    primary key (task_id, claim, number)
)""")
    op.execute("comment on table penstock.task_output is 'Log lines and chunks of tasks'")
    op.execute("comment on column penstock.task_output.entries is 'JSON text of a list, or encrypted'")
    op.execute(
        "comment on column penstock.task_output.dropped is "
        "'How many entries of the attempt its worker had dropped by then, above the limit'"
    )


def downgrade() -> None:
    op.execute("drop table penstock.task_output")
