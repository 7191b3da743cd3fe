-- Results: what is waited for, and what is emptied before its record goes.

-- name: read_settled
-- $1 ids (distinct), $2 how many bytes of results and errors (the last one may go beyond). Of those that are not live: id, state
-- (null where there is no such task), and its outcome. One snapshot, so a task that is just settling, or just being
-- retried, is in one of the two tables. The history has an index in each partition, so it is asked for the settled alone;
-- those whose results and errors are too many are left to the next look. Lateral: each record is found by its own look.
with live as materialized (
    select u.id from {asked} where (select t.id from penstock.task t where t.id = u.id) is not null
), gone as materialized (
    select i as id from unnest($1::bigint[]) i where i not in (select id from live) order by i
), found as materialized (
    select g.id, h.*, sum(s.size) over (order by g.id) - s.size as bytes_before
    from gone g left join lateral (
        select state::text as state, result::text as result, reason, result_gone is true as result_gone,
               case when state <> 'SUCCESS' then (failures -> -1 -> 'error')::text end as error
        from penstock.task_history where id = g.id limit 1) h on true
    cross join lateral (
        select coalesce(octet_length(h.result), 0) + coalesce(octet_length(h.error), 0) as size) s
)
select id, state, result, error, reason, result_gone from found where bytes_before < $2::bigint;

-- name: read_emptied
-- $1 what, $2 where to begin. How far it was emptied, and how far the next look goes; locked, so that one supervisor
-- is at it.
insert into penstock.emptying as e (what, upto, step_seconds) values ($1, $2, 3600)
on conflict (what) do update set upto = e.upto
returning upto, step_seconds;

-- name: note_emptied
-- $1 what, $2 how far, $3 how far the next look goes in seconds. The row is locked by read_emptied.
update penstock.emptying set upto = $2, step_seconds = $3 where what = $1;

-- name: limit_lock_wait_briefly
-- For the rest of the transaction. Shorter than deadlock_timeout, after which Postgres takes a lock from autovacuum.
select set_config('lock_timeout', '200ms', true);

-- name: summarize_settled
-- $1 days, as partitions are called. Page ranges that the BRIN index on finished_at knows nothing of yet are read by
-- every look; here each is read once.
select penstock.summarize_history($1);

-- name: count_settled_between
-- $1 after, $2 up to, $3 where to stop counting. Partitions of other days are passed by; within one, the BRIN index on
-- finished_at.
select count(*) from (
    select 1 from penstock.task_history where finished_at > $1 and finished_at <= $2 limit $3) counted;

-- name: empty_payloads
-- $1 after, $2 up to. Payloads of tasks that settled then; an empty one stays what it was.
update penstock.task_history set payload = '{}', payload_gone = true
where finished_at > $1 and finished_at <= $2 and payload_gone is null and payload::text not in ('{}', '[]')
returning 1;

-- name: empty_results
-- $1 after, $2 up to. Results of tasks that settled then; null stays what it was.
update penstock.task_history set result = 'null', result_gone = true
where finished_at > $1 and finished_at <= $2 and state = 'SUCCESS' and result_gone is null and result::text <> 'null'
returning 1;
