-- Functions that enqueue: for the processes, and for statements of other programs in their own transactions.

create function penstock.enqueue_plain_tasks(text[], text[], timestamptz[], float8[], int2[], int2[], float8[])
returns table (id bigint) language plpgsql as $$
    #variable_conflict use_column
    begin
        return query 
-- The common case: no keys in the batch. Ids grow in the order of the arrays, so the ids sorted are the
-- ids of the input in its order.
with inserted as (
    insert into penstock.task (id, state, action, payload, run_at, priority, max_attempts, timeout_seconds,
                               created_at, updated_at)
    select nextval('penstock.task_id_seq'), 'SCHEDULED', i.action, i.payload::json,
           coalesce(i.run_at, now() + make_interval(secs => coalesce(i.delay, 0))),
           i.priority, i.max_attempts, i.timeout, now(), now()
    from unnest($1::text[], $2::text[], $3::timestamptz[], $4::float8[], $5::int2[], $6::int2[], $7::float8[])
        with ordinality as i (action, payload, run_at, delay, priority, max_attempts, timeout, place)
    order by i.place
    returning id, action
), tallied as (
    insert into penstock.tally (action, event, count)
    select action, 'ENQUEUED', count(*) from inserted group by action
)
select id from inserted order by id
;
    end $$;
revoke all on function penstock.enqueue_plain_tasks from public;

create function penstock.enqueue_traced_tasks(
    text[], text[], timestamptz[], float8[], int2[], int2[], float8[], text[])
returns table (id bigint) language plpgsql as $$
    #variable_conflict use_column
    begin
        return query 
-- $1 actions, $2 payloads (JSON text), $3 run_at or null, $4 delay in seconds or null, $5 priorities, $6 max_attempts,
-- $7 timeout in seconds or null, $8 traces or null. As enqueue_plain_tasks in all else.
with inserted as (
    insert into penstock.task (id, state, action, payload, run_at, priority, max_attempts, timeout_seconds, trace,
                               created_at, updated_at)
    select nextval('penstock.task_id_seq'), 'SCHEDULED', i.action, i.payload::json,
           coalesce(i.run_at, now() + make_interval(secs => coalesce(i.delay, 0))),
           i.priority, i.max_attempts, i.timeout, i.trace, now(), now()
    from unnest($1::text[], $2::text[], $3::timestamptz[], $4::float8[], $5::int2[], $6::int2[], $7::float8[],
                $8::text[])
        with ordinality as i (action, payload, run_at, delay, priority, max_attempts, timeout, trace, place)
    order by i.place
    returning id, action
), tallied as (
    insert into penstock.tally (action, event, count)
    select action, 'ENQUEUED', count(*) from inserted group by action
)
select id from inserted order by id
;
    end $$;
revoke all on function penstock.enqueue_traced_tasks from public;

create function penstock.enqueue_keyed_tasks(
    text[], text[], timestamptz[], float8[], int2[], int2[], float8[], text[],
    text[], text[], timestamptz[], float8[], text[], bool[], float8[], text[] default null)
returns table (place bigint, id bigint, state text, fresh bool) language plpgsql as $$
#variable_conflict use_column
begin
    return query 
