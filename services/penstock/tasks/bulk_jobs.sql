-- Jobs: work on many records, done by the supervisor in batches.

-- part: job
id, kind, params::text as params, state, cursor::text as cursor, total,
coalesce((cursor ->> 'exact')::bool, false) as total_is_exact, seen, changed, refused,
coalesce(round((changed + refused) / nullif(extract(epoch from coalesce(finished_at, updated_at) - created_at), 0), 1),
         0)::float8 as rate,
errors::text as errors, created_at, updated_at, finished_at

-- name: create_job
-- $1 kind, $2 parameters as JSON text. `top` is the highest id that any task has had: the job is about no later one.
insert into penstock.job (kind, params)
select $1, $2::jsonb || jsonb_build_object('top', (select last_value from penstock.task_id_seq))
returning {job};

-- name: read_last_id
-- The highest id that any task has had.
select last_value from penstock.task_id_seq;

-- name: read_job
-- $1 id.
select {job} from penstock.job where id = $1;

-- name: list_jobs
-- Newest first. $1 id that the page begins behind, or null; $2 limit; $3 tenant or null for all.
select {job} from penstock.job
where ($1::bigint is null or id < $1) and ($3::text is null or params ->> 'tenant' = $3)
order by id desc limit $2;

-- name: take_job
-- $1 ids to leave alone for now, $2 kinds. The job that has waited longest for a batch, locked until the end of the
-- transaction, so that no two supervisors are at one job. Relies on job_running, which holds the running ones alone.
select {job} from penstock.job where state = 'RUNNING' and id <> all($1::bigint[]) and kind = any($2::text[])
order by updated_at, id limit 1 for update skip locked;

-- name: advance_job
-- $1 id, $2 cursor as JSON text, $3 total or null where it stays; $4 seen, $5 changed and $6 refused in this batch;
-- $7 errors to add, as the JSON text of an array, of which the first 20 in all are kept; $8 state. The row is locked by
-- take_job.
update penstock.job
set cursor = $2::jsonb, total = coalesce($3::bigint, total), seen = seen + $4, changed = changed + $5,
    refused = refused + $6, state = $8, updated_at = clock_timestamp(),
    errors = jsonb_path_query_array(errors || $7::jsonb, '$[0 to 19]'),
    finished_at = case when $8 <> 'RUNNING' then clock_timestamp() end
where id = $1;

-- name: end_job
-- $1 id, $2 state, $3 errors to add, as the JSON text of an array. One that has ended already stays unchanged.
update penstock.job
set errors = errors || $3::jsonb, state = $2, updated_at = clock_timestamp(), finished_at = clock_timestamp()
where id = $1 and state = 'RUNNING'
returning id;

-- name: plan_jobs
-- For the rest of the transaction. Records are read along the index on id. By the statistics of a table that was empty
-- a moment ago, or by a plan kept from then, Postgres would fetch all that is left and sort it, for every batch.
select set_config('plan_cache_mode', 'force_custom_plan', true), set_config('enable_bitmapscan', 'off', true),
       set_config('enable_sort', 'off', true);

-- name: delete_old_jobs
-- $1 seconds, $2 how many.
with gone as (
    delete from penstock.job where id in (
        select id from penstock.job
        where finished_at < now() - make_interval(secs => $1) order by id limit $2 for update skip locked)
    returning 1
) select count(*) from gone;
