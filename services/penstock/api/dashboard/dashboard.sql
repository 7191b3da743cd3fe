-- Statements of the dashboard that no method has, its sessions, and the audit.

-- name: begin_audit
-- $1 who, $2 addresses, $3 sources, $4 methods, $5 parameters, in parallel. Ids in their order.
insert into penstock.audit (who, address, door, method, params)
select who, address, door, method, params
from unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[])
     with ordinality i (who, address, door, method, params, place)
order by place returning id;

-- name: end_audit
-- $1 ids, $2 outcomes, in parallel.
update penstock.audit a set outcome = i.outcome, ended_at = now()
from unnest($1::bigint[], $2::text[]) i (id, outcome) where a.id = i.id and a.ended_at is null;

-- name: list_audit
-- $1 before this id or null, $2 how many. Newest first, along the primary key.
select id, at, who, address, door, method, params, outcome, ended_at from penstock.audit
where $1::bigint is null or id < $1 order by id desc limit $2;

-- name: begin_session
-- $1 SHA-256 of the cookie, $2 of the API key, $3 seconds. Expired sessions are deleted along with it, a few at a time.
with gone as (
    delete from penstock.dashboard_session where token_hash in (
        select token_hash from penstock.dashboard_session where expires_at < now()
        order by expires_at limit 100 for update skip locked)
)
insert into penstock.dashboard_session (token_hash, key_hash, expires_at)
values ($1, $2, now() + make_interval(secs => $3));

-- name: read_session
-- $1 SHA-256 of the cookie.
select key_hash from penstock.dashboard_session where token_hash = $1 and expires_at > now();

-- name: end_session
-- $1 SHA-256 of the cookie.
delete from penstock.dashboard_session where token_hash = $1;

-- name: read_tally_steps
-- $1 how many whole steps, $2 seconds of one. The last ones, oldest first: the time of day at which each begins, UTC, and
-- the tasks enqueued and the attempts that succeeded and failed in it, along tally_at. Rows older than three minutes are
-- stored by the minute, so steps must not be shorter there.
with present as (select floor(extract(epoch from now()) / $2::float8)::bigint as step)
select to_char(to_timestamp(s.step * $2::float8) at time zone 'UTC', 'HH24:MI') as at,
       coalesce(sum(t.count) filter (where t.event = 'ENQUEUED'), 0)::bigint as enqueued,
       coalesce(sum(t.count) filter (where t.event = 'SUCCESS'), 0)::bigint as succeeded,
       coalesce(sum(t.count) filter (where t.event in ('ERROR', 'CRITICAL_ERROR')), 0)::bigint as failed
from present p
cross join lateral generate_series(p.step - $1::int, p.step - 1) s (step)
left join (
    select floor(extract(epoch from at) / $2::float8)::bigint as step, event, count from penstock.tally
    where at > now() - make_interval(secs => ($1::int + 1) * $2::float8) and count > 0
) t on t.step = s.step
group by s.step order by s.step;

-- name: read_attempts_by_action
-- $1 seconds to look back. Of each action, and of all, its name being null: the mean run time of handlers in seconds, as
-- workers report it, or null, and failed attempts, those that were the last one among them; the most first.
select action, sum(seconds) filter (where event = 'RAN') / sum(count) filter (where event = 'RAN') as mean_seconds,
       coalesce(sum(count) filter (where event in ('ERROR', 'CRITICAL_ERROR')), 0)::bigint as failed,
       coalesce(sum(count) filter (where event = 'CRITICAL_ERROR'), 0)::bigint as final
from penstock.tally
where at > now() - make_interval(secs => $1) and count > 0
group by grouping sets ((), (action)) order by failed desc, action;

-- name: read_latency
-- $1 how many successes, $2 how many rows. Of the newest by id, along the index of each partition: percentiles of how long
-- they waited from due to claimed and of how long it took from there to the result, in seconds. Of all, its action being
-- null, then of the most frequent actions.
with newest as materialized (
    select action, greatest(0, extract(epoch from claimed_at - greatest(run_at, created_at)))::float8 as waited,
           greatest(0, extract(epoch from finished_at - claimed_at))::float8 as took
    from penstock.task_history where state = 'SUCCESS' order by id desc limit $1
)
select action, count(*) as count,
       percentile_disc(array[0.5, 0.95, 0.99]) within group (order by waited) as waited,
       percentile_disc(array[0.5, 0.95, 0.99]) within group (order by took) as took
