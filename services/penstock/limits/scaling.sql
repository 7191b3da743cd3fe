-- Scaling: the tasks that wait for workers, by route.

-- name: read_lanes
-- $1 stop counting there, in each route and for each count; $2 how many priorities are looked at, the highest. By route
-- (null: the outbound queue) and action: how many tasks wait for a worker, how many are in flight, for how long the
-- oldest waits, how many handlers ran at once within the last $3 seconds, and for how long each on average. If fewer than
-- $4 attempts can end in that time, tasks in flight are the better estimate.
-- Tasks of limited and paused actions wait for their limit and not for workers, so they count from their claim on.
-- Tasks that no claim has routed yet are routed here, as claim_tasks_by_rules will, once for each kind of
-- task; the highest priorities come first, so that a count that stops has left the others out.
-- Relies on task_ready (a priority at a time: across them it would pass what is due tomorrow), task_ready_by_route,
-- task_acquired and task_acquired_by_route.
with recursive step as (
    (select priority from penstock.task
     where state in ('SCHEDULED', 'ERROR') and route is null and gate is null order by priority desc limit 1)
    union all
    select (select t.priority from penstock.task t
            where t.state in ('SCHEDULED', 'ERROR') and t.route is null and t.gate is null
              and t.priority < step.priority
            order by t.priority desc limit 1)
    from step where step.priority is not null
), levels as materialized (
    select priority from step where priority is not null limit $2::bigint
), unsorted as materialized (
    select ready.action,
           case when exists (select from penstock.route where labels <> '{}') then ready.labels::text end as labels,
           ready.run_at
    from levels cross join lateral (
        select t.action, t.labels, t.run_at from penstock.task t
        where t.state in ('SCHEDULED', 'ERROR') and t.route is null and t.gate is null
          and t.priority = levels.priority and t.run_at <= now()
          and (t.expires_at is null or t.expires_at > now())
        order by t.run_at, t.id limit (select $1::bigint)
    ) ready limit (select $1::bigint)
), kinds as materialized (
    select action, labels, count(*) as count, min(run_at) as oldest from unsorted group by action, labels
), counted as (
    select (select r.name from penstock.route r
            where k.action like any(r.actions) and (r.labels = '{}' or k.labels::jsonb @> r.labels)
            order by r.position, r.name limit 1) as route,
           k.action, k.count as waiting, k.oldest, 0 as in_flight
    from kinds k where not exists (select from penstock.action a where a.name = k.action and not ({is_free}))
    union all
    select r.name, ready.action, count(*), min(ready.run_at), 0
    from penstock.route r cross join lateral (
        select t.action, t.run_at from penstock.task t
        where t.state in ('SCHEDULED', 'ERROR') and t.route = r.name and t.gate is null and t.run_at <= now()
          and (t.expires_at is null or t.expires_at > now())
        order by t.priority desc, t.run_at, t.id limit (select $1::bigint)
    ) ready group by r.name, ready.action
    union all
    select null, held.action, 0, null, count(*)
    from (select t.action from penstock.task t
          where t.state = 'ACQUIRED' and t.route is null order by t.claimed_at limit (select $1::bigint)) held
    group by held.action
    union all
    select r.name, held.action, 0, null, count(*)
    from penstock.route r cross join lateral (
        select t.action from penstock.task t
        where t.state = 'ACQUIRED' and t.route = r.name order by t.claimed_at limit (select $1::bigint)
    ) held group by r.name, held.action
), lanes as materialized (
    select route, action, sum(waiting)::bigint as waiting, sum(in_flight)::bigint as in_flight,
           greatest(0, date_part('epoch', now() - min(oldest))) as oldest_seconds
    from counted group by route, action
), timed as materialized (
    -- The seconds that attempts of an action ran which ended lately, the mean of their run times or, when none ended, of
    -- all that ever did; and the route that takes all its tasks, whatever their labels.
    select p.action, p.seconds, p.mean_seconds,
           (select r.name from penstock.route r where p.action like any(r.actions) and r.labels = '{}'
            order by r.position, r.name limit 1) as route
    from (
        select action, coalesce(sum(seconds) filter (where at > now() - make_interval(secs => $3)), 0) as seconds,
               coalesce(sum(seconds) filter (where at > now() - make_interval(secs => $3))
                            / nullif(sum(count) filter (where at > now() - make_interval(secs => $3)), 0),
                        sum(seconds) / sum(count))::float8 as mean_seconds
        from penstock.tally where event = 'RAN' and count > 0 group by action
    ) p
), loads as (
    -- Of the action's attempts, a route has its share of the tasks.
    select *, (waiting + in_flight)::float8 / nullif(sum(waiting + in_flight) over (partition by action), 0) as share
    from lanes
    union all  -- those that run, but have no task at this instant
    select t.route, t.action, 0, 0, 0, 1 from timed t
    where t.seconds > 0 and not exists (select from lanes where lanes.action = t.action)
)
select l.route, l.action, l.waiting, l.in_flight, coalesce(l.oldest_seconds, 0) as oldest_seconds,
       coalesce(least(l.share * t.seconds / $3::float8,
                      case when t.mean_seconds * $4::float8 > $3::float8 then l.in_flight end), 0) as running,
       t.mean_seconds as run_seconds
from loads l left join timed t on t.action = l.action;

-- name: list_route_names
select name from penstock.route order by name;
