-- From Postgres to the outbound queue: claim, confirm, give back.

-- part: candidates
-- Relies on the index task_ready: its order is the claim's order, its predicate is repeated word for word. A stretch
-- of one priority begins in the middle of that priority, so that what was claimed before is not read again; dead
-- entries cost as much as live ones while an old transaction is open. Across several priorities it cannot.
-- The limit stands in a select of its own, which hides its value from the planner: with the statistics of a table that
-- was empty a moment ago, a limit above the rows expected would have all due tasks sorted for each claim. Each stretch
-- repeats it: without, they are sorted with the statistics of a full table.
    select ready.id, ready.action, ready.labels, ready.tenant, ready.limit_key, ready.priority, ready.run_at
    from unnest($3::int2[], $4::int2[], $5::timestamptz[], $6::bigint[]) as stretch (low, high, run_at, id)
    cross join lateral (
        select id, action, labels, tenant, limit_key, priority, run_at from (
            select t.id, t.action, t.labels, t.tenant, t.limit_key, t.priority, t.run_at from penstock.task t
            where stretch.low = stretch.high and t.state in ('SCHEDULED', 'ERROR') and t.route is null and t.gate is null
              and t.priority = stretch.low and (t.run_at, t.id) > (stretch.run_at, stretch.id)
              and t.run_at <= coalesce($2::timestamptz, now()) - make_interval(secs => $7)
              and (t.expires_at is null or t.expires_at > coalesce($2::timestamptz, now()))
            order by t.run_at, t.id limit (select $1::bigint) for update skip locked) one
        union all
        select id, action, labels, tenant, limit_key, priority, run_at from (
            select t.id, t.action, t.labels, t.tenant, t.limit_key, t.priority, t.run_at from penstock.task t
            where stretch.low < stretch.high and t.state in ('SCHEDULED', 'ERROR') and t.route is null and t.gate is null
              and t.priority between stretch.low and stretch.high
              and t.run_at <= coalesce($2::timestamptz, now()) - make_interval(secs => $7)
              and (t.expires_at is null or t.expires_at > coalesce($2::timestamptz, now()))
            order by t.priority desc, t.run_at, t.id limit (select $1::bigint) for update skip locked) several
    ) ready

-- part: turns
-- Tasks that no index knows as ready, for one row promotes many in their ordering keys (see
-- finish_tasks): those that come before the last one in `behind`, or find room. They are merged with these, and locked
-- only then. What is taken leaves its turn. One of which something chosen cannot be taken, for it was cancelled, moved in
-- time or is locked, is over (see promote_overdue). By the index on ends_at no dead entry is passed that is older than a turn can
-- be. A claim for tasks that have waited long leaves turns alone, which do not last.
-- No join of one task each with another: of a few rows expected, it would be walked once for each, four million steps
-- for two thousand. Inside a CASE, `in` is looked up in a hash.
turns as materialized (
    select id, priority, size, task_ids, run_ats, keys from penstock.turn
    where id = any(array(
        select id from (
            select live.id, sum(live.size) over (order by live.priority desc, live.run_at, live.task_id) - live.size as before
            from (select u.id, u.priority, u.run_at, u.task_id, u.size from penstock.turn u
                  where {unruled} and $7::float8 = 0 and u.ends_at > now()
                  order by u.ends_at limit 1000) live
            where case when (select count(*) from behind) < $1::bigint then true
                       else (-live.priority::int, live.run_at, live.task_id)
                            < (select -priority::int, run_at, id from behind order by priority, run_at desc, id desc limit 1) end
            ) near
        where before < $1::bigint))
    for update skip locked
), merged as materialized (
    select id, priority, run_at, turn from (
        select id, priority, run_at, null::bigint as turn from behind where exists (select from turns)
        union all
        select e.id, u.priority, e.run_at, u.id
        from turns u cross join lateral unnest(u.task_ids, u.run_ats) as e (id, run_at)) either
    order by priority desc, run_at, id limit (select $1::bigint)
), found as materialized (
    select t.id, t.priority, t.run_at from merged m join penstock.task t on t.id = any(array[m.id])
    where m.turn is not null and t.state::text = 'WAITING' and t.claimed_at is null and t.ordering_key is not null
      and (t.expires_at is null or t.expires_at > coalesce($2::timestamptz, now()))
    for update of t skip locked
), taken as materialized (
    select id, turn from merged
    where turn is not null
      and case when (id, priority, run_at) in (select id, priority, run_at from found) then true else false end
), used_up as (
    -- Of the sizes as they were locked: the row may be a newer one than this statement sees.
    delete from penstock.turn
    where id = any(array(select u.id from turns u join (select turn, count(*) as count from taken group by turn) t
                         on t.turn = u.id and t.count = u.size))
    returning id
), kept as materialized (
    select u.id, count(*) as size, min(e.run_at) as run_at, min(e.id) as task_id, array_agg(e.id) as task_ids,
           array_agg(e.run_at) as run_ats, array_agg(e.key) as keys,
           bool_or(case when e.id in (select id from merged) then true else false end) as is_passed_over
    from turns u cross join lateral unnest(u.task_ids, u.run_ats, u.keys) as e (id, run_at, key)
    where u.id = any(array(select distinct turn from merged where turn is not null except select id from used_up))
      and case when e.id in (select id from taken) then false else true end
    group by u.id
), shortened as (
    update penstock.turn u
    set size = k.size, run_at = k.run_at, task_id = k.task_id, task_ids = k.task_ids, run_ats = k.run_ats, keys = k.keys,
        ends_at = case when k.is_passed_over then now() else u.ends_at end
    from kept k where u.id = k.id and u.id = any(array(select id from turns))
)

