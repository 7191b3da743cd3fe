-- Reading: status, lists, counts.

-- name: read_tasks
-- $1 ids. Live tasks and settled ones; at most one row an id, for a task is in one of the two tables.
select t.id, state::text as state, action, payload::text as payload, priority, run_at, attempts, max_attempts, claim,
       created_at, updated_at, unique_key, ordering_key, timeout_seconds, progress::text as progress,
       null::text as result, failures::text as failures, (failures -> -1 -> 'error')::text as error,
       labels::text as labels, expires_at, limit_key, tenant, null::text as reason, null::bool as payload_gone,
       null::bool as result_gone, trace, worker
from {asked} join penstock.task t on t.id = any(array[u.id])
union all
select id, state::text, action, payload::text, priority, run_at, attempts, max_attempts, claim,
       created_at, updated_at, unique_key, ordering_key, timeout_seconds, progress::text,
       result::text, failures::text, (failures -> -1 -> 'error')::text, labels::text, expires_at, limit_key, tenant, reason,
       payload_gone, result_gone, trace, worker
from penstock.task_history where id = any($1::bigint[]);

-- name: show_tasks
-- $1 ids, $2 whether with payloads and failures, $3 how many bytes of payloads, results, errors and failures; the rows
-- behind them, by falling id, come without (the last one before may go beyond). As they are shown, and is_cut; with payloads
-- also how often each was put off by its handler, and what one that runs no more waits for, of its claim alone.
with found as (
    select t.id, t.state::text as state, action, case when $2 then payload::text end as payload, priority, run_at, attempts,
           max_attempts, claim, created_at, updated_at, unique_key, ordering_key, timeout_seconds as timeout,
           progress::text as progress, null::text as result, case when $2 then failures::text end as failures,
           (failures -> -1 -> 'error')::text as error, labels, expires_at, limit_key, tenant,
           null::text as reason, false as payload_gone, false as result_gone, trace, worker, claimed_at,
           case when $2 then (select p.snoozes from penstock.postponed p where p.task_id = t.id) end as snoozes,
           w.token, w.deadline
    from {asked} join penstock.task t on t.id = any(array[u.id]) left join lateral (
        select token, deadline from penstock.wait
        where $2 and t.state::text = 'WAITING' and t.claimed_at is not null
              and task_id = t.id and claim = t.claim and deadline is not null
        order by deadline desc limit 1) w on true
    union all
    select id, state::text, action, case when $2 and payload_gone is not true then payload::text end, priority, run_at, attempts,
           max_attempts, claim, created_at, updated_at, unique_key, ordering_key, timeout_seconds,
           progress::text, result::text, case when $2 then failures::text end,
           case when state <> 'SUCCESS' then (failures -> -1 -> 'error')::text end, labels, expires_at, limit_key, tenant,
           reason, payload_gone is true, result_gone is true, trace, worker, claimed_at,
           case when $2 then (select p.snoozes from penstock.postponed p where p.task_id = h.id) end, null, null
    from penstock.task_history h where id = any($1::bigint[])
), sized as (
    select *, coalesce(octet_length(payload), 0) + coalesce(octet_length(result), 0)
              + coalesce(octet_length(failures), 0) + coalesce(octet_length(error), 0) as size
    from found
), bounded as (
    select *, sum(size) over (order by id desc) - size >= $3::bigint as is_cut from sized
)
select id, state, action, priority, run_at, attempts, max_attempts, claim, created_at, updated_at, unique_key,
       ordering_key, timeout, progress, coalesce(labels::text, '{}') as labels, expires_at, limit_key, tenant, reason,
       payload_gone, result_gone, trace, worker, claimed_at, coalesce(snoozes, 0) as snoozes, token, deadline, is_cut,
       case when not is_cut then payload end as payload, case when not is_cut then result end as result,
       case when not is_cut then failures end as failures, case when not is_cut then error end as error
from bounded;

-- name: read_states
-- $1 ids. As read_tasks, no more than (id, state), the tenant and whether the payload is gone.
select t.id, t.state::text as state, null::bool as payload_gone, t.tenant from {asked} join penstock.task t on t.id = any(array[u.id])
union all
select id, state::text, payload_gone, tenant from penstock.task_history where id = any($1::bigint[]);

