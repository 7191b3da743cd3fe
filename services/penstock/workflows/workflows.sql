-- Workflows: created, advanced, read. A statement that settles a task of a workflow adds an event to workflow_event,
-- and takes no lock of the workflow's. Advancing a workflow locks its row, takes its
-- events, and changes its steps; so of one workflow everything happens one after the other, and different ones go side
-- by side. A step is known by (workflow, number). Locks are taken in one order: workflow, task, ordering head.

-- part: settled_step
-- What the changes of a step come back as.
s.workflow_id, s.number, s.name, s.parent, s.kind, s.state::text as state, s.done, s.passed, s.on_failure, s.task_id

-- part: ready_step
-- What a step that may start comes back as.
s.workflow_id, s.number, s.name, s.kind, s.action, s.task_id, s.after, s.results_as, s.errors_as,
s.options::text as options, s.on_failure, s.undo

-- name: create_workflow
-- $1 key or null, $2 name, $3 SHA-256 of the definition, $4 how many steps, $5 tenant or null. Nothing where the key
-- is another's; keys of a tenant are its own.
insert into penstock.workflow (key, name, definition, steps, open, tenant)
values (coalesce($5::text || E'\x1f', '') || $1, $2, $3, $4, $4, $5)
on conflict (key) do nothing returning id;

-- name: find_workflow
-- $1 key, $2 tenant or null.
select id, definition, state from penstock.workflow where key = coalesce($2::text || E'\x1f', '') || $1;

-- name: insert_steps
-- All arrays run in parallel, one element a step. $1 workflows, $2 numbers, $3 names, $4 kinds, $5 actions or null,
-- $6 parents or null, $7 predecessors (text of an array of numbers), $8 predecessors not done, $9 states, $10 failure
-- policies, $11 undoing actions or null, $12 and $13 where results and errors of predecessors go, or null, $14 options
-- as JSON text or null; of the task: $15 payload as JSON text, null where the step has no task, $16 run_at or null,
-- $17 priorities, $18 max_attempts, $19 timeouts or null, $20 labels as JSON text or null, $21 expires_at or null,
-- $22 limit keys or null, $23 traces or null, $24 whether one without has that of its parent. Its tenant is that of its workflow. A step that is SCHEDULED at once has neither a delay nor an ordering key.
with input as materialized (
    select case when i.payload is not null then nextval('penstock.task_id_seq') end as task_id, i.*
    from unnest($1::bigint[], $2::int[], $3::text[], $4::text[], $5::text[], $6::int[], $7::text[], $8::int[],
                $9::text[], $10::text[], $11::text[], $12::text[], $13::text[], $14::text[], $15::text[],
                $16::timestamptz[], $17::int2[], $18::int2[], $19::float8[], $20::text[], $21::timestamptz[],
                $22::text[], $23::text[])
        with ordinality as i (workflow_id, number, name, kind, action, parent, after, pending, state, on_failure, undo,
                              results_as, errors_as, options, payload, run_at, priority, max_attempts, timeout, labels,
                              expires_at, limit_key, trace, place)
    order by i.place
), steps as (
    insert into penstock.workflow_step (workflow_id, number, name, kind, action, task_id, parent, after, pending, state,
                                        on_failure, undo, results_as, errors_as, options)
    select workflow_id, number, name, kind, action, task_id, parent, after::int[], pending,
           state::penstock.task_state, on_failure, undo, results_as, errors_as, options::json
    from input
), edges as (
    insert into penstock.workflow_edge (workflow_id, predecessor, successor)
    select i.workflow_id, predecessor, i.number from input i cross join lateral unnest(i.after::int[]) predecessor
), inserted as (
    insert into penstock.task (id, state, action, payload, run_at, priority, max_attempts, timeout_seconds, labels,
                               expires_at, limit_key, trace, workflow, tenant, created_at, updated_at)
    select task_id, state::penstock.task_state, action, payload::json, coalesce(run_at, now()), priority, max_attempts,
           timeout, labels::jsonb, expires_at, limit_key,
           coalesce(trace, case when $24::bool then (
               select coalesce((select t.trace from penstock.task t where t.id = s.task_id),
                               (select h.trace from penstock.task_history h where h.id = s.task_id limit 1))
               from penstock.workflow_step s where s.workflow_id = i.workflow_id and s.number = i.parent) end),
           workflow_id, (select w.tenant from penstock.workflow w where w.id = workflow_id), now(), now()
    from input i where payload is not null
    returning action
)
insert into penstock.tally (action, event, count)
select action, 'ENQUEUED', count(*) from inserted group by action;

