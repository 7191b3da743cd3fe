"""Upkeep in bounded steps: history partitions made apart and attached, dropped piece by piece; replica identities."""

from __future__ import annotations

from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None

# How enqueue_keyed_tasks tells that the task of a unique key has settled. Its text is changed and not repeated: it is
# long, and nothing else of it changes. A test holds it and sql/enqueue.sql together.
_KEYED_CHANGES = [
    (
        """\
-- A key is free only on evidence that its task has settled: its record is in the history, and the row of the key is the
-- one that this snapshot knows. "Not among the live" would be true of a task committed after the snapshot, and a record
-- may just have been taken back by a retry, which moves taken_at. The record is looked up by a scalar subquery, for an
-- EXISTS may be hashed, and that reads the whole history. $15 is looked up in an object, made once: a search of the
-- input for each row would take the square of their number.""",
        """\
-- A key is free only on evidence that its task has settled: this snapshot sees the row of the key as it is now, and
-- does not see its task among the live. One transaction wrote both, so a snapshot that knows the row knows the task
-- too, and a task committed later comes with a row that it does not know; a retry of a settled task moves taken_at.
-- The history is not asked: a record may leave it before its key does. $15 is looked up in an object, made once: a
-- search of the input for each row would take the square of their number.""",
    ),
    (
        "(select h.id from penstock.task_history h where h.id = k.task_id) is not null",
        "(select t.id from penstock.task t where t.id = k.task_id) is null",
    ),
]


def _rewrite(changes: list[tuple[str, str]]) -> str:
    """Change the text of penstock.enqueue_keyed_tasks, or fail where it is another one."""
    lines = "\n    ".join(
        f"if strpos(body, $a${before}$a$) = 0 then raise exception 'penstock.enqueue_keyed_tasks is another one'; "
        f"end if;\n    body := replace(body, $a${before}$a$, $a${after}$a$);"
        for before, after in changes
    )
    return f"""
do $do$
declare
    body text := pg_get_functiondef('penstock.enqueue_keyed_tasks'::regproc);
begin
    {lines}
    execute body;
end $do$
"""


# An empty table that is attached needs no lock that settling waits for, where `create table ... partition of` does.
# The owner stays the one of the parent, whoever of its members calls this.
_MAKE_PARTITION = """
create function penstock.make_partition(parent text, name text, first timestamptz, upto timestamptz)
returns void language plpgsql as $$
declare
    owner constant text := (select relowner::regrole::text from pg_class
                            where oid = format('penstock.%I', parent)::regclass);
begin
    execute format('create table penstock.%I (like penstock.%I including all)', name, parent);
    execute format('alter table penstock.%I replica identity full', name);
    if owner <> quote_ident(current_user) then
        execute format('alter table penstock.%I owner to %s', name, owner);
    end if;
    if first is null then
        execute format('alter table penstock.%I attach partition penstock.%I default', parent, name);
    else
        execute format('alter table penstock.%I attach partition penstock.%I for values from (%L) to (%L)',
                       parent, name, first, upto);
    end if;
end $$
"""

# Of the name and arguments that older supervisors call.
_ENSURE_PARTITIONS = """
create or replace function penstock.ensure_partitions(days_ahead int) returns int language plpgsql as $$
declare
    missing record;
    made int := 0;
begin
    for missing in select * from penstock.list_missing_partitions(days_ahead) loop
        begin
            perform penstock.make_partition(missing.parent, missing.name, missing.first, missing.upto);
            made := made + 1;
        exception when check_violation then
            null;  -- the default partition holds rows of that day; they stay there until they expire
        end;
    end loop;
    return made;
end $$
"""
_LIST_MISSING = """
create function penstock.list_missing_partitions(days_ahead int)
returns table (parent text, name text, first timestamptz, upto timestamptz) language sql stable as $$
    select p.parent, p.parent || to_char(d.day, '_YYYYMMDD'), d.day::timestamp at time zone 'utc',
           (d.day + 1)::timestamp at time zone 'utc'
    from unnest(array['task_success', 'task_critical_error', 'task_cancelled']) p (parent)
    cross join (select (now() at time zone 'utc')::date + n as day from generate_series(0, days_ahead) n) d
    where to_regclass(format('penstock.%I', p.parent || to_char(d.day, '_YYYYMMDD'))) is null
    order by 1, 2
$$
"""
_ENSURE_PARTITIONS_BEFORE = """
create or replace function penstock.ensure_partitions(days_ahead int) returns int language plpgsql as $$
declare
    parent text;
    day date;
    made int := 0;
begin
    foreach parent in array array['task_success', 'task_critical_error', 'task_cancelled'] loop
        for day in select (now() at time zone 'utc')::date + n from generate_series(0, days_ahead) n loop
            if to_regclass(format('penstock.%I', parent || to_char(day, '_YYYYMMDD'))) is null then
                begin
                    execute format(
                        'create table penstock.%I partition of penstock.%I for values from (%L) to (%L)',
                        parent || to_char(day, '_YYYYMMDD'), parent,
                        day::timestamp at time zone 'utc', (day + 1)::timestamp at time zone 'utc');
                    made := made + 1;
                exception when check_violation then
                    null;  -- the default partition holds rows of that day; they stay there until they expire
                end;
            end if;
        end loop;
    end loop;
    return made;
end $$
"""

# Without a primary key, a publication that publishes deletes and updates would have Postgres refuse them.
_IDENTITY = """
do $do$
declare
    part regclass;
begin
    for part in
        select c.oid from pg_class c
        where c.relnamespace = 'penstock'::regnamespace and c.relkind = 'r'
          and c.relname ~ '^task_(success|critical_error|cancelled)_(default|[0-9]{{8}})$'
        order by c.relname
    loop
        execute format('alter table %s replica identity {identity}', part);
    end loop;
end $do$
"""

UPGRADE = [
    _rewrite(_KEYED_CHANGES),
    "alter table penstock.tally replica identity full",
    _IDENTITY.format(identity="full"),
    _MAKE_PARTITION,
    _LIST_MISSING,
    _ENSURE_PARTITIONS,
    """
    create table penstock.forgetting (
        partition  text primary key,
        filenode   bigint not null,
        next_block bigint not null default 0,
        counts     jsonb not null default '{}'
    )
    """,
    "comment on table penstock.forgetting is 'How far the unique keys of a detached partition were deleted'",
    "comment on column penstock.forgetting.filenode is 'Of the file whose blocks were read; another one is read again'",
    "comment on column penstock.forgetting.counts is 'Records read so far, by action'",
]

DOWNGRADE = [
    "drop table penstock.forgetting",
    _ENSURE_PARTITIONS_BEFORE,
    "drop function penstock.list_missing_partitions(int), "
    "penstock.make_partition(text, text, timestamptz, timestamptz)",
    _IDENTITY.format(identity="default"),
    "alter table penstock.tally replica identity default",
    _rewrite([(after, before) for before, after in reversed(_KEYED_CHANGES)]),
]


def upgrade() -> None:
    for statement in UPGRADE:
        op.execute(statement)


def downgrade() -> None:
    for statement in DOWNGRADE:
        op.execute(statement)
