-- Delayed records, stored apart from the tasks until they are due. Replacing and cancelling changes one narrow row, and
-- the order within a key is decided when records are due.

-- name: put_delayed_records
-- Arrays, one element a record, no (source, key, variant) twice: $1 sources, $2 keys, $3 due_at, $4 ordering keys,
-- $5 records, $6 last records or null, $7 variants, $8 partitions or null, $9 held; $10 whether a stored record is
-- replaced, with a new id. In the order of the arrays. Returns (place from 1, fresh) of the records written.
with input as materialized (
    select i.* from unnest($1::text[], $2::bytea[], $3::timestamptz[], $4::text[], $5::text[], $6::text[], $7::bytea[],
                           $8::int[], $9::bool[])
        with ordinality as i (source, key, due_at, ordering_key, record, last, variant, partition, held, place)
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

-- name: lock_delayed_record_keys
-- $1 sources, $2 keys. Locks keys until the transaction ends, between the check for a record and its insert.
select pg_advisory_xact_lock(hashtextextended(source || ':' || encode(key, 'hex'), hashtext('penstock records')))
from (select distinct source, key from unnest($1::text[], $2::bytea[]) u (source, key) order by source, key) taken;

-- name: find_delayed_records
-- $1 source, $2 keys. (key, variant) of their records.
select key, variant from penstock.armed where source = $1 and key = any($2::bytea[]);

-- name: cancel_delayed_records
-- $1 source, $2 keys. Every variant of them; returns the key of each deleted record.
delete from penstock.armed where source = $1 and key = any($2::bytea[]) returning key;

-- name: lock_publishing
-- One supervisor publishes at a time, to keep the order of due records. False while another does.
select pg_try_advisory_xact_lock(hashtext('penstock publishing'));

-- name: claim_due_records
-- $1 how many, $2 seconds, $3 bytes, over which the last one may be. Due records in the order of time and arrival. Where
-- the ordering key has a live task, records due for less than $2 are left, to share one task after that task has settled.
-- Rows locked by a replacement or a cancellation are skipped. By the index armed_due, whose order is the claim's, and the
-- sum's; the limit stands in a select of its own, which hides its value from the planner: with the statistics of a
-- recently empty table, it would sort every due record for each claim. The head is read by a scalar subquery, because an
-- EXISTS may be hashed, which reads all heads.
with due as materialized (
    select a.id, a.source, a.ordering_key, a.record, a.last,
           extract(epoch from now() - a.due_at)::float8 as late_seconds,
           octet_length(a.record) + coalesce(octet_length(a.last), 0) as bytes
    from penstock.armed a
    where not a.held and a.due_at <= now()
      and (a.due_at <= now() - make_interval(secs => $2)
           or (select h.task_id from penstock.ordering_head h where h.key = a.ordering_key) is null)
    order by a.due_at, a.id limit (select $1::bigint) for update of a skip locked
)
select id, source, ordering_key, record, last, late_seconds
from (select *, sum(bytes) over (rows unbounded preceding) - bytes as before from due) counted
where before < $3::bigint;

-- name: delete_delayed_records
-- $1 ids.
delete from penstock.armed where id = any($1::bigint[]);

-- name: stop_delayed_record
-- $1 id of a record that Postgres rejects as a task: it stays stored and is never claimed again.
update penstock.armed set held = true, partition = null where id = $1;

-- name: read_delayed_record_wait
-- Seconds until the next record is due, or null; by the end of armed_due.
select extract(epoch from min(due_at) - clock_timestamp())::float8 from penstock.armed where not held;

-- name: release_held_records
-- $1 source, $2 partition that has been read to its end, $3 limit. Returns the number of records released.
with freed as (
    update penstock.armed set held = false
    where ctid = any(array(select ctid from penstock.armed where held and source = $1 and partition = $2
                           order by source, partition limit $3 for update))
    returning 1
) select count(*) from freed;

-- name: count_delayed_records
-- Reads every record.
select source, count(*) as count from penstock.armed group by source;

-- name: open_positions
-- $1 group, $2 topics, $3 partitions, $4 offsets to begin with, where none is known, $5 ends. A partition that ends
-- before its position is read from there on as for the first time. Returns (topic, partition, next_offset, complete,
-- restarted).
with input as (
    select u.* from unnest($2::text[], $3::int[], $4::bigint[], $5::bigint[]) u (topic, partition, first, past)
), known as (
    select topic, partition, p.next_offset, p.complete, i.first, p.next_offset > i.past as is_beyond
    from penstock.kafka_position p join input i using (topic, partition)
    where p.group_id = $1 order by topic, partition for update of p
), restarted as (
    update penstock.kafka_position p set next_offset = k.first, complete = false, updated_at = now()
    from known k where k.is_beyond and p.group_id = $1 and p.topic = k.topic and p.partition = k.partition
    returning p.topic, p.partition, p.next_offset, p.complete
), begun as (
    insert into penstock.kafka_position (group_id, topic, partition, next_offset)
    select $1, topic, partition, first from input order by topic, partition
    on conflict do nothing returning topic, partition, next_offset, complete
)
select topic, partition, next_offset, complete, false as restarted from known where not is_beyond
union all select topic, partition, next_offset, complete, false from begun
union all select topic, partition, next_offset, complete, true from restarted;

-- name: move_positions
-- $1 group, $2 topics, $3 partitions, $4 where this process expects them, $5 next offsets. Locked until the records that
-- were read are stored. Returns (topic, partition) of those that are there; another process has moved the others.
with held as (
    select topic, partition, u.next_offset
    from penstock.kafka_position p
    join unnest($2::text[], $3::int[], $4::bigint[], $5::bigint[]) u (topic, partition, expected, next_offset)
        using (topic, partition)
    where p.group_id = $1 and p.next_offset = u.expected order by topic, partition for update of p
)
update penstock.kafka_position p set next_offset = h.next_offset, updated_at = now()
from held h where p.group_id = $1 and p.topic = h.topic and p.partition = h.partition
returning p.topic, p.partition;

-- name: complete_position
-- $1 group, $2 topic, $3 partition; held before.
update penstock.kafka_position set complete = true, updated_at = now()
where group_id = $1 and topic = $2 and partition = $3;