-- name: add_children
-- $1 workflows, $2 numbers of parents, $3 how many children each has got.
update penstock.workflow_step s set children = s.children + i.n, open_children = s.open_children + i.n
from unnest($1::bigint[], $2::int[], $3::int[]) i (workflow_id, number, n)
where s.workflow_id = i.workflow_id and s.number = i.number;

-- name: hold_workflow
-- $1 to $3 as read_workflow. Waits for a process that advances it.
select id, tenant, state, steps, open, undo, compensated, reason from penstock.workflow
where id = $1 or key = coalesce($3::text || E'\x1f', '') || $2 for update;

-- name: find_told_workflows
-- $1 behind this id, $2 how many. Those that have events; each step is one look into the index.
with recursive next as (
    (select workflow_id from penstock.workflow_event where workflow_id > $1 order by workflow_id limit 1)
    union all
    select (select e.workflow_id from penstock.workflow_event e
            where e.workflow_id > next.workflow_id order by e.workflow_id limit 1)
    from next where next.workflow_id is not null
)
select workflow_id from next where workflow_id is not null limit $2;

-- name: hold_workflows
-- $1 ids. Those that no other process advances at the moment.
select id, tenant, state, steps, open, undo, compensated, reason from penstock.workflow
where id = any($1::bigint[]) order by id for update skip locked;

-- name: take_events
-- $1 workflows, held before by a statement of its own, whose snapshot may be older than the events; $2 how many, and $3 up
-- to the one that brings the texts of their children to so many characters. By ctid, as no other process changes them; a join
-- with the ids would be tried for every pair of workflow and event.
with next as (
    select ctid, workflow_id, id, coalesce(length(children), 0) as asked
    from penstock.workflow_event where workflow_id = any($1::bigint[]) order by workflow_id, id limit $2
), gone as (
    delete from penstock.workflow_event where ctid = any(array(
        select ctid from (select ctid, sum(asked) over (order by workflow_id, id) - asked as before from next) n
        where before < $3))
    returning id, workflow_id, task_id, state, children
)
select id, workflow_id, task_id, state::text as state, children from gone order by id;

-- name: hold_spawners
-- $1 ids, $2 claims. Tasks whose claim still holds, locked: their results will be accepted in this transaction. workflow: the
-- one in which they may have children; a compensation has none.
select t.id, t.claim, t.tenant,
       case when t.workflow is not null
                 and (select s.kind from penstock.workflow_step s where s.task_id = t.id) <> 'compensation'
            then t.workflow end as workflow,
       t.action, t.labels::text as labels from {pairs} join penstock.task t on {held}
order by r.id for update of t;

-- name: attach_children
-- $1 workflows, $2 ids of tasks settled in this transaction, $3 claims, $4 the children that they ask for, as JSON text.
update penstock.workflow_event e set children = i.children
from unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::text[]) i (workflow_id, task_id, claim, children)
where e.workflow_id = i.workflow_id and e.task_id = i.task_id and e.claim = i.claim and e.children is null;

-- name: find_steps
-- $1 tasks. The steps that they are.
select s.task_id, s.workflow_id, s.number, s.name, s.kind, s.on_failure, s.undo from penstock.workflow_step s where s.task_id = any($1::bigint[]);

-- name: keep_refused_children
-- $1 task, $2 options as JSON text: the children that it asked for. Its step has started, and needs no other options.
update penstock.workflow_step set options = $2::json where task_id = $1;