-- Any mixture of keys, labels and expiries; of a unique key that several name, the first decides.
-- $10 labels as JSON text or null, $11 expires_at or null, $12 expires in so many seconds or null, $13 limit keys or
-- null; $14 whether a unique key is free when the task that has it is settled, $15 or was taken so many seconds ago;
-- $16 tenants or null. Keys of a tenant are its own: they are kept behind its name.
-- The two upserts change nothing in a row that somebody has: they lock it and return it, which a plain DO NOTHING would
-- not for a row committed after this statement's snapshot. Keys are taken in sorted order, so two such batches cannot
-- deadlock. A task behind a live one of its ordering key starts as WAITING.
-- A key is free only on evidence that its task has settled: this snapshot sees the row of the key as it is now, and
-- does not see its task among the live. One transaction wrote both, so a snapshot that knows the row knows the task
-- too, and a task committed later comes with a row that it does not know; a retry of a settled task moves taken_at.
-- The history is not asked: a record may leave it before its key does. $15 is looked up in an object, made once: a
-- search of the input for each row would take the square of their number.
-- Returns (place from 1, id, state or null, fresh) per task; a duplicate has the first task's id and no state.
with input as materialized (
    select nextval('penstock.task_id_seq') as id, i.*,
           coalesce(i.tenant || E'\x1f', '') || i.own_unique_key as unique_key,
           coalesce(i.tenant || E'\x1f', '') || i.own_ordering_key as ordering_key
    from unnest($1::text[], $2::text[], $3::timestamptz[], $4::float8[], $5::int2[], $6::int2[], $7::float8[],
                $8::text[], $9::text[], $10::text[], $11::timestamptz[], $12::float8[], $13::text[], $14::bool[],
                $15::float8[], $16::text[])
        with ordinality as i (action, payload, run_at, delay, priority, max_attempts, timeout, own_unique_key,
                              own_ordering_key, labels, expires_at, expires_in, limit_key, unless_live, unless_since,
                              tenant, place)
    order by i.place
), keyed as (
    insert into penstock.unique_key as k (action, key, task_id, taken_at)
    select distinct on (action, unique_key) action, unique_key, id, now()
    from input where unique_key is not null
    order by action, unique_key, place
    on conflict (action, key) do update set (task_id, taken_at) = (
        select case when free then excluded.task_id else k.task_id end,
               case when free then excluded.taken_at else k.taken_at end
        from (select case
            when excluded.task_id in (select id from input where unless_live)
                then (select t.id from penstock.task t where t.id = k.task_id) is null
                    and (select (s.task_id, s.taken_at) from penstock.unique_key s
                         where s.action = k.action and s.key = k.key) = (k.task_id, k.taken_at)
            else coalesce(k.taken_at <= now() - make_interval(secs => (
                (select jsonb_object_agg(id, unless_since) from input where unless_since is not null)
                ->> excluded.task_id::text)::float8), false)
            end as free) told)
    returning k.action, k.key, k.task_id
), fresh as (
    select i.* from input i left join keyed k on k.action = i.action and k.key = i.unique_key
    where i.unique_key is null or k.task_id = i.id
), heads as (
    insert into penstock.ordering_head as h (key, task_id)
    select distinct on (ordering_key) ordering_key, id
    from fresh where ordering_key is not null
    order by ordering_key, place
    on conflict (key) do update set task_id = h.task_id
    returning h.key, h.task_id
), inserted as (
    insert into penstock.task (id, state, action, payload, run_at, priority, max_attempts, timeout_seconds,
                               unique_key, ordering_key, labels, expires_at, limit_key, tenant, created_at, updated_at)
    select f.id, case when h.task_id <> f.id then 'WAITING' else 'SCHEDULED' end::penstock.task_state,
           f.action, f.payload::json, coalesce(f.run_at, now() + make_interval(secs => coalesce(f.delay, 0))),
           f.priority, f.max_attempts, f.timeout, f.unique_key, f.ordering_key, f.labels::jsonb,
           coalesce(f.expires_at, now() + make_interval(secs => f.expires_in)), f.limit_key, f.tenant, now(), now()
    from fresh f left join heads h on h.key = f.ordering_key
    returning id, state, action
), tallied as (
    insert into penstock.tally (action, event, count)
    select action, 'ENQUEUED', count(*) from inserted group by action
)
select i.place, coalesce(k.task_id, i.id) as id, t.state::text as state, t.id is not null as fresh
from input i
left join keyed k on k.action = i.action and k.key = i.unique_key
left join inserted t on t.id = i.id
order by i.place
;
end $$;
revoke all on function penstock.enqueue_keyed_tasks from public;

create function penstock.replace_tasks(bigint[], text[], timestamptz[], float8[], int2[])
returns table (id bigint, state text) language plpgsql as $$
    #variable_conflict use_column
    begin
        return query 
-- $1 ids (distinct), $2 payloads (JSON text), $3 run_at or null, $4 delay in seconds or null, $5 priorities or null;
-- what is null stays. Tasks that wait take the place of what was asked first. A statement of its own behind
-- enqueue_keyed_tasks, whose snapshot may be too old to see the task; the lock on its unique key is held from there.
-- A task that is claimed meanwhile is left alone. Returns (id, state).
update penstock.task t
set payload = i.payload::json, priority = coalesce(i.priority, t.priority), updated_at = now(),
    run_at = coalesce(i.run_at, now() + make_interval(secs => i.delay), t.run_at)
from (select * from unnest($1::bigint[], $2::text[], $3::timestamptz[], $4::float8[], $5::int2[])
      r (id, payload, run_at, delay, priority)) i
where t.id = i.id and t.id = any(array(
        select id from penstock.task
        where id = any($1::bigint[]) and state::text in ('WAITING', 'SCHEDULED', 'ERROR') and claimed_at is null
        order by id for no key update))  -- in the order of cancel_tasks, or the two deadlock
returning t.id, t.state::text as state
;
    end $$;
revoke all on function penstock.replace_tasks from public;