-- name: find_first_id
-- $1 an instant. The lowest id that a task created then or later may have: ids are given in the order of creation, but
-- for transactions of some length. By halving, each look along the index on id of each partition.
with recursive halved (low, high) as (
    select 0::bigint, (select last_value + 1 from penstock.task_id_seq)
    union all
    select case when p.before then m.middle else h.low end, case when p.before then h.high else m.middle end
    from halved h
    cross join lateral (select (h.low + h.high) / 2 as middle) m
    cross join lateral (
        select coalesce((
            select created_at < $1::timestamptz from (
                (select id, created_at from penstock.task where id <= m.middle order by id desc limit 1)
                union all
                (select id, created_at from penstock.task_history where id <= m.middle order by id desc limit 1)
            ) nearest order by id desc limit 1), true) as before) p
    where h.high - h.low > 1
)
select min(high) from halved;

-- part: fits
($4::text is null or action = $4) and ($6::text is null or labels @> $6::jsonb)
and ($7::text is null or coalesce(tenant || E'\x1f', '') || $7 in (unique_key, ordering_key))
and ($8::text is null or tenant = $8)
and ($9::text[] is null or payload::text ilike any($9) or failures::text ilike any($9))

-- name: list_tasks
-- $1 before this id, $2 how many, $3 how many to look at, $4 action or null, $5 from this id on, $6 labels as JSON text
-- or null, $7 unique or ordering key or null, $8 tenant or null, $9 patterns of which payload or failures match one, or
-- null. Newest first; one row: the ids of the page, the last id looked at (null for none) and how many were. Each side of
-- the union is cut by the index on id, in every partition, so the cost hangs on $3 alone and not on how many tasks there
-- are: no index serves the filters.
with seen as materialized (
    select id, fits from (
        (select id, {fits} as fits from penstock.task where id < $1 and id >= $5 order by id desc limit $3)
        union all
        (select id, {fits} as fits from penstock.task_history where id < $1 and id >= $5 order by id desc limit $3)
    ) both_tables order by id desc limit $3
)
select array(select id from seen where fits order by id desc limit $2) as ids,
       (select min(id) from seen) as last, (select count(*) from seen) as count;

-- name: list_live_tasks
-- $1 to $9 as list_tasks, $10 a state that is not final.
with seen as materialized (
    select id, state = $10 and {fits} as fits from penstock.task where id < $1 and id >= $5 order by id desc limit $3
)
select array(select id from seen where fits order by id desc limit $2) as ids,
       (select min(id) from seen) as last, (select count(*) from seen) as count;

-- name: list_settled_tasks
-- $1 to $9 as list_tasks, $10 a final state: only its own partitions are read.
with seen as materialized (
    select id, {fits} as fits from penstock.task_history
    where state = $10 and id < $1 and id >= $5 order by id desc limit $3
)
select array(select id from seen where fits order by id desc limit $2) as ids,
       (select min(id) from seen) as last, (select count(*) from seen) as count;

-- name: keep_fitting
-- $1 before this id, $2 ids, $3 how many, $4 to $9 as list_tasks, $10 a state or null. Those of the ids that the search fits, newest first.
select id from (
    select id from penstock.task
    where id = any($2::bigint[]) and id < $1 and id >= $5 and ($10::text is null or state::text = $10) and {fits}
    union all
    select id from penstock.task_history
    where id = any($2::bigint[]) and id < $1 and id >= $5 and ($10::text is null or state::text = $10) and {fits}
) both_tables order by id desc limit $3;

-- name: find_by_key
-- $1 a key, behind the name of its tenant if it has one, $2 how many. Tasks that have it as their unique key, of whichever action, and those
-- that wait behind it as their ordering key, or were its first while that is live; each by an index, however old. The one that
-- runs once the first has settled is found by the scan alone. The actions of unique keys are found one by one along the primary key.
(with recursive known (action) as (
     (select action from penstock.unique_key order by action limit 1)
     union all
     select (select u.action from penstock.unique_key u where u.action > k.action order by u.action limit 1)
     from known k where k.action is not null
 )
 select u.task_id as id from known join penstock.unique_key u on u.action = known.action and u.key = $1)