-- name: settle_steps
-- $1 tasks (distinct), $2 their final states, $3 the events, $4 reasons or null. A step lets its successors go when it has succeeded, or
-- failed under the policy `continue`, while the workflow runs.
update penstock.workflow_step s
set ended = i.event, reason = i.reason, state = i.state::penstock.task_state, done = s.open_children = 0,
    passed = s.open_children = 0 and (i.state = 'SUCCESS' or s.on_failure = 'continue')
             and (w.state = 'RUNNING' or s.kind = 'compensation')
from (select * from unnest($1::bigint[], $2::text[], $3::bigint[], $4::text[]) e (task_id, state, event, reason)) i,
     penstock.workflow w
where s.task_id = any($1::bigint[]) and s.task_id = i.task_id and w.id = s.workflow_id
      and s.state in ('WAITING', 'SCHEDULED')
returning {settled_step};

-- name: settle_nodes
-- $1 workflows, $2 numbers, $3 states, $4 reasons or null. As settle_steps, for steps without a task, which end when
-- their turn comes.
update penstock.workflow_step s
set reason = i.reason, state = i.state::penstock.task_state, done = s.open_children = 0,
    passed = s.open_children = 0 and (i.state = 'SUCCESS' or s.on_failure = 'continue') and w.state = 'RUNNING'
from unnest($1::bigint[], $2::int[], $3::text[], $4::text[]) i (workflow_id, number, state, reason), penstock.workflow w
where s.workflow_id = i.workflow_id and s.number = i.number and w.id = i.workflow_id
      and s.state in ('WAITING', 'SCHEDULED')
returning {settled_step};

-- name: release_parents
-- $1 workflows, $2 numbers (distinct), $3 how many of their children are done. Returns those of which all are, and
-- which have ended themselves.
with freed as (
    update penstock.workflow_step s
    set open_children = s.open_children - i.n,
        done = s.open_children = i.n and s.state in ('SUCCESS', 'CRITICAL_ERROR', 'CANCELLED'),
        passed = s.open_children = i.n and w.state = 'RUNNING'
                 and (s.state = 'SUCCESS' or s.on_failure = 'continue' and s.state in ('CRITICAL_ERROR', 'CANCELLED'))
    from unnest($1::bigint[], $2::int[], $3::int[]) i (workflow_id, number, n), penstock.workflow w
    where s.workflow_id = i.workflow_id and s.number = i.number and w.id = i.workflow_id
    returning s.*
)
select {settled_step} from freed s where s.done;

-- name: release_successors
-- $1 workflows, $2 numbers of steps that have just let their successors go. Returns those that may start.
with freed as materialized (
    select e.workflow_id, e.successor as number, count(*)::int as n
    from unnest($1::bigint[], $2::int[]) i (workflow_id, number)
    join penstock.workflow_edge e on e.workflow_id = i.workflow_id and e.predecessor = i.number
    group by e.workflow_id, e.successor
), changed as (
    update penstock.workflow_step s
    set pending = s.pending - f.n,
        state = case when s.pending = f.n then 'SCHEDULED' else s.state end
    from freed f
    where s.workflow_id = f.workflow_id and s.number = f.number and s.state = 'WAITING'
    returning s.*
)
select {ready_step} from changed s where s.pending = 0;

