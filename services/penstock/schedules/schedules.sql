-- Schedules: changed by callers, fired by supervisors. Firing a schedule locks its clock's row; changing it locks the row
-- of the schedule and that of the clock, in this order.

-- part: schedule
-- What a schedule s with its clock c is read as, but for its payload: the parameters of schedule.create, by their names.
s.id, s.name, s.expression, s.timezone, s.start_at, s.end_at, s.jitter_seconds as jitter, s.missed, s.max_missed,
s.max_lateness_seconds as max_lateness, s.overlap, s.action, s.priority, s.max_attempts, s.timeout_seconds as timeout,
s.ordering_key, s.labels, s.paused, s.tenant, s.created_at, s.updated_at, c.next_at, c.due_at, c.last_at, c.last_task_id,
c.problem, case when c.problem is not null then 'STOPPED' when s.paused then 'PAUSED' when c.next_at is null then 'ENDED'
           else 'ACTIVE' end as state

-- name: lock_schedules
-- $1 names, $2 tenant or null. The existing ones, of that tenant, current and locked. Locking both rows is what makes both of them current.
select {schedule}, s.payload
from penstock.schedule s join penstock.schedule_clock c on c.schedule_id = s.id
where s.name = any($1::text[]) and ($2::text is null or s.tenant = $2) order by s.name for update;

-- name: write_schedules
-- $1 to $21 arrays, one element a schedule, of distinct names: the fields of NewSchedule in their order, payloads and
-- labels as JSON text; $20 next_at and $21 due_at or null. $22 whether one that exists is replaced. Returns (id, name,
-- fresh) of those written, in no order. By name, so that two batches cannot deadlock.
with input as materialized (
    select * from unnest($1::text[], $2::text[], $3::text[], $4::timestamptz[], $5::timestamptz[], $6::float8[],
                         $7::text[], $8::int[], $9::float8[], $10::text[], $11::text[], $12::text[], $13::int2[],
                         $14::int2[], $15::float8[], $16::text[], $17::text[], $18::bool[], $19::text[],
                         $20::timestamptz[], $21::timestamptz[])
        as i (name, expression, timezone, start_at, end_at, jitter_seconds, missed, max_missed, max_lateness_seconds,
              overlap, action, payload, priority, max_attempts, timeout_seconds, ordering_key, labels, paused, tenant,
              next_at, due_at)
), written as (
    insert into penstock.schedule as s (name, expression, timezone, start_at, end_at, jitter_seconds, missed, max_missed,
                                        max_lateness_seconds, overlap, action, payload, priority, max_attempts,
                                        timeout_seconds, ordering_key, labels, paused, tenant)
    select name, expression, timezone, start_at, end_at, jitter_seconds, missed, max_missed, max_lateness_seconds,
           overlap, action, payload::json, priority, max_attempts, timeout_seconds, ordering_key, labels::jsonb, paused,
           tenant
    from input order by name
    on conflict (name) do update
    set expression = excluded.expression, timezone = excluded.timezone, start_at = excluded.start_at,
        end_at = excluded.end_at, jitter_seconds = excluded.jitter_seconds, missed = excluded.missed,
        max_missed = excluded.max_missed, max_lateness_seconds = excluded.max_lateness_seconds,
        overlap = excluded.overlap, action = excluded.action, payload = excluded.payload, priority = excluded.priority,
        max_attempts = excluded.max_attempts, timeout_seconds = excluded.timeout_seconds,
        ordering_key = excluded.ordering_key, labels = excluded.labels, paused = excluded.paused, tenant = excluded.tenant,
        updated_at = now()
    where $22::boolean
    returning s.id, s.name, s.xmax = 0 as fresh
), clocks as (
    insert into penstock.schedule_clock (schedule_id, next_at, due_at)
    select w.id, i.next_at, i.due_at from written w join input i on i.name = w.name
    on conflict (schedule_id) do update set next_at = excluded.next_at, due_at = excluded.due_at, problem = null
)
select id, name, fresh from written;

