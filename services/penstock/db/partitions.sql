-- Dividing penstock.task by hash. Statements that read the catalog, and those whose rows are the statements to run.
--
-- The partitions of a divided table are ranges of ids, named after their first one: task_from_0 and so on. Each is a table, or
-- divided by hash itself. task_divided is the divided table until it takes the place of the undivided one.

-- name: read_task_table
select c.relkind = 'p' as is_divided, pg_get_userbyid(c.relowner)::text as owner, pg_has_role(c.relowner, 'USAGE') as owns,
       current_user::text as role, current_setting('max_locks_per_transaction')::int as locks,
       ((select last_value from penstock.task_id_seq) / 1000000000 + 2) * 1000000000 as bound
from pg_class c where c.oid = 'penstock.task'::regclass;

-- name: list_ranges
-- (name, first id, in how many tables), oldest first.
select r.relname::text as name, substr(r.relname, 11)::bigint as first, case r.relkind when 'p' then (
           select count(*) from pg_inherits l where l.inhparent = r.oid) else 1 end::int as partitions
from pg_inherits i join pg_class r on r.oid = i.inhrelid where i.inhparent = 'penstock.task'::regclass order by 2;

-- name: list_dependents
-- What is bound to the table itself, and would stay with the old one.
select distinct pg_describe_object(d.classid, d.objid, 0) as what
from pg_class c join pg_depend d on d.refclassid = 'pg_class'::regclass and d.refobjid = c.oid
                                 or d.refclassid = 'pg_type'::regclass and d.refobjid = c.reltype
where c.oid = 'penstock.task'::regclass
  and (d.classid in ('pg_rewrite'::regclass, 'pg_policy'::regclass, 'pg_publication_rel'::regclass, 'pg_proc'::regclass)
       or d.classid = 'pg_trigger'::regclass and not (select tgisinternal from pg_trigger where oid = d.objid)
       or d.classid = 'pg_constraint'::regclass and (select contype from pg_constraint where oid = d.objid) = 'f');

-- name: drop_unfinished_division
-- Of a run that was ended before its last step.
select 'drop table penstock.task_divided' where to_regclass('penstock.task_divided') is not null
union all
select format('drop table penstock.%1$I', relname) from pg_class
where relnamespace = 'penstock'::regnamespace and relname ~ '^task_from_\d+$' and not relispartition
union all
select format('alter table %1$s drop constraint task_id_range', c.oid::regclass)
from pg_constraint n join pg_class c on c.oid = n.conrelid
where n.conname = 'task_id_range' and n.connamespace = 'penstock'::regnamespace
  and (c.oid = 'penstock.task'::regclass or pg_get_expr(c.relpartbound, c.oid) like '%TO (MAXVALUE)');

-- part: options
(select coalesce(' with (' || array_to_string(reloptions, ', ') || ')', '') from pg_class
 where oid = coalesce((select relid::oid from pg_partition_tree('penstock.task') where isleaf limit 1), 'penstock.task'::regclass))

-- name: create_range
-- $1 first id, $2 in how many tables. A range for ids from there on.
select format('create table penstock.task_from_%1$s (like penstock.task including all)', $1::bigint)
       || case when $2::int > 1 then ' partition by hash (id)' else {options} end
union all
select format('create table penstock.task_from_%1$s_%2$s partition of penstock.task_from_%1$s '
              'for values with (modulus %3$s, remainder %2$s)', $1, n, $2) || {options}
from generate_series(0, $2 - 1) n where $2 > 1;

-- name: create_divided_table
-- $1 first id of the range for new ids.
select 'create table penstock.task_divided (like penstock.task including all excluding indexes) partition by range (id)'
union all
select format('comment on table penstock.task_divided is %1$L', obj_description('penstock.task'::regclass))
union all
select coalesce(
    (select format('alter table penstock.task_divided add constraint %1$I %2$s', conname || '_new', pg_get_constraintdef(oid))
     from pg_constraint where conindid = i.indexrelid and conrelid = i.indrelid),
    regexp_replace(pg_get_indexdef(i.indexrelid), '^CREATE (UNIQUE )?INDEX \S+ ON \S+ ',
                   format('create \1index %1$I on penstock.task_divided ', c.relname || '_new')))