create function penstock.note_traces(bigint[], text[]) returns void language plpgsql as $$
    begin
        
-- $1 ids (distinct) of tasks that this transaction has added, $2 traces. Behind enqueue_keyed_tasks. Touches no indexed
-- column, so the update is HOT.
update penstock.task t set trace = i.trace
from (select * from unnest($1::bigint[], $2::text[]) i (id, trace)) i
where t.id = i.id and t.id = any($1::bigint[])
;
    end $$;
revoke all on function penstock.note_traces from public;

create function penstock.read_instant(value json, name text) returns timestamptz language plpgsql as $$
declare
    given constant text := value #>> '{}';
    instant timestamptz;
begin
    if json_typeof(value) = 'number' and given ~ '^-?\d{1,16}$' then
        instant := timestamptz '1970-01-01 00:00:00+00' + given::bigint * interval '1 millisecond';
    elsif given ~ '^\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d(:\d\d(\.\d+)?)?$' then
        raise exception '%', format('needs a zone, such as Z or +01:00: %L', given) using errcode = '22007';
    elsif json_typeof(value) = 'string'
            and given ~ '^\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d(:\d\d(\.\d+)?)?([Zz]|[+-]\d\d(:?\d\d)?)$' then
        instant := given::timestamptz;
    else
        raise exception '%', format('must be RFC 3339 such as 2030-01-31T08:00:00Z, or epoch milliseconds, not %s',
                                    left(value::text, 60)) using errcode = '22007';
    end if;
    -- No driver reads an instant beyond, and no claim begins before.
    if instant < '0001-01-02 00:00:00+00' or instant >= '10000-01-01 00:00:00+00' then
        raise exception '%', format('is out of range: %L', given) using errcode = '22008';
    end if;
    return instant;
end $$;
revoke all on function penstock.read_instant from public;

create function penstock.read_trace(traceparent text, tracestate text) returns text language plpgsql immutable as $$
declare
    found constant text[] := regexp_match(btrim(traceparent, E' \t'),
                                          '^([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?$');
    state text;
begin
    if found is null or found[1] = 'ff' or found[2] ~ '^0+$' or found[3] ~ '^0+$'
            or (found[1] = '00' and found[5] is not null) then
        return null;
    end if;
    if length(tracestate) <= 512 then
        select string_agg(m.member, ',' order by m.place) into state
        from (select btrim(s.part, E' \t') as member, s.place
              from unnest(string_to_array(tracestate, ',')) with ordinality s (part, place)) m
        cross join lateral (select split_part(m.member, '=', 1) as key, split_part(m.member, '=', 2) as value) t
        where m.member <> ''
        having count(*) <= 32 and count(*) = count(distinct t.key) and bool_and(
            t.value ~ '^[\u0020-\u002b\u002d-\u003c\u003e-\u007e]+$' and length(t.value) <= 256
            and m.member = t.key || '=' || t.value and (
                (t.key ~ '^[a-z][a-z0-9_*/-]*$' and length(t.key) <= 256)
                or (t.key ~ '^[a-z0-9][a-z0-9_*/-]*@[a-z][a-z0-9_*/-]*$'
                    and length(split_part(t.key, '@', 1)) <= 241 and length(split_part(t.key, '@', 2)) <= 14)));
    end if;
    -- Of the flags two are known; a newer version may mean something else by the others.
    return '00-' || found[2] || '-' || found[3] || '-' || lpad(to_hex(('x' || found[4])::bit(8)::int & 3), 2, '0')
        || coalesce(' ' || state, '');
end $$;
revoke all on function penstock.read_trace from public;

create function penstock.payload_problem(value json) returns text language plpgsql as $$
declare
    body constant text := value::text;
    read constant jsonb := case when body ~ '[eE][+-]?\d{3}'
        then regexp_replace(body, '("(?:[^"\\]|\\.)*")|(\d)[eE][+-]?\d+', '\1\2', 'g')::jsonb else value::jsonb end;
begin
    if jsonb_typeof(read) not in ('object', 'array') then
        return 'must be an object or an array, not '
            || case jsonb_typeof(read) when 'null' then 'null' else 'a ' || jsonb_typeof(read) end;
    end if;
    if length(body) - length(translate(body, '{[', '')) > 100 and jsonb_path_exists(
            read, 'strict $.**{100} ? (@.type() == "object" || @.type() == "array")') then
        return 'is nested deeper than 100 levels';
    end if;
    return null;
end $$;
revoke all on function penstock.payload_problem from public;

