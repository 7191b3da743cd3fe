-- Tenants: the rules of each, what its rate leaves, and the gates of its tasks.

-- name: add_tenant_paces
-- $1 tenants. Sorted, so that two schedulers cannot deadlock.
insert into penstock.tenant_pace (name) select t from unnest($1::text[]) t order by t on conflict do nothing;

-- name: lock_tenants
-- $1 tenants. What each may do, by the clock `at`; those that another scheduler is at are left out. Behind lock_action in
-- the same transaction, which keeps the rules as they are until its end.
select p.name, p.tokens, p.refilled_at, now() as at, {tenant_rules}
from penstock.tenant_pace p
left join penstock.tenant o on o.name = p.name left join penstock.tenant d on d.name = '*'
where p.name = any($1::text[]) order by p.name for update of p skip locked;

-- name: count_gated_of_tenants
-- $1 tenants, $2 stop counting there, for each. How many of its tasks are in flight that came through a gate, of whichever
-- action. A statement of its own behind the lock, as count_gated. Relies on task_acquired_by_tenant.
select w.name, (select count(*) from (select from penstock.task t
                                     where t.state = 'ACQUIRED' and t.gate is not null and t.tenant = w.name
                                     limit w.most) held) as in_flight
from unnest($1::text[], $2::bigint[]) w (name, most);

-- name: note_tenants
-- $1 tenants, which are locked, $2 tokens left now.
update penstock.tenant_pace p set tokens = n.tokens, refilled_at = now()
from unnest($1::text[], $2::float8[]) n (name, tokens) where p.name = n.name and p.name = any($1::text[]);

-- name: close_gates_of_paused
-- $1 gates, which are locked, of tenants that are paused: not worth a look until they are resumed.
update penstock.gate set next_at = 'infinity' where name = any($1::text[]);

-- name: open_gates_of_tenant
-- $1 tenant, or null for all, whose limits have changed.
update penstock.gate set next_at = greatest(held_until, now())
where tenant is not null and ($1::text is null or tenant = $1) and next_at > now();

-- name: set_tenant
-- $1 tenant, $2 paused, $3 whether it has limits of its own, $4 max_in_flight, $5 rate, $6 burst.
insert into penstock.tenant (name, paused, own, max_in_flight, rate, burst) values ($1, $2, $3, $4, $5, $6)
on conflict (name) do update set paused = excluded.paused, own = excluded.own, max_in_flight = excluded.max_in_flight,
    rate = excluded.rate, burst = excluded.burst, updated_at = now();

-- name: forget_tenant
-- $1 tenant. It goes by the default again.
delete from penstock.tenant where name = $1 returning name;

-- name: adopt_in_flight_of_tenants
-- $1 tenant, or null for every one that is limited. As adopt_in_flight, for what is in flight when a tenant becomes limited.
update penstock.task t
set gate = {gate_name}
from (select t.id from penstock.task t
      where t.state = 'ACQUIRED' and t.gate is null and t.claimed_at <= now()
        and ($1::text is null or t.tenant = $1) and {tenant_is_limited}
      for no key update of t skip locked) found
where t.id = any(array[found.id]) and t.state::text = 'ACQUIRED' and t.gate is null
returning t.id;

-- name: read_tenant
-- $1 tenant, or * for the default. What is asked of it, its own or by the default, and how many of its tasks are in
-- flight and wait at gates, each counted up to 100000.
select w.name as tenant, o.name is not null as known, coalesce(o.own, false) as own, o.updated_at, {tenant_rules},
       (select count(*) from (select from penstock.task t
                              where t.state = 'ACQUIRED' and t.gate is not null and t.tenant = w.name
                              limit 100000) held) as in_flight,
       (select coalesce(sum(n), 0) from (
            select (select count(*) from (select from penstock.task t
                                          where t.state in ('SCHEDULED', 'ERROR') and t.gate = g.name
                                          limit 100000) waiting) as n
            from penstock.gate g where g.tenant = w.name limit 1000) counted)::bigint as waiting
from (select $1::text as name) w
left join penstock.tenant o on o.name = w.name left join penstock.tenant d on d.name = '*';

-- name: list_tenants
-- $1 behind this name or null, $2 how many. Every tenant with a rule of its own, the default first.
select o.name as tenant, true as known, o.own, o.updated_at, {tenant_rules}, 0::bigint as in_flight, 0::bigint as waiting
from penstock.tenant o left join penstock.tenant d on d.name = '*'
where $1::text is null or (o.name <> '*' and ($1 = '*' or o.name > $1))
order by o.name <> '*', o.name limit $2;

-- name: count_live_of_tenant
-- $1 tenant, $2 how many to look at. Live tasks among the newest, along the index on id, so the cost hangs on $2 alone: the
-- tenant's by action and state, and all others as one row without an action. In one pass, which costs a third.
select case when tenant = $1 then action end as action, case when tenant = $1 then state::text end as state,
       count(*) as count
from (select action, state, tenant from penstock.task order by id desc limit $2) seen
group by 1, 2;

-- name: count_settled_of_tenant
-- $1 and $2 as count_live_of_tenant, $3 a final state: only its own partitions are read.
select case when tenant = $1 then action end as action, case when tenant = $1 then state::text end as state,
       count(*) as count
from (select action, state, tenant from penstock.task_history where state = $3 order by id desc limit $2) seen
group by 1, 2;

-- name: forget_tenant_paces
-- Of tenants at whose gates nothing stands, once their rate is full again: what it left need not be remembered.
delete from penstock.tenant_pace where name in (
    select name from (
        select p.name, p.tokens, p.refilled_at, {tenant_rules}
        from penstock.tenant_pace p
        left join penstock.tenant o on o.name = p.name left join penstock.tenant d on d.name = '*'
        where not exists (select from penstock.gate g where g.tenant = p.name)
        for update of p skip locked
    ) idle
    where tokens is null or rate is null
       or refilled_at + make_interval(secs => least(1e9, greatest(0, coalesce(burst, greatest(1, ceil(rate))) - tokens) / rate)) < now());
