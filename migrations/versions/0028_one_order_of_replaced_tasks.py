"""Bodies that replace tasks lock them by id, as their cancellation does."""

from __future__ import annotations

from alembic import op

revision = "0028"
down_revision = "0027"
branch_labels = None
depends_on = None

_BEFORE = """\
where t.id = i.id and t.id = any($1::bigint[]) and t.state::text in ('WAITING', 'SCHEDULED', 'ERROR')
  and t.claimed_at is null
returning t.id, t.state::text as state"""
# sql/enqueue.sql. A test holds the texts together.
_AFTER = """\
where t.id = i.id and t.id = any(array(
        select id from penstock.task
        where id = any($1::bigint[]) and state::text in ('WAITING', 'SCHEDULED', 'ERROR') and claimed_at is null
        order by id for no key update))  -- in the order of cancel_tasks, or the two deadlock
returning t.id, t.state::text as state"""

# A body that names a key again replaces its task by a later statement than the others. The tasks of all its keys are
# locked before the first.
_FIRST = """\
            if 'replace' = any(policies[first:last]) then
"""
_LOCKED_FIRST = """\
            if first = 1 and last < count and 'replace' = any(policies) then
                -- What a later part replaces is locked along with what this one does: all by id, as cancel_tasks.
                perform from penstock.task t
                where t.id = any(ids) and t.state::text in ('WAITING', 'SCHEDULED', 'ERROR') and t.claimed_at is null
                order by t.id for no key update;
            end if;
"""


def _rewrite(function: str, before: str, after: str) -> None:
    """Change the text of a function, or fail where it is not what it is taken for."""
    op.execute(f"""
        do $do$ declare body text := pg_get_functiondef('penstock.{function}'::regproc); begin
            if strpos(body, $a${before}$a$) = 0 then raise exception 'penstock.{function} is another one'; end if;
            execute replace(body, $a${before}$a$, $a${after}$a$);
        end $do$""")


def upgrade() -> None:
    _rewrite("replace_tasks", _BEFORE, _AFTER)
    _rewrite("enqueue_tasks", _FIRST, _LOCKED_FIRST + _FIRST)


def downgrade() -> None:
    _rewrite("enqueue_tasks", _LOCKED_FIRST + _FIRST, _FIRST)
    _rewrite("replace_tasks", _AFTER, _BEFORE)
