-- Rules: limits and pauses of actions, the gates that their tasks wait at, routes.

-- name: read_rules
-- Whether any action or tenant is limited or paused, whether any gate is there, and whether any task has its turn; routes with
-- their queues, in the order in which they are tried.
select exists (select from penstock.action) or exists (select from penstock.tenant) as limits, exists (select from penstock.gate) as gates,
       exists (select from penstock.turn where ends_at > now()) as turns,
       coalesce((select json_agg(json_build_array(name, queue) order by position, name) from penstock.route), '[]')::text
           as routes;

-- name: find_open_gates
-- Actions with a gate that is worth a look, when the limits of each were changed last (null: it has none), and how long until the
-- next gate is, in seconds (null: never). Two looks into gate_by_action for each action, however many gates it has.
with recursive earliest as (
    (select action, next_at from penstock.gate order by action, next_at limit 1)
    union all
    select g.action, g.next_at from earliest e cross join lateral (
        select action, next_at from penstock.gate where action > e.action order by action, next_at limit 1) g
)
select coalesce(array_agg(e.action) filter (where e.next_at <= now()), '{}') as actions,
       coalesce(array_agg((select a.updated_at from penstock.action a where a.name = e.action))
                filter (where e.next_at <= now()), '{}') as changed_at,
       date_part('epoch', min(coming.next_at) - now()) as seconds
from earliest e left join lateral (
    select next_at from penstock.gate
    where action = e.action and next_at > now() and next_at < 'infinity' order by next_at limit 1) coming on true;

-- name: lock_action
-- $1 action. Its limits, by the clock `at`. No row when it is not limited, and none while another scheduler is at it.
select paused, max_in_flight, rate, burst, key_max_in_flight, key_rate, key_burst, tokens, refilled_at, held_until, now() as at
from penstock.action where name = $1 for update skip locked;

-- name: count_gated
-- $1 action, $2 stop counting there. How many of its tasks are in flight that came through a gate. A statement of its
-- own behind the lock: in the same one, it would count what was so before the last holder of the lock committed.
select count(*) from (
    select from penstock.task where state = 'ACQUIRED' and gate is not null and action = $1 limit $2::bigint) held;

-- name: action_is_limited
-- $1 action.
select exists (select from penstock.action where name = $1);

-- name: lock_admitting
-- $1 actions. Those that have a limit as a whole, and none of each limit key, and are neither paused nor held. One that another
-- scheduler is at is waited for, which takes as long as a claim: its tasks would be diverted otherwise.
select name, max_in_flight, rate, burst, tokens, refilled_at, now() as at from penstock.action
where name = any($1::text[]) and not paused and key_max_in_flight is null and key_rate is null
  and (held_until is null or held_until <= now())
order by name for update;

-- name: count_admitting
-- $1 actions, $2 where to stop counting each. As count_gated; without the actions at whose gates anything waits or is held, which
-- goes first. Of an action with many gates, of as many limit keys or tenants, that is not looked at.
select a.name, (select count(*) from (
    select from penstock.task where state = 'ACQUIRED' and gate is not null and action = a.name limit a.most) held)
from unnest($1::text[], $2::bigint[]) a (name, most)
where (select count(*) < 20 and coalesce(bool_and(is_free), true) from (
    select coalesce(g.held_until <= now(), true) and (
               select t.id from penstock.task t
               where t.state in ('SCHEDULED', 'ERROR') and t.gate = g.name and t.run_at <= now() limit 1) is null as is_free
    from penstock.gate g where g.action = a.name limit 20) known);

-- name: lock_gates
-- $1 action, $2 how many. Those that have waited longest for a look, each with the limits of a limit key and how many are in
-- flight, counted up to there; nulls and 0 for a gate of no limit key, see gate_name. Behind lock_action, which keeps the limits.
select g.name, g.tenant, g.tokens, g.refilled_at, now() as at,
       a.key_max_in_flight as max_in_flight, a.key_rate as rate, a.key_burst as burst,
       case when a.key_max_in_flight is null then 0 else (
           select count(*) from (select from penstock.task t
                                 where t.state = 'ACQUIRED' and t.action = $1 and t.gate = g.name
                                 limit a.key_max_in_flight) held)
       end as in_flight
