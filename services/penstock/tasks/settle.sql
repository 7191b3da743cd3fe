-- Outcomes of claimed tasks. Every statement matches id, claim and state together; a row that does not
-- match is a stale report, which is no error.
--
-- Each row is looked up by `id = any(array[r.id])`. As `id = r.id`, a join that the planner may hash, it becomes a scan on a table that
-- swings between empty and full, at 400 us a task instead of 5. As `id = any($1)`, each id would be looked up in every
-- partition of a divided table. An array of one is neither: always a look at the primary key, of the id's partition alone.
-- `state::text` keeps the planner from the partial indexes on state, and ids go in their order, so that two which lock the
-- same rows do not deadlock.
-- Whatever makes a task of a workflow final adds to workflow_event in the same statement: see workflows.sql.

-- part: next
-- Of the ordering keys in `ended`, of which this transaction has settled the task that ran, or which it releases: the
-- oldest that waits in each, which may run. The row of the head stays unchanged, and is not even locked: while tasks wait,
-- it costs nothing. The id is null where this snapshot knows of none that waits (see forget_ordering_keys).
next as materialized (
    select e.key, t.id, t.priority, t.run_at
    from ended e left join lateral (
        select id, priority, run_at from penstock.task
        where ordering_key = e.key and state = 'WAITING' and claimed_at is null order by id limit 1) t on true
)

-- part: ruled
exists (select from penstock.action) or exists (select from penstock.route) or exists (select from penstock.tenant)

-- part: moved
-- Of the tasks in `gone`.
moved as (
    insert into penstock.task_history (id, state, action, payload, priority, run_at, attempts, max_attempts, claim,
        claimed_at, created_at, updated_at, timeout_seconds, unique_key, ordering_key, progress, failures,
        labels, expires_at, limit_key, tenant, workflow, trace, finished_at, result, worker)
    select g.id, 'SUCCESS', g.action, g.payload, g.priority, g.run_at, g.attempts, g.max_attempts, g.claim,
        g.claimed_at, g.created_at, now(), g.timeout_seconds, g.unique_key, g.ordering_key, g.progress, g.failures,
        g.labels, g.expires_at, g.limit_key, g.tenant, g.workflow, g.trace, now(), g.result::json, coalesce(g.reporter, g.worker)
    from gone g
), notified as (
    insert into penstock.workflow_event (workflow_id, task_id, claim, state)
    select workflow, id, claim, 'SUCCESS' from gone where workflow is not null
), tallied as (
    insert into penstock.tally (action, event, count)
    select action, 'SUCCESS', count(*) from gone group by action
)

-- part: is_awaited
-- Whether a caller waits for results: its api holds the lock while it listens (see LongPolls). It cannot be had before this
-- transaction ends, so a caller that waits from then on sees what this settles. Another that settles may hold it too; no harm.
(select not pg_try_advisory_xact_lock(hashtext('penstock results')))

-- name: hold_results_lock
-- Of the connection that listens; see is_awaited.
select pg_advisory_lock_shared(hashtext('penstock results'));

-- name: finish_few_tasks
-- $1 to $4 as finish_tasks, for those without an ordering key: a statement that is its own transaction, at half the cost for a
-- single task. Returns (action, their ids, their workflows, whether a caller waits for results).
with gone as (
    delete from penstock.task t using unnest($1::bigint[], $2::bigint[], $3::text[], $4::text[]) r (id, claim, result, worker)
    where {held} and t.ordering_key is null
    returning t.*, r.result, r.worker as reporter
), {moved}
select action, array_agg(id) as ids, array_agg(workflow) filter (where workflow is not null) as workflows,
       {is_awaited} as awaited
from gone group by action;