-- part: unruled
not exists (select from penstock.action) and not exists (select from penstock.route)
      and not exists (select from penstock.tenant)

-- part: claimed
-- Of the tasks in `due`. They are chosen in a materialised CTE: a plain subquery in FROM may be run again by some plans
-- and so exceed its LIMIT. The update looks each id up (see settle.sql).
-- All tasks of one claim share its token. The row in dispatch lives until the sending is confirmed; should this
-- process die before, the supervisor finds it and gives exactly these claims back.
noted as materialized (
    insert into penstock.dispatch (id, claimed_at)
    select nextval('penstock.claim_seq'), now() where exists (select from due)
    returning id
), claimed as (
    update penstock.task t
    set state = 'ACQUIRED', attempts = t.attempts + 1, claim = n.id,
        claimed_at = now(), heartbeat_at = null, worker = null, updated_at = now()
    from noted n cross join due d
    where t.id = any(array[d.id])
      and t.claim < n.id  -- another scheduler claimed it and lost it again, between our token and our lock
    returning t.id, t.claim, t.action, t.payload, t.timeout_seconds, t.priority, t.run_at, t.suspect, t.route, t.tenant,
              {trace}
)

-- part: trace
-- Of a claimed task that is traced: its context and, on a line of its own, that of the attempt before, which the worker
-- returned with its error; and whether it may have a journal, which is read behind the claim (read_carried_journals).
case when t.trace is not null then concat_ws(E'\n', t.trace, t.failures -> -1 -> 'error' ->> 'traceparent')
              end as trace, t.journal

-- part: kinds
-- Of the tasks in `looked`: by which route each kind goes, and whether its action is limited, or has limit keys that may be held.
-- Rules are looked up once for each kind of task; labels make kinds only where a route asks for some. Where no rule concerns any of them (is_concerned), nothing
-- is made of them one by one: a CTE is read only by who asks for its rows.
seen as materialized (
    select distinct action, {kind} as labels from looked
), {held_tenants}, kinds as materialized (
    select k.action, k.labels, a.name is not null and not ({is_free}) as is_limited,
           coalesce({is_free}, false) as may_be_held,
           (select r.name from penstock.route r
            where k.action like any(r.actions) and (r.labels = '{}' or nullif(k.labels, '')::jsonb @> r.labels)
            order by r.position, r.name limit 1) as route
    from seen k left join penstock.action a on a.name = k.action
), concerned as materialized (
    select exists (select from kinds where is_limited or may_be_held or route is not null)
        or exists (select from held_tenants) as is_concerned
)

