-- Settled tasks in partitions by state and day, and the functions that create, detach and drop these.

create table penstock.task_history (
    id              bigint not null,
    state           penstock.task_state not null,
    action          text not null,
    payload         json not null,
    priority        smallint not null,
    run_at          timestamptz not null,
    attempts        smallint not null default 0,
    max_attempts    smallint not null,
    claim           bigint not null default 0,
    claimed_at      timestamptz,
    created_at      timestamptz not null,
    updated_at      timestamptz not null,
    timeout_seconds double precision,
    unique_key      text,
    ordering_key    text,
    progress        json,
    failures        jsonb,
    finished_at     timestamptz not null,
    result          json,
    labels          jsonb,
    expires_at      timestamptz,
    limit_key       text,
    reason          text,
    payload_gone    boolean,
    result_gone     boolean,
    workflow        bigint,
    tenant          text,
    trace           text,
    worker          text,
    constraint history_state_is_final check (state in ('SUCCESS', 'CRITICAL_ERROR', 'CANCELLED')),
    constraint history_result_iff_success check ((state = 'SUCCESS') = (result is not null)),
    constraint history_claimed_if_run check (state = 'CANCELLED' or claimed_at is not null),
    constraint history_failed_if_critical check (state <> 'CRITICAL_ERROR' or failures is not null)
) partition by list (state);
create index task_history_id on penstock.task_history (id);
create index task_history_finished_at on penstock.task_history using brin (finished_at);
comment on column penstock.task_history.reason is 'Why it was cancelled';
comment on column penstock.task_history.payload_gone is 'The payload was emptied by retention; null: it is there';
comment on column penstock.task_history.result_gone is 'Likewise the result';
comment on column penstock.task_history.worker is 'Worker that ran the newest attempt; null: not told';

create table penstock.task_success partition of penstock.task_history
    for values in ('SUCCESS') partition by range (finished_at);

create table penstock.task_critical_error partition of penstock.task_history
    for values in ('CRITICAL_ERROR') partition by range (finished_at);

create table penstock.task_cancelled partition of penstock.task_history
    for values in ('CANCELLED') partition by range (finished_at);

-- No row is ever refused for want of a partition: the supervisor keeps days ahead, these take the rest.
create table penstock.task_success_default partition of penstock.task_success default;
alter table penstock.task_success_default replica identity full;

create table penstock.task_critical_error_default partition of penstock.task_critical_error default;
alter table penstock.task_critical_error_default replica identity full;

create table penstock.task_cancelled_default partition of penstock.task_cancelled default;
alter table penstock.task_cancelled_default replica identity full;

create table penstock.forgetting (
    partition  text primary key,
    filenode   bigint not null,
    next_block bigint not null default 0,
    counts     jsonb not null default '{}'
);
comment on table penstock.forgetting is 'How far the unique keys of a detached partition were deleted';
comment on column penstock.forgetting.filenode is 'Of the file whose blocks were read; another one is read again';
comment on column penstock.forgetting.counts is 'Records read so far, by action';

create table penstock.default_move (
    parent     text primary key,
    filenode   bigint not null,
    next_block bigint not null default 0,
    blocks     bigint not null
);
comment on table penstock.default_move is 'Default partitions whose records are being copied to tables of their days';
comment on column penstock.default_move.filenode is 'Of the file whose blocks are copied; of a new one, again';
comment on column penstock.default_move.blocks is 'How many there were; all that came later is in default_change';

create table penstock.default_change (
    parent text not null,
    place  bigint generated always as identity,
    id     bigint not null,
    primary key (parent, place)
) with (
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 10000,
    autovacuum_vacuum_cost_delay = 0
);
comment on table penstock.default_change is
    'Tasks whose record was written to a default partition, or has left it, since its move began';

-- These three raise unless they are given a part of the history, so that nothing else is created, altered or dropped.
create function penstock.check_parent(parent text) returns text language plpgsql immutable as $$
begin
    if parent is null or parent not in ('task_success', 'task_critical_error', 'task_cancelled') then
        raise exception '% is no table of settled tasks', parent using errcode = '22023';
    end if;
    return parent;
end $$;

create function penstock.parent_of(part text) returns text language plpgsql immutable as $$
begin
    if part is null or part !~ '^[a-z_]+_\d{8}$' then
        raise exception '% is no partition of a day', part using errcode = '22023';
    end if;
    return penstock.check_parent(left(part, -9));
end $$;

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
end $$;

-- An empty table that is attached needs no lock that settling waits for, where `create table ... partition of` does.
-- The owner stays the one of the parent, whichever member calls this.
create function penstock.make_partition(parent text, name text, first timestamptz, upto timestamptz)
returns void
language plpgsql security definer set search_path = pg_catalog, penstock, pg_temp as $$
declare
    owner constant text := (select relowner::regrole::text from pg_class
                            where oid = format('penstock.%I', parent)::regclass);
begin
    perform penstock.check_day(parent, name, first, upto);
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
end $$;
revoke all on function penstock.make_partition(text, text, timestamptz, timestamptz) from public;

