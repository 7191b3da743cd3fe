-- What workers announce: which actions they run.

-- name: note_announced
-- $1 actions, $2 workers, $3 versions or null, $4 descriptions or null, $5 and $6 schemas as JSON text or null, $7 seconds for
-- which an announcement holds. Sorted, so that two resulters cannot deadlock.
insert into penstock.announced as a (action, worker, version, description, params, result)
select distinct on (action, worker) action, worker, version, description, params::json, result::json
from unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[], $6::text[])
    g (action, worker, version, description, params, result)
order by action, worker
on conflict (action, worker) do update
set version = excluded.version, description = excluded.description, params = excluded.params, result = excluded.result,
    since = case when a.seen_at < now() - make_interval(secs => $7) then now() else a.since end, seen_at = now();

-- name: list_announced
-- $1 seconds for which an announcement holds, $2 how many actions, $3 how many tasks to look at for each. Actions that workers announce or
-- announced, and those whose tasks wait for a worker; what is said of one by the worker seen last.
with actions as (
    select action from penstock.announced group by action
    union
    select action from penstock.postponed where unknown_since is not null group by action
    order by action limit $2
)
select n.action, l.workers, l.versions, l.seen_at, l.description, l.params, l.result,
       (select count(*) from (
            select task_id, attempts from penstock.postponed
            where action = n.action and unknown_since is not null order by returned_at desc limit $3) p
        join penstock.task t on t.id = p.task_id and t.attempts = p.attempts and t.state in ('SCHEDULED', 'ERROR')
       ) as waiting
from actions n cross join lateral (
    select count(*) filter (where a.seen_at > now() - make_interval(secs => $1)) as workers,
           coalesce(array_agg(distinct a.version) filter (
               where a.version is not null and a.seen_at > now() - make_interval(secs => $1)), '{}') as versions,
           max(a.seen_at) as seen_at, (array_agg(a.description order by a.seen_at desc))[1] as description,
           (array_agg(a.params::text order by a.seen_at desc))[1] as params,
           (array_agg(a.result::text order by a.seen_at desc))[1] as result
    from penstock.announced a where a.action = n.action) l
order by n.action;

-- name: read_announced_params
-- $1 actions, $2 seconds for which an announcement holds. The schemas of their parameters, each once, the newest first.
select action, params from (
    select action, params::text as params, max(seen_at) as seen_at from penstock.announced
    where action = any($1::text[]) and seen_at > now() - make_interval(secs => $2) group by action, params::text) a
order by seen_at desc;

-- name: release_announced
-- $1 how many, $2 seconds for which an announcement holds. Tasks that workers without their action gave back before another one
-- announced it are due now; those that ran or were changed meanwhile, as by a user who gave them a time, are no longer
-- noted. What another transaction holds keeps its time.
with found as materialized (
    select p.task_id, p.attempts, p.returned_at from (
        select action, max(since) as since from penstock.announced
        where seen_at > now() - make_interval(secs => $2) group by action) a
    join penstock.postponed p on p.action = a.action and p.returned_at < a.since
    where p.unknown_since is not null limit $1 for update of p skip locked
), noted as (
    update penstock.postponed set unknown_since = null where task_id = any(array(select task_id from found))
)
update penstock.task t set run_at = now(), updated_at = now(), route = null, gate = null
from (select w.id from found f join penstock.task w on w.id = any(array[f.task_id])
      where w.attempts = any(array[f.attempts]) and w.updated_at = any(array[f.returned_at])
        and w.state::text in ('SCHEDULED', 'ERROR') and w.run_at > now()
      for update of w skip locked) free
where t.id = any(array[free.id])
  and t.state::text in ('SCHEDULED', 'ERROR')
returning t.id;

-- name: forget_announced
-- $1 seconds without another announcement.
delete from penstock.announced where seen_at < now() - make_interval(secs => $1);
