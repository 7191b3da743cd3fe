-- Reading what Postgres knows of messages in a dead-letter queue.

-- name: find_accepted
-- $1 message ids, $2 when they were sent, in epoch seconds, or null, in parallel, $3 for how many seconds receipts can be
-- counted on. Whether each was accepted, in their order; null: its receipt may be gone.
select case when exists (select from penstock.inbound_receipt r where r.message_id = i.id) then true
            when i.sent_at > extract(epoch from now()) - $3::float8 then false end as accepted
from unnest($1::text[], $2::float8[]) with ordinality i (id, sent_at, place) order by place;

-- name: find_tasks_of_entries
-- $1 task ids or null, $2 actions and $3 unique keys or null, in parallel. The task of each id, or the one that holds the
-- key, and its state, null for none, in their order.
select f.task_id, s.state
from unnest($1::bigint[], $2::text[], $3::text[]) with ordinality i (task_id, action, key, place)
left join penstock.unique_key k on k.action = i.action and k.key = i.key
cross join lateral (select coalesce(i.task_id, k.task_id) as task_id) f
left join lateral (
    select state::text from penstock.task where id = f.task_id
    union all
    select state::text from penstock.task_history where id = f.task_id
) s on true
order by place;
