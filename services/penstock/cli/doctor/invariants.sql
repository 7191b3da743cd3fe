-- What must hold in every snapshot, for `penstock doctor --invariants`. Reads only, and no more than $1 rows of a table,
-- the oldest ones of the live tasks. Each statement returns what breaks its invariant, with ids alone: names may hold
-- anything. Holds is shown as long as it returns nothing, Fix ({report} unless it is given) for what it returns, as an
-- error unless there is a Level.

-- part: live
live as materialized (
    select id, state, action, attempts, max_attempts, claim, claimed_at, heartbeat_at, unique_key, ordering_key, limit_key,
           tenant, gate, workflow, created_at
    from penstock.task order by id limit $1
)

-- part: running
-- Of each ordering key, the tasks that may run or wait for an event; those behind them wait.
running as materialized (
    select id, ordering_key, claimed_at, created_at from live
    where ordering_key is not null and (state::text <> 'WAITING' or claimed_at is not null)
)

-- name: count_live_up_to
-- $1 how many.
select count(*) from (select from penstock.task limit $1) one;

-- name: find_tasks_settled_twice
-- Holds: a task is live or has one final record
-- Fix: compare the records with `penstock task`; after a restore, see docs/operations.md; else {report}
with recent as materialized (select id, state::text from penstock.task_history order by id desc limit $1)
select 'task ' || id || ' has ' || count(*) || ' final records: ' || string_agg(state, ', ') as seen
from recent group by id having count(*) > 1
union all
select 'task ' || t.id || ' is live and has a final record' from recent r join penstock.task t on t.id = r.id
union all
select 'task ' || t.id || ' is live and has a final record'
from (select id from penstock.task order by id limit $1) t
where exists (select from penstock.task_history h where h.id = t.id)
  and t.id < (select min(id) from recent);

-- name: find_attempts_beyond_limit
-- Holds: attempts stay within their limit
with {live}
select 'task ' || id || ' is at attempt ' || attempts || ' of ' || max_attempts as seen from live
where attempts > max_attempts;

-- name: find_sequences_behind
-- Holds: every claim has a token of its own
-- Fix: stop the schedulers and raise the sequence: select setval('penstock.claim_seq', greatest((select max(claim) from penstock.task), (select max(claim) from penstock.task_history)) + 1000); likewise task_id_seq, by id
-- A claim that takes a token again passes the fence of the one before. The sequences are read behind the snapshot; a role
-- that may not read one is given null, and does not look at it.
with {live}
select 'claim ' || claim || ' of task ' || id || ' is above the sequence of claims' as seen
from (select id, claim from live order by claim desc limit 1) newest
where case when has_sequence_privilege('penstock.claim_seq', 'SELECT, USAGE')
           then claim > coalesce(pg_sequence_last_value('penstock.claim_seq'), 0) end
union all
select 'task ' || id || ' is above the sequence of ids'
from (select id from penstock.task order by id desc limit 1) newest
where case when has_sequence_privilege('penstock.task_id_seq', 'SELECT, USAGE')
           then id > coalesce(pg_sequence_last_value('penstock.task_id_seq'), 0) end;

-- name: find_keys_run_twice
-- Holds: one task of an ordering key runs
with {live}, {running}
select 'tasks ' || string_agg(id::text, ', ' order by id) || ' of one ordering key may run' as seen
from running group by ordering_key having count(*) > 1;

-- name: find_keys_out_of_order
-- Holds: tasks of an ordering key run in order
-- A task that was retried, or a step that takes its place now, stands behind those that are there, though it is older: it
-- has changed since they were made.
with {live}, {running}
select 'task ' || r.id || ' was claimed before task ' || older.id || ' of its ordering key' as seen
from running r cross join lateral (
    select t.id from penstock.task t
    where t.ordering_key = r.ordering_key and t.state = 'WAITING' and t.claimed_at is null and t.id < r.id
      and t.updated_at <= r.created_at
    order by t.id limit 1) older
where r.claimed_at is not null;

-- name: find_keys_without_head
-- Holds: an ordering key is taken while its task runs
-- The next task of such a key would run at once.
with {live}, {running}
select 'task ' || id || ' runs in an ordering key that is not taken' as seen from running r
where not exists (select from penstock.ordering_head h where h.key = r.ordering_key);

-- name: find_keys_that_stand_still
-- Holds: an ordering key moves on
-- Fix: `penstock task cancel` the task to have the next one looked at; {report}
-- Where there are more live tasks than $1, the one that runs may be among those not read.
with {live}, {running}, turned as materialized (
    select unnest(keys) as key from (select keys from penstock.turn limit $1) u
)
select 'task ' || min(id) || ' waits in an ordering key in which nothing runs' as seen from live
where ordering_key is not null and state::text = 'WAITING' and claimed_at is null
  and (select count(*) from live) < $1
  and ordering_key not in (select ordering_key from running) and ordering_key not in (select key from turned)
  and not exists (select from penstock.ordering_head h where h.key = live.ordering_key and h.held)