-- part: sorted
-- Of the tasks in `looked`: by which route each goes, and whether it is of a limited action or tenant or of a held limit key, and not
-- in `admitted`.
sorted as materialized (
    select t.id, k.route,
           (k.is_limited or k.may_be_held and {is_held} or coalesce(t.tenant in (select tenant from held_tenants), false))
               and t.id not in (select id from admitted) as is_limited
    from (select id, action, {kind} as labels, tenant, limit_key from looked) t
    join kinds k on k.action = t.action and k.labels = t.labels
    where (select is_concerned from concerned)
)

-- part: is_held
-- Of a task t: whether its gate is held.
coalesce((select g.held_until > now() from penstock.gate g where g.name = {gate_name}), false)

-- part: kind
case when exists (select from penstock.route where labels <> '{}') then coalesce(looked.labels::text, '') else '' end

-- part: diverted
-- Of the tasks in `sorted`: puts aside what goes by a route, or is of a limited action. From then on it stands in the
-- index of its route or its gate, and in no other task's way; until it is claimed and given back, fails, or is moved in
-- time, whereupon it begins here again. One that another scheduler has claimed meanwhile is left alone, or that another
-- transaction holds.
aside as materialized (
    select s.id, s.is_limited, s.route from sorted s join penstock.task t on t.id = any(array[s.id])
    where s.is_limited or s.route is not null order by s.id for update of t skip locked
), diverted as (
    update penstock.task t
    set route = case when not a.is_limited then a.route end, gate = case when a.is_limited then {gate_name} end
    from aside a
    where t.id = any(array[a.id])
      and t.state::text in ('SCHEDULED', 'ERROR') and t.route is null and t.gate is null
    returning t.action, t.gate, t.tenant
), {opened}

-- part: held_tenants
-- Of the tenants of the tasks in `looked`, those that are limited or paused.
held_tenants as materialized (
    select t.tenant from (select distinct tenant from looked where tenant is not null) t
    where exists (select from penstock.tenant r
                  where r.name = t.tenant and (r.paused or r.max_in_flight is not null or r.rate is not null))
       or exists (select from penstock.tenant r
                  where r.name = '*' and (r.max_in_flight is not null or r.rate is not null))
          and not exists (select from penstock.tenant r where r.name = t.tenant and r.own)
)

-- part: opened
-- The gates of what is in `diverted`: there is something to look for at them.
opened as (
    insert into penstock.gate as g (name, action, tenant)
    select distinct gate, action, tenant from diverted where gate is not null order by gate
    on conflict (name) do update set next_at = greatest(g.held_until, least(g.next_at, now()))
)

-- part: claim_rows
-- last_run_at: run_at, on the last row of each priority only, null on the others.
select c.id, c.claim, c.action, c.payload::text, c.timeout_seconds,
       date_part('epoch', coalesce($2::timestamptz, now()) - c.run_at) as waited_seconds, c.suspect, c.route, c.tenant,
       c.trace, c.journal, c.priority,
       case when lead(c.priority) over claim_order is distinct from c.priority then c.run_at end as last_run_at
from claimed c
window claim_order as (order by c.priority desc, c.run_at, c.id)
order by c.priority desc, c.run_at, c.id

-- name: claim_ready_tasks
-- As claim_tasks, while no task has its turn: it finds nothing then, at half the cost of a small claim. $8 tokens of earlier
-- claims, all of whose tasks were sent: they are confirmed with it.
with due as materialized (
    select id from (
{candidates}
    ) candidate
    where {unruled} and not exists (select from penstock.turn where ends_at > now())
    limit (select $1::bigint)
), confirmed as (
    delete from penstock.dispatch where id = any($8::bigint[])
), {claimed}
{claim_rows};

-- name: claim_tasks
-- Those that are ready, and those that have their turn.
-- $1 how many, $2 now or null for the database's clock; $3 to $6 the stretches of the index to look through, in the
-- claim's order: lowest and highest priority of each, and the (run_at, id) behind which it begins (see ScanBounds);
-- $7 seconds for which they have been due. Finds nothing once any action or tenant is limited or any route is set: a
-- scheduler that finds nothing reads the rules (read_rules) and continues with claim_tasks_by_rules.
with behind as materialized (
    select id, priority, run_at from (
{candidates}
    ) candidate
    where {unruled}
    limit (select $1::bigint)
), {turns}, due as materialized (
    select id from behind where not exists (select from turns)
    union all
    select id from merged where turn is null
    union all
    select id from taken
), {claimed}
{claim_rows};

