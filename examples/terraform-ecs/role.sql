-- The processes' role; `penstock migrate --grant penstock_app` gives it its rights, and it may not change the schema.
\getenv password APP_PASSWORD
select 'create role penstock_app login'
where not exists (select from pg_roles where rolname = 'penstock_app') \gexec
alter role penstock_app password :'password';