from pg_index i join pg_class c on c.oid = i.indexrelid where i.indrelid = 'penstock.task'::regclass
union all
select format('alter table penstock.task_divided attach partition penstock.task_from_%1$s for values from (%1$s) to (maxvalue)', $1::bigint);

-- name: bound_range
-- $1 the table of the newest ids, $2 its first id, $3 the first one behind it. Beside it, it can be attached without being read.
select format('alter table penstock.%1$I drop constraint if exists task_id_range, add constraint task_id_range '
              'check (id >= %2$s and id < %3$s) not valid', $1::text, $2::bigint, $3::bigint);

-- name: validate_range
-- $1 the table.
select format('alter table penstock.%1$I validate constraint task_id_range', $1::text);

-- name: replace_undivided_table
-- $1 first id of the range for new ids.
select format('alter index penstock.%1$I rename to %2$I', c.relname, c.relname || '_0')
from pg_index i join pg_class c on c.oid = i.indexrelid where i.indrelid = 'penstock.task'::regclass
union all
select 'alter table penstock.task rename to task_from_0'
union all
select format('alter index penstock.%1$I rename to %2$I', c.relname || '_new', c.relname)
from pg_index i join pg_class c on c.oid = i.indexrelid where i.indrelid = 'penstock.task'::regclass
union all
select 'alter table penstock.task_divided rename to task'
union all
select format('alter table penstock.task attach partition penstock.task_from_0 for values from (minvalue) to (%1$s)', $1::bigint);

-- name: replace_newest_range
-- $1 the range of the newest ids, $2 its first id, $3 the first one behind it, where the next range begins.
select unnest(array[
    format('alter table penstock.task detach partition penstock.%1$I', $1::text),
    format('alter table penstock.task attach partition penstock.%1$I for values from (%2$s) to (%3$s)', $1,
           coalesce(nullif($2::bigint, 0)::text, 'minvalue'), $3::bigint),
    format('alter table penstock.task attach partition penstock.task_from_%1$s for values from (%1$s) to (maxvalue)', $3)]);

-- name: has_tasks
select true from penstock.{partition} limit 1;

-- name: drop_older_range
-- $1 a range that is empty, and not the newest.
select format('drop table penstock.%1$I', $1::text);

-- name: widen_newest_range
-- $1 the only range. It takes over all ids: an old task may start again.
select unnest(array[
    format('alter table penstock.task detach partition penstock.%1$I', $1::text),
    format('alter table penstock.task attach partition penstock.%1$I for values from (minvalue) to (maxvalue)', $1),
    format('alter table penstock.%1$I rename to task_from_0', $1)]);

-- name: unite_table
-- The only range, a table, becomes the undivided one, with the names of the indexes.
select 'alter table penstock.task detach partition penstock.task_from_0'
union all
select format('comment on table penstock.task_from_0 is %1$L', obj_description('penstock.task'::regclass))
union all
select 'drop table penstock.task'
union all
select 'alter table penstock.task_from_0 rename to task'
union all
select format('alter index penstock.%1$I rename to %2$I', child.relname, parent.relname)
from pg_index i join pg_class parent on parent.oid = i.indexrelid join pg_inherits h on h.inhparent = parent.oid
join pg_class child on child.oid = h.inhrelid where i.indrelid = 'penstock.task'::regclass;

-- name: copy_grants
-- $1 of which table, $2 to which.
select format('grant %1$s on penstock.%2$I to %3$s%4$s', a.privilege_type || a.part, $2::text,
              case when a.grantee = 0 then 'public' else a.grantee::regrole::text end,
              case when a.is_grantable then ' with grant option' else '' end)
from pg_class c cross join lateral (
    select '' as part, e.* from aclexplode(c.relacl) e
    union all
    select format(' (%1$I)', t.attname), e.* from pg_attribute t cross join lateral aclexplode(t.attacl) e where t.attrelid = c.oid) a
where c.oid = ('penstock.' || $1::text)::regclass and a.grantee <> c.relowner;

-- name: lock_task_table_against_vacuum
-- Reads and writes go on, so it may wait until a vacuum has made way.
lock table penstock.task in share update exclusive mode;

-- name: lock_task_table
lock table penstock.task in access exclusive mode;

-- name: skip_ids
-- $1 first id of the newest range. Ids go on there, unless they come to it soon on their own.
select setval('penstock.task_id_seq', $1::bigint, false)
where (select last_value from penstock.task_id_seq) < $1 - 1000000;
