"""Rejected messages may come from the topics of kafka-message-scheduler's clients."""

from __future__ import annotations

from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

UPGRADE = [
    "alter table penstock.rejected drop constraint rejected_source_check",
    "alter table penstock.rejected add constraint rejected_source_check "
    "check (source in ('inbound', 'results', 'kafka-source')) not valid",
    "alter table penstock.rejected validate constraint rejected_source_check",
]

DOWNGRADE = [
    "delete from penstock.rejected where source = 'kafka-source'",
    "alter table penstock.rejected drop constraint rejected_source_check",
    "alter table penstock.rejected add constraint rejected_source_check check (source in ('inbound', 'results'))",
]


def upgrade() -> None:
    for statement in UPGRADE:
        op.execute(statement)


def downgrade() -> None:
    for statement in DOWNGRADE:
        op.execute(statement)
