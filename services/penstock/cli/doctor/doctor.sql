-- What `penstock doctor` looks at. Reads only.

-- name: read_server
-- The server and what of its settings matters; the clock is its own.
select current_setting('server_version_num')::int as version,
       current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int as connections,
       -- Of sessions of other roles only those that may read all statistics see the type.
       (select count(*) from pg_stat_activity
        where datid is not null and coalesce(backend_type, 'client backend') = 'client backend')::int as connected,
       date_part('epoch', clock_timestamp()) as clock,
       exists (select from pg_class where relnamespace = (select oid from pg_namespace where nspname = 'penstock')
               and relname = 'alembic_version') as has_schema,
       (select has_schema_privilege(oid, 'USAGE') from pg_namespace where nspname = 'penstock') as may_use_schema;

-- name: find_unsafe_settings
-- $1 seconds for a statement, $2 for which an idle connection must stay. What of the settings of the server, the database or
-- the role harms Penstock: findings, as doctor reports them. Of the timeouts, the first is of PostgreSQL 17 and later.
with timeout as materialized (
    select name, setting::float8 / 1000 as seconds, 'alter role ' || quote_ident(current_user) || ' set ' || name || ' = 0' as fix
    from pg_settings where name in ('transaction_timeout', 'idle_session_timeout')
)
select 'error', 'timeouts', name || ' ends transactions after ' || seconds || ' s, before a statement''s '
       || $1::float8 || ' s', fix
from timeout where name = 'transaction_timeout' and seconds > 0 and seconds <= $1
union all
select 'warning', 'timeouts', name || ' closes connections that wait for work after ' || seconds || ' s', fix
from timeout where name = 'idle_session_timeout' and seconds > 0 and seconds <= $2::float8
union all
select level, what, seen, fix from (values
    (pg_is_in_recovery(), 'error', 'database role', 'it is a standby, and takes no writes',
     'name the primary in PENSTOCK_DATABASE_URL, or all hosts: the one that takes writes is chosen'),
    (current_setting('default_transaction_read_only') = 'on' and not pg_is_in_recovery(), 'error', 'database role',
     'default_transaction_read_only is on: nothing can be written',
     'set it to off for this role or database; a provider sets it when the disk is full'),
    (current_setting('fsync') = 'off', 'warning', 'fsync', 'off: a crash of the machine may lose everything', 'set fsync = on'),
    (current_setting('synchronous_commit') = 'off', 'warning', 'synchronous_commit',
     'off: a crash may lose tasks whose acceptance was answered', 'set synchronous_commit = on for this role or database'),
    (current_setting('autovacuum') = 'off', 'warning', 'autovacuum',
     'off: dead rows of the live table slow every claim down', 'set autovacuum = on')
) checks (applies, level, what, seen, fix) where applies;

-- name: read_schema_revision
select version_num from penstock.alembic_version;

-- name: list_missing_privileges
-- Of this role, on tables, partitions, sequences and functions of the schema; the version table is the migrations' business.
select c.relname as name, p.privilege
from pg_class c
cross join lateral unnest(case when c.relkind = 'S' then array['SELECT', 'USAGE']
                               else array['SELECT', 'INSERT', 'UPDATE', 'DELETE'] end) p (privilege)
where c.relnamespace = (select oid from pg_namespace where nspname = 'penstock') and c.relkind in ('r', 'p', 'S')
  and c.relname <> 'alembic_version'
  and not case when c.relkind = 'S' then has_sequence_privilege(c.oid, p.privilege)
               else has_table_privilege(c.oid, p.privilege) end
union all
select proname, 'EXECUTE' from pg_proc
where pronamespace = (select oid from pg_namespace where nspname = 'penstock') and prosecdef
  and prorettype <> 'trigger'::regtype and not has_function_privilege(oid, 'EXECUTE')
order by 1, 2;

-- name: list_penstock_connections
-- By the name that each process gives its connections, which the machine and the process's number follow; is_own: some
-- of them are of this role.
select split_part(application_name, '@', 1) as name, count(*)::int as connections,
       bool_or(usename = current_user) as is_own
from pg_stat_activity
where datname = current_database() and application_name like 'penstock-%' group by 1;

-- name: read_oldest_transaction
-- Seconds for which the oldest transaction of this database has been open, and by whom, of those that this role may see.
select date_part('epoch', clock_timestamp() - xact_start) as seconds, pid, application_name as name, state
from pg_stat_activity
where datname = current_database() and xact_start is not null and pid <> pg_backend_pid()
  and backend_type = 'client backend'
order by xact_start limit 1;

-- name: list_published_without_identity
-- (publication, name): tables of the schema of which Postgres would refuse updates and deletes, for one of its tables is
-- in a publication that passes these on. A publication may name a partition by its root, so all of them are asked.
select p.pubname as publication, c.relname as name
from pg_class c cross join pg_publication p
where c.relnamespace = (select oid from pg_namespace where nspname = 'penstock') and c.relkind = 'r'
  and (p.pubupdate or p.pubdelete)
  and exists (select from pg_publication_tables t where t.pubname = p.pubname and t.schemaname = 'penstock'
              and (t.tablename = c.relname or c.relispartition))
  and (c.relreplident = 'n' or c.relreplident = 'd'
       and not exists (select from pg_index i where i.indrelid = c.oid and i.indisprimary))
order by 1, 2;

-- name: read_open_schema
-- The schema of penstock_enqueue, penstock_enqueue_many and penstock_settle where PUBLIC may create in it, as in the schema public of
-- PostgreSQL up to 14; no row where it may not.
select distinct n.nspname::text as name
from pg_proc p join pg_namespace n on n.oid = p.pronamespace
cross join lateral aclexplode(coalesce(n.nspacl, acldefault('n', n.nspowner))) a
where p.proname in ('penstock_enqueue', 'penstock_enqueue_many', 'penstock_settle') and a.grantee = 0 and a.privilege_type = 'CREATE';

-- name: read_settings_in_force
-- $1 names. (name, setting), in the units of each.
select name, setting from pg_settings where name = any($1::text[]);

-- name: read_role
select current_user::text;

-- name: read_backend
-- The server's process behind this connection.
select pg_backend_pid();