-- name: finish_tasks
-- $1 ids (distinct, ascending), $2 claims, $3 results as JSON text, $4 workers or null: the row may know it
-- by a heartbeat, $5 from how many on one row promotes them. ACQUIRED to SUCCESS: the row moves to the history.
-- The next of each ordering key is promoted. Where they are many, of one priority and due, one row in `turn` promotes them instead:
-- one row that names them all, by which the claim takes them unchanged (see turns in claim.sql). A row rewritten for each,
-- with its entries in the indexes, is what a key costs otherwise. Not where there are rules: those go by the tasks' rows.
-- Returns (action, how many of it moved, how many of those belong to workflows, how many of it were promoted, null, whether
-- another process must hear of it: one had a key, or a caller waits), and a row with the ordering keys, and no action, for which the caller has to look again: what was found to be next was taken away
-- meanwhile or is locked, or nothing was found. No lock is waited for but those of the tasks that settle: a program that
-- replaces a task that waits holds its row, and may want others that are held here.
with gone as (
    delete from penstock.task t using unnest($1::bigint[], $2::bigint[], $3::text[], $4::text[]) r (id, claim, result, worker)
    where {held}
    returning t.*, r.result, r.worker as reporter
), {moved}, ended as (
    select ordering_key as key from gone where ordering_key is not null
), {next}, turned as (
    insert into penstock.turn (priority, run_at, task_id, size, task_ids, run_ats, keys, ends_at)
    select priority, min(run_at), min(id), count(*), array_agg(id), array_agg(run_at), array_agg(key),
           now() + interval '5 seconds'
    from next
    where id is not null and run_at <= now() and not ({ruled})
    group by priority having count(*) >= $5::int
    returning priority
), others as materialized (
    select key, id from next
    where id is null or run_at > now() or priority not in (select priority from turned)
), promoted as (
    update penstock.task t set state = 'SCHEDULED', updated_at = now()
    from (select l.id from others n join penstock.task l on l.id = any(array[n.id])
          where l.state::text = 'WAITING' and l.claimed_at is null for update of l skip locked) free
    where t.id = any(array[free.id]) and t.state::text = 'WAITING' and t.claimed_at is null
    returning t.id, t.action
)
select action, count(*) as finished, count(workflow) as notified, 0 as promoted, null::text[] as keys,
       count(ordering_key) > 0 or {is_awaited} as wakes
from gone group by action
union all
select action, 0, 0, count(*), null, true from promoted group by action
union all
select null, 0, 0, 0, array_agg(key), true from others
where case when id in (select id from promoted) then false else true end having count(*) > 0;

-- name: read_attempts
-- $1 ids, $2 claims. The attempts of claims that still hold their task, to decide what their failure means.
select t.id, t.claim, t.action, t.attempts, t.max_attempts from {pairs} join penstock.task t on {held};

-- name: find_claims_by_attempt
-- $1 ids, $2 attempts: the older convention, in which a result names its attempt and not its claim.
select t.id, t.attempts, t.claim from unnest($1::bigint[], $2::int[]) r (id, attempt)
join penstock.task t on t.id = any(array[r.id]) and t.attempts = any(array[r.attempt]) and t.state::text = 'ACQUIRED';

-- name: delay_tasks
-- $1 ids (distinct), $2 claims, $3 errors as JSON text, $4 delays in seconds, $5 whether each is suspect from now on,
-- $6 workers or null.
-- ACQUIRED to ERROR, to run again later.
with changed as (
    update penstock.task t
    set state = 'ERROR', run_at = greatest(now() + make_interval(secs => r.delay), {cancelled_by}), claimed_at = null,
        heartbeat_at = null, progress = null, updated_at = now(), suspect = t.suspect or r.suspect, route = null, gate = null,
        worker = coalesce(r.worker, t.worker),
        failures = coalesce(t.failures, '[]') || jsonb_build_array(jsonb_build_object(
            'attempt', t.attempts, 'claim', t.claim, 'at', now(), 'error', r.error::jsonb,
            'worker', coalesce(r.worker, t.worker)))
    from (select * from unnest($1::bigint[], $2::bigint[], $3::text[], $4::float8[], $5::bool[], $6::text[])
              r (id, claim, error, delay, suspect, worker) order by id) r
    where {held}
    returning t.id, t.action, t.workflow
), {notified}, tallied as (
    insert into penstock.tally (action, event, count)
    select action, 'ERROR', count(*) from changed group by action
)
select id, action from changed;