from penstock.gate g left join penstock.action a on a.name = $1 and strpos(g.name, E'\x1f') > 0
where g.action = $1 and g.next_at <= now() order by g.next_at limit $2 for update of g skip locked;

-- name: note_action
-- $1 action, $2 tokens left now.
update penstock.action set tokens = $2, refilled_at = now() where name = $1;

-- name: give_back_starts
-- $1 ids, $2 claims. Of claims that were not sent and still hold their tasks: what the rates of their actions, limit keys and
-- tenants lost by them. Actions are locked first, as by all who lock gates, and each kind by name.
with unsent as materialized (
    select t.action, t.gate, t.tenant from {pairs} join penstock.task t on {held} where t.gate is not null
), actions as materialized (
    select name from penstock.action where name = any(array(select action from unsent)) order by name for update
), tenants as materialized (
    select name from penstock.tenant_pace
    where name = any(array(select tenant from unsent)) and tokens is not null order by name for update
), of_actions as (
    update penstock.action a set tokens = a.tokens + (select count(*) from unsent where action = a.name)
    where a.name = any(array(select name from actions)) and a.tokens is not null
), of_gates as (
    update penstock.gate g set tokens = g.tokens + (select count(*) from unsent where gate = g.name)
    where g.name = any(array(select gate from unsent where action in (select name from actions))) and g.tokens is not null
)
update penstock.tenant_pace p set tokens = p.tokens + (select count(*) from unsent where tenant = p.name)
where p.name = any(array(select name from tenants));

-- name: note_gates
-- $1 gates, $2 tokens left or null, $3 seconds until the next look, of which Postgres can count no more than 9e12.
update penstock.gate g set tokens = n.tokens, refilled_at = now(),
    next_at = greatest(g.held_until, now() + make_interval(secs => least(1e9, n.seconds)))
from unnest($1::text[], $2::float8[], $3::float8[]) n (name, tokens, seconds)
where g.name = n.name and g.name = any($1::text[]);

-- name: leave_gates
-- $1 gates of an action that is not limited any more, $2 how many. Tasks at them stand in line again, for they may be a backlog
-- that the window has to hold and others have to pass; but not those that a limit of their tenant concerns. Returns ids.
with free as materialized (
    select w.id from penstock.gate t cross join lateral (
        select id from penstock.task where state in ('SCHEDULED', 'ERROR') and gate = t.name
        order by priority desc, run_at, id limit $2::bigint for update skip locked) w
    where t.name = any($1::text[]) and ({tenant_is_limited}) is not true limit $2::bigint
)
update penstock.task t set gate = null from free where t.id = any(array[free.id]) returning t.id;

-- name: rest_gates
-- $1 gates at which less was due than may go. One at which nothing stands goes, unless what its key has used of a rate
-- has to be remembered; then it goes when the rate is refilled. What comes later opens it again.
with looked as materialized (
    select g.name,
           -- Not EXISTS, which may become a hash of all that waits at any gate.
           (select t.id from penstock.task t where t.state in ('SCHEDULED', 'ERROR') and t.gate = g.name limit 1)
               is not null as waits,
           g.held_until, greatest(g.held_until, case when g.tokens is not null and a.key_rate is not null
                then g.refilled_at + make_interval(
                    secs => least(1e9, (coalesce(a.key_burst, greatest(1, ceil(a.key_rate))) - g.tokens) / a.key_rate))
                else now() end) as full_at
    from penstock.gate g left join penstock.action a on a.name = g.action
    where g.name = any($1::text[])
), gone as (
    delete from penstock.gate g using looked l where g.name = l.name and not l.waits and l.full_at <= now()
)
update penstock.gate g set next_at = case when l.waits then greatest(l.held_until, now()) else l.full_at end
from looked l where g.name = l.name and (l.waits or l.full_at > now());