-- name: start_steps
-- $1 tasks (distinct), $2 ordering keys or null, $3 delays in seconds or null, $4 expires in so many seconds or null,
-- $5 payloads (JSON text), null where it stays. WAITING to SCHEDULED, or on as WAITING behind the head of the ordering
-- key that the task takes its place behind only now; a head is read as in restart_tasks. The rows are locked first: a key must not get a head that another process
-- is just cancelling.
with held as materialized (
    select t.id, t.tenant from {asked} join penstock.task t on t.id = any(array[u.id])
    where t.state::text = 'WAITING' and t.ordering_key is null order by u.id for update of t
), input as materialized (
    select i.id, coalesce(h.tenant || E'\x1f', '') || i.ordering_key as ordering_key, i.delay, i.expires_in, i.payload
    from unnest($1::bigint[], $2::text[], $3::float8[], $4::float8[], $5::text[])
        i (id, ordering_key, delay, expires_in, payload) join held h on h.id = i.id
), heads as (
    insert into penstock.ordering_head as h (key, task_id)
    select distinct on (ordering_key) ordering_key, id from input where ordering_key is not null
    order by ordering_key, id
    on conflict (key) do update set task_id = case when h.held then h.task_id else 0 end,
        held = h.held and h.task_id not in (select id from input)
    returning h.key, h.task_id
)
update penstock.task t
set state = case when h.task_id <> t.id then 'WAITING' else 'SCHEDULED' end::penstock.task_state,
    ordering_key = i.ordering_key, updated_at = now(), payload = coalesce(i.payload::json, t.payload),
    -- Not earlier than now: a claim looks behind what it has claimed last. A delay that began before a retry is in run_at.
    run_at = greatest(t.run_at, now() + make_interval(secs => case when t.run_at = t.created_at then i.delay end), now()),
    expires_at = coalesce(t.expires_at, case when t.journal is null then now() + make_interval(secs => i.expires_in) end)
from input i left join heads h on h.key = i.ordering_key
where t.id = any(array[i.id])
returning t.id, t.action, t.state::text as state;

-- name: read_steps
-- $1 workflows, $2 numbers.
select s.workflow_id, s.number, s.name, s.kind, s.task_id, s.state::text as state, s.after, s.children, s.reason
from unnest($1::bigint[], $2::int[]) i (workflow_id, number)
join penstock.workflow_step s on s.workflow_id = i.workflow_id and s.number = i.number;

-- name: read_children
-- $1 workflows, $2 numbers of parents. Compensations have none. In the order in which they were made.
select s.workflow_id, s.parent, s.number, s.name, s.kind, s.task_id, s.state::text as state, s.after, s.children,
       s.reason
from unnest($1::bigint[], $2::int[]) i (workflow_id, number)
join penstock.workflow_step s on s.workflow_id = i.workflow_id and s.parent = i.number and s.kind <> 'compensation'
order by s.workflow_id, s.number;

-- name: read_results
-- $1 ids of settled tasks. What they came to; no result where it was emptied, and no error where it was overcome.
select id, case when result_gone is null then result::text end as result,
       case when state <> 'SUCCESS' then (failures -> -1 -> 'error')::text end as error, reason
from penstock.task_history where id = any($1::bigint[]);

-- name: read_payloads
-- $1 ids of tasks that wait.
select t.id, t.payload::text as payload, t.tenant from {asked} join penstock.task t on t.id = any(array[u.id]);

-- name: find_undone
-- $1 workflow, $2 number of a compensation. The name of the step that it undoes; and its task, nulls where the record is gone:
-- what it was given and what it came to, null where it was emptied.
select u.name, h.id, h.action, h.tenant, case when h.payload_gone is null then h.payload::text end as payload,
       case when h.result_gone is null then h.result::text end as result
from penstock.workflow_step s
join penstock.workflow_step u on u.workflow_id = s.workflow_id and u.number = s.parent
left join penstock.task_history h on h.id = any(array[u.task_id]) and h.state = 'SUCCESS'
where s.workflow_id = $1 and s.number = $2;

-- name: find_ready
-- $1 workflow, $2 from this number on. Steps just made that wait for nothing and have not started. Returned as
-- SCHEDULED from now on.
with changed as (
    update penstock.workflow_step s set pending = 0, state = 'SCHEDULED'
    where s.workflow_id = $1 and s.number >= $2 and s.pending = 0 and s.state = 'WAITING'
    returning s.*
)
select {ready_step} from changed s;

-- name: update_workflows
-- $1 ids, $2 states, $3 how many steps were added, $4 how many are open, $5 undoing actions or null, $6 whether undoing
-- has begun, $7 reasons or null. Their rows are held.
update penstock.workflow w
set steps = w.steps + i.added, state = i.state, open = i.open, undo = i.undo, compensated = i.compensated,
    reason = i.reason, updated_at = now(),
    finished_at = case when i.state in ('SUCCESS', 'FAILED', 'CANCELLED') then coalesce(w.finished_at, now()) end
