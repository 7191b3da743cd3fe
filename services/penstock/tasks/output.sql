-- Output of tasks: what their handlers log and emit. Tasks without any have no row, so that they cost nothing.

-- name: record_output
-- $1 ids, $2 claims, $3 numbers, $4 entries as JSON text, $5 how many entries of the attempt were dropped, $6 workers or
-- null, $7 how many bytes an attempt may have. Parts that are there already or of claims that are not made yet are left out;
-- those beyond the limit are stored without entries, each counted as one that was dropped: workers count by the same limit,
-- and drop before. A task that is settled has its output too. Returns how many parts were stored.
with given as materialized (
    select g.*, sum(octet_length(entries)) over (partition by task_id, claim order by number) as upto
    from unnest($1::bigint[], $2::bigint[], $3::int[], $4::text[], $5::int[], $6::text[])
         g (task_id, claim, number, entries, dropped, worker)
), sizes as materialized (
    select task_id, claim, sum(octet_length(entries)) as bytes from penstock.task_output
    where task_id = any($1::bigint[]) group by task_id, claim
), bounded as (
    select g.*, coalesce(s.bytes, 0) + g.upto > $7::bigint as is_over
    from given g left join sizes s on s.task_id = g.task_id and s.claim = g.claim
), stored as (
    insert into penstock.task_output (task_id, claim, number, entries, dropped, worker)
    select g.task_id, g.claim, g.number, case when is_over then '[]' else g.entries end, g.dropped + is_over::int, g.worker
    from bounded g
    where g.claim <= coalesce((select t.claim from penstock.task t where t.id = g.task_id), g.claim)
    order by g.task_id, g.claim, g.number
    on conflict do nothing
    returning 1
)
select count(*) as stored,
       array(select task_id from sizes group by task_id having sum(bytes) > $7::bigint * 10) as full_tasks from stored;

-- name: trim_output
-- $1 ids, $2 how many bytes a task may have. The output of its oldest attempts beyond that is deleted.
delete from penstock.task_output o using (
    select task_id, claim, sum(sum(octet_length(entries))) over (partition by task_id order by claim desc) as upto
    from penstock.task_output where task_id = any($1::bigint[]) group by task_id, claim) s
where o.task_id = s.task_id and o.claim = s.claim and s.upto > $2::bigint;

-- name: read_output
-- $1 id, $2 claims, $3 first numbers, $4 last numbers of the parts to leave out, $5 how many bytes; the parts behind them
-- are left to the next call. Oldest first.
select claim, number, entries, dropped from (
    select claim, number, entries, dropped,
           sum(octet_length(entries)) over (order by claim, number) - octet_length(entries) as before
    from penstock.task_output o
    where task_id = $1 and not exists (
        select from unnest($2::bigint[], $3::int[], $4::int[]) s (claim, first, last)
        where s.claim = o.claim and o.number between s.first and s.last)) unseen
where before < $5::bigint order by claim, number;

-- name: read_newest_output
-- $1 id, $2 how many bytes; what is older is left out. Oldest first.
select claim, number, entries, dropped from (
    select claim, number, entries, dropped,
           sum(octet_length(entries)) over (order by claim desc, number desc) - octet_length(entries) as behind
    from penstock.task_output where task_id = $1) newest
where behind < $2::bigint order by claim, number;

-- name: look_at_tasks
-- $1 ids. Of tasks whose events are followed: what changes when there is something new to read, and for how long each is
-- settled.
select t.id, row (t.state, t.claim, t.attempts, t.run_at, t.progress::text)::text as mark, null::float8 as settled_seconds,
       (select count(*) from penstock.task_output o where o.task_id = t.id) as parts,
       (select count(*) from penstock.journal_entry j where j.task_id = t.id) as steps
from {asked} join penstock.task t on t.id = any(array[u.id])
union all
select h.id, h.state::text, extract(epoch from now() - h.finished_at)::float8,
       (select count(*) from penstock.task_output o where o.task_id = h.id), 0
from penstock.task_history h where h.id = any($1::bigint[]);

-- name: delete_gone_output
-- $1 behind this task, $2 how many tasks to look at. As delete_gone_journals, of output.
with looked as materialized (
    select distinct task_id from penstock.task_output where task_id > $1 order by task_id limit $2
), gone as (
    delete from penstock.task_output where task_id = any(array(
        select l.task_id from looked l
        where (select t.id from penstock.task t where t.id = l.task_id) is null
          and (select h.id from penstock.task_history h where h.id = l.task_id limit 1) is null))
    returning 1
)
select max(task_id) as last, count(*) as looked, (select count(*) from gone) as deleted from looked;
