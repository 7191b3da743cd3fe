-- The processes' role; `penstock migrate --grant penstock_app` gives it its rights, and it may not change the schema. It signs in
-- with tokens of IAM alone: RDS takes no password from members of rds_iam.
select 'create role penstock_app login'
where not exists (select from pg_roles where rolname = 'penstock_app') \gexec
grant rds_iam to penstock_app;