-- name: claim_tasks_by_rules
-- $1 to $7 as claim_tasks. What goes by a route, or is of a limited action, is not claimed but put aside; except for $9 tasks of
-- each action in $8, whose rows the caller has locked: the first of them are claimed through their gates at once.
-- diverted, on every row: how many were put aside; the columns of the task are null when none was claimed.
with looked as materialized (
    select id, action, labels, tenant, limit_key, priority, run_at from (
{candidates}
    ) candidate
    limit (select $1::bigint)
), {kinds}, admitted as materialized (
    select id from (
        select id, action, row_number() over (partition by action order by priority desc, run_at, id) as place
        from looked
        where action = any($8::text[]) and action not in (select action from kinds where route is not null)
          and coalesce(tenant not in (select tenant from held_tenants), true)) queued
    where place <= ($9::bigint[])[array_position($8::text[], action)]
), {sorted}, due as materialized (
    select id from looked where not (select is_concerned from concerned)
    union all
    select id from sorted where not is_limited and route is null
), {diverted}, noted as materialized (
    insert into penstock.dispatch (id, claimed_at)
    select nextval('penstock.claim_seq'), now() where exists (select from due)
    returning id
), claimed as (
    update penstock.task t
    set state = 'ACQUIRED', attempts = t.attempts + 1, claim = n.id,
        claimed_at = now(), heartbeat_at = null, worker = null, updated_at = now(),
        gate = case when t.id in (select id from admitted) then {gate_name} end
    from noted n cross join due d
    where t.id = any(array[d.id]) and t.claim < n.id
    returning t.id, t.claim, t.action, t.payload, t.timeout_seconds, t.priority, t.run_at, t.suspect, t.route, t.tenant,
              {trace}
)
select c.id, c.claim, c.action, c.payload::text, c.timeout_seconds,
       date_part('epoch', coalesce($2::timestamptz, now()) - c.run_at) as waited_seconds, c.suspect, c.route, c.tenant,
       c.trace, c.journal, c.priority,
       case when lead(c.priority) over claim_order is distinct from c.priority then c.run_at end as last_run_at,
       d.count as diverted
from (select count(*) as count from diverted) d left join claimed c on true
window claim_order as (order by c.priority desc, c.run_at, c.id)
order by c.priority desc, c.run_at, c.id;

-- name: read_carried_journals
-- $1 ids of claimed tasks. The finished steps of each, as its message carries them. A statement of its own: the one that claims
-- sees nothing that was recorded after it began, and its task may have been claimed, run and suspended since then.
select task_id, '[' || string_agg(entry, ',' order by position, name, repetition) || ']'
from penstock.journal_entry where task_id = any($1::bigint[]) group by task_id;

-- name: find_candidates
-- $1 to $7 as claim_tasks. What a claim would look at, locked.
select id from (
{candidates}
    ) candidate
limit (select $1::bigint);

-- name: claim_candidates
-- $1 ids, locked before. Does with them what claim_tasks_by_rules would, for a caller who undoes it: to learn whether
-- Postgres takes it.
with looked as materialized (
    select t.id, t.action, t.labels, t.tenant, t.limit_key from {asked} join penstock.task t on t.id = any(array[u.id])
    where t.state::text in ('SCHEDULED', 'ERROR') and t.route is null and t.gate is null
), {kinds}, admitted as (
    select null::bigint as id where false
), {sorted}, due as (
    select id from looked where not (select is_concerned from concerned)
    union all
    select id from sorted where not is_limited and route is null
), {diverted}, {claimed}
select count(*) from claimed;

-- name: claim_plainly
-- $1 ids, locked before. Whatever the rules are.
with due as materialized (
    select unnest($1::bigint[]) as id
), {claimed}
select c.id, c.claim, c.action from claimed c;