-- name: delete_schedules
-- $1 names. Their runs stay until they are too old, as their tasks do.
with gone as (
    delete from penstock.schedule where name = any($1::text[]) returning id
), clocks as (
    delete from penstock.schedule_clock where schedule_id in (select id from gone)
)
select id from gone;

-- name: read_schedules
-- $1 names, $2 tenant or null.
select {schedule}, s.payload
from penstock.schedule s join penstock.schedule_clock c on c.schedule_id = s.id
where s.name = any($1::text[]) and ($2::text is null or s.tenant = $2);

-- name: list_schedules
-- Newest first. $1 id that the page begins behind, or null; $2 limit; $3 labels that they all have (JSON text) or null,
-- $4 action or null, $5 paused or null, $6 tenant or null. Without the payloads, which may be large.
select {schedule}, 'null' as payload
from penstock.schedule s join penstock.schedule_clock c on c.schedule_id = s.id
where ($1::bigint is null or s.id < $1)
  and ($3::text is null or (s.labels @> $3::jsonb and s.labels <> '{}'))
  and ($4::text is null or s.action = $4) and ($5::boolean is null or s.paused = $5)
  and ($6::text is null or s.tenant = $6)
order by s.id desc limit $2;

-- name: claim_due_schedules
-- $1 how many, $2 seconds back from now to begin at, null for the front: behind the dead entries of what was
-- fired. Oldest first; what another supervisor holds is left to it. By schedule_clock_due.
select schedule_id from penstock.schedule_clock
where due_at <= now() and due_at >= case when $2::float8 is null then '-infinity' else now() - make_interval(secs => $2) end
order by due_at limit $1 for update skip locked;

-- name: read_due_schedules
-- $1 ids of clocks that are held. A statement of its own, so that it sees what was written before they were locked.
-- busy: the newest task of one that is not to overlap is not settled.
select {schedule}, s.payload, now() as now,
       s.overlap = 'skip' and exists (select from penstock.task t where t.id = c.last_task_id) as busy
from penstock.schedule_clock c join penstock.schedule s on s.id = c.schedule_id
where c.schedule_id = any($1::bigint[]) order by c.due_at;

-- name: record_runs
-- Arrays, one element a run: $1 schedule ids, $2 instants, $3 outcomes, $4 task ids or null, $5 since or null,
-- $6 instants that the row stands for. A second run of an instant violates the primary key, which is meant.
insert into penstock.schedule_run (schedule_id, scheduled_at, outcome, task_id, since, instants, fired_at)
select u.*, clock_timestamp()
from unnest($1::bigint[], $2::timestamptz[], $3::text[], $4::bigint[], $5::timestamptz[], $6::int[]) u;

-- name: move_clocks
-- Arrays, one element a schedule: $1 ids, $2 next_at and $3 due_at or null, $4 last_at, $5 newest task id or null.
update penstock.schedule_clock c
set next_at = u.next_at, due_at = u.due_at, last_at = u.last_at, last_task_id = coalesce(u.task_id, c.last_task_id)
from unnest($1::bigint[], $2::timestamptz[], $3::timestamptz[], $4::timestamptz[], $5::bigint[])
    as u (id, next_at, due_at, last_at, task_id)
where c.schedule_id = u.id;

-- name: put_clocks_off
-- $1 ids of clocks that are held, $2 seconds. The instant that they stand at stays.
update penstock.schedule_clock set due_at = now() + make_interval(secs => $2) where schedule_id = any($1::bigint[]);

-- name: stop_clock
-- $1 id, $2 why it cannot be fired.
update penstock.schedule_clock set next_at = null, due_at = null, problem = $2 where schedule_id = $1;

-- name: record_manual_run
-- $1 schedule id, $2 instant, $3 id of the task, null where the run was skipped. Returns the run.
with noted as (
    update penstock.schedule_clock set last_task_id = $3::bigint where schedule_id = $1 and $3::bigint is not null
)
insert into penstock.schedule_run (schedule_id, scheduled_at, outcome, task_id, manual, fired_at)
values ($1, $2, case when $3::bigint is null then 'SKIPPED' else 'FIRED' end, $3::bigint, true, clock_timestamp())
returning scheduled_at, outcome, fired_at, task_id, manual, since, instants;

