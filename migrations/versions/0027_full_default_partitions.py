"""Records of a default partition are copied aside by the day in bounded steps, and the partition is replaced."""

from __future__ import annotations

from alembic import op

revision = "0027"
down_revision = "0026"
branch_labels = None
depends_on = None

# With the owner's rights: any role that settles tasks notes what it changes.
_NOTE = """
create function penstock.note_default_change() returns trigger language plpgsql security definer
set search_path = pg_catalog, pg_temp as $$
begin
    if tg_op = 'DELETE' then
        insert into penstock.default_change (parent, id) values (tg_argv[0], old.id);
    else
        insert into penstock.default_change (parent, id) values (tg_argv[0], new.id);
    end if;
    return null;
end $$
"""

# No write is under way between the lock that a trigger takes and the commit: what is not noted is in these blocks.
_BEGIN = """
create function penstock.begin_default_move(parent text) returns void language plpgsql as $$
declare
    source constant text := $1 || '_default';
begin
    execute format('create trigger note_default_change after insert or update or delete on penstock.%I for each row '
                   'execute function penstock.note_default_change(%L)', source, $1);
    insert into penstock.default_move (parent, filenode, blocks)
    values ($1, pg_relation_filenode(format('penstock.%I', source)::regclass),
            pg_relation_size(format('penstock.%I', source)::regclass) / current_setting('block_size')::bigint);
end $$
"""

# The constraint spares the scan when the table is attached, so it says all that is asked of a partition there. The
# table has it while it is empty.
_ASIDE = """
create function penstock.make_aside(parent text, day date) returns text language plpgsql as $$
declare
    name constant text := $1 || to_char(day, '_YYYYMMDD') || '_aside';
    owner constant text := (select relowner::regrole::text from pg_class
                            where oid = format('penstock.%I', $1)::regclass);
begin
    if to_regclass(format('penstock.%I', name)) is null then
        execute format('create table penstock.%I (like penstock.%I including all)', name, $1);
        execute format('alter table penstock.%I replica identity full, add constraint of_the_day '
                       'check (state = %L and finished_at is not null and finished_at >= %L and finished_at < %L)',
                       name, upper(substr($1, length('task_') + 1)), day::timestamp at time zone 'utc',
                       (day + 1)::timestamp at time zone 'utc');
        if owner <> quote_ident(current_user) then
            execute format('alter table penstock.%I owner to %s', name, owner);
        end if;
    end if;
    return name;
end $$
"""
_LIST_ASIDES = """
create function penstock.list_asides(parent text) returns table (name text, day date) language sql stable as $$
    select relname::text, to_date(substring(relname from '_(\\d{8})_aside$'), 'YYYYMMDD') from pg_class
    where relnamespace = 'penstock'::regnamespace and relkind = 'r' and relname ~ ('^' || $1 || '_\\d{8}_aside$')
    order by 1
$$
"""

# The ids are those of records that were written or have left since the copy began: copies of them are made again.
_CATCH_UP = """
create function penstock.catch_up_default(parent text, most int) returns void language plpgsql as $$
declare
    source constant text := $1 || '_default';
    ids bigint[];
    aside text;
    one date;
begin
    with gone as (
        delete from penstock.default_change c where c.parent = $1 and c.place = any(array(
            select n.place from penstock.default_change n where n.parent = $1 order by n.place limit most))
        returning c.id
    )
    select array_agg(distinct id) into ids from gone;
    if ids is null then
        return;
    end if;
    for aside in select name from penstock.list_asides($1) loop
        execute format('delete from penstock.%I where id = any($1)', aside) using ids;
    end loop;
    for one in execute format('select distinct (finished_at at time zone ''utc'')::date from penstock.%I '
                              'where id = any($1)', source) using ids loop
        execute format('insert into penstock.%I select * from penstock.%I where id = any($1) '
                       'and (finished_at at time zone ''utc'')::date = $2', penstock.make_aside($1, one), source)
        using ids, one;
    end loop;
end $$
"""

