-- What `penstock migrate --grant` asks about roles.

-- name: lock_migrations
-- The locks of a migration and of the supervisor's upkeep, so that neither creates a table without its grants.
select pg_advisory_xact_lock(hashtext(name)) from unnest(array['penstock migrate', 'penstock upkeep']) name;

-- name: read_grantee
-- $1 role. Its quoted name, and whether it has the rights of the schema's owner, and who that is; no row for an unknown role.
select quote_ident(r.rolname) as name, pg_has_role(r.oid, n.nspowner, 'MEMBER') as owns,
       n.nspowner::regrole::text as owner
from pg_roles r cross join pg_namespace n where r.rolname = $1 and n.nspname = 'penstock';

-- name: list_table_creators
-- The roles that will create tables: owners of the functions that create partitions, and this role by migrations.
select distinct creator::regrole::text from (
    select proowner from pg_proc where pronamespace = 'penstock'::regnamespace and prosecdef
    union select oid from pg_roles where rolname = current_user) c (creator)
order by 1;
