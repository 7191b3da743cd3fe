"""Replaced tasks take a new expiry and stand in line again; results that are settled hold what Postgres can read."""

from __future__ import annotations

from alembic import op

revision = "replaced"
down_revision = "limits_in_bytes"
branch_labels = None
depends_on = None


_TIMES = "timestamp with time zone[]"
_SECONDS = "double precision[]"
_GIVEN = f"bigint[], text[], {_TIMES}, {_SECONDS}, smallint[]"
_REPLACE_TASKS = [  # texts of the function, and what each becomes
    (f"{_GIVEN})", f"{_GIVEN}, {_TIMES} DEFAULT NULL::{_TIMES}, {_SECONDS} DEFAULT NULL::{_SECONDS})"),
    (
        "$5 priorities or null;\n-- what is null stays. Tasks",
        "$5 priorities or null,\n"
        "-- $6 expires_at or null, $7 expires in so many seconds or null; what is null stays, but for an expiry that "
        "has passed.\n-- Tasks",
    ),
    ("updated_at = now(),\n", "updated_at = now(), route = null, gate = null,\n"),
    (
        "t.run_at)\nfrom",
        "t.run_at),\n    expires_at = coalesce(i.expires_at, now() + make_interval(secs => i.expires_in),\n"
        "                          case when t.expires_at > now() then t.expires_at end)\nfrom",
    ),
    (
        "$5::int2[])\n      r (id, payload, run_at, delay, priority)) i",
        "$5::int2[], $6::timestamptz[],\n"
        "                           $7::float8[]) r (id, payload, run_at, delay, priority, expires_at, expires_in)) i",
    ),
]
_ENQUEUE_TASKS = [
    ("t.delay, t.priority\n", "t.delay, t.priority, t.expires_at, t.expires_in\n"),
    (
        "given_priorities[first:last])\n",
        "given_priorities[first:last],\n"
        "                                    expiries[first:last], expiry_seconds[first:last])\n",
    ),
    (
        "run_at, delay, priority, n)\n",
        "run_at, delay, priority, expires_at,\n                                               expires_in, n)\n",
    ),
    (
        "array(select priority from wanted order by n)) r",
        "array(select priority from wanted order by n),\n"
        "                        array(select expires_at from wanted order by n),\n"
        "                        array(select expires_in from wanted order by n)) r",
    ),
]


# NUL and half a surrogate pair become U+FFFD, as in results that workers send. Escaped backslashes and pairs stand
# aside meanwhile, as characters that no JSON text holds.
_REPLACED = r"""        if body ~ '\\u(0000|[dD][89a-fA-F])' then
            body := replace(body, '\\', E'\x01');
            body := regexp_replace(body, '\\(u[dD][89abAB][0-9a-fA-F]{2})\\(u[dD][c-fC-F])', E'\x02\\1\x02\\2', 'g');
            body := regexp_replace(body, '\\u(0000|[dD][89a-fA-F][0-9a-fA-F]{2})', '\\ufffd', 'g');
            body := replace(replace(body, E'\x02', '\'), E'\x01', '\\');
        end if;
"""
_ESCAPED = r"""        if body ~ '^\s*"penstock\+"""
_SETTLE = [(_ESCAPED, _REPLACED + _ESCAPED)]


def _change(function: str, changes: list[tuple[str, str]]) -> None:
    text = f"pg_get_functiondef('{function}'::regproc)"
    for old, new in changes:
        text = f"replace({text}, $old${old}$old$, $new${new}$new$)"
    op.execute(f"do $do$ begin execute {text}; end $do$")


def upgrade() -> None:
    _change("penstock.replace_tasks", _REPLACE_TASKS)
    op.execute(f"drop function penstock.replace_tasks({_GIVEN})")
    op.execute("revoke all on function penstock.replace_tasks from public")
    _change("penstock.enqueue_tasks", _ENQUEUE_TASKS)
    _change("public.penstock_settle", _SETTLE)


def downgrade() -> None:
    _change("public.penstock_settle", [(new, old) for old, new in _SETTLE])
    _change("penstock.enqueue_tasks", [(new, old) for old, new in _ENQUEUE_TASKS])
    _change("penstock.replace_tasks", [(new, old) for old, new in _REPLACE_TASKS])
    op.execute(f"drop function penstock.replace_tasks({_GIVEN}, {_TIMES}, {_SECONDS})")
    op.execute("revoke all on function penstock.replace_tasks from public")