group by ordering_key;

-- name: find_unique_keys_free
-- Holds: a unique key is taken while its task is live
-- A key that is taken for a time may pass to a newer task while the older one is live.
with {live}
select 'task ' || t.id || ' is live, and its unique key is free' as seen from live t
where t.unique_key is not null
  and not exists (select from penstock.unique_key k
                  where k.action = t.action and k.key = t.unique_key and k.task_id >= t.id);

-- name: find_unique_keys_shared
-- Holds: one live task has a unique key
-- Fix: right if they were enqueued with a time for unique; else {report}
-- Level: note
with {live}
select 'live tasks ' || string_agg(id::text, ', ' order by id) || ' have one unique key' as seen
from live where unique_key is not null group by action, unique_key having count(*) > 1;

-- name: find_limits_exceeded
-- Holds: no limit is exceeded
-- Of the tasks claimed since the limit was set; schedulers may have had the limit before for a moment.
with {live}, acquired as materialized (
    select action, tenant, limit_key, claimed_at from live where state::text = 'ACQUIRED' and gate is not null
)
select count(*) || ' tasks of ' || a.name || ' run, ' || a.max_in_flight || ' may' as seen
from acquired t join penstock.action a on a.name = t.action and t.claimed_at > a.updated_at + interval '5 seconds'
group by a.name, a.max_in_flight having count(*) > a.max_in_flight
union all
select count(*) || ' tasks of ' || a.name || ' with one limit key run, ' || a.key_max_in_flight || ' may'
from acquired t join penstock.action a on a.name = t.action and t.claimed_at > a.updated_at + interval '5 seconds'
where t.limit_key is not null
group by a.name, t.tenant, t.limit_key, a.key_max_in_flight having count(*) > a.key_max_in_flight
union all
select count(*) || ' tasks of tenant ' || t.tenant || ' run, ' || r.max_in_flight || ' may'
from acquired t join penstock.tenant r on r.name = t.tenant and r.own and t.claimed_at > r.updated_at + interval '5 seconds'
group by t.tenant, r.max_in_flight having count(*) > r.max_in_flight;

-- name: find_waits_without_end
-- Holds: a task that waits has an event to wait for
-- Fix: `penstock task cancel`, then `penstock task retry` the task; {report}
with {live}
select 'task ' || t.id || ' waits for an event that nothing will bring' as seen from live t
where t.state::text = 'WAITING' and t.claimed_at is not null
  and not exists (select from penstock.wait w
                  where w.task_id = t.id and w.claim = t.claim and w.deadline is not null);

-- name: find_gates_missing
-- Holds: a limited task waits at a gate
-- Fix: `penstock task reschedule` the task; {report}
with {live}
select 'task ' || t.id || ' waits at a gate that is not there' as seen from live t
where t.gate is not null and t.state::text in ('SCHEDULED', 'ERROR')
  and not exists (select from penstock.gate g where g.name = t.gate);

-- name: find_workflows_astray
-- Holds: a workflow moves on
-- Fix: `penstock workflows cancel` it, then retry it; {report}
-- Nothing of the workflow runs, and no event will move it on; or a step has no workflow.
with {live}
select 'workflow ' || w.id || ' is ' || w.state || ', and none of its steps is live' as seen
from (select id, state from penstock.workflow where state in ('RUNNING', 'FAILING') order by id limit $1) w
where not exists (select from penstock.workflow_event e where e.workflow_id = w.id)
  and not exists (select from penstock.workflow_step s where s.workflow_id = w.id and s.state = 'SCHEDULED' and s.task_id is null)
  and not exists (select from penstock.workflow_step s join penstock.task t on t.id = s.task_id where s.workflow_id = w.id)
union all
select 'task ' || t.id || ' is a step of a workflow that is not there' from live t
where t.workflow is not null and not exists (select from penstock.workflow w where w.id = t.workflow);

-- name: find_work_overdue
-- Holds: nothing is overdue
-- Fix: is a supervisor running, and a resulter? See their logs for duties that fail
-- Level: warning
-- $2 seconds after which a claim without a heartbeat is stale. What the supervisor and the resulters should have
-- done ten minutes ago. $3 seconds for which a task that no worker has taken may wait in its queue.
with {live}
select 'task ' || id || ' is claimed, without a heartbeat for ' ||
       round(extract(epoch from now() - coalesce(heartbeat_at, claimed_at)) / 60) || ' minutes' as seen
from live where state::text = 'ACQUIRED'
  and coalesce(heartbeat_at, claimed_at) < now() - interval '10 minutes'
      - make_interval(secs => greatest(2 * $2::float8, case when heartbeat_at is null then $3::float8 end))
union all
select 'task ' || task_id || ' waits for an event beyond its deadline' from (
    select task_id from penstock.wait where deadline < now() - interval '10 minutes' order by deadline limit $1) w
union all
select 'ordering keys of ' || size || ' tasks wait to be looked at' from (
    select size from penstock.turn where ends_at < now() - interval '10 minutes' order by ends_at limit $1) u;