-- name: refund_attempts
-- $1 ids (distinct), $2 claims, $3 errors as JSON text. ACQUIRED back to the state it came from, suspect from now on: the
-- attempt was lost with others of its message, so it is refunded and recorded as a failure. What is noted of workers without
-- its action ends. Returns ids.
with changed as (
    update penstock.task t
    set state = case when t.attempts = 1 then 'SCHEDULED' else 'ERROR' end::penstock.task_state,
        attempts = t.attempts - 1, run_at = {due_again}, claimed_at = null, heartbeat_at = null,
        progress = null, updated_at = now(), suspect = true, route = null, gate = null,
        failures = coalesce(t.failures, '[]') || jsonb_build_array(jsonb_build_object(
            'attempt', t.attempts, 'claim', t.claim, 'at', now(), 'error', r.error::jsonb, 'worker', t.worker))
    from (select * from unnest($1::bigint[], $2::bigint[], $3::text[]) r (id, claim, error) order by id) r
    where {held}
    returning t.id, t.workflow, true as moved
), {notified}, {renoted}
select id from changed;

-- name: postpone_tasks
-- $1 ids (distinct), $2 claims, $3 delays in seconds, $4 why, as progress in JSON text, $5 the reason: payload (it could not
-- be had), snooze or unknown (the worker has no handler). ACQUIRED back to the state that the claim came from, the attempt
-- given back. Noted beside the task, which is rare, and not in its row.
with changed as (
    update penstock.task t
    set state = case when t.attempts = 1 then 'SCHEDULED' else 'ERROR' end::penstock.task_state,
        attempts = t.attempts - 1, run_at = greatest(now() + make_interval(secs => r.delay), {cancelled_by}),
        claimed_at = null, heartbeat_at = null, progress = r.why::json, updated_at = now(), route = null, gate = null
    from (select * from unnest($1::bigint[], $2::bigint[], $3::float8[], $4::text[], $5::text[])
              r (id, claim, delay, why, reason) order by id) r
    where {held}
    returning t.id, t.action, t.workflow, t.state::text as state, t.attempts, r.reason
), {notified}, noted as (
    insert into penstock.postponed as n (task_id, action, snoozes, attempts, unknown_since)
    select id, action, (reason = 'snooze')::int, attempts, case when reason = 'unknown' then now() end
    from changed
    on conflict (task_id) do update
    set snoozes = n.snoozes + excluded.snoozes, attempts = excluded.attempts, returned_at = now(),
        unknown_since = case when n.attempts = excluded.attempts and n.unknown_since < excluded.unknown_since
                             then n.unknown_since else excluded.unknown_since end
)
select id, action, state, reason from changed;

-- name: read_postponed
-- $1 ids, $2 claims, $3 seconds for which an announcement holds. Of claims that still hold their task: how often a handler
-- has put it off, for how many seconds workers without a handler have given it back (null: they did not), and whether any
-- worker announces its action.
select t.id, t.claim, coalesce(p.snoozes, 0) as snoozes,
       case when p.attempts = t.attempts - 1 then date_part('epoch', now() - p.unknown_since) end as unknown_seconds,
       exists (select from penstock.announced a
               where a.action = t.action and a.seen_at > now() - make_interval(secs => $3)) as is_announced
from {pairs} join penstock.task t on {held} left join penstock.postponed p on p.task_id = t.id;

-- name: fail_tasks_permanently
-- $1 ids (distinct), $2 claims, $3 errors as JSON text, $4 workers or null. ACQUIRED to CRITICAL_ERROR: the row moves to the history.
with gone as (
    delete from penstock.task t
    using (select * from unnest($1::bigint[], $2::bigint[], $3::text[], $4::text[]) r (id, claim, error, worker) order by id) r
    where {held}
    returning t.*, r.error, r.worker as reporter
), moved as (
    insert into penstock.task_history (id, state, action, payload, priority, run_at, attempts, max_attempts, claim,
        claimed_at, created_at, updated_at, timeout_seconds, unique_key, ordering_key, progress, failures,
        labels, expires_at, limit_key, tenant, workflow, trace, finished_at, worker)
    select g.id, 'CRITICAL_ERROR', g.action, g.payload, g.priority, g.run_at, g.attempts, g.max_attempts, g.claim,
        g.claimed_at, g.created_at, now(), g.timeout_seconds, g.unique_key, g.ordering_key, g.progress,
        coalesce(g.failures, '[]') || jsonb_build_array(jsonb_build_object(
            'attempt', g.attempts, 'claim', g.claim, 'at', now(), 'error', g.error::jsonb,
            'worker', coalesce(g.reporter, g.worker))),
        g.labels, g.expires_at, g.limit_key, g.tenant, g.workflow, g.trace, now(), coalesce(g.reporter, g.worker)
    from gone g
), notified as (
    insert into penstock.workflow_event (workflow_id, task_id, claim, state)
    select workflow, id, claim, 'CRITICAL_ERROR' from gone where workflow is not null
), tallied as (
    insert into penstock.tally (action, event, count)
    select action, 'CRITICAL_ERROR', count(*) from gone group by action
)
select id, action, ordering_key, workflow from gone;

