"""Who ran a task: the worker that had its newest claim, as it named itself."""

from __future__ import annotations

from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

# Nullable and without a default: no row is written anew. Processes of the version before leave it null.
UPGRADE = [
    "alter table penstock.task add column worker text",
    "alter table penstock.task_history add column worker text",
    "comment on column penstock.task.worker is "
    "'Worker that told a sign of life or the end of the newest claim, as it named itself; null: none has told'",
    "comment on column penstock.task_history.worker is 'Worker that ran the newest attempt; null: not told'",
]

DOWNGRADE = [
    "alter table penstock.task drop column worker",
    "alter table penstock.task_history drop column worker",
]


def upgrade() -> None:
    for statement in UPGRADE:
        op.execute(statement)


def downgrade() -> None:
    for statement in DOWNGRADE:
        op.execute(statement)
