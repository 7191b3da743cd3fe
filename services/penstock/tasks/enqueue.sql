-- Statements that bring tasks in. All arrays run in parallel, one element a task.
-- $1 actions, $2 payloads (JSON text), $3 run_at or null, $4 delay in seconds or null, $5 priorities,
-- $6 max_attempts, $7 timeout in seconds or null; $8 unique keys or null, $9 ordering keys or null.

-- part: insert_plain_tasks
with inserted as (
    insert into penstock.task (id, state, action, payload, run_at, priority, max_attempts, timeout_seconds,
                               created_at, updated_at)
    select nextval('penstock.task_id_seq'), 'SCHEDULED', i.action, i.payload::json,
           coalesce(i.run_at, now() + make_interval(secs => coalesce(i.delay, 0))),
           i.priority, i.max_attempts, i.timeout, now(), now()
    from unnest($1::text[], $2::text[], $3::timestamptz[], $4::float8[], $5::int2[], $6::int2[], $7::float8[])
        with ordinality as i (action, payload, run_at, delay, priority, max_attempts, timeout, place)
    order by i.place
    returning id, action
), tallied as (
    insert into penstock.tally (action, event, count)
    select action, 'ENQUEUED', count(*) from inserted group by action
)

-- name: enqueue_plain_tasks
-- The common case: no keys in the batch. Ids grow in the order of the arrays, so the ids sorted are the
-- ids of the input in its order.
{insert_plain_tasks}
select id from inserted order by id;

-- name: enqueue_task_and_notify
-- As enqueue_plain_tasks, of one task. $8 a channel, named as in the schema penstock, and $9 what it hears at the commit.
{insert_plain_tasks}
select id, pg_notify('penstock_' || substr($8, 10), $9) from inserted;

-- name: enqueue_keyed_tasks
-- Any mixture of keys, labels and expiries; of a unique key that several name, the first decides.
-- $10 labels as JSON text or null, $11 expires_at or null, $12 expires in so many seconds or null, $13 limit keys or
-- null; $14 whether a unique key is free when the task that has it is settled, $15 or was taken so many seconds ago;
-- $16 tenants or null. Keys of a tenant are its own: they are kept behind its name.
-- The two upserts change nothing in a row that somebody has: they lock it and return it, which a plain DO NOTHING would
-- not for a row committed after this statement's snapshot. Keys are taken in sorted order, so two such batches cannot
-- deadlock. A task behind a live one of its ordering key starts as WAITING.
-- A key is free only on evidence that its task has settled: this snapshot sees the row of the key as it is now, and
-- does not see its task among the live. One transaction wrote both, so a snapshot that knows the row knows the task
-- too, and a task committed later comes with a row that it does not know; a retry of a settled task moves taken_at.
-- The history is not asked: a record may leave it before its key does. $15 is looked up in an object, made once: a
-- search of the input for each row would take the square of their number.
-- Returns (place from 1, id, state or null, fresh) per task; a duplicate has the first task's id and no state.
with input as materialized (
    select nextval('penstock.task_id_seq') as id, i.*,
           coalesce(i.tenant || E'\x1f', '') || i.own_unique_key as unique_key,
           coalesce(i.tenant || E'\x1f', '') || i.own_ordering_key as ordering_key
    from unnest($1::text[], $2::text[], $3::timestamptz[], $4::float8[], $5::int2[], $6::int2[], $7::float8[],
                $8::text[], $9::text[], $10::text[], $11::timestamptz[], $12::float8[], $13::text[], $14::bool[],
                $15::float8[], $16::text[])
        with ordinality as i (action, payload, run_at, delay, priority, max_attempts, timeout, own_unique_key,
                              own_ordering_key, labels, expires_at, expires_in, limit_key, unless_live, unless_since,
                              tenant, place)
    order by i.place
), keyed as (
    insert into penstock.unique_key as k (action, key, task_id, taken_at)
    select distinct on (action, unique_key) action, unique_key, id, now()
    from input where unique_key is not null
    order by action, unique_key, place
    on conflict (action, key) do update set (task_id, taken_at) = (
        select case when free then excluded.task_id else k.task_id end,
               case when free then excluded.taken_at else k.taken_at end
        from (select case
            when excluded.task_id in (select id from input where unless_live)
                then (select t.id from penstock.task t where t.id = k.task_id) is null
                    and (select (s.task_id, s.taken_at) from penstock.unique_key s
                         where s.action = k.action and s.key = k.key) = (k.task_id, k.taken_at)
            else coalesce(k.taken_at <= now() - make_interval(secs => (
                (select jsonb_object_agg(id, unless_since) from input where unless_since is not null)
                ->> excluded.task_id::text)::float8), false)
            end as free) told)
    returning k.action, k.key, k.task_id
), fresh as (
    select i.* from input i left join keyed k on k.action = i.action and k.key = i.unique_key
    where i.unique_key is null or k.task_id = i.id
), heads as (
    insert into penstock.ordering_head as h (key, task_id)
    select distinct on (ordering_key) ordering_key, id
    from fresh where ordering_key is not null
    order by ordering_key, place
    on conflict (key) do update set task_id = h.task_id
    returning h.key, h.task_id
), inserted as (
    insert into penstock.task (id, state, action, payload, run_at, priority, max_attempts, timeout_seconds,
                               unique_key, ordering_key, labels, expires_at, limit_key, tenant, created_at, updated_at)
    select f.id, case when h.task_id <> f.id then 'WAITING' else 'SCHEDULED' end::penstock.task_state,
           f.action, f.payload::json, coalesce(f.run_at, now() + make_interval(secs => coalesce(f.delay, 0))),
           f.priority, f.max_attempts, f.timeout, f.unique_key, f.ordering_key, f.labels::jsonb,
           coalesce(f.expires_at, now() + make_interval(secs => f.expires_in)), f.limit_key, f.tenant, now(), now()
    from fresh f left join heads h on h.key = f.ordering_key
    returning id, state, action
), tallied as (
    insert into penstock.tally (action, event, count)
    select action, 'ENQUEUED', count(*) from inserted group by action
)
select i.place, coalesce(k.task_id, i.id) as id, t.state::text as state, t.id is not null as fresh
from input i
left join keyed k on k.action = i.action and k.key = i.unique_key
left join inserted t on t.id = i.id
order by i.place;