create function penstock.list_missing_partitions(days_ahead int)
returns table (parent text, name text, first timestamptz, upto timestamptz) language sql stable as $$
    select p.parent, p.parent || to_char(d.day, '_YYYYMMDD'), d.day::timestamp at time zone 'utc',
           (d.day + 1)::timestamp at time zone 'utc'
    from unnest(array['task_success', 'task_critical_error', 'task_cancelled']) p (parent)
    cross join (select (now() at time zone 'utc')::date + n as day from generate_series(0, days_ahead) n) d
    where to_regclass(format('penstock.%I', p.parent || to_char(d.day, '_YYYYMMDD'))) is null
    order by 1, 2
$$;

create function penstock.ensure_partitions(days_ahead int) returns int language plpgsql as $$
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
end $$;

create function penstock.detach_partition(part text) returns void
language plpgsql security definer set search_path = pg_catalog, penstock, pg_temp as $$
begin
    execute format('alter table penstock.%I detach partition penstock.%I', penstock.parent_of(part), part);
end $$;
revoke all on function penstock.detach_partition(text) from public;

create function penstock.drop_partition(part text) returns void
language plpgsql security definer set search_path = pg_catalog, penstock, pg_temp as $$
begin
    perform penstock.parent_of(part);
    if exists (select from pg_inherits where inhrelid = format('penstock.%I', part)::regclass) then
        raise exception '% is still attached', part using errcode = '55006';
    end if;
    execute format('drop table penstock.%I', part);
end $$;
revoke all on function penstock.drop_partition(text) from public;

create function penstock.index_partition(part text) returns void
language plpgsql security definer set search_path = pg_catalog, penstock, pg_temp as $$
begin
    perform penstock.parent_of(part);
    execute format('create index on penstock.%I (finished_at)', part);
end $$;
revoke all on function penstock.index_partition(text) from public;

create function penstock.summarize_history(days text[]) returns void
language sql security definer set search_path = pg_catalog, penstock, pg_temp as $$
    select brin_summarize_new_values(i.oid)
    from pg_index x
    join pg_class i on i.oid = x.indexrelid
    join pg_am a on a.oid = i.relam
    join pg_class t on t.oid = x.indrelid
    where t.relnamespace = 'penstock'::regnamespace and a.amname = 'brin' and i.relkind = 'i'
      and t.relname ~ '^task_(success|critical_error|cancelled)_'
      and (right(t.relname, 8) = any(days) or t.relname like '%\_default')
$$;
revoke all on function penstock.summarize_history(text[]) from public;

-- With the owner's rights: any role that settles tasks notes what it changes.
create function penstock.note_default_change() returns trigger language plpgsql security definer
set search_path = pg_catalog, pg_temp as $$
begin
    if tg_op = 'DELETE' then
        insert into penstock.default_change (parent, id) values (tg_argv[0], old.id);
    else
        insert into penstock.default_change (parent, id) values (tg_argv[0], new.id);
    end if;
    return null;
end $$;
revoke all on function penstock.note_default_change() from public;

-- No write is under way between the lock that a trigger takes and the commit: what is not noted is in these blocks.
create function penstock.begin_default_move(parent text) returns void
language plpgsql security definer set search_path = pg_catalog, penstock, pg_temp as $$
declare
    source constant text := penstock.check_parent($1) || '_default';
begin
    execute format('create trigger note_default_change after insert or update or delete on penstock.%I for each row '
                   'execute function penstock.note_default_change(%L)', source, $1);
    insert into penstock.default_move (parent, filenode, blocks)
    values ($1, pg_relation_filenode(format('penstock.%I', source)::regclass),
            pg_relation_size(format('penstock.%I', source)::regclass) / current_setting('block_size')::bigint);
end $$;
revoke all on function penstock.begin_default_move(text) from public;

-- The constraint spares the scan when the table is attached, so it says all that is required of a partition there. The
-- table has it while it is empty.
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
end $$;

create function penstock.list_asides(parent text) returns table (name text, day date) language sql stable as $$
    select relname::text, to_date(substring(relname from '_(\d{8})_aside$'), 'YYYYMMDD') from pg_class
    where relnamespace = 'penstock'::regnamespace and relkind = 'r' and relname ~ ('^' || $1 || '_\d{8}_aside$')
    order by 1
$$;

-- The ids are those of records that were written or have left since the copy began: copies of them are made again.
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
end $$;

-- What is noted is looked at when all blocks are copied: a block that is copied later would double it.
create function penstock.step_default_move(parent text, most_blocks int, most_changes int) returns text
language plpgsql security definer set search_path = pg_catalog, penstock, pg_temp as $$
declare
    source constant text := penstock.check_parent($1) || '_default';
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
end $$;
revoke all on function penstock.step_default_move(text, int, int) from public;

-- In one transaction, so no record is missing at any moment. False: too much was noted meanwhile, or a table of the name
-- of a day is still there that is detached and about to be dropped.
create function penstock.end_default_move(parent text, most_changes int) returns boolean
language plpgsql security definer set search_path = pg_catalog, penstock, pg_temp as $$
declare
    source constant text := penstock.check_parent($1) || '_default';
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
end $$;
revoke all on function penstock.end_default_move(text, int) from public;

select penstock.ensure_partitions(3);