-- name: close_gates
-- $1 action, $2 until when it is held; null: it is paused, and nothing is worth a look until it is resumed.
update penstock.gate set next_at = coalesce($2::timestamptz, 'infinity')
where action = $1 and next_at < coalesce($2::timestamptz, 'infinity');

-- name: open_gates
-- $1 action, whose limits have changed, which ends what holds its limit keys.
update penstock.gate set next_at = least(next_at, now()), held_until = null
where action = $1 and (next_at > now() or held_until is not null);

-- part: held_limits
-- What handlers of claims that still hold their task ask to be held: $1 ids, $2 claims, $3 seconds, $4 limit keys or null for
-- the task's own, $5 whether the whole action.
select t.action, t.tenant, coalesce(h.key, t.limit_key) as limit_key, h.whole, now() + make_interval(secs => h.seconds) as until
from unnest($1::bigint[], $2::bigint[], $3::float8[], $4::text[], $5::bool[]) h (id, claim, seconds, key, whole)
join penstock.task t on t.id = any(array[h.id]) and t.claim = any(array[h.claim])
where t.state::text = 'ACQUIRED' and (h.whole or coalesce(h.key, t.limit_key) is not null)

-- name: hold_actions
-- $1 to $5 as held_limits. Tasks of an action without a row pass no gate, so a held limit key needs one too.
insert into penstock.action as a (name, held_until)
select action, coalesce(max(until) filter (where whole), now()) from ({held_limits}) held group by action order by action
on conflict (name) do update set held_until = greatest(a.held_until, excluded.held_until);

-- name: hold_gates
-- $1 to $5 as held_limits; a statement of its own behind hold_actions, for a scheduler locks the action first too.
insert into penstock.gate as g (name, action, tenant, next_at, held_until)
select {gate_name}, t.action, t.tenant, max(t.until), max(t.until)
from ({held_limits}) t where not t.whole group by 1, 2, 3 order by 1
on conflict (name) do update
set held_until = greatest(g.held_until, excluded.held_until), next_at = greatest(g.next_at, excluded.held_until);

-- name: forget_holds
-- Actions that were held and are not any more, without a limit: they run freely again.
delete from penstock.action where name = any(array(
    select a.name from penstock.action a
    where a.held_until <= now() and not a.paused
      and num_nonnulls(a.max_in_flight, a.rate, a.key_max_in_flight, a.key_rate, a.burst, a.key_burst) = 0
      and not exists (select from penstock.gate g where g.action = a.name and g.held_until > now())
    for update skip locked));

-- name: lock_rules
-- One change at a time, and none while a gate is looked at. Readers go on, among them a backup of hours.
lock table penstock.action, penstock.route, penstock.tenant in exclusive mode;

-- name: set_action
-- $1 action, $2 paused, $3 max_in_flight, $4 rate, $5 burst, $6 to $8 the same by key.
insert into penstock.action (name, paused, max_in_flight, rate, burst, key_max_in_flight, key_rate, key_burst)
values ($1, $2, $3, $4, $5, $6, $7, $8)
on conflict (name) do update set paused = excluded.paused, max_in_flight = excluded.max_in_flight,
    rate = excluded.rate, burst = excluded.burst, key_max_in_flight = excluded.key_max_in_flight,
    key_rate = excluded.key_rate, key_burst = excluded.key_burst, held_until = null, updated_at = now();

-- name: forget_action
-- $1 action. It runs freely again.
delete from penstock.action where name = $1;