union
(select id from penstock.task where ordering_key = $1 and state = 'WAITING' order by id desc limit $2)
union
(select t.id from penstock.ordering_head h join penstock.task t on t.id = h.task_id where h.key = $1);

-- name: count_live
-- Live tasks by action and state.
select action, state::text as state, count(*) as count from penstock.task group by action, state;

-- name: count_settled
-- Settled tasks kept, by action and state: the sum of what settling added and retention and retry took away. $1 the name
-- under which further actions are counted, what is taken from them below zero as well; see compact_tally.
select case when s.count < 0 then $1::text else s.action end as action, s.state, sum(s.count)::bigint as count
from (
    select action, event as state, sum(count) as count from penstock.tally
    where event in ('SUCCESS', 'CRITICAL_ERROR', 'CANCELLED')
    group by action, event
) s group by 1, 2 having sum(s.count) <> 0;

-- name: read_rates
-- Changes of state a second, over the last minute.
select round(coalesce(sum(count) filter (where event = 'ENQUEUED'), 0) / 60, 3)::float8 as enqueued_per_second,
       round(coalesce(sum(count) filter (where event = 'SUCCESS'), 0) / 60, 3)::float8 as succeeded_per_second,
       round(coalesce(sum(count) filter (where event in ('ERROR', 'CRITICAL_ERROR')), 0) / 60, 3)::float8
           as failed_per_second
from penstock.tally where at > now() - interval '1 minute' and count > 0;

-- name: read_throughput
-- $1 seconds to look back. By action: attempts that have ended, and of those whose run time is known, how many and
-- how many seconds they ran together.
select action, coalesce(sum(count) filter (where event in ('SUCCESS', 'ERROR', 'CRITICAL_ERROR')), 0)::bigint as ended,
       coalesce(sum(count) filter (where event = 'RAN'), 0)::bigint as timed,
       coalesce(sum(seconds) filter (where event = 'RAN'), 0) as seconds
from penstock.tally where at > now() - make_interval(secs => $1) and count > 0
group by action;

-- name: read_lag
-- How many are due and unclaimed, and how long the oldest of them has waited, in seconds; those of paused actions not.
-- Each part goes by an index of its own.
select coalesce(sum(count), 0)::bigint as due,
       coalesce(extract(epoch from now() - min(oldest)), 0)::float8 as oldest_seconds
from (
    select count(*) as count, min(run_at) as oldest from penstock.task
    where state in ('SCHEDULED', 'ERROR') and route is null and gate is null and run_at <= now()
    union all
    select count(*), min(run_at) from penstock.task
    where state in ('SCHEDULED', 'ERROR') and route is not null and gate is null and run_at <= now()
    union all
    select count(*), min(run_at) from penstock.task
    where state in ('SCHEDULED', 'ERROR') and gate is not null and run_at <= now()
      and action not in (select name from penstock.action where paused)
      and (tenant is null or tenant not in (select name from penstock.tenant where paused))
) waiting;

-- name: list_rejected_page
-- $1 before this id or null, $2 how many, $3 source or null, $4 bytes of bodies behind which a page ends. found: how many there are up to the limit.
select id, source, body, reason, at, found from (
    select *, count(*) over () as found,
           sum(octet_length(body)) over (order by id desc) - octet_length(body) as bytes_before
    from (
        select id, source, body, reason, at from penstock.rejected
        where ($1::bigint is null or id < $1) and ($3::text is null or source = $3) order by id desc limit $2
    ) newest
) measured
where bytes_before < $4 order by id desc;

-- name: list_rejected_ids
-- $1 to $3 as list_rejected.
select id from penstock.rejected
where ($1::bigint is null or id < $1) and ($3::text is null or source = $3) order by id desc limit $2;

-- name: read_rejected
-- $1 id.
select id, source, body, reason, at from penstock.rejected where id = $1;

-- name: take_rejected
-- $1 ids. Locked, so that two operators do not replay one message twice.
select id, source, body from penstock.rejected where id = any($1::bigint[]) order by id for update skip locked;

-- name: delete_rejected
-- $1 ids.
delete from penstock.rejected where id = any($1::bigint[]) returning id;

-- name: explain_rejected
-- $1 id, $2 the reason that it was refused again.
update penstock.rejected set reason = $2 where id = $1;

-- name: count_rejected
select count(*) from penstock.rejected;