-- name: note_heartbeats
-- $1 ids (distinct), $2 claims, $3 progress as JSON text or null, $4 workers or null. Touches no indexed column, so the update is HOT.
update penstock.task t
set heartbeat_at = now(), updated_at = now(), progress = coalesce(r.detail::json, t.progress),
    worker = coalesce(r.worker, t.worker)
from (select * from unnest($1::bigint[], $2::bigint[], $3::text[], $4::text[]) r (id, claim, detail, worker) order by id) r
where {held}
returning t.id;

-- name: cancel_tasks
-- $1 ids, $2 the reason or null. Any live state to CANCELLED; a late result finds no row and is ignored. Returns also
-- whether each waited for an event, and its ordering key unless it waited behind another of that key. Rows are locked by
-- id, the order of replace_tasks: a program that replaces the same tasks may hold one and want another.
with gone as (
    delete from penstock.task t using (
        select l.id from {asked} join penstock.task l on l.id = any(array[u.id])
        order by u.id for update of l) held
    where t.id = any(array[held.id])
    returning t.*
), moved as (
    insert into penstock.task_history (id, state, action, payload, priority, run_at, attempts, max_attempts, claim,
        claimed_at, created_at, updated_at, timeout_seconds, unique_key, ordering_key, progress, failures,
        labels, expires_at, limit_key, tenant, workflow, trace, finished_at, reason, worker)
    select id, 'CANCELLED', action, payload, priority, run_at, attempts, max_attempts, claim,
        claimed_at, created_at, now(), timeout_seconds, unique_key, ordering_key, progress, failures,
        labels, expires_at, limit_key, tenant, workflow, trace, now(), $2::text, worker
    from gone
), notified as (
    insert into penstock.workflow_event (workflow_id, task_id, claim, state)
    select workflow, id, claim, 'CANCELLED' from gone where workflow is not null
), tallied as (
    insert into penstock.tally (action, event, count)
    select action, 'CANCELLED', count(*) from gone group by action
)
select id, action, case when state::text <> 'WAITING' or claimed_at is not null then ordering_key end as ordering_key,
       workflow, state::text = 'WAITING' and claimed_at is not null as waited from gone;

