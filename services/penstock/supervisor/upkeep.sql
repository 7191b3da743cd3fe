-- The supervisor's statements. Each touches a bounded number of rows.

-- name: release_unsent
-- $1 seconds, $2 at most so many batches, $3 now or null. Claims whose sending was never confirmed, because their
-- scheduler died between the claim and the send: back to the state they came from, the attempt given back.
-- If the message did go out after all, its result is of an old claim and is ignored; a task with a heartbeat
-- was received, and is left to its worker; so is one that another transaction holds, such as its handler's.
with lost as (
    delete from penstock.dispatch where id in (
        select id from penstock.dispatch
        where claimed_at < coalesce($3::timestamptz, now()) - make_interval(secs => $1)
        order by id limit $2 for update skip locked)
    returning id, claimed_at
), changed as (
    update penstock.task t
    set state = case when t.attempts = 1 then 'SCHEDULED' else 'ERROR' end::penstock.task_state,
        attempts = t.attempts - 1, run_at = {due_again}, claimed_at = null, heartbeat_at = null,
        updated_at = now(), route = null, gate = null
    from (
        -- The claim and its row have one instant, by which the tasks stand together in the index task_acquired.
        select w.id, w.claim from lost join penstock.task w
            on w.state = 'ACQUIRED' and w.claimed_at = lost.claimed_at and w.claim = lost.id and w.heartbeat_at is null
        for no key update of w skip locked) r
    where {held} and t.heartbeat_at is null
    returning t.id, t.workflow
), {notified}
select id from changed;

-- name: find_oldest_claim
-- $1 seconds, $2 not before this instant, or null. The oldest claim that holds, of those older than $1, and that long ago
-- where there is none: from there find_stale passes none of the dead entries before it.
select coalesce(min(claimed_at), now() - make_interval(secs => $1)) from penstock.task
where state = 'ACQUIRED' and claimed_at < now() - make_interval(secs => $1)
  and claimed_at >= coalesce($2::timestamptz, '-infinity');

-- name: find_stale
-- $1 seconds, $2 how many, $3 now or null, $4 and $5 behind this claimed_at and id or null (keyset; the tasks of
-- one claim share their claimed_at). No heartbeat for that long. `claimed_at` bounds the scan of task_acquired:
-- a heartbeat is never older than its claim.
-- taken: a worker has reported it. suspect: it travelled alone. held_seconds: since its claim. silent_seconds: since its last heartbeat.
-- trace: as the claim returns it; see claim.sql.
select id, claim, action, attempts, max_attempts, claimed_at, heartbeat_at is not null as taken, suspect,
       route, extract(epoch from coalesce($3::timestamptz, now()) - claimed_at)::float8 as held_seconds,
       extract(epoch from coalesce($3::timestamptz, now()) - coalesce(heartbeat_at, claimed_at))::float8
           as silent_seconds, worker,
       case when trace is not null then concat_ws(E'\n', trace, failures -> -1 -> 'error' ->> 'traceparent')
            end as trace
from penstock.task
where state = 'ACQUIRED'
  and claimed_at < coalesce($3::timestamptz, now()) - make_interval(secs => $1)
  and coalesce(heartbeat_at, claimed_at) < coalesce($3::timestamptz, now()) - make_interval(secs => $1)
  and (claimed_at, id) > (coalesce($4::timestamptz, '-infinity'), coalesce($5::bigint, 0))
order by claimed_at, id limit $2;

-- name: find_expired
-- $1 how many, $2 now or null. Tasks that were not started in time, locked; relies on task_expiring. One that runs, or
-- has begun and waits for an event, is left to finish.
select id from penstock.task
where expires_at is not null and claimed_at is null and expires_at <= coalesce($2::timestamptz, now())
order by expires_at limit $1 for update skip locked;

