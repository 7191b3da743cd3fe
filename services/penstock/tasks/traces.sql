-- Tasks that belong to a trace. None of this runs while tracing is off. What enqueues is a function of the database too.

-- name: enqueue_traced_tasks
-- $1 actions, $2 payloads (JSON text), $3 run_at or null, $4 delay in seconds or null, $5 priorities, $6 max_attempts,
-- $7 timeout in seconds or null, $8 traces or null. As enqueue_plain_tasks in all else.
with inserted as (
    insert into penstock.task (id, state, action, payload, run_at, priority, max_attempts, timeout_seconds, trace,
                               created_at, updated_at)
    select nextval('penstock.task_id_seq'), 'SCHEDULED', i.action, i.payload::json,
           coalesce(i.run_at, now() + make_interval(secs => coalesce(i.delay, 0))),
           i.priority, i.max_attempts, i.timeout, i.trace, now(), now()
    from unnest($1::text[], $2::text[], $3::timestamptz[], $4::float8[], $5::int2[], $6::int2[], $7::float8[],
                $8::text[])
        with ordinality as i (action, payload, run_at, delay, priority, max_attempts, timeout, trace, place)
    order by i.place
    returning id, action
), tallied as (
    insert into penstock.tally (action, event, count)
    select action, 'ENQUEUED', count(*) from inserted group by action
)
select id from inserted order by id;

-- name: note_traces
-- $1 ids (distinct) of tasks that this transaction has added, $2 traces. Behind enqueue_keyed_tasks. Touches no indexed
-- column, so the update is HOT.
update penstock.task t set trace = i.trace
from (select * from unnest($1::bigint[], $2::text[]) i (id, trace)) i
where t.id = i.id and t.id = any($1::bigint[]);
