-- Objects of large payloads and results: which task each is of, whether it is still needed, and which are to be deleted.
-- An object is needed as long as the record of its task names it, wherever that stands; so whatever removes or empties
-- a record, by whichever statement, need not know of objects. No plain task has a row here.

-- name: reference_objects
-- $1 names, $2 the tasks that name them, in the transaction that stores those.
insert into penstock.payload_object (name, task_id) select * from unnest($1::text[], $2::bigint[])
on conflict do nothing;

-- name: find_owners
-- $1 names. The tasks that name these objects already.
select name, task_id from penstock.payload_object where name = any($1::text[]) and task_id <> 0;

-- name: delete_objects_later
-- $1 names. Objects that nobody needs, whoever knows of them.
insert into penstock.payload_object (name, task_id, doomed) select distinct n, 0, true from unnest($1::text[]) n
on conflict do nothing;

-- name: look_at_objects
-- $1 seconds since the last look, $2 how many, $3 now or null. Looks whether the records of tasks still name their
-- objects; those that do not are doomed. One snapshot, in which a task is in one of the two tables. Records are looked
-- up by scalar subqueries, for an EXISTS may be hashed, and that reads the whole history. Relies on
-- payload_object_looked_at. Returns whether each is doomed.
with chosen as materialized (
    select name, task_id from penstock.payload_object
    where not doomed and looked_at <= coalesce($3::timestamptz, now()) - make_interval(secs => $1)
    order by looked_at limit $2 for update skip locked
), looked as materialized (
    select c.name, c.task_id,
           (select t.id from penstock.task t
            where t.id = c.task_id and strpos(t.payload::text, c.name) > 0) is null
           and (select h.id from penstock.task_history h
                where h.id = c.task_id and strpos(h.payload::text || coalesce(h.result::text, ''), c.name) > 0
                limit 1) is null
           and (select j.task_id from penstock.journal_entry j
                where j.task_id = c.task_id and strpos(j.entry, c.name) > 0 limit 1) is null as doomed
    from chosen c
)
update penstock.payload_object o
set looked_at = coalesce($3::timestamptz, now()), doomed = l.doomed
from looked l where o.name = l.name and o.task_id = l.task_id
returning o.doomed;

-- name: find_objects_to_delete
-- $1 behind this name, $2 how many. By name, and whether another task still needs the object. Relies on
-- payload_object_doomed.
select d.name, (select n.name from penstock.payload_object n where n.name = d.name and not n.doomed limit 1) is not null
       as needed
from (select distinct name from penstock.payload_object where doomed and name > $1 order by name limit $2) d
order by d.name;

-- name: forget_objects
-- $1 names of objects that are deleted, or are another task's from now on.
delete from penstock.payload_object where name = any($1::text[]) and doomed;

-- name: delete_orphans_later
-- $1 names of old objects, as the bucket lists them. Those that no task has adopted are doomed. Returns them.
insert into penstock.payload_object (name, task_id, doomed)
select n, 0, true from unnest($1::text[]) n
where (select o.name from penstock.payload_object o where o.name = n limit 1) is null
on conflict do nothing
returning name;