-- name: put_tasks_aside
-- $1 how many to look at, $2 priority, $3 and $4 the (run_at, id) behind which, $5 actions that are spared. What goes by a
-- route, or is of a limited action, is put aside while there is no room to claim anything else: it must not wait behind that. What is not put aside
-- is not locked, for others may have room for it. Returns how many were looked at, how many put aside, and the last.
with looked as materialized (
    select id, action, labels, tenant, limit_key, run_at from (
        select t.id, t.action, t.labels, t.tenant, t.limit_key, t.run_at from penstock.task t
        where t.state in ('SCHEDULED', 'ERROR') and t.route is null and t.gate is null
          and t.priority = $2::int2 and (t.run_at, t.id) > ($3::timestamptz, $4::bigint) and t.run_at <= now()
          and (t.expires_at is null or t.expires_at > now())
        order by t.run_at, t.id limit (select $1::bigint)) one
), {kinds}, admitted as materialized (
    select id from looked where action = any($5::text[])
), {sorted}, {diverted}
select (select count(*) from looked) as looked, (select count(*) from diverted) as diverted, l.run_at, l.id
from (select 1) always left join lateral (select run_at, id from looked order by run_at desc, id desc limit 1) l on true;

-- name: claim_tasks_by_route
-- $1 how many, $2 route. What is of a limited action or tenant by now is not claimed but put aside, at its gate: a pause
-- or a limit may be younger than the route's backlog. diverted: as claim_tasks_by_rules. Relies on task_ready_by_route.
with looked as materialized (
    select t.id, t.action, t.tenant, t.limit_key from penstock.task t
    where t.state in ('SCHEDULED', 'ERROR') and t.route = $2 and t.gate is null and t.run_at <= now()
      and (t.expires_at is null or t.expires_at > now())
    order by t.priority desc, t.run_at, t.id limit (select $1::bigint) for update skip locked
), {held_tenants}, limited as materialized (
    select t.id from looked t
    where exists (select from penstock.action) and (
              t.action in (select a.name from penstock.action a where not ({is_free}))
              or t.action in (select name from penstock.action) and {is_held})
       or exists (select from held_tenants) and t.tenant in (select tenant from held_tenants)
), due as (
    select id from looked where not exists (select from limited) or id not in (select id from limited)
), diverted as (
    update penstock.task t
    set route = null, gate = {gate_name}
    from limited l
    where t.id = any(array[l.id])
      and t.state::text in ('SCHEDULED', 'ERROR') and t.route = $2 and t.gate is null
    returning t.action, t.gate, t.tenant
), {opened}, {claimed}
select c.id, c.claim, c.action, c.payload::text, c.timeout_seconds,
       date_part('epoch', now() - c.run_at) as waited_seconds, c.suspect, c.route, c.tenant, c.trace, c.journal,
       d.count as diverted
from (select count(*) as count from diverted) d left join claimed c on true
order by c.priority desc, c.run_at, c.id;

-- name: claim_tasks_at_gates
-- $1 gates, $2 how many of each. Their rows, and that of the action, are locked before in the same transaction.
-- Relies on the index task_ready_by_gate. By which route they go is decided only now, for routes may have changed while
-- they waited.
with due as materialized (
    select ready.id from unnest($1::text[], $2::bigint[]) as allotted (gate, tasks)
    cross join lateral (
        select t.id from penstock.task t
        where t.state in ('SCHEDULED', 'ERROR') and t.gate = allotted.gate and t.run_at <= now()
          and (t.expires_at is null or t.expires_at > now())
        order by t.priority desc, t.run_at, t.id limit allotted.tasks for update skip locked
    ) ready
), noted as materialized (
    insert into penstock.dispatch (id, claimed_at)
    select nextval('penstock.claim_seq'), now() where exists (select from due)
    returning id
), claimed as (
    update penstock.task t
    set state = 'ACQUIRED', attempts = t.attempts + 1, claim = n.id,
        claimed_at = now(), heartbeat_at = null, worker = null, updated_at = now(),
        route = (select r.name from penstock.route r
                 where t.action like any(r.actions) and (r.labels = '{}' or t.labels @> r.labels)
                 order by r.position, r.name limit 1)
    from noted n cross join due d
    where t.id = any(array[d.id]) and t.claim < n.id
    returning t.id, t.claim, t.action, t.payload, t.timeout_seconds, t.priority, t.run_at, t.suspect, t.route, t.gate,
              t.tenant,
              {trace}
)
select c.id, c.claim, c.action, c.payload::text, c.timeout_seconds,
       date_part('epoch', now() - c.run_at) as waited_seconds, c.suspect, c.route, c.tenant, c.trace, c.journal, c.gate
