"""API keys may be limited to actions, and may do only what a worker or an autoscaler asks for."""

from __future__ import annotations

from alembic import op

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None

_KNOWN = "check (permissions <@ array[{}] and cardinality(permissions) > 0)"

UPGRADE = [
    "alter table penstock.api_key add column actions text[]",
    "comment on column penstock.api_key.actions is "
    "'Patterns of the actions that the key may enqueue; null: all, with a tenant all but the built-in ones'",
    "alter table penstock.api_key drop constraint api_key_permissions_known",
    "alter table penstock.api_key add constraint api_key_permissions_known "
    + _KNOWN.format("'enqueue', 'read', 'admin', 'worker', 'scaling'"),
]

DOWNGRADE = [
    "delete from penstock.api_key where not permissions <@ array['enqueue', 'read', 'admin']",
    "alter table penstock.api_key drop constraint api_key_permissions_known",
    "alter table penstock.api_key add constraint api_key_permissions_known "
    + _KNOWN.format("'enqueue', 'read', 'admin'"),
    "alter table penstock.api_key drop column actions",
]


def upgrade() -> None:
    for statement in UPGRADE:
        op.execute(statement)


def downgrade() -> None:
    for statement in DOWNGRADE:
        op.execute(statement)
