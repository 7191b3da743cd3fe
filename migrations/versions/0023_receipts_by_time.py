"""An index by which old receipts are found; without, each look for them reads all."""

from __future__ import annotations

from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None


def upgrade() -> None:
    if op.get_context().as_sql:  # run as one script, which may be one transaction, from nothing
        op.execute("create index inbound_receipt_received_at on penstock.inbound_receipt (received_at)")
        return
    with op.get_context().autocommit_block():
        # Left over and of no use where a try before did not get its lock.
        op.execute("drop index concurrently if exists penstock.inbound_receipt_received_at")
        op.execute("create index concurrently inbound_receipt_received_at on penstock.inbound_receipt (received_at)")


def downgrade() -> None:
    op.execute("drop index penstock.inbound_receipt_received_at")