from claimed c order by c.priority desc, c.run_at, c.id;

-- name: read_priorities
-- $1 at most how many. The priorities of tasks that are due, now or later; each step is one look into the index
-- task_ready.
with recursive step as (
    (select priority from penstock.task
     where state in ('SCHEDULED', 'ERROR') and route is null and gate is null order by priority desc limit 1)
    union all
    select (select t.priority from penstock.task t
            where t.state in ('SCHEDULED', 'ERROR') and t.route is null and t.gate is null
              and t.priority < step.priority
            order by t.priority desc limit 1)
    from step where step.priority is not null
)
select priority from step where priority is not null limit $1;

-- name: read_seconds_to_next
-- $1 and $2 lowest and highest priority of each stretch to look through (see ScanBounds), $3 at most how many priorities of
-- those that cover several. Seconds until the next task is due that is not due yet, null for none. Where a stretch is one
-- priority, the look begins at what is due now: dead entries of what was claimed before stand in front of that.
-- Selects of their own hide the parameters from the planner, which would plan each time: 0.8 ms a look instead of 0.4.
with recursive stretch as materialized (
    select low, high from unnest((select $1::int2[]), (select $2::int2[])) as s (low, high)
), step as (
    select s.low, (select t.priority from penstock.task t
                   where t.state in ('SCHEDULED', 'ERROR') and t.route is null and t.gate is null
                     and t.priority between s.low and s.high
                   order by t.priority desc limit 1) as priority
    from stretch s where s.low < s.high
    union all
    select step.low, (select t.priority from penstock.task t
                      where t.state in ('SCHEDULED', 'ERROR') and t.route is null and t.gate is null
                        and t.priority >= step.low and t.priority < step.priority
                      order by t.priority desc limit 1)
    from step where step.priority is not null
), levels as materialized (
    select low as priority from stretch where low = high
    union all
    (select priority from step where priority is not null limit (select $3::bigint))
)
select date_part('epoch', min(next.run_at) - now())
from levels cross join lateral (
    select t.run_at from penstock.task t
    where t.state in ('SCHEDULED', 'ERROR') and t.route is null and t.gate is null
      and t.priority = levels.priority and t.run_at > now()
    order by t.run_at, t.id limit 1) next;

-- name: confirm_claim
-- $1 the tokens of claims: everything of them was sent or given back.
delete from penstock.dispatch where id = any($1::bigint[]);

-- name: release_tasks
-- $1 ids, $2 claims, $3 seconds, or null. Back to the state it came from, its attempt given back; one that a worker has reported
-- only if that was so long ago, by a heartbeat that may have come since it was chosen. Returns ids.
with changed as (
    update penstock.task t
    set state = case when t.attempts = 1 then 'SCHEDULED' else 'ERROR' end::penstock.task_state,
        attempts = t.attempts - 1, run_at = {due_again}, claimed_at = null, heartbeat_at = null,
        updated_at = now(), route = null, gate = null
    from {pairs}
    where {held} and (t.heartbeat_at is null or t.heartbeat_at < now() - make_interval(secs => $3::float8))
    returning t.id, t.workflow
), {notified}
select id from changed;

-- name: count_in_flight
-- $1 stop counting there, $2 claimed no earlier than this. How many are ACQUIRED that go by no route, how many of them
-- for longer than a moment, and when that moment began. Relies on task_acquired, which holds the window's rows alone.
select count(*), count(*) filter (where claimed_at < now() - interval '2 seconds'), now() - interval '2 seconds'
from (select claimed_at from penstock.task
      where state = 'ACQUIRED' and claimed_at >= $2::timestamptz and route is null order by claimed_at limit $1) held;

-- name: count_in_flight_by_route
-- $1 and $2 as count_in_flight, $3 route. Relies on task_acquired_by_route.
select count(*), count(*) filter (where claimed_at < now() - interval '2 seconds'), now() - interval '2 seconds'
from (select claimed_at from penstock.task
      where state = 'ACQUIRED' and claimed_at >= $2::timestamptz and route = $3 order by claimed_at limit $1) held;

-- name: notify_work
-- $1 channel, named as in the schema penstock, $2 payload. A statement of its own: see db/notify.py.
select pg_notify('penstock_' || substr($1, 10), $2);
