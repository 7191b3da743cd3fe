-- Statements name the clock functions of Postgres without a schema. Here the search path leads them to a test's clock.
-- {schema} holds it; {now} and {clock} are expressions of type timestamptz.
create schema {schema};
create function {schema}.now() returns timestamptz stable language sql as $${now}$$;
create function {schema}.clock_timestamp() returns timestamptz stable language sql as $${clock}$$;
grant usage on schema {schema} to public;
do $$
declare one record;
begin
    for one in select p.oid::regprocedure as name from pg_proc p, unnest(p.proconfig) setting
        where p.pronamespace in ('penstock'::regnamespace, 'public'::regnamespace) and setting like 'search_path=%' loop
        execute format('alter function %s set search_path = {schema}, pg_catalog, penstock, pg_temp', one.name);
    end loop;
    for one in select d.adrelid::regclass as owner, a.attname as name from pg_attrdef d
        join pg_attribute a on a.attrelid = d.adrelid and a.attnum = d.adnum
        where pg_get_expr(d.adbin, d.adrelid) = 'now()' loop
        execute format('alter table %s alter column %I set default {schema}.now()', one.owner, one.name);
    end loop;
end $$;
