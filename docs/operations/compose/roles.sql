-- What the compose file sets up in Postgres before the schema, by psql; doing so again changes nothing but the passwords.

-- The processes' role; `penstock migrate --grant penstock_app` gives it its rights, and it may not change the schema.
\getenv password APP_PASSWORD
select 'create role penstock_app login'
where not exists (select from pg_roles where rolname = 'penstock_app') \gexec
alter role penstock_app password :'password';

-- The example's handlers work on a database of their own, as a role that can use nothing else.
\getenv password EXPORT_PASSWORD
select 'create role export login'
where not exists (select from pg_roles where rolname = 'export') \gexec
alter role export password :'password';
select 'create database export owner export'
where not exists (select from pg_database where datname = 'export') \gexec

-- The owner's role has the name of its schema: by Postgres' default, "$user" first, unqualified tables would be made in it.
alter role penstock in database penstock set search_path = public;