from unnest($1::bigint[], $2::text[], $3::int[], $4::int[], $5::text[], $6::bool[], $7::text[])
    i (id, state, added, open, undo, compensated, reason)
where w.id = i.id;

-- name: hold_unstarted_steps
-- $1 workflow, $2 whether those that run, and compensations, are meant too. Tasks of the workflow that are not settled,
-- locked.
select t.id from penstock.workflow_step s join penstock.task t on t.id = s.task_id
where s.workflow_id = $1 and not s.done and s.state in ('WAITING', 'SCHEDULED')
      and ($2 or (t.state <> 'ACQUIRED' and s.kind <> 'compensation'))
order by t.id for update of t;

-- name: cancel_nodes
-- $1 workflow, $2 the reason. Steps without a task that have not had their turn.
update penstock.workflow_step s set done = s.open_children = 0, state = 'CANCELLED', reason = $2
where s.workflow_id = $1 and s.task_id is null and s.state in ('WAITING', 'SCHEDULED')
returning {settled_step};

-- name: find_undoable
-- $1 workflow, $2 the action for steps that name none of their own, or empty. What has succeeded, last first.
select s.number, s.name, coalesce(s.undo, nullif($2, '')) as undo from penstock.workflow_step s
where s.workflow_id = $1 and s.kind = 'task' and s.state = 'SUCCESS' and coalesce(s.undo, nullif($2, '')) is not null
order by s.ended desc, s.number desc;

-- name: reopen_steps
-- $1 workflow, $2 whether its compensations are meant, or all else. What did not succeed begins again, and waits for
-- what else begins again; a parent of such steps is open again. Compensations still go one by one: each waits for the one
-- before it that begins again, as those between them have succeeded. Returns the steps that begin again. refused: the children
-- for whose rejection alone a step failed, encoded, as keep_refused_children has stored them.
with recursive again as materialized (
    select number, parent, case when $2 then lag(number) over (order by number) end as before from penstock.workflow_step
    where workflow_id = $1 and (kind = 'compensation') = $2 and state <> 'SUCCESS' and ($2 or not passed)
), above as (
    select parent as number from again where parent is not null and not $2
    union
    select s.parent from above a join penstock.workflow_step s on s.workflow_id = $1 and s.number = a.number
    where s.parent is not null
), opened as materialized (
    select number from again union select number from above
), waiting as materialized (
    select e.successor as number, count(*)::int as n
    from opened o join penstock.workflow_edge e on e.workflow_id = $1 and e.predecessor = o.number
    where not $2 group by e.successor
    union all
    select number, 1 from again where before is not null
), linked as (
    insert into penstock.workflow_edge (workflow_id, predecessor, successor)
    select $1, before, number from again where before is not null on conflict do nothing
), parents as materialized (
    select c.parent as number, count(*)::int as n
    from opened o join penstock.workflow_step c on c.workflow_id = $1 and c.number = o.number
    where c.parent is not null and c.kind <> 'compensation' group by c.parent
), changed as (
    update penstock.workflow_step s
    set done = false, passed = false,
        state = case when a.number is null then s.state when w.n is null then 'SCHEDULED' else 'WAITING' end,
        pending = coalesce(w.n, 0), open_children = coalesce(p.n, 0), reason = null,
        after = case when a.before is null then s.after else array[a.before] end
    from opened o left join again a on a.number = o.number left join waiting w on w.number = o.number
    left join parents p on p.number = o.number
    where s.workflow_id = $1 and s.number = o.number
    returning s.*, a.number is not null as again
)
select {ready_step}, s.pending, s.again, s.options ->> 'refused' as refused from changed s;