-- name: adopt_in_flight
-- $1 action. What is in flight when its action becomes limited counts from then on; what another transaction holds, such as a
-- handler's own that settles it, by the next round of upkeep.
update penstock.task t
set gate = {gate_name}
from (select id from penstock.task
      where state = 'ACQUIRED' and gate is null and claimed_at <= now()
        and action = $1 and action = any(array(select name from penstock.action)) for no key update skip locked) found
where t.id = any(array[found.id]) and t.state::text = 'ACQUIRED' and t.gate is null
returning t.id;

-- name: adopt_next_in_flight
-- $1 and $2 behind this claimed_at and id, or null for the oldest; $3 how many to look at. Claims that were under way when
-- their action or tenant was limited count too. No look for each: up to PostgreSQL 17 the rules of tenants seem too
-- expensive to the planner for that. Returns the last one looked at, no row when there are none behind it.
with looked as materialized (
    select id, claimed_at from penstock.task
    where state = 'ACQUIRED' and (claimed_at, id) > (coalesce($1::timestamptz, '-infinity'), coalesce($2::bigint, 0))
    order by claimed_at, id limit $3
), free as materialized (
    select t.id from penstock.task t
    where t.id = any(array(select id from looked)) and t.state::text = 'ACQUIRED' and t.gate is null
      and (t.action = any(array(select name from penstock.action)) or {tenant_is_limited})
    for no key update of t skip locked
), adopted as (
    update penstock.task t
    set gate = {gate_name}
    where t.id = any(array(select id from free)) and t.state::text = 'ACQUIRED' and t.gate is null
)
select claimed_at, id from looked order by claimed_at, id offset $3 - 1;

-- name: read_actions
-- $1 name of one, which may be unlimited, or null for all that are limited or paused. With how many are in flight through their
-- gates, counted up to 100000.
select w.name as action, coalesce(a.paused, false) as paused, a.max_in_flight, a.rate, a.burst, a.key_max_in_flight, a.key_rate,
       a.key_burst, a.updated_at, case when a.held_until > now() then a.held_until end as held_until,
       (select count(*) from (select from penstock.task t
                              where t.state = 'ACQUIRED' and t.gate is not null and t.action = a.name
                              limit 100000) held) as in_flight
from (select $1::text as name where $1 is not null union all select name from penstock.action where $1 is null) w
left join penstock.action a on a.name = w.name order by w.name;

-- name: set_route
-- $1 name, $2 queue, $3 patterns of LIKE, $4 labels as JSON text, $5 position.
insert into penstock.route (name, queue, actions, labels, position) values ($1, $2, $3, $4::jsonb, $5)
on conflict (name) do update set queue = excluded.queue, actions = excluded.actions, labels = excluded.labels,
    position = excluded.position, updated_at = now();

-- name: delete_route
-- $1 name.
delete from penstock.route where name = $1 returning name;

-- name: read_routes
select name, queue, actions, labels::text as labels, position, updated_at,
       (select count(*) from (select from penstock.task t
                              where t.state = 'ACQUIRED' and t.route = r.name limit 100000) held) as in_flight
from penstock.route r order by position, name;

-- name: return_strays
-- $1 how many. Tasks that wait for a route that is no longer there; back to where all begin.
with recursive step as (
    (select route from penstock.task
     where state in ('SCHEDULED', 'ERROR') and route is not null and gate is null order by route limit 1)
    union all
    select (select t.route from penstock.task t
            where t.state in ('SCHEDULED', 'ERROR') and t.route is not null and t.gate is null and t.route > step.route
            order by t.route limit 1)
    from step where step.route is not null
), lost as materialized (
    select route from step where route is not null and not exists (select from penstock.route r where r.name = route)
), picked as materialized (
    select t.id from lost cross join lateral (
        select id from penstock.task t
        where t.state in ('SCHEDULED', 'ERROR') and t.route = lost.route and t.gate is null
        limit $1 for update skip locked) t
    limit $1
)
update penstock.task t set route = null from picked p where t.id = any(array[p.id]) returning t.id;