-- name: release_orphaned_keys
-- $1 how many held ordering keys to look at, $2 behind this one. Those held by a task whose record or payload is gone, which
-- cannot be retried any more, or has no key: a step that came back with its workflow and was cancelled before it started. Held
-- no more and locked. Relies on ordering_head_held. One row: these keys, and the last key looked at,
-- null when there are none behind it.
with looked as materialized (
    select key, task_id from penstock.ordering_head where held and key > $2 order by key limit $1
), orphaned as materialized (
    select l.key from looked l
    where not exists (select 1 from penstock.task t where t.id = l.task_id)
      and (select r.id from penstock.task_history r where r.id = l.task_id and r.ordering_key is not null
           and r.payload_gone is null) is null
), freed as (
    update penstock.ordering_head set held = false
    where key in (select h.key from penstock.ordering_head h join looked l on l.key = h.key and l.task_id = h.task_id
                  where h.held and h.key = any(array(select key from orphaned))
                  order by h.key for update of h skip locked)
    returning key
)
select array(select key from freed) as keys, (select max(key) from looked having count(*) >= $1) as last;

-- name: detach_expired_partition
-- $1 partitioned tables of the history, $2 seconds for which each keeps a record. The first partition of a day that has none
-- to keep, by its name; a default partition is of no day. From here on no statement sees its records. This and other changes
-- of tables are functions with the rights of the schema's owner, which the role of the processes need not have.
with expired as materialized (
    select c.relname
    from unnest($1::text[], $2::float8[]) kept (parent, seconds)
    join pg_class p on p.relname = kept.parent
    join pg_namespace n on n.oid = p.relnamespace and n.nspname = 'penstock'
    join pg_inherits i on i.inhparent = p.oid
    join pg_class c on c.oid = i.inhrelid
    where (to_date(substring(c.relname from '_(\d{8})$'), 'YYYYMMDD') + 1)::timestamp at time zone 'UTC'
          < now() - make_interval(secs => kept.seconds)
    order by c.relname limit 1
)
select penstock.detach_partition(relname) from expired;

-- name: read_clock
select now();

-- name: try_upkeep_lock
-- One supervisor at a time; the lock ends with the transaction.
select pg_try_advisory_xact_lock(hashtext('penstock upkeep'));

-- name: limit_lock_wait
-- Dropping a table takes a lock that others would queue behind: better give up and try again.
select set_config('lock_timeout', '2s', true);

-- name: limit_lock_wait_to
-- $1 milliseconds, for the rest of the transaction. All others queue up behind a waiting
-- exclusive lock.
select set_config('lock_timeout', $1::int::text, true);

-- name: lift_statement_timeout
-- For the rest of the transaction: its work does not grow with the number of records.
select set_config('statement_timeout', '0', true);

-- name: list_missing_partitions
-- $1 days ahead of today. (parent, name, first, upto) of each that is to be made, but for those whose default partition is
-- being emptied: it would be read for each. The functions here are the migrations'.
select * from penstock.list_missing_partitions($1) m
where not exists (select from penstock.default_move d where d.parent = m.parent);

-- name: step_default_move
-- $1 parent, $2 blocks at once, $3 changes at once. Copies some records of the default partition to tables of their days, or
-- copies again what has changed since. What is next: none, begin, more, or ready (to end, but for so many changes).
select penstock.step_default_move($1, $2, $3);

-- name: begin_default_move
-- $1 parent. From here on, changes in its default partition are noted. Waits for those who write there.
select penstock.begin_default_move($1);

-- name: end_default_move
-- $1 parent, $2 how many changes may be left. The tables of the days become partitions, and an empty default partition replaces the
-- one that was copied, under the exclusive lock of both. Whether that was done.
select penstock.end_default_move($1, $2);

-- name: make_partition
-- $1 to $4 as list_missing_partitions returns them. Waits for readers of the default partition alone.
select penstock.make_partition($1, $2, $3, $4);

-- name: shorten_waits
-- For parts of a batch that has waited already, for a lock or for a statement: 20 ms for a lock, a tenth of its usual time
-- for a statement, which is $1 ms.
select set_config('lock_timeout', '20', true),
       set_config('statement_timeout', greatest($1::int / 10, least($1, 100))::text, true);

-- name: list_detached
-- Partitions of the history that are attached no more: (name, state).
select c.relname as name, regexp_replace(upper(c.relname), '^TASK_|_\d{8}$', '', 'g') as state
from pg_class c join pg_namespace n on n.oid = c.relnamespace
where n.nspname = 'penstock' and c.relkind = 'r' and c.relname ~ '^task_(success|critical_error|cancelled)_\d{8}$'
  and not exists (select 1 from pg_inherits i where i.inhrelid = c.oid)
