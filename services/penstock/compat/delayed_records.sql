-- Armed schedules: kept apart from the tasks until they are due, when each becomes one, or a record of one. So replacing
-- and calling off is a matter of one narrow row, and the order within a key is decided when they are due.

-- name: arm_schedules
-- Arrays, one element a schedule, no (source, key, variant) twice: $1 sources, $2 keys, $3 variants, $4 due_at,
-- $5 partitions or null, $6 held, $7 ordering keys, $8 records, $9 last records or null; $10 whether one that is armed
-- already is replaced: it arrives anew then. In the order of the arrays. Returns (place from 1, fresh) of those written.
with input as materialized (
    select i.* from unnest($1::text[], $2::bytea[], $3::bytea[], $4::timestamptz[], $5::int[], $6::bool[], $7::text[],
                           $8::text[], $9::text[])
        with ordinality as i (source, key, variant, due_at, partition, held, ordering_key, record, last, place)
), written as (
    insert into penstock.armed as a (source, key, variant, due_at, partition, held, ordering_key, record, last)
    select source, key, variant, due_at, partition, held, ordering_key, record, last from input order by place
    on conflict (source, key, variant) do update
    set id = excluded.id, due_at = excluded.due_at, partition = excluded.partition, held = excluded.held,
        ordering_key = excluded.ordering_key, record = excluded.record, last = excluded.last
    where $10::boolean
    returning a.source, a.key, a.variant, a.xmax = 0 as fresh
)
select i.place, w.fresh from written w
join input i on i.source = w.source and i.key = w.key and i.variant = w.variant;

-- name: lock_armed_keys
-- $1 sources, $2 keys. Whoever looks whether a key is armed before it arms it holds this until its transaction ends.
select pg_advisory_xact_lock(hashtextextended(source || ':' || encode(key, 'hex'), 4726091))
from (select distinct source, key from unnest($1::text[], $2::bytea[]) u (source, key) order by source, key) taken;

-- name: find_armed
-- $1 source, $2 keys. (key, variant) of what is armed of them.
select key, variant from penstock.armed where source = $1 and key = any($2::bytea[]);

-- name: disarm_schedules
-- $1 source, $2 keys. Every variant of them; returns the key of each that was armed.
delete from penstock.armed where source = $1 and key = any($2::bytea[]) returning key;

-- name: lock_firing
-- One fires at a time, or what is due in one order would become tasks in another. False where somebody else does.
select pg_try_advisory_xact_lock(4726092);

-- name: claim_armed
-- $1 how many, $2 seconds. What is due, in the order of time and arrival. Where the ordering key has a live task, what has
-- been due for less than that is left: it goes with others of its key in one task, once that task has settled. What
-- somebody is about to replace or to call off is left to them. By the index armed_due, whose order is the claim's; the limit
-- stands in a select of its own, which hides its value from the planner: with the statistics of a table that was empty a
-- moment ago, all that is due would be sorted for each claim. The head is looked up by a scalar subquery, for an EXISTS may
-- be hashed, and that reads all heads.
select a.id, a.source, a.ordering_key, a.record, a.last, extract(epoch from now() - a.due_at)::float8 as late_seconds
from penstock.armed a
where not a.held and a.due_at <= now()
  and (a.due_at <= now() - make_interval(secs => $2)
       or (select h.task_id from penstock.ordering_head h where h.key = a.ordering_key) is null)
order by a.due_at, a.id limit (select $1::bigint) for update of a skip locked;

-- name: delete_armed
-- $1 ids.
delete from penstock.armed where id = any($1::bigint[]);

-- name: stop_armed
-- $1 id of one that Postgres will not make a task of: it stays, and is not looked at again.
update penstock.armed set held = true, partition = null where id = $1;

-- name: read_armed_wait
-- Seconds until the next is due, null for none; by the end of armed_due.
select extract(epoch from min(due_at) - clock_timestamp())::float8 from penstock.armed where not held;

-- name: release_held
-- $1 source, $2 partition, $3 how many at the most. The partition has been read to its end. Returns how many.
with freed as (
    update penstock.armed set held = false
    where ctid = any(array(select ctid from penstock.armed where held and source = $1 and partition = $2
                           order by source, partition limit $3 for update))
    returning 1
) select count(*) from freed;

-- name: count_armed
-- Reads all of them.
select source, count(*) as count from penstock.armed group by source;

-- name: begin_positions
-- $1 group, $2 topics, $3 partitions, $4 offsets to begin with. Returns what is known, of these or from before.
with fresh as (
    insert into penstock.kafka_position (group_id, topic, partition, next_offset)
    select $1, u.* from unnest($2::text[], $3::int[], $4::bigint[]) u (topic, partition, next_offset)
    order by topic, partition
    on conflict do nothing
    returning topic, partition, next_offset, complete
)
select topic, partition, next_offset, complete from fresh
union all
select topic, partition, next_offset, complete from penstock.kafka_position
where group_id = $1 and (topic, partition) in (select * from unnest($2::text[], $3::int[]));

-- name: lock_positions
-- $1 group, $2 topics, $3 partitions. Whoever stores what was read holds them, and goes by what they say.
select topic, partition, next_offset, complete from penstock.kafka_position
where group_id = $1 and (topic, partition) in (select * from unnest($2::text[], $3::int[]))
order by topic, partition for update;

-- name: move_positions
-- $1 group, $2 topics, $3 partitions, $4 next offsets; held before.
update penstock.kafka_position p set next_offset = u.next_offset, updated_at = now()
from unnest($2::text[], $3::int[], $4::bigint[]) u (topic, partition, next_offset)
where p.group_id = $1 and p.topic = u.topic and p.partition = u.partition;

-- name: complete_position
-- $1 group, $2 topic, $3 partition; held before.
update penstock.kafka_position set complete = true, updated_at = now()
where group_id = $1 and topic = $2 and partition = $3;
