"""Large payloads and results: which task each object in the bucket is of."""

from __future__ import annotations

from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

UPGRADE = [
    """
    create table penstock.payload_object (
        name      text not null,
        task_id   bigint not null,
        looked_at timestamptz not null default now(),
        doomed    boolean not null default false,
        primary key (name, task_id)
    )
    """,
    "create index payload_object_looked_at on penstock.payload_object (looked_at) where not doomed",
    "create index payload_object_doomed on penstock.payload_object (name) where doomed",
    "alter table penstock.emptying drop constraint emptying_known",
    "alter table penstock.emptying add constraint emptying_known check (what in ('payload', 'result', 'orphans'))",
    "comment on table penstock.payload_object is 'Objects in the bucket of large payloads and results, by task'",
    "comment on column penstock.payload_object.name is 'Behind the prefix of PENSTOCK_PAYLOAD_BUCKET'",
    "comment on column penstock.payload_object.task_id is '0: of no task'",
    "comment on column penstock.payload_object.looked_at is 'When it was last asked whether its task still names it'",
    "comment on column penstock.payload_object.doomed is 'To be deleted from the bucket'",
]

DOWNGRADE = [
    "delete from penstock.emptying where what = 'orphans'",
    "alter table penstock.emptying drop constraint emptying_known",
    "alter table penstock.emptying add constraint emptying_known check (what in ('payload', 'result'))",
    "drop table penstock.payload_object",
]


def upgrade() -> None:
    for statement in UPGRADE:
        op.execute(statement)


def downgrade() -> None:
    for statement in DOWNGRADE:
        op.execute(statement)