create function penstock.enqueue_tasks(tasks json, payload_limit_bytes int)
returns table (place int, id bigint, state text, duplicate bool, replaced bool) language plpgsql as $$
#variable_conflict use_column
declare
    longest_seconds constant float8 := 3162240000;
    controls constant text := '[\u0001-\u001f\u007f-\u009f]';
    default_attempts constant int := greatest(1, least(1000, coalesce(nullif(current_setting('penstock.max_attempts', true), '')::int, 10)));
    limit_bytes constant int := least(900000, coalesce(
        payload_limit_bytes, nullif(current_setting('penstock.payload_limit_bytes', true), '')::int, 262144));
    count int := 0;
    given json;
    member text;
    value json;
    kind text;
    word text;
    size int;
    field text;
    problem text;
    too_large bool := false;
    is_plain bool := true;
    is_usual bool := true;
    is_traced bool := false;
    wakes bool := false;
    -- of one task
    action text; payload text; run_at timestamptz; delay float8; priority int; unique_key text; ordering_key text;
    max_attempts int; timeout float8; labels text; expires_at timestamptz; expires_in float8; limit_key text;
    tenant text; traceparent text; tracestate text; read_parent text; read_state text; trace text;
    unique_scope text; unique_seconds float8; on_duplicate text;
    -- of all
    actions text[]; payloads text[]; run_ats timestamptz[]; delays float8[]; priorities int2[]; unique_keys text[];
    ordering_keys text[]; attempts int2[]; timeouts float8[]; all_labels text[]; expiries timestamptz[];
    expiry_seconds float8[]; tenants text[]; traces text[]; limit_keys text[]; are_live bool[]; unique_since float8[]; policies text[];
    given_priorities int2[];
    earlier int[];
    places int[];
    first int;
    last int;
    entry record;
    ids bigint[]; states text[]; fresh bool[]; were_replaced bool[];