-- name: read_wait
-- $1 as $2 of claim_due_schedules. Seconds until the next schedule is due, null for none. By the end of schedule_clock_due.
select extract(epoch from min(due_at) - clock_timestamp())::float8 from penstock.schedule_clock
where due_at >= case when $1::float8 is null then '-infinity' else now() - make_interval(secs => $1) end;

-- name: is_live_task
-- $1 id or null.
select exists (select from penstock.task where id = $1::bigint);

-- name: read_instants
-- When this transaction began, which is when what it writes was made, and the present instant.
select now(), clock_timestamp();

-- name: read_instant
-- The present instant, never a whole second: those belong to the clocks.
select case when clock_timestamp() = date_trunc('second', clock_timestamp())
            then clock_timestamp() + interval '1 microsecond' else clock_timestamp() end;

-- name: list_runs
-- $1 schedule id, $2 instant that the page begins behind, or null, $3 limit. Newest first. outcome: of one that fired, the
-- state of its task.
select scheduled_at, fired_at, task_id, manual, since, instants,
       case when outcome = 'FIRED' then coalesce(
           (select t.state::text from penstock.task t where t.id = r.task_id),
           (select h.state::text from penstock.task_history h where h.id = r.task_id limit 1), 'CLEANED')
       else outcome end as outcome
from penstock.schedule_run r
where schedule_id = $1 and ($2::timestamptz is null or scheduled_at < $2)
order by scheduled_at desc limit $3;

-- name: delete_old_runs
-- $1 seconds, $2 how many.
with gone as (
    delete from penstock.schedule_run where (schedule_id, scheduled_at) in (
        select schedule_id, scheduled_at from penstock.schedule_run
        where fired_at < now() - make_interval(secs => $1) order by fired_at limit $2 for update skip locked)
    returning 1
) select count(*) from gone;

-- name: create_import
-- $1 whether one that exists is replaced, $2 how many entries.
insert into penstock.schedule_import (replace, total) values ($1, $2) returning id;

-- name: insert_import_parts
-- $1 import id, $2 places of the first entries, $3 entries (JSON arrays).
insert into penstock.schedule_import_part (import_id, place, entries)
select $1, * from unnest($2::int[], $3::text[]);

-- name: claim_import
-- The oldest import that no supervisor works on, locked.
select id, replace from penstock.schedule_import where finished_at is null order by id limit 1 for update skip locked;

-- name: take_import_part
-- $1 import id, which is held.
delete from penstock.schedule_import_part where import_id = $1 and place = (
    select min(place) from penstock.schedule_import_part where import_id = $1)
returning place, entries;

-- name: note_import
-- $1 import id, $2 created, $3 replaced, $4 refused, $5 errors (JSON array), $6 how many errors are kept.
update penstock.schedule_import
set seen = seen + $2::int + $3::int + $4::int, created = created + $2::int, replaced = replaced + $3::int,
    refused = refused + $4::int, updated_at = now(),
    errors = case when jsonb_array_length(errors) < $6::int then errors || $5::text::jsonb else errors end,
    finished_at = case when seen + $2::int + $3::int + $4::int >= total then now() end
where id = $1;

-- name: read_import
-- $1 id.
select id, replace, total, seen, created, replaced, refused, errors::text as errors, created_at, updated_at, finished_at
from penstock.schedule_import where id = $1;

-- name: delete_old_imports
-- $1 seconds, $2 how many. With the parts of it, of which a finished one has none.
with gone as (
    delete from penstock.schedule_import where id in (
        select id from penstock.schedule_import
        where finished_at < now() - make_interval(secs => $1) order by id limit $2 for update skip locked)
    returning 1
) select count(*) from gone;