order by c.relname;

-- name: begin_forgetting
-- {partition} is detached. Up to which block its unique keys were deleted, and how many blocks there are; locked. Nothing when
-- the table is gone.
insert into penstock.forgetting as f (partition, filenode)
select '{partition}', pg_relation_filenode(part) from to_regclass('penstock.{partition}') part where part is not null
on conflict (partition) do update
set filenode = excluded.filenode,
    next_block = case when f.filenode = excluded.filenode then f.next_block else 0 end,
    counts = case when f.filenode = excluded.filenode then f.counts else '{}' end
returning next_block,
          pg_relation_size(to_regclass('penstock.{partition}')) / current_setting('block_size')::bigint as blocks;

-- name: plan_forgetting
-- For the rest of the transaction: unique keys are looked up one by one; as a join of another kind all of them are read.
select set_config('enable_hashjoin', 'off', true), set_config('enable_mergejoin', 'off', true);

-- name: forget_blocks
-- $1 first block, $2 block behind the last; {partition} is detached, so its records have all expired and stay where they
-- are. Deletes the unique keys that they hold; deleting them again is harmless. By key, as an enqueue takes them. The records
-- are counted by action, in the row that begin_forgetting has locked.
with old as materialized (
    select id, action, unique_key from penstock.{partition}
    where ctid >= ('(' || $1::bigint || ',0)')::tid and ctid < ('(' || $2::bigint || ',0)')::tid
    order by action, unique_key
), keys as (
    delete from penstock.unique_key k using old o
    where o.unique_key is not null and k.action = o.action and k.key = o.unique_key and k.task_id = o.id
), counted as (
    select jsonb_object_agg(action, count) as counts from (
        select action, sum(count)::bigint as count from (
            select c.key as action, c.value::bigint as count
            from penstock.forgetting f cross join jsonb_each_text(f.counts) c where f.partition = '{partition}'
            union all
            select action, count(*) from old group by action) each group by action) summed
)
update penstock.forgetting set next_block = $2, counts = coalesce(counted.counts, '{}')
from counted where partition = '{partition}';

-- name: end_forgetting
-- $1 partition, $2 state. Its records leave the counts; returns how many there were.
with gone as (
    delete from penstock.forgetting where partition = $1 returning counts
), counted as (
    select c.key as action, c.value::bigint as count from gone cross join jsonb_each_text(gone.counts) c
), tallied as (
    insert into penstock.tally (action, event, count) select action, $2::text, -count from counted
)
select coalesce(sum(count), 0)::bigint from counted;

-- name: drop_partition
-- $1 partition, which is detached.
select penstock.drop_partition($1);

-- name: index_next_partition
-- $1 partitioned tables of the history, whose records leave one by one. A partition of a day, from today's on, that has no
-- btree on finished_at and is small enough to be given one. BRIN knows nothing of pages written since the last vacuum, and of
-- reused pages only the oldest record, so a look for what has expired would read the day.
with found as materialized (
    select c.relname
    from unnest($1::text[]) parent (name) join pg_inherits i on i.inhparent = ('penstock.' || parent.name)::regclass
    join pg_class c on c.oid = i.inhrelid
    where right(c.relname, 8) between to_char(now() at time zone 'utc', 'YYYYMMDD') and '99999999'
      and pg_relation_size(c.oid) < 8388608
      and not exists (
          select from pg_index x join pg_class ic on ic.oid = x.indexrelid join pg_am m on m.oid = ic.relam
          join pg_attribute a on a.attrelid = c.oid and a.attnum = x.indkey[0]
          where x.indrelid = c.oid and m.amname = 'btree' and a.attname = 'finished_at')
    order by c.relname limit 1
)
select penstock.index_partition(relname) from found;