-- name: replace_tasks
-- $1 ids (distinct), $2 payloads (JSON text), $3 run_at or null, $4 delay in seconds or null, $5 priorities or null,
-- $6 expires_at or null, $7 expires in so many seconds or null; what is null stays, but for an expiry that has passed.
-- Tasks that wait take the place of what was asked first. A statement of its own behind
-- enqueue_keyed_tasks, whose snapshot may be too old to see the task; the lock on its unique key is held from there.
-- A task that is claimed meanwhile is left alone. Returns (id, state).
update penstock.task t
set payload = i.payload::json, priority = coalesce(i.priority, t.priority), updated_at = now(), route = null, gate = null,
    run_at = coalesce(i.run_at, now() + make_interval(secs => i.delay), t.run_at),
    expires_at = coalesce(i.expires_at, now() + make_interval(secs => i.expires_in),
                          case when t.expires_at > now() then t.expires_at end)
from (select * from unnest($1::bigint[], $2::text[], $3::timestamptz[], $4::float8[], $5::int2[], $6::timestamptz[],
                           $7::float8[]) r (id, payload, run_at, delay, priority, expires_at, expires_in)) i
where t.id = i.id and t.id = any(array(
        select id from penstock.task
        where id = any($1::bigint[]) and state::text in ('WAITING', 'SCHEDULED', 'ERROR') and claimed_at is null
          and journal is null  -- finished steps belong to the payload that they ran with
        order by id for no key update))  -- in the order of cancel_tasks, or the two deadlock
returning t.id, t.state::text as state;

-- name: record_receipts
-- $1 message ids. Returns those seen for the first time; sorted, so that two submitters cannot deadlock.
insert into penstock.inbound_receipt (message_id)
select distinct m from unnest($1::text[]) m order by m
on conflict do nothing
returning message_id;

-- name: insert_rejected
-- $1 sources, $2 bodies (bytes), $3 reasons. Returns the ids, in the order of the arrays.
insert into penstock.rejected (source, body, reason)
select * from unnest($1::text[], $2::bytea[], $3::text[])
returning id;

-- name: find_routes
-- $1 actions, $2 labels of each as JSON text, or null. By which route a task of each goes, and to which queue, nulls for
-- none, in their order.
select r.name as route, r.queue
from unnest($1::text[], $2::text[]) with ordinality k (action, labels, place)
left join lateral (select r.name, r.queue from penstock.route r
                   where k.action like any(r.actions) and (r.labels = '{}' or k.labels::jsonb @> r.labels)
                   order by r.position, r.name limit 1) r on true
order by place;

-- name: find_queues
-- $1 ids of tasks that wait. To which queue each would go now, for those that go by a route.
select t.id, r.queue
from {asked} join penstock.task t on t.id = any(array[u.id])
join lateral (select r.queue from penstock.route r
              where t.action like any(r.actions) and (r.labels = '{}' or t.labels @> r.labels)
              order by r.position, r.name limit 1) r on true;