-- name: restart_steps
-- $1 tasks, $2 whether they are compensations, which get their payload when they start. CRITICAL_ERROR or CANCELLED to
-- WAITING, as restart_tasks, for steps of a workflow that begins again; a step that may start at once is started next,
-- by start_steps. One whose last claim has not failed keeps its time, which a caller or a sleep has set; a wait for a worker
-- with its action is over. One whose payload was emptied stays unchanged. Returns the ids.
with gone as (
    delete from penstock.task_history
    where id = any($1::bigint[]) and state in ('CRITICAL_ERROR', 'CANCELLED') and workflow is not null
      and (payload_gone is null or $2)
    returning *
), back as (
    insert into penstock.task (id, state, action, payload, priority, run_at, attempts, max_attempts, claim,
        created_at, updated_at, timeout_seconds, failures, labels, expires_at, limit_key, workflow, tenant,
        trace, journal)
    select g.id, 'WAITING', g.action, g.payload, g.priority,
        case when (g.attempts = 0 or g.claim is distinct from (g.failures -> -1 ->> 'claim')::bigint)
                  and p.unknown_since is null then g.run_at else now() end,
        0, g.max_attempts, g.claim,
        g.created_at, now(), g.timeout_seconds, g.failures, g.labels,
        case when g.expires_at > now() then g.expires_at end, g.limit_key, g.workflow, g.tenant, g.trace,
        {journal_left}
    from gone g left join penstock.postponed p on p.task_id = any(array[g.id])
    returning id
), {failed_forgotten}, tallied as (
    insert into penstock.tally (action, event, count)
    select action, state::text, -count(*) from gone group by action, state
)
select id from back;

-- name: read_workflow
-- $1 id or null, $2 key or null, $3 tenant of the key or null.
select id, key, name, state, steps, open, reason, compensated, created_at, updated_at, finished_at, tenant
from penstock.workflow where id = $1 or key = coalesce($3::text || E'\x1f', '') || $2;

-- name: list_workflows
-- $1 before this id or null, $2 how many, $3 state or null, $4 tenant or null for all. Newest first.
select id, key, name, state, steps, open, reason, compensated, created_at, updated_at, finished_at, tenant
from penstock.workflow where ($1::bigint is null or id < $1) and ($3::text is null or state = $3)
  and ($4::text is null or tenant = $4)
order by id desc limit $2;

-- name: count_steps
-- $1 workflow. By state as last seen.
select state::text as state, count(*) as count from penstock.workflow_step s where workflow_id = $1
group by s.state order by s.state;

-- name: page_steps
-- $1 workflow, $2 behind this number, $3 how many, $4 how many predecessors of each are named. With the state of its
-- task where that is not settled. Names are looked up one by one: as joins, with the statistics of a table that was
-- empty a moment ago, all steps of the workflow are read for each step of the page.
select s.number, s.name, s.kind, s.action, s.task_id,
       coalesce((select t.state from penstock.task t where t.id = s.task_id), s.state)::text as state, s.reason,
       (select p.name from penstock.workflow_step p where p.workflow_id = $1 and p.number = s.parent) as parent,
       s.children, s.open_children, cardinality(s.after) as after_count,
       array(select (select a.name from penstock.workflow_step a where a.workflow_id = $1 and a.number = n.number)
             from unnest(s.after[1:$4]) with ordinality n (number, place) order by n.place) as after
from penstock.workflow_step s
where s.workflow_id = $1 and s.number > $2 order by s.number limit $3;

-- name: delete_old_workflows
-- $1 seconds since they ended, $2 how many steps at most, all together, but for one workflow. Returns how many workflows.
with old as (
    select id, steps from penstock.workflow
    where finished_at < now() - make_interval(secs => $1) order by finished_at limit 1000 for update skip locked
), summed as (
    select id, sum(steps) over (order by id) as total, row_number() over (order by id) as place from old
), few as materialized (
    select id from summed where total <= $2 or place = 1
), steps as (
    delete from penstock.workflow_step where workflow_id = any(array(select id from few))
), edges as (
    delete from penstock.workflow_edge where workflow_id = any(array(select id from few))
), events as (
    delete from penstock.workflow_event where workflow_id = any(array(select id from few))
), gone as (
    delete from penstock.workflow where id = any(array(select id from few)) returning 1
)
select count(*) from gone;