-- name: delete_expired
-- $1 state, $2 seconds, $3 how many, $4 now or null; {partition} where to look. Records that have outlived their
-- retention, with their unique keys, in the order in which an enqueue takes them, and their part of the counts.
with old as materialized (
    select id, finished_at from penstock.{partition}
    where finished_at < coalesce($4::timestamptz, now()) - make_interval(secs => $2)
    order by finished_at limit $3
), gone as (
    delete from penstock.{partition} h
    where h.id in (select id from old)
      and h.finished_at < coalesce($4::timestamptz, now()) - make_interval(secs => $2)
    returning h.id, h.action, h.unique_key
), keys as (
    delete from penstock.unique_key k
    using (select * from gone where unique_key is not null order by action, unique_key) g
    where k.action = g.action and k.key = g.unique_key and k.task_id = g.id
), tallied as (
    insert into penstock.tally (action, event, count) select action, $1::text, -count(*) from gone group by action
)
select count(*) from gone;

-- name: delete_old_receipts
-- $1 seconds, $2 how many. Relies on inbound_receipt_received_at.
with gone as (
    delete from penstock.inbound_receipt where message_id in (
        select message_id from penstock.inbound_receipt
        where received_at < now() - make_interval(secs => $1) order by received_at limit $2 for update skip locked)
    returning 1
) select count(*) from gone;

-- name: delete_old_rejected
-- $1 seconds, $2 how many.
with gone as (
    delete from penstock.rejected where id in (
        select id from penstock.rejected
        where at < now() - make_interval(secs => $1) order by id limit $2 for update skip locked)
    returning 1
) select count(*) from gone;

-- name: compact_tally
-- $1 seconds: rows older than this are folded; it must exceed the window of read_rates. $2 seconds: as long as this
-- there is one row a minute, action, event and sign, by which charts are drawn; of all before, one per action and event,
-- which stands at the epoch. $3 how many rows at once, oldest first; returns how many there were.
-- $4 how many actions keep their names in a minute, and in the sums: those with most settled tasks. $5 the name that the
-- rows of all others go by. What was counted under it may be taken back under the action's own name, so sums below zero
-- are taken from it too, where there is one.
-- A row that stands on a whole minute was folded before, so a minute is folded once, when it is over. No other
-- transaction changes rows of the tally, so their ctid stays.
with batch as materialized (
    select ctid, at from penstock.tally
    where at > 'epoch'
      and at < case when $2 > 0 then date_trunc('minute', now() - make_interval(secs => $1))
                    else now() - make_interval(secs => $1) end
      and (at <> date_trunc('minute', at) or at < now() - make_interval(secs => $2))
    order by at limit $3
), sums as (
    delete from penstock.tally
    where at = 'epoch' and exists (select from batch where at < now() - make_interval(secs => $2))
    returning at, action, event, count, seconds
), old as (
    delete from penstock.tally where ctid = any(array(select ctid from batch))
    returning at, action, event, count, seconds
), placed as (
    select action, event, count, seconds,
           case when at >= now() - make_interval(secs => $2) then date_trunc('minute', at) else 'epoch' end as at
    from (select * from sums union all select * from old) either
), ranked as (
    select at, action, row_number() over (
        partition by at
        order by sum(count) filter (where event in ('SUCCESS', 'CRITICAL_ERROR', 'CANCELLED')
                                    and (at = 'epoch' or count > 0)) desc nulls last, sum(abs(count)) desc, action) as place
    from placed where action <> $5::text group by at, action
), summed as (
    select p.at, case when r.place <= $4::int then p.action else $5 end as action, p.event, sum(p.count) as count,
           sum(p.seconds) as seconds
    from placed p left join ranked r on r.at = p.at and r.action = p.action
    group by 1, 2, 3, case when p.at > 'epoch' then p.count > 0 end
), folded as (
    insert into penstock.tally (at, action, event, count, seconds)
    select at, case when at = 'epoch' and count < 0 and exists (
                        select from summed o where o.at = 'epoch' and o.action = $5 and o.event = s.event and o.count > 0)
                    then $5 else action end, event, sum(count), sum(seconds)
    from summed s
    group by 1, 2, 3, case when at > 'epoch' then count > 0 end
    having sum(count) <> 0
)
select count(*) from batch;

-- name: delete_old_audit
-- $1 seconds, $2 how many.
with gone as (
    delete from penstock.audit where id in (
        select id from penstock.audit
        where at < now() - make_interval(secs => $1) order by at limit $2 for update skip locked)
    returning 1
) select count(*) from gone;
