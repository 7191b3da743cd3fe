-- Bulk operations: which records a filter means, and what is done to a batch of them.

-- name: find_live_matches
-- $1 behind this id, $2 up to that one, $3 how many to look at, $4 how many to pick, $5 how many bytes (the last one
-- picked may go beyond); $6 pattern of LIKE or null, $7 states, $8 labels as JSON text or null, $9 created no later
-- than, $10 created later than, or null, $11 tenant or null. Goes along the primary key, and no further than $3: a filter needs no index.
-- One row: ids and their places among those looked at, how many match, how many were looked at,
-- the first and the last of these.
with page as materialized (
    select id, action, state, labels, tenant, created_at,
           pg_column_size(payload) + coalesce(pg_column_size(failures), 0) as size
    from penstock.task where id > $1 and id <= $2 order by id limit $3
), seen as materialized (
    select *, row_number() over (order by id) as place from page
), matching as materialized (
    select id, place, sum(size) over (order by id) - size as bytes_before from seen
    where state::text = any($7::text[]) and ($6::text is null or action like $6)
      and ($8::text is null or labels @> $8::jsonb)
      and created_at <= $9::timestamptz and ($10::timestamptz is null or created_at > $10)
      and ($11::text is null or tenant = $11)
), picked as materialized (
    select id, place from matching where bytes_before < $5::bigint order by id limit $4
)
select array(select id from picked order by id) as ids, array(select place from picked order by id) as places,
       (select count(*) from matching) as matching, (select count(*) from seen) as seen,
       (select min(id) from seen) as first, (select max(id) from seen) as last;

-- name: find_settled_matches
-- As find_live_matches, among settled tasks: $1 to $11 likewise. Only the partitions of the states asked for are read,
-- each along its index on id.
with page as materialized (
    select id, action, state, labels, tenant, created_at,
           pg_column_size(payload) + coalesce(pg_column_size(failures), 0) as size
    from penstock.task_history
    where id > $1 and id <= $2 and state = any($7::text[]::penstock.task_state[]) order by id limit $3
), seen as materialized (
    select *, row_number() over (order by id) as place from page
), matching as materialized (
    select id, place, sum(size) over (order by id) - size as bytes_before from seen
    where ($6::text is null or action like $6) and ($8::text is null or labels @> $8::jsonb)
      and created_at <= $9::timestamptz and ($10::timestamptz is null or created_at > $10)
      and ($11::text is null or tenant = $11)
), picked as materialized (
    select id, place from matching where bytes_before < $5::bigint order by id limit $4
)
select array(select id from picked order by id) as ids, array(select place from picked order by id) as places,
       (select count(*) from matching) as matching, (select count(*) from seen) as seen,
       (select min(id) from seen) as first, (select max(id) from seen) as last;

-- part: counted
select count(*) filter (where fits) as matching, count(*) as seen, min(id) as first, max(id) as last,
       coalesce((array_agg(id) filter (where fits))[1:100], '{}') as ids

-- name: count_live_matches
-- $1 behind this id, $2 up to that one, $3 how many to look at; $4 pattern of LIKE or null, $5 states, $6 labels as JSON
-- text or null, $7 created no later than, $8 created later than, or null, $9 tenant or null. As find_live_matches, but in one pass, which
-- costs a third: how many match and the first ids of them, how many were looked at, the first and the last of these.
{counted}
from (
    select id, (state::text = any($5::text[]) and ($4::text is null or action like $4)
                and ($6::text is null or labels @> $6::jsonb)
                and created_at <= $7::timestamptz and ($8::timestamptz is null or created_at > $8)
                and ($9::text is null or tenant = $9)) as fits
    from penstock.task where id > $1 and id <= $2 order by id limit $3) seen;

-- name: count_settled_matches
-- As count_live_matches, among settled tasks: $1 to $9 likewise.
{counted}
from (
    select id, (($4::text is null or action like $4) and ($6::text is null or labels @> $6::jsonb)
                and created_at <= $7::timestamptz and ($8::timestamptz is null or created_at > $8)
                and ($9::text is null or tenant = $9)) as fits
    from penstock.task_history
    where id > $1 and id <= $2 and state = any($5::text[]::penstock.task_state[]) order by id limit $3) seen;

-- name: estimate_rows
-- $1 a table. How many records it and its partitions have, by their statistics; 0 where there are none yet.
select coalesce(sum(greatest(reltuples, pg_stat_get_live_tuples(oid), 0)), 0)::bigint from pg_class
where relkind = 'r' and (oid = ('penstock.' || $1::text)::regclass
                         or oid in (select relid from pg_partition_tree(('penstock.' || $1::text)::regclass)));

-- name: hold_live_tasks
-- $1 ids, $2 states. Those in such a state that no other transaction holds; locked until the end of the transaction.
select t.id from {asked} join penstock.task t on t.id = any(array[u.id]) where t.state::text = any($2::text[])
order by u.id for update of t skip locked;

-- name: hold_settled_tasks
-- As hold_live_tasks, among settled tasks: $1 and $2 likewise.
select id from penstock.task_history
where id = any($1::bigint[]) and state = any($2::text[]::penstock.task_state[])
order by id for update skip locked;

-- name: hold_unique_keys
-- $1 ids of settled tasks. In the order in which an enqueue takes them, so that the two cannot deadlock; looked up one
-- by one, for as a join a table of keys that seems empty would be read whole.
select held.task_id from (
    select id, action, unique_key from penstock.task_history
    where id = any($1::bigint[]) and unique_key is not null order by action, unique_key) settled
cross join lateral (
    select k.task_id from penstock.unique_key k
    where k.action = settled.action and k.key = settled.unique_key and k.task_id = settled.id for update) held;

-- name: spread_tasks
-- $1 ids, $2 how many seconds each comes later than $3, an instant, or null where run_at stays; $4 priority, or null
-- where it stays. Tasks that wait, in whichever state: it stays too.
with changed as (
    update penstock.task t
    set run_at = coalesce($3::timestamptz + make_interval(secs => s.later), t.run_at),
        priority = coalesce($4::int2, t.priority), updated_at = now(), route = null, gate = null
    from (select * from unnest($1::bigint[], $2::float8[]) s (id, later) order by id) s
    where t.id = any(array[s.id]) and t.state::text in ('WAITING', 'SCHEDULED', 'ERROR') and t.claimed_at is null
    returning t.id, $3::timestamptz is not null as moved
), {renoted}
select id from changed;

-- name: delete_settled_tasks
-- $1 ids. As delete_expired: their unique keys are free again and the counts fall.
with gone as (
    delete from penstock.task_history where id = any($1::bigint[]) returning id, action, state, unique_key
), keys as (
    delete from penstock.unique_key k using gone g
    where k.action = g.action and k.key = g.unique_key and k.task_id = g.id
), tallied as (
    insert into penstock.tally (action, event, count)
    select action, state::text, -count(*) from gone group by action, state
)
select id from gone;