from newest group by grouping sets ((), (action)) having count(*) > 0
order by grouping(action) desc, count(*) desc limit $2;

-- name: read_failure_groups
-- $1 how many to look at, $2 tenant or null. The newest permanent failures by id, in groups of one action and kind of
-- error whose messages differ by numbers alone, those with the most failures first. message: of the newest.
with newest as materialized (
    select id, action, tenant, finished_at, failures -> -1 -> 'error' as error from penstock.task_history
    where state = 'CRITICAL_ERROR' order by id desc limit $1
), told as (
    select id, action, finished_at, left(error -> 'data' ->> 'type', 100) as kind,
           coalesce(nullif(left(coalesce(error -> 'data' ->> 'message', error ->> 'message'), 300), ''), 'no message')
               as message
    from newest where $2::text is null or tenant = $2
), marked as (
    select id, action, finished_at, kind, m.message,
           regexp_replace(m.message, '\m[0-9a-f]{8,}(?:-[0-9a-f]{4,})*\M|\d+', '0', 'gi') as mark
    from told cross join lateral (
        select case when starts_with(message, kind || ': ') then substr(message, length(kind) + 3) else message end
    ) m (message)
)
select left(encode(sha256(convert_to(concat_ws(E'\x1f', action, coalesce(kind, ''), mark), 'UTF8')), 'hex'), 12)
           as fingerprint,
       action, kind, (array_agg(message order by id desc))[1] as message, min(finished_at) as first,
       max(finished_at) as last, array_agg(id order by id desc) as ids
from marked group by action, kind, mark order by count(*) desc, max(id) desc;

-- name: read_in_flight
-- $1 how many to count. Tasks ACQUIRED, those of them that a worker has reported, and how long ago the oldest was
-- claimed, in seconds; claims not yet confirmed as sent; when an attempt last ended, if within minutes. Along task_acquired
-- and tally_at.
select count(*) as claimed, count(heartbeat_at) as reported,
       coalesce(extract(epoch from now() - min(claimed_at)), 0)::float8 as oldest_seconds,
       (select count(*) from penstock.dispatch) as unsent,
       (select max(at) from penstock.tally where at > now() - interval '3 minutes' and count > 0
        and event in ('SUCCESS', 'ERROR', 'CRITICAL_ERROR')) as last_result
from (select claimed_at, heartbeat_at from penstock.task
      where state = 'ACQUIRED' order by claimed_at limit $1::bigint) held;

-- name: read_connections
-- Our processes by their connections to this database: process, host and process id, as in the connection's name, and when
-- the first of its connections began.
select m[1] as process, coalesce(m[2], host(client_addr), '') as host, coalesce(m[3], '') as pid,
       min(backend_start) as since
from pg_stat_activity
cross join lateral regexp_match(application_name, '^penstock-(\w+(?:-source)?)(?:@(.*):(\d+))?(?:-listen)?$') m
where datname = current_database() and m is not null
group by 1, 2, 3 order by 1, 2, 3;

-- name: read_life
-- $1 id. Columns of a task that no method answers, from either table.
select claimed_at, heartbeat_at, workflow, route, suspect,
       state = 'ACQUIRED' and exists (select from penstock.dispatch d where d.id = t.claim) as unsent,
       (select h.task_id from penstock.ordering_head h where h.key = t.ordering_key
        and (h.held or exists (select from penstock.task r where r.id = h.task_id))) as behind
from penstock.task t where id = $1
union all
select claimed_at, null, workflow, null, false, false, null
from penstock.task_history where id = $1;

-- name: read_failed_steps
-- $1 workflow, $2 how many. Along the primary key, as count_steps.
select name, task_id, reason from penstock.workflow_step
where workflow_id = $1 and state = 'CRITICAL_ERROR' order by number limit $2;
