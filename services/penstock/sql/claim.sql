-- From Postgres to the outbound queue: claim, confirm, give back.

-- name: claim_tasks
-- $1 how many, $2 now or null for the database's clock.
-- Relies on the index task_ready: its order is the claim's order, its predicate is repeated word for word.
-- The candidates are chosen in a materialised CTE: a plain subquery in FROM may be run again by some plans and
-- so exceed its LIMIT. The limit stands in a select of its own, which hides its value from the planner: with the
-- statistics of a table that was empty a moment ago, a limit above the rows expected would have all due tasks sorted
-- for each claim. The update goes by an array: as a join, a claim of 1000 scanned a table of 42,000 tasks whole.
-- The row in dispatch lives until the sending is confirmed; should this process die before, the supervisor finds it
-- and gives exactly these claims back.
with due as materialized (
    select id from penstock.task
    where state in ('SCHEDULED', 'ERROR') and run_at <= coalesce($2::timestamptz, now())
    order by priority desc, run_at, id
    limit (select $1::bigint)
    for update skip locked
), claimed as (
    update penstock.task t
    set state = 'ACQUIRED', attempts = t.attempts + 1, claim = nextval('penstock.claim_seq'),
        claimed_at = now(), heartbeat_at = null, updated_at = now()
    where t.id = any(array(select id from due))
    returning t.id, t.claim, t.action, t.payload, t.timeout_seconds, t.priority, t.run_at
), noted as (
    insert into penstock.dispatch (task_ids, claims, claimed_at)
    select array_agg(id), array_agg(claim), now() from claimed having count(*) > 0
    returning id
)
select c.id, c.claim, c.action, c.payload::text, c.timeout_seconds,
       extract(epoch from coalesce($2::timestamptz, now()) - c.run_at)::float8 as waited_seconds, n.id as dispatch_id
from claimed c cross join noted n
order by c.priority desc, c.run_at, c.id;

-- name: confirm_dispatch
-- $1 dispatch id: everything of it was sent or given back.
delete from penstock.dispatch where id = $1;

-- name: release_tasks
-- $1 ids, $2 claims. Back to the state it came from, its attempt given back. Returns ids.
update penstock.task
set state = case when attempts = 1 then 'SCHEDULED' else 'ERROR' end::penstock.task_state,
    attempts = attempts - 1, claimed_at = null, heartbeat_at = null, updated_at = now()
where id = any($1::bigint[]) and claim = any($2::bigint[]) and state::text = 'ACQUIRED'
returning id;

-- name: count_in_flight
-- $1 stop counting there. Relies on task_acquired, which holds the window's rows and no others.
select count(*) from (select 1 from penstock.task where state = 'ACQUIRED' limit $1) held;

-- name: notify_work
-- $1 channel. A statement of its own: see penstock.notify.
select pg_notify($1, '');