# What is noted is looked at when all blocks are copied: a block that is copied later would double it.
_STEP = """
create function penstock.step_default_move(parent text, most_blocks int, most_changes int) returns text
language plpgsql as $$
declare
    source constant text := $1 || '_default';
    source_id constant regclass := format('penstock.%I', source)::regclass;
    progress penstock.default_move;
    aside text;
    one date;
    first tid;
    upto tid;
    filled boolean;
begin
    select * into progress from penstock.default_move m where m.parent = $1 for update;
    if not found then
        execute format('select exists (select from penstock.%I)', source) into filled;
        return case when filled then 'begin' else 'none' end;
    end if;
    if progress.next_block >= progress.blocks then
        perform penstock.catch_up_default($1, most_changes);
        return case when exists (select from penstock.default_change c where c.parent = $1 offset most_changes)
            then 'more' else 'ready' end;
    end if;
    if progress.filenode <> pg_relation_filenode(source_id) then  -- rewritten: its records stand in other blocks
        for aside in select name from penstock.list_asides($1) loop
            execute format('drop table penstock.%I', aside);
        end loop;
        update penstock.default_move m
        set next_block = 0, filenode = pg_relation_filenode(source_id),
            blocks = pg_relation_size(source_id) / current_setting('block_size')::bigint
        where m.parent = $1;
        return 'more';
    end if;
    first := format('(%s,0)', progress.next_block);
    upto := format('(%s,0)', least(progress.next_block + most_blocks, progress.blocks));
    for one in execute format('select distinct (finished_at at time zone ''utc'')::date from penstock.%I '
                              'where ctid >= $1 and ctid < $2', source) using first, upto loop
        execute format('insert into penstock.%I select * from penstock.%I where ctid >= $1 and ctid < $2 '
                       'and (finished_at at time zone ''utc'')::date = $3', penstock.make_aside($1, one), source)
        using first, upto, one;
    end loop;
    update penstock.default_move m set next_block = least(progress.next_block + most_blocks, progress.blocks)
    where m.parent = $1;
    return 'more';
end $$
"""

# In one transaction, so no record is missing at any moment. False: too much was noted meanwhile, or a table of the name
# of a day is still there that is detached and about to be dropped.
_END = """
create function penstock.end_default_move(parent text, most_changes int) returns boolean language plpgsql as $$
declare
    source constant text := $1 || '_default';
    aside record;
    is_empty boolean;
    name text;
begin
    execute format('lock table only penstock.%I in access exclusive mode', $1);
    execute format('lock table penstock.%I in access exclusive mode', source);
    if exists (select from penstock.default_change c where c.parent = $1 offset most_changes) then
        return false;
    end if;
    perform penstock.catch_up_default($1, most_changes);
    for aside in select a.name from penstock.list_asides($1) a loop
        execute format('select not exists (select from penstock.%I)', aside.name) into is_empty;
        if is_empty then
            execute format('drop table penstock.%I', aside.name);
        end if;
    end loop;
    if exists (select from penstock.list_asides($1) a
               where to_regclass(format('penstock.%I', $1 || to_char(a.day, '_YYYYMMDD'))) is not null) then
        return false;
    end if;
    execute format('drop table penstock.%I', source);
    perform penstock.make_partition($1, source, null, null);
    for aside in select * from penstock.list_asides($1) loop
        name := $1 || to_char(aside.day, '_YYYYMMDD');
        execute format('alter table penstock.%I rename to %I', aside.name, name);
        execute format('alter table penstock.%I attach partition penstock.%I for values from (%L) to (%L)', $1, name,
                       aside.day::timestamp at time zone 'utc', (aside.day + 1)::timestamp at time zone 'utc');
        execute format('alter table penstock.%I drop constraint of_the_day', name);
    end loop;
    delete from penstock.default_move m where m.parent = $1;
    return true;
end $$
"""

UPGRADE = [
    """
    create table penstock.default_move (
        parent     text primary key,
        filenode   bigint not null,
        next_block bigint not null default 0,
        blocks     bigint not null
    )
    """,
    "comment on table penstock.default_move is "
    "'Default partitions whose records are being copied to tables of their days'",
    "comment on column penstock.default_move.filenode is 'Of the file whose blocks are copied; of a new one, again'",
    "comment on column penstock.default_move.blocks is 'How many there were; all that came later is in default_change'",
    """
    create table penstock.default_change (
        parent text not null,
        place  bigint generated always as identity,
        id     bigint not null,
        primary key (parent, place)
    ) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 10000, autovacuum_vacuum_cost_delay = 0)
    """,
    "comment on table penstock.default_change is "
    "'Tasks whose record was written to a default partition, or has left it, since its move began'",
    _NOTE,
    "revoke all on function penstock.note_default_change() from public",
    _BEGIN,
    _ASIDE,
    _LIST_ASIDES,
    _CATCH_UP,
    _STEP,
    _END,
]

DOWNGRADE = [
    """
    do $do$
    declare
        one text;
    begin
        foreach one in array array['task_success', 'task_critical_error', 'task_cancelled'] loop
            execute format('drop trigger if exists note_default_change on penstock.%I', one || '_default');
        end loop;
        for one in select a.name from unnest(array['task_success', 'task_critical_error', 'task_cancelled']) p (parent)
                   cross join lateral penstock.list_asides(p.parent) a loop
            execute format('drop table penstock.%I', one);
        end loop;
    end $do$
    """,
    "drop function penstock.note_default_change(), penstock.begin_default_move(text), penstock.make_aside(text, date), "
    "penstock.list_asides(text), penstock.catch_up_default(text, int), penstock.step_default_move(text, int, int), "
    "penstock.end_default_move(text, int)",
    "drop table penstock.default_change, penstock.default_move",
]


def upgrade() -> None:
    for statement in UPGRADE:
        op.execute(statement)


def downgrade() -> None:
    for statement in DOWNGRADE:
        op.execute(statement)
