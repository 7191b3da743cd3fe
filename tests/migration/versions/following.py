"""A revision of tests alone, behind the newest one that ships: what docs/upgrading.md lets a migration do."""

from __future__ import annotations

from alembic import op
from alembic.script import ScriptDirectory

from penstock.db.migrate import migrations_path

revision = "following"
down_revision = ScriptDirectory(str(migrations_path())).get_current_head()
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("alter table penstock.task add column following text")
    op.execute("alter table penstock.task_history add column following text")
    op.execute("alter table penstock.tally add column following int not null default 0")
    op.execute("alter table penstock.rejected drop constraint rejected_source_check")
    op.execute("alter table penstock.rejected add constraint rejected_source_check check (source <> '') not valid")
    op.execute("create table penstock.following (id bigint primary key)")
    op.execute("create function penstock.following(a int default 1) returns int language sql as 'select a'")


def downgrade() -> None:
    op.execute("drop function penstock.following(int)")
    op.execute("drop table penstock.following")
    op.execute("delete from penstock.rejected where source not in ('inbound', 'results', 'kafka-source')")
    op.execute("alter table penstock.rejected drop constraint rejected_source_check")
    op.execute(
        "alter table penstock.rejected add constraint rejected_source_check "
        "check (source in ('inbound', 'results', 'kafka-source'))"
    )
    for table in ("tally", "task_history", "task"):
        op.execute(f"alter table penstock.{table} drop column following")
