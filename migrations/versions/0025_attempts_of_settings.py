"""The setting penstock.max_attempts, which any caller may set, keeps to the limit of a task's own max_attempts."""

from __future__ import annotations

from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None

_BEFORE = "coalesce(nullif(current_setting('penstock.max_attempts', true), '')::int, 10);"
_AFTER = "greatest(1, least(1000, coalesce(nullif(current_setting('penstock.max_attempts', true), '')::int, 10)));"


def _rewrite(before: str, after: str) -> str:
    """Change one place of the function behind penstock_enqueue and penstock_enqueue_many; its grants stay."""
    return f"""
do $do$
declare
    body constant text := pg_get_functiondef('penstock.enqueue_tasks'::regproc);
begin
    if strpos(body, $a${before}$a$) = 0 then raise exception 'penstock.enqueue_tasks is another one'; end if;
    execute replace(body, $a${before}$a$, $a${after}$a$);
end $do$
"""


def upgrade() -> None:
    op.execute(_rewrite(_BEFORE, _AFTER))


def downgrade() -> None:
    op.execute(_rewrite(_AFTER, _BEFORE))