-- name: restart_tasks
-- $1 ids. CRITICAL_ERROR or CANCELLED to a new life: attempts from 0, the claim token kept, so that a late result
-- of the old life can never match. Behind a live task of the same ordering key it waits; a key that it held is held no
-- more. A head names the task that holds its key, or some task that ran before; so it is asked only of a key that is
-- held, lest a task that ran first take itself for the one that runs. An expiry that has passed is forgotten. One whose payload was emptied stays unchanged, and so does a step of a
-- workflow: see restart_steps.
-- Its unique key must be its own or free: the upsert locks the row and returns who has it. taken_at moves on, by
-- which an enqueuer whose snapshot is older sees that the task that it takes for settled is so no longer.
with chosen as materialized (
    select id, action, unique_key from penstock.task_history
    where id = any($1::bigint[]) and state in ('CRITICAL_ERROR', 'CANCELLED') and payload_gone is null
      and workflow is null
    order by id for update
), keys as (
    insert into penstock.unique_key as k (action, key, task_id, taken_at)
    select distinct on (action, unique_key) action, unique_key, id, clock_timestamp()
    from chosen where unique_key is not null
    order by action, unique_key, id
    on conflict (action, key) do update set taken_at = case when k.task_id in (select id from chosen)
        then greatest(clock_timestamp(), k.taken_at + interval '1 microsecond') else k.taken_at end
    returning k.task_id
), gone as (
    delete from penstock.task_history
    where id = any(array(select id from chosen where unique_key is null or id in (select task_id from keys)))
      and state in ('CRITICAL_ERROR', 'CANCELLED')
    returning *
), heads as (
    insert into penstock.ordering_head as h (key, task_id)
    select distinct on (ordering_key) ordering_key, id from gone where ordering_key is not null
    order by ordering_key, id
    on conflict (key) do update set task_id = case when h.held then h.task_id else 0 end,
        held = h.held and h.task_id not in (select id from gone)
    returning h.key, h.task_id
), back as (
    insert into penstock.task (id, state, action, payload, priority, run_at, attempts, max_attempts, claim,
        created_at, updated_at, timeout_seconds, unique_key, ordering_key, failures, labels, expires_at, limit_key, tenant,
        trace, journal)
    select g.id, case when h.task_id <> g.id then 'WAITING' else 'SCHEDULED' end::penstock.task_state,
        g.action, g.payload, g.priority, now(), 0, g.max_attempts, g.claim,
        g.created_at, now(), g.timeout_seconds, g.unique_key, g.ordering_key, g.failures,
        g.labels, case when g.expires_at > now() then g.expires_at end, g.limit_key, g.tenant, g.trace,
        {journal_left}
    from gone g left join heads h on h.key = g.ordering_key
    returning id, action, state
), {failed_forgotten}, tallied as (
    insert into penstock.tally (action, event, count)
    select action, state::text, -count(*) from gone group by action, state
)
select id, action, state::text as state from back;

-- name: find_workflow_of
-- $1 id of a settled task. The workflow that it is a step of.
select workflow from penstock.task_history where id = $1;

-- name: find_key_holder
-- $1 id of a settled task. The task that has its unique key in its place.
select k.task_id from penstock.task_history t
join penstock.unique_key k on k.action = t.action and k.key = t.unique_key
where t.id = $1 and k.task_id <> t.id;

-- name: reschedule_tasks
-- $1 ids, $2 run_at or null, $3 delay in seconds or null, $4 priority or null; what is null stays. A task that is
-- claimed, which it also is while it waits for an event, or settled is left alone. A bounded claim finds what has come to stand before its bounds by its next sweep.
with changed as (
    update penstock.task t
    set run_at = coalesce($2::timestamptz, now() + make_interval(secs => $3::float8), t.run_at),
        priority = coalesce($4::int2, t.priority), updated_at = now(), route = null, gate = null
    from {asked}
    where t.id = any(array[u.id]) and t.state::text in ('WAITING', 'SCHEDULED', 'ERROR') and t.claimed_at is null
    returning t.id, t.state::text as state, num_nonnulls($2::timestamptz, $3::float8) > 0 as moved
), {renoted}
select id, state from changed;

-- name: lock_ordering_heads
-- $1 ordering keys. An enqueuer holds the head of its key until its task can be seen, so who holds it cannot miss one.
-- Returns (key, whether it is locked by this transaction) of those that there are; none is waited for.
with held as materialized (
    select key from penstock.ordering_head where key = any($1::text[]) order by key for update skip locked
)
select key, case when key in (select key from held) then true else false end as is_held
from penstock.ordering_head where key = any($1::text[]);

-- name: lock_ordering_heads_at_once
-- $1 ordering keys. An error where another transaction holds one.
select key from penstock.ordering_head where key = any($1::text[]) order by key for update nowait;

-- name: look_later
-- $1 ordering keys of which nothing runs, and of which another transaction holds the head or the task that is next. They
-- are noted as an overdue promotion without tasks: a resulter that ends promotions looks for their next tasks.
insert into penstock.turn (priority, run_at, task_id, size, task_ids, run_ats, keys, ends_at)
select 0, now(), min(k.id), count(*), array_agg(k.id), array_agg(now()), array_agg(k.key), now()
from (select -nextval('penstock.turn_id_seq') as id, key from unnest($1::text[]) u (key)) k;

