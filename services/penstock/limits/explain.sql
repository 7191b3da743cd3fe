-- Why a task does not run: what a person would look up, bounded.

-- name: explain_task
-- $1 id, $2 stop counting there. From either table; of a settled task its state and when it settled.
select t.id, t.state::text as state, t.action, t.tenant, t.priority, t.run_at, t.attempts, t.max_attempts, t.claimed_at,
       t.heartbeat_at, t.worker, t.updated_at, t.ordering_key, t.workflow, t.route, t.gate is not null as is_gated, now() as at,
       null::timestamptz as finished_at,
       exists (select from penstock.dispatch d where d.id = t.claim) as is_unsent,
       case when t.claimed_at is null and t.expires_at <= now() then t.expires_at end as expired_at,  -- see find_expired
       b.id as head, h.held, b.state::text as head_state,
       w.token, w.deadline, s.after as steps_before,
       greatest(a.held_until, g.held_until) as held_until, a.held_until as action_held_until, a.paused, a.max_in_flight, a.rate, a.key_max_in_flight, a.key_rate, t.limit_key,
       case when a.max_in_flight is not null then (
           select count(*) from (select from penstock.task o where o.state = 'ACQUIRED' and o.gate is not null
                                   and o.action = t.action limit greatest($2, a.max_in_flight)) held) end as in_flight,
       case when a.key_max_in_flight is not null and t.limit_key is not null then (
           select count(*) from (select from penstock.task o where o.state = 'ACQUIRED' and o.action = t.action
                                   and o.gate = {gate_name} limit greatest($2, a.key_max_in_flight)) held) end as key_in_flight,
       p.paused as tenant_paused, p.max_in_flight as tenant_max_in_flight, p.rate as tenant_rate,
       case when p.max_in_flight is not null then (
           select count(*) from (select from penstock.task o where o.state = 'ACQUIRED' and o.gate is not null
                                   and o.tenant = t.tenant limit greatest($2, p.max_in_flight)) held) end as tenant_in_flight,
       case when (y.attempts, y.returned_at) = (t.attempts, t.updated_at) then y.unknown_since end as unknown_since,
       case when y.unknown_since is not null then
           (select max(n.seen_at) from penstock.announced n where n.action = t.action) end as announced_at
from penstock.task t
left join penstock.postponed y on y.task_id = t.id
left join penstock.ordering_head h on h.key = t.ordering_key
-- The row of a head names the task that holds its key, else one that ran before: what runs now is sought among the $2 live
-- tasks before this one, then the oldest that waits.
left join lateral (
    select id, state from (
        select h.task_id as id, (select state from penstock.task_history p where p.id = h.task_id) as state, 1 as place
        where h.held
        union all
        select o.id, o.state, 2 from penstock.task o
        where o.id = h.task_id and o.id <> t.id and (o.state <> 'WAITING' or o.claimed_at is not null)
        union all
        (select o.id, o.state, 3 from (
             select id, state, ordering_key, claimed_at from penstock.task where id < t.id order by id desc limit $2) o
         where o.ordering_key = t.ordering_key and (o.state <> 'WAITING' or o.claimed_at is not null) limit 1)
        union all
        (select o.id, o.state, 4 from penstock.task o
         where o.ordering_key = t.ordering_key and o.state = 'WAITING' and o.claimed_at is null and o.id < t.id
         order by o.id limit 1)) first
    where t.state = 'WAITING' and t.claimed_at is null and t.ordering_key is not null
    order by place limit 1) b on true
left join penstock.wait w on w.task_id = t.id and w.deadline is not null
left join lateral (
    select (select string_agg(b.name, ', ' order by b.number) from (
                select b.number, b.name from penstock.workflow_step b
                where b.workflow_id = s.workflow_id and b.number = any(s.after)
                  and not (b.passed or b.done and b.state = 'SUCCESS')  -- as the workflow failed
                order by b.number limit 3) b) as after
    from penstock.workflow_step s where s.task_id = t.id limit 1) s on true
left join penstock.gate g on g.name = t.gate
left join penstock.action a on a.name = t.action
left join lateral (
    select {tenant_rules} from (select) one
    left join penstock.tenant o on o.name = t.tenant left join penstock.tenant d on d.name = '*') p on t.tenant is not null
where t.id = $1
union all
select t.id, t.state::text, t.action, t.tenant, t.priority, t.run_at, t.attempts, t.max_attempts, t.claimed_at, null, t.worker, null, null, null,
       null, false, now(), t.finished_at, false, null, null, null, null, null, null, null, null, null, null, null, null, null, null,
       null, null, null, null, null, null, null, null, null
from penstock.task_history t where t.id = $1;

-- name: count_before
-- $1 route or null, $2 priority, $3 run_at, $4 id, $5 how many to look at. Of the tasks that are sent first by that
-- route: how many are due and go before this one; how many are in flight.
select (select count(*) filter (where o.run_at <= now()
                                  and (o.priority > $2 or (o.priority = $2 and (o.run_at, o.id) < ($3, $4))))
        from (
            (select priority, run_at, id from penstock.task
             where $1::text is null and state in ('SCHEDULED', 'ERROR') and route is null and gate is null
             order by priority desc, run_at, id limit $5)
            union all
            (select priority, run_at, id from penstock.task
             where route = $1 and route is not null and gate is null and state in ('SCHEDULED', 'ERROR')
             order by priority desc, run_at, id limit $5)) o) as before,
       (select count(*) from (
            (select from penstock.task where $1::text is null and state = 'ACQUIRED' and route is null limit $5)
            union all
            (select from penstock.task where route = $1 and route is not null and state = 'ACQUIRED' limit $5)) o) as in_flight;