begin
    if tasks is null or json_typeof(tasks) <> 'array' then
        raise exception 'Invalid params: tasks must be an array of objects, not %', coalesce(json_typeof(tasks), 'null')
            using errcode = '22023', detail = json_build_object('field', 'tasks', 'problem', 'must be an array')::text,
                  hint = 'Each object has an action, and what else the method enqueue takes.';
    end if;
    <<reading>>
    begin
        for given in select e.value from json_array_elements(tasks) e loop
            count := count + 1;
            action := null; payload := '{}'; run_at := null; delay := null; priority := null; unique_key := null;
            ordering_key := null; max_attempts := default_attempts; timeout := null; labels := null; expires_at := null;
            expires_in := null; tenant := null; traceparent := null; tracestate := null;
            limit_key := null; unique_scope := 'retained'; unique_seconds := null;
            on_duplicate := 'return';
            field := 'task';
            if json_typeof(given) <> 'object' then
                problem := 'must be an object, not ' || json_typeof(given);
                exit reading;
            end if;
            for member, value in select e.key, e.value from json_each(given) e loop
                field := member;
                kind := json_typeof(value);
                if kind = 'null' and member not in ('action', 'payload', 'unique', 'on_duplicate') then
                    continue;
                end if;
                word := case when kind = 'string' then value #>> '{}' else value::text end;
                case member
                when 'action' then
                    problem := case
                        when kind <> 'string' then 'must be text, not ' || kind
                        when word = '' then 'is empty'
                        when length(word) > 200 then format('is %s characters long; the limit is 200', length(word))
                        when word ~ controls then 'holds a control character'
                        when word like 'rpc.%' then 'must not begin with rpc., which JSON-RPC reserves' end;
                    action := word;
                when 'payload' then
                    size := octet_length(word);
                    if size <> length(word) then  -- two characters travel as escapes, for SQS does not take them
                        size := size + 3 * (length(word) - length(translate(word, U&'\FFFE\FFFF', '')));
                    end if;
                    too_large := size > limit_bytes;
                    problem := case when too_large then format('is %s bytes; the limit is %s', size, limit_bytes)
                                    else penstock.payload_problem(value) end;
                    payload := value::text;
                when 'run_at' then
                    run_at := penstock.read_instant(value, member);
                when 'expires_at' then
                    expires_at := penstock.read_instant(value, member);
                when 'delay', 'expires_in', 'timeout' then
                    if kind <> 'number' then
                        problem := 'must be a number of seconds, not ' || kind;
                    elsif member = 'delay' then
                        delay := word::float8;
                        if not delay between 0 and longest_seconds then
                            problem := format('must be between 0 and %s seconds, not %s', longest_seconds, word);
                        end if;
                    elsif member = 'expires_in' then
                        expires_in := word::float8;
                        if not (expires_in > 0 and expires_in <= longest_seconds) then
                            problem := format('must be above 0 and at most %s seconds, not %s', longest_seconds, word);
                        end if;
                    else
                        timeout := word::float8;
                        if not (timeout > 0 and timeout <= 43200) then
                            problem := format('must be above 0 and at most 43200 seconds, not %s', word);
                        end if;
                    end if;
                when 'priority' then
                    if kind <> 'number' or word !~ '^-?\d+$' or not word::numeric between -32768 and 32767 then
                        problem := format('must be a whole number between -32768 and 32767, not %s', left(word, 60));
                    else
                        priority := word::int;
                    end if;
                when 'max_attempts' then
                    if kind <> 'number' or word !~ '^-?\d+$' or not word::numeric between 1 and 1000 then
                        problem := format('must be a whole number between 1 and 1000, not %s', left(word, 60));
                    else
                        max_attempts := word::int;
                    end if;
                when 'unique_key', 'ordering_key', 'limit_key' then
                    problem := case
                        when kind <> 'string' then 'must be text, not ' || kind
                        when length(word) not between 1 and 500
                            then format('must have 1 to 500 characters, not %s', length(word))
                        when word ~ controls then 'holds a control character' end;
                    if member = 'unique_key' then unique_key := word;
                    elsif member = 'ordering_key' then ordering_key := word;
                    else limit_key := word; end if;
                when 'tenant' then
                    problem := case
                        when kind <> 'string' then 'must be text, not ' || kind
                        when length(word) not between 1 and 128
                            then format('must have 1 to 128 characters, not %s', length(word))
                        when word ~ controls then 'holds a control character'
                        when word = '*' then 'must not be *, which stands for every tenant in rules' end;
                    tenant := word;
                when 'traceparent' then
                    -- Never a problem: a trace is not worth a task.
                    traceparent := case when kind = 'string' then word end;
                when 'tracestate' then
                    tracestate := case when kind = 'string' then word end;
                when 'labels' then
                    if kind <> 'object' then
                        problem := 'must be an object of text by text, not ' || kind;
                    elsif (select count(*) from json_each(value)) > 16 then
                        problem := 'are more than 16';
                    else
                        select case
                            when json_typeof(e.value) <> 'string' then format('must be text by text; %L is not', e.key)
                            when length(e.key) not between 1 and 60 or e.key ~ controls
                                then 'need names of 1 to 60 characters, none of them a control character'
                            when length(e.value #>> '{}') > 200 or e.value #>> '{}' ~ controls
                                then 'need values of at most 200 characters, none of them a control character' end
                        into problem from json_each(value) e order by 1 nulls last limit 1;
                        labels := nullif(value::jsonb::text, '{}');
                    end if;
                when 'unique' then
                    if kind = 'number' then
                        unique_seconds := word::float8;
                        if not (unique_seconds > 0 and unique_seconds <= longest_seconds) then
                            problem := format('must be above 0 and at most %s seconds, not %s', longest_seconds, word);
                        end if;
                    elsif kind <> 'string' or word not in ('retained', 'live') then
                        problem := format('must be retained, live or a number of seconds, not %s', left(word, 60));
                    else
                        unique_scope := word;
                    end if;
                when 'on_duplicate' then
                    if kind <> 'string' or word not in ('return', 'replace', 'error') then
                        problem := format('must be return, replace or error, not %s', left(word, 60));
                    end if;
                    on_duplicate := word;
                else
                    field := left(member, 100);
                    problem := 'is unknown; the members are those of the method enqueue';
                end case;
                exit reading when problem is not null;
            end loop;
            if action is null then
                field := 'action'; problem := 'is missing';
            elsif run_at is not null and delay is not null then
                field := 'delay'; problem := 'and run_at exclude each other; give one';
            elsif expires_at is not null and expires_in is not null then
                field := 'expires_in'; problem := 'and expires_at exclude each other; give one';
            elsif unique_key is null and (unique_scope <> 'retained' or unique_seconds is not null) then
                field := 'unique'; problem := 'goes with unique_key';
            elsif unique_key is null and on_duplicate <> 'return' then
                field := 'on_duplicate'; problem := 'goes with unique_key';
            end if;
            exit reading when problem is not null;
            is_plain := is_plain and coalesce(unique_key, ordering_key, labels, limit_key, tenant) is null
                and expires_at is null and expires_in is null;
            is_usual := is_usual and unique_scope = 'retained' and unique_seconds is null and on_duplicate <> 'replace';
            actions[count] := action;
            payloads[count] := payload;
            run_ats[count] := run_at;
            delays[count] := delay;
            priorities[count] := coalesce(priority, 0);
            given_priorities[count] := priority;
            unique_keys[count] := unique_key;
            ordering_keys[count] := ordering_key;
            attempts[count] := max_attempts;
            timeouts[count] := timeout;
            all_labels[count] := labels;
            expiries[count] := expires_at;
            expiry_seconds[count] := expires_in;
            limit_keys[count] := limit_key;
            tenants[count] := tenant;
            if traceparent is not null then
                if traceparent is distinct from read_parent or tracestate is distinct from read_state then
                    -- Once for all that belong to one span, as tasks of one call mostly do.
                    trace := penstock.read_trace(traceparent, tracestate);
                    read_parent := traceparent; read_state := tracestate;
                end if;
                traces[count] := trace;
                is_traced := is_traced or trace is not null;
            else
                traces[count] := null;
            end if;
            are_live[count] := unique_scope = 'live';
            unique_since[count] := unique_seconds;
            policies[count] := on_duplicate;
        end loop;
    exception when data_exception then
        problem := case
            when sqlstate in ('22007', '22008') then sqlerrm
            when sqlstate in ('22P02', '22P05') then 'holds \u0000 or half a surrogate pair, which no text may hold'
            else 'is wrong: ' || sqlerrm end;
    end reading;
    if problem is not null then
        raise exception '%', case when too_large then field || ' ' || problem
                                  else format('Invalid params: %s %s', field, problem) end
            using errcode = case when too_large then '54000' else '22023' end,
                  detail = json_build_object('field', field, 'problem', problem, 'place', count)::text,
                  hint = case when too_large
                      then 'Keep what is large elsewhere and pass where it is, or set penstock.payload_limit_bytes.'
                      else 'docs/protocol.md lists what enqueue takes; place counts the tasks of the call from 1.' end;
    end if;
    if count = 0 then
        return;
    end if;
    if count >= 50 then
        -- A plan that is kept for any array takes it for ten elements; see Session.plan_for.
        perform set_config('plan_cache_mode', 'force_custom_plan', true);
    end if;

    -- An array that is first given its second member would begin there.
    were_replaced := array_fill(null::bool, array[count]);
    if is_plain then
        if is_traced then
            ids := array(select p.id from penstock.enqueue_traced_tasks(
                actions, payloads, run_ats, delays, priorities, attempts, timeouts, traces) p
                order by p.id);
        else
            ids := array(select p.id from penstock.enqueue_plain_tasks(
                actions, payloads, run_ats, delays, priorities, attempts, timeouts) p order by p.id);
        end if;
        wakes := true;
        states := array_fill('SCHEDULED'::text, array[count]);
        fresh := array_fill(true, array[count]);
    else
        if not is_usual then
            -- A statement does not see the rows that it makes itself, so none may meet a task of its own part by a key
            -- that it would take or whose task it would replace; see _cut_at_repeated_keys in tasks/enqueue.py.
            if not exists (
                select from unnest(actions, tenants, unique_keys, are_live, unique_since)
                    t (action, tenant, key, live, since)
                where t.key is not null group by t.action, t.tenant, t.key
                having count(distinct (t.live, t.since)) > 1
            ) then
                -- The first of each key and what has none, then what names a key again: so the first statement takes
                -- all keys in their sorted order, and two such calls cannot deadlock.
                select array_agg(t.n::int), array_agg(t.action), array_agg(t.payload), array_agg(t.run_at),
                       array_agg(t.delay), array_agg(t.priority), array_agg(t.attempts), array_agg(t.timeout),
                       array_agg(t.key), array_agg(t.ordering_key), array_agg(t.labels), array_agg(t.expires_at),
                       array_agg(t.expires_in), array_agg(t.limit_key), array_agg(t.live and t.times = 1),
                       array_agg(case when t.times = 1 then t.since end), array_agg(t.tenant), array_agg(t.trace),
                       array_agg(t.policy), array_agg(t.given_priority)
                into places, actions, payloads, run_ats, delays, priorities, attempts, timeouts, unique_keys,
                     ordering_keys, all_labels, expiries, expiry_seconds, limit_keys, are_live, unique_since, tenants,
                     traces, policies, given_priorities
                from (
                    select u.*, case when u.key is null then 1 else row_number() over (
                        partition by u.action, u.tenant, u.key order by u.n) end as times
                    from unnest(actions, payloads, run_ats, delays, priorities, attempts, timeouts, unique_keys,
                                ordering_keys, all_labels, expiries, expiry_seconds, limit_keys, are_live,
                                unique_since, tenants, traces, policies, given_priorities)
                        with ordinality u (action, payload, run_at, delay, priority, attempts, timeout, key,
                                           ordering_key, labels, expires_at, expires_in, limit_key, live,
                                           since, tenant, trace, policy, given_priority, n)
                    order by times, u.n) t;
            end if;
            earlier := array(
                select lag(t.n) over (partition by t.action, t.tenant, t.key order by t.n)
                from unnest(actions, tenants, unique_keys) with ordinality t (action, tenant, key, n) order by t.n);
        end if;
        first := 1;
        while first <= count loop
            last := count;
            if not is_usual then
                select coalesce(min(t.n) - 1, count) into last
                from unnest(earlier, unique_keys) with ordinality t (before, key, n)
                where t.n > first and t.key is not null and t.before >= first;
            end if;
            for entry in select * from penstock.enqueue_keyed_tasks(
                actions[first:last], payloads[first:last], run_ats[first:last], delays[first:last],
                priorities[first:last], attempts[first:last], timeouts[first:last], unique_keys[first:last],
                ordering_keys[first:last], all_labels[first:last], expiries[first:last], expiry_seconds[first:last],
                limit_keys[first:last], are_live[first:last], unique_since[first:last], tenants[first:last])
            loop
                ids[first + entry.place - 1] := entry.id;
                states[first + entry.place - 1] := entry.state;
                fresh[first + entry.place - 1] := entry.fresh;
                wakes := wakes or coalesce(entry.state = 'SCHEDULED', false);
            end loop;
            if first = 1 and last < count and 'replace' = any(policies) then
                -- What a later part replaces is locked along with what this one does: all by id, as cancel_tasks.
                perform from penstock.task t
                where t.id = any(ids) and t.state::text in ('WAITING', 'SCHEDULED', 'ERROR') and t.claimed_at is null
                order by t.id for no key update;
            end if;
            if 'replace' = any(policies[first:last]) then
                -- The lock on each unique key is held from the statement before, whose snapshot may be too old to see
                -- the task.
                for entry in
                    with wanted as materialized (
                        select t.n, t.id, t.payload, t.run_at, t.delay, t.priority
                        from unnest(ids[first:last], fresh[first:last], policies[first:last], payloads[first:last],
                                    run_ats[first:last], delays[first:last], given_priorities[first:last])
                            with ordinality t (id, fresh, policy, payload, run_at, delay, priority, n)
                        where t.policy = 'replace' and not t.fresh
                    )
                    select w.n, r.state from wanted w left join penstock.replace_tasks(
                        array(select id from wanted order by n), array(select payload from wanted order by n),
                        array(select run_at from wanted order by n), array(select delay from wanted order by n),
                        array(select priority from wanted order by n)) r on r.id = w.id
                loop
                    were_replaced[first + entry.n - 1] := entry.state is not null;
                    states[first + entry.n - 1] := entry.state;
                    wakes := wakes or coalesce(entry.state = 'SCHEDULED', false);
                end loop;
            end if;
            first := last + 1;
        end loop;
        if is_traced then
            perform penstock.note_traces(
                array(select t.id from unnest(ids, fresh, traces) t (id, fresh, trace)
                      where t.fresh and t.trace is not null order by t.id),
                array(select t.trace from unnest(ids, fresh, traces) t (id, fresh, trace)
                      where t.fresh and t.trace is not null order by t.id));
        end if;
        if false = any(fresh) then
            -- A statement of its own, for a duplicate's first task may be younger than the snapshots above. One that
            -- was cleaned in between is told as it last must have been.
            for entry in
                select t.n, coalesce(
                    (select l.state::text from penstock.task l where l.id = t.id),
                    (select h.state::text from penstock.task_history h where h.id = t.id limit 1),
                    (select unnest(states[k.n:k.n]) from unnest(ids) with ordinality k (id, n)
                     where k.id = t.id and states[k.n] is not null limit 1), 'SUCCESS') as state
                from unnest(ids, states) with ordinality t (id, state, n) where t.state is null
            loop
                states[entry.n] := entry.state;
            end loop;
        end if;
        for last in 1..count loop
            if policies[last] = 'error' and not fresh[last] then
                raise exception 'Task % has this unique key already', ids[last]
                    using errcode = '23505',
                          detail = json_build_object('id', ids[last], 'state', states[last], 'place', coalesce(places[last], last))::text,
                          hint = 'With on_duplicate return, the default, the answer is that task''s id.';
            end if;
            if policies[last] = 'replace' and fresh[last] then
                were_replaced[last] := false;
            end if;
        end loop;
    end if;
    if wakes and coalesce(current_setting('penstock.notify', true), '') <> 'off' then
        perform pg_notify('penstock_work', '');  -- delivered by the caller's commit, once for each transaction
    end if;
    return query select coalesce(places[t.n], t.n::int), t.id, t.state, not t.fresh, t.replaced
        from unnest(ids, states, fresh, were_replaced) with ordinality t (id, state, fresh, replaced, n) order by 1;
end $$;
revoke all on function penstock.enqueue_tasks from public;

create function public.penstock_enqueue(
    action text, payload anycompatible default '{}'::text, run_at timestamptz default null,
    delay float8 default null, priority int default null, unique_key text default null,
    ordering_key text default null, max_attempts int default null, timeout float8 default null,
    labels jsonb default null, expires_at timestamptz default null, expires_in float8 default null,
    limit_key text default null, "unique" text default null, on_duplicate text default null,
    tenant text default null, traceparent text default null, tracestate text default null)
returns table (id bigint, state text, duplicate bool, replaced bool)
language plpgsql security definer
set search_path = pg_catalog, pg_temp set enable_seqscan = off set jit = off set timezone = 'UTC' set plan_cache_mode = auto as $$
    #variable_conflict use_variable
    declare
        body json;
        given json;
    begin
        if pg_typeof(payload)::text not in ('json', 'jsonb', 'text', 'character varying') then
            raise exception 'Invalid params: payload must be json, jsonb or text, not %', pg_typeof(payload)
                using errcode = '22023', detail = '{"field": "payload", "problem": "is of another type"}',
                      hint = 'Wrap it: to_jsonb(...).';
        end if;
        begin
            body := coalesce(payload::text, '{}')::json;
        exception when data_exception then
            raise exception 'Invalid params: payload is not valid JSON: %', sqlerrm
                using errcode = '22023', detail = '{"field": "payload", "problem": "is not valid JSON"}';
        end;
        select json_build_array(json_object_agg(m.name, m.value)) into given from (values
            ('action', coalesce(to_json(action), 'null')), ('payload', body), ('run_at', to_json(run_at)),
            ('delay', to_json(delay)), ('priority', to_json(priority)), ('unique_key', to_json(unique_key)),
            ('ordering_key', to_json(ordering_key)), ('max_attempts', to_json(max_attempts)),
            ('timeout', to_json(timeout)), ('labels', labels::text::json), ('expires_at', to_json(expires_at)),
            ('expires_in', to_json(expires_in)), ('limit_key', to_json(limit_key)),
            ('unique', case when "unique" ~ '^\d+(\.\d+)?$' then to_json("unique"::float8) else to_json("unique") end),
            ('on_duplicate', to_json(on_duplicate)), ('tenant', to_json(tenant)),
            ('traceparent', to_json(traceparent)), ('tracestate', to_json(tracestate))) m (name, value) where m.value is not null;
        return query select t.id, t.state, t.duplicate, t.replaced from penstock.enqueue_tasks(given, null) t;
    end $$;
revoke all on function public.penstock_enqueue from public;
comment on function public.penstock_enqueue is 'Adds a task in the caller''s transaction';

create function public.penstock_enqueue_many(tasks anycompatible, payload_limit_bytes int default null)
returns table (place int, id bigint, state text, duplicate bool, replaced bool)
language plpgsql security definer
set search_path = pg_catalog, pg_temp set enable_seqscan = off set jit = off set plan_cache_mode = auto as $$
    #variable_conflict use_column
    declare
        body json;
    begin
        if pg_typeof(tasks)::text not in ('json', 'jsonb', 'text', 'character varying') then
            raise exception 'Invalid params: tasks must be json, jsonb or text, not %', pg_typeof(tasks)
                using errcode = '22023', hint = 'Wrap it: to_jsonb(...).';
        end if;
        begin
            body := tasks::text::json;
        exception when data_exception then
            raise exception 'Invalid params: tasks is no JSON: %', sqlerrm using errcode = '22023';
        end;
        return query select * from penstock.enqueue_tasks(body, payload_limit_bytes);
    end $$;
revoke all on function public.penstock_enqueue_many from public;
comment on function public.penstock_enqueue_many is 'Adds tasks, an array of what the method enqueue takes';

create function public.penstock_note_trace(ids bigint[], trace text) returns void
   
language sql security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off as $$
        update penstock.task t set trace = $2
        where t.id = any($1) and t.created_at = now() and t.trace is null and length($2) <= 600
          and $2 ~ '^00-[0-9a-f]{32}-[0-9a-f]{16}-'
    $$;
revoke all on function public.penstock_note_trace from public;
comment on function public.penstock_note_trace is
    'Of the version before, whose programs call it: penstock_enqueue_many takes traceparent with each task';