-- name: promote_successors
-- $1 ordering keys. Returns for each key the task found or null, and its action, null where another transaction holds the
-- task or has taken it away meanwhile.
with ended as (
    select * from unnest($1::text[]) k (key)
), {next}, promoted as (
    update penstock.task t set state = 'SCHEDULED', updated_at = now()
    from (select l.id from next n join penstock.task l on l.id = any(array[n.id])
          where l.state::text = 'WAITING' and l.claimed_at is null for update of l skip locked) free
    where t.id = any(array[free.id]) and t.state::text = 'WAITING' and t.claimed_at is null
    returning t.ordering_key, t.id, t.action
)
select ordering_key as key, id, action from promoted
union all
select key, id, null from next where case when id in (select id from promoted) then false else true end;

-- name: take_overdue_promotions
-- $1 how many, $2 whether those that are not over too, $3 seconds back from now to begin at, null for the front: behind the
-- dead entries of turns that were taken. Promotions that have lasted too long, or of which the claim could not take
-- what it chose; once there are rules, all of them, for the claims by rules know of none. Returns (task_ids, keys, for how
-- many seconds it was over) of each.
delete from penstock.turn where id = any(array(
    select id from penstock.turn
    where ends_at <= case when $2::bool or {ruled} then 'infinity' else now() end
      and ends_at >= case when $3::float8 is null then '-infinity' else now() - make_interval(secs => $3) end
    order by ends_at limit $1 for update skip locked))
returning task_ids, keys, extract(epoch from now() - ends_at)::float8 as late_seconds;

-- name: promote_tasks
-- $1 ids whose turn was taken in this transaction. Returns (id, action); those that are missing were cancelled, or another
-- transaction holds them. A step that has come back since, with its workflow, waits without its key.
update penstock.task t set state = 'SCHEDULED', updated_at = now()
from (select l.id from {asked} join penstock.task l on l.id = any(array[u.id])
      where l.state::text = 'WAITING' and l.claimed_at is null and l.ordering_key is not null
      for update of l skip locked) free
where t.id = any(array[free.id]) and t.state::text = 'WAITING' and t.claimed_at is null and t.ordering_key is not null
returning t.id, t.action;

-- name: forget_ordering_keys
-- $1 ordering keys, locked before in the same transaction. Those without a waiting task are forgotten; returns them.
delete from penstock.ordering_head h
where h.key = any($1::text[])
  and (select t.id from penstock.task t where t.ordering_key = h.key and t.state = 'WAITING' limit 1) is null
returning h.key;

-- name: hold_ordering_keys
-- $1 ordering keys, locked before in the same transaction, $2 the task of each. The keys stand still: nothing behind
-- that task runs until it is retried, or the key is released.
update penstock.ordering_head h set held = true, task_id = i.task_id
from unnest($1::text[], $2::bigint[]) i (key, task_id)
where h.key = i.key and h.key = any($1::text[]);

-- name: release_ordering_keys
-- $1 ordering keys. Those that were held are held no more and locked; their successors are promoted by the caller.
update penstock.ordering_head set held = false
where key in (select key from penstock.ordering_head where key = any($1::text[]) and held order by key for update)
returning key;

-- name: list_held_keys
-- $1 behind this key or null, $2 how many, $3 where to stop counting those that wait. By key.
select h.key, h.task_id, t.action, t.finished_at,
       (select count(*) from (select 1 from penstock.task w where w.ordering_key = h.key and w.state = 'WAITING'
                             limit $3) counted) as waiting
from penstock.ordering_head h left join penstock.task_history t on t.id = h.task_id
where h.held and ($1::text is null or h.key > $1) order by h.key limit $2;

-- name: note_run_times
-- $1 actions, $2 how many attempts have ended, $3 how many seconds they ran together, as workers report.
insert into penstock.tally (action, event, count, seconds)
select action, 'RAN', sum(count)::bigint, sum(seconds)
from unnest($1::text[], $2::bigint[], $3::float8[]) r (action, count, seconds) group by action;
