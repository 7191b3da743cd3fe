-- What `penstock doctor` looks at. Reads only. The statements find_... return findings, as doctor reports them.

-- name: read_server
-- The clock is the server's own.
select date_part('epoch', clock_timestamp()) as clock,
       exists (select from pg_class where relnamespace = (select oid from pg_namespace where nspname = 'penstock')
               and relname = 'alembic_version') as has_schema,
       (select has_schema_privilege(oid, 'USAGE') from pg_namespace where nspname = 'penstock') as may_use_schema;

-- name: find_server_problems
-- $1 seconds for a statement, $2 for which an idle connection must stay, $3 connections that one of each process may take, $4
-- whether through a pooler, which has its own limits, $5 and $6 the oldest and the newest major version. The server, and what of
-- its settings, of the database's or of the role's harms Penstock. Of the timeouts, the first is of PostgreSQL 17 and later.
with timeout as materialized (
    select name, setting::float8 / 1000 as seconds, 'alter role ' || quote_ident(current_user) || ' set ' || name || ' = 0' as fix
    from pg_settings where name in ('transaction_timeout', 'idle_session_timeout')
), server as (
    select current_setting('server_version_num')::int / 10000 as version,
           current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int as room,
           -- Of sessions of other roles only those that may read all statistics see the type.
           (select count(*) from pg_stat_activity
            where datid is not null and coalesce(backend_type, 'client backend') = 'client backend') as connected
)
select level, 'database' as what, 'PostgreSQL ' || version || seen as seen, fix from server, lateral (values
    (version < $5::int, 'error', '', 'upgrade: ' || $5::int || ' to ' || $6::int || ' are supported'),
    (version > $6::int, 'note', '', 'tested up to ' || $6::int || '; look for a newer Penstock'),
    (version between $5::int and $6::int, 'ok', ' answers', '')
) checks (applies, level, seen, fix) where applies
union all
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
     'off: dead rows of the live table slow every claim down', 'set autovacuum = on'),
    ($1 < 3, 'warning', 'timeouts',
     'statements are cancelled after ' || $1 || ' s: one of a thousand tasks takes longer on a busy server',
     'set PENSTOCK_STATEMENT_TIMEOUT_SECONDS to 30, the default')
) checks (applies, level, what, seen, fix) where applies
union all
(select level, 'connections', connected || ' of ' || room || ' connections in use; one of each process may take ' || $3::int, fix
 from server, lateral (values
    (1, $3 > room and not $4::bool, 'error', 'raise max_connections, or lower PENSTOCK_DATABASE_POOL_SIZE'),
    (2, connected > room * 0.8, 'warning', 'raise max_connections before a burst finds none'),
    (3, true, 'ok', '')
 ) checks (place, applies, level, fix) where applies order by place limit 1);

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

-- name: find_schema_problems
-- $1 seconds for which a transaction may be open, $2 the processes, $3 whether through a pooler, whose connections have the names
-- of the clients that used them last.
with published as (
    -- Tables of which Postgres would refuse updates and deletes, for one of the schema's is in a publication that passes these on.
    -- A publication may name a partition by its root, so all of them are asked.
    select p.pubname::text as publication, c.relname::text as name
    from pg_class c cross join pg_publication p
    where c.relnamespace = (select oid from pg_namespace where nspname = 'penstock') and c.relkind = 'r'
      and (p.pubupdate or p.pubdelete)
      and exists (select from pg_publication_tables t where t.pubname = p.pubname and t.schemaname = 'penstock'
                  and (t.tablename = c.relname or c.relispartition))
      and (c.relreplident = 'n' or c.relreplident = 'd'
           and not exists (select from pg_index i where i.indrelid = c.oid and i.indisprimary))
), open_schema as (
    -- Of penstock_enqueue, penstock_enqueue_many and penstock_settle, where PUBLIC may create in it, as in the schema public of
    -- PostgreSQL up to 14.
    select distinct n.nspname::text as name
    from pg_proc p join pg_namespace n on n.oid = p.pronamespace
    cross join lateral aclexplode(coalesce(n.nspacl, acldefault('n', n.nspowner))) a
    where p.proname in ('penstock_enqueue', 'penstock_enqueue_many', 'penstock_settle') and a.grantee = 0
      and a.privilege_type = 'CREATE'
), oldest as (
    -- Of the transactions of this database that this role may see.
    select date_part('epoch', clock_timestamp() - xact_start) as seconds, pid, nullif(application_name, '') as name, state
    from pg_stat_activity
    where datname = current_database() and xact_start is not null and pid <> pg_backend_pid()
      and backend_type = 'client backend'
    order by xact_start limit 1
), missing as (
    select array_agg(process order by place) as processes from unnest($2::text[]) with ordinality each (process, place)
    where not exists (select from pg_stat_activity where datname = current_database()
                      and split_part(application_name, '@', 1) = 'penstock-' || process)
)
select 'error' as level, 'publications' as what,
       (array_agg(publication order by publication, name))[1] || ' publishes '
       || array_to_string((array_agg(name order by publication, name))[:3], ', ')
       || case when count(*) > 3 then ' and ' || count(*) - 3 || ' more' else '' end
       || ', which have no replica identity: Postgres refuses their updates and deletes' as seen,
       'alter table penstock.' || (array_agg(name order by publication, name))[1] || ' replica identity full' as fix
from published having count(*) > 0
union all
select 'warning', 'enqueue functions', 'every role may create in the schema ' || name
       || ': functions that calls find before the one of enqueueing', 'revoke create on schema ' || name || ' from public'
from open_schema
union all
select 'warning', 'transactions', 'process ' || pid || ' (' || coalesce(name, 'without a name') || ', '
       || coalesce(state, 'in a state unknown') || ') has had one open for ' || round(seconds / 60)
       || ' minutes: until it ends, no dead row can be removed',
       'end it, or select pg_terminate_backend(' || pid || '); set idle_in_transaction_session_timeout'
from oldest where seconds >= $1::float8
union all
select case when $3::bool then 'note' else 'warning' end, 'processes',
       'none is connected: ' || array_to_string(processes, ', '),
       'start at least one of each: `penstock ' || processes[1] || '` and so on'
from missing where processes is not null;

-- name: find_ignored_settings
-- $1 names and $2 the values that connections ask for, $3 what to do where others are in force.
select 'error' as level, 'connection settings' as what, 'a pooler does not pass on what connections ask for: '
       || string_agg(name || ' is ' || setting || ', not ' || asked, '; ') as seen, $3::text as fix
from unnest($1::text[], $2::text[]) wanted (name, asked) join pg_settings using (name) where setting <> asked
having count(*) > 0;

-- name: read_role
select current_user::text;

-- name: read_backend
-- The server's process behind this connection.
select pg_backend_pid();
