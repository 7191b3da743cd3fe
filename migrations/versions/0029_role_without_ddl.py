"""Upkeep of the history's partitions by functions with the owner's rights, so that no process needs to run DDL."""

from __future__ import annotations

from alembic import op

revision = "0029"
down_revision = "0028"
branch_labels = None
depends_on = None

_GUARDED = "security definer set search_path = pg_catalog, penstock, pg_temp"

# Both raise unless they are given a part of the history, so that nothing else is created, altered or dropped.
_CHECK_PARENT = """
create function penstock.check_parent(parent text) returns text language plpgsql immutable as $$
begin
    if parent is null or parent not in ('task_success', 'task_critical_error', 'task_cancelled') then
        raise exception '% is no table of settled tasks', parent using errcode = '22023';
    end if;
    return parent;
end $$
"""
_PARENT_OF = r"""
create function penstock.parent_of(part text) returns text language plpgsql immutable as $$
begin
    if part is null or part !~ '^[a-z_]+_\d{8}$' then
        raise exception '% is no partition of a day', part using errcode = '22023';
    end if;
    return penstock.check_parent(left(part, -9));
end $$
"""
_CHECK_DAY = """
create function penstock.check_day(parent text, part text, first timestamptz, upto timestamptz) returns void
language plpgsql immutable as $$
declare
    day constant timestamp := first at time zone 'utc';
begin
    perform penstock.check_parent(parent);
    if first is null and upto is null and part = parent || '_default' then
        return;
    end if;
    if penstock.parent_of(part) <> parent or first is null or upto is null or day <> date_trunc('day', day)
       or part <> parent || to_char(day, '_YYYYMMDD') or upto at time zone 'utc' <> day + interval '1 day' then
        raise exception '% is no partition of % for % to %', part, parent, first, upto using errcode = '22023';
    end if;
end $$
"""

_DETACH = f"""
create function penstock.detach_partition(part text) returns void language plpgsql {_GUARDED} as $$
begin
    execute format('alter table penstock.%I detach partition penstock.%I', penstock.parent_of(part), part);
end $$
"""
_DROP = f"""
create function penstock.drop_partition(part text) returns void language plpgsql {_GUARDED} as $$
begin
    perform penstock.parent_of(part);
    if exists (select from pg_inherits where inhrelid = format('penstock.%I', part)::regclass) then
        raise exception '% is still attached', part using errcode = '55006';
    end if;
    execute format('drop table penstock.%I', part);
end $$
"""
_INDEX = f"""
create function penstock.index_partition(part text) returns void language plpgsql {_GUARDED} as $$
begin
    perform penstock.parent_of(part);
    execute format('create index on penstock.%I (finished_at)', part);
end $$
"""
_SUMMARIZE = rf"""
create function penstock.summarize_history(days text[]) returns void language sql {_GUARDED} as $$
    select brin_summarize_new_values(i.oid)
    from pg_index x
    join pg_class i on i.oid = x.indexrelid
    join pg_am a on a.oid = i.relam
    join pg_class t on t.oid = x.indrelid
    where t.relnamespace = 'penstock'::regnamespace and a.amname = 'brin' and i.relkind = 'i'
      and t.relname ~ '^task_(success|critical_error|cancelled)_'
      and (right(t.relname, 8) = any(days) or t.relname like '%\_default')
$$
"""

_MADE = [
    "penstock.detach_partition(text)", "penstock.drop_partition(text)", "penstock.index_partition(text)",
    "penstock.summarize_history(text[])",
]  # fmt: skip
_SOURCE = ("text := $1 || '_default'", "text := penstock.check_parent($1) || '_default'")
# Of each function that was there before: what in its text becomes what.
_CHANGED = {
    "penstock.make_partition(text, text, timestamptz, timestamptz)": (
        "begin\n    execute", "begin\n    perform penstock.check_day(parent, name, first, upto);\n    execute"
    ),
    "penstock.begin_default_move(text)": _SOURCE,
    "penstock.step_default_move(text, int, int)": _SOURCE,
    "penstock.end_default_move(text, int)": _SOURCE,
}  # fmt: skip


def _rewrite(function: str, before: str, after: str) -> str:
    return f"""
do $do$
declare
    body text := pg_get_functiondef('{function}'::regprocedure);
begin
    if strpos(body, $a${before}$a$) = 0 then raise exception '{function} is another one'; end if;
    execute replace(body, $a${before}$a$, $a${after}$a$);
end $do$
"""


UPGRADE = [
    _CHECK_PARENT,
    _PARENT_OF,
    _CHECK_DAY,
    _DETACH,
    _DROP,
    _INDEX,
    _SUMMARIZE,
    *(_rewrite(function, before, after) for function, (before, after) in _CHANGED.items()),
    *(f"alter function {function} {_GUARDED}" for function in _CHANGED),
    *(f"revoke all on function {function} from public" for function in [*_MADE, *_CHANGED]),
]

DOWNGRADE = [
    *(f"grant execute on function {function} to public" for function in _CHANGED),
    *(f"alter function {function} security invoker reset all" for function in _CHANGED),
    *(_rewrite(function, after, before) for function, (before, after) in _CHANGED.items()),
    *(f"drop function {function}" for function in _MADE),
    "drop function penstock.check_day(text, text, timestamptz, timestamptz), penstock.parent_of(text), "
    "penstock.check_parent(text)",
]


def upgrade() -> None:
    for statement in UPGRADE:
        op.execute(statement)


def downgrade() -> None:
    for statement in DOWNGRADE:
        op.execute(statement)
