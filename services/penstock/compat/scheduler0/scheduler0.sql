-- scheduler0's API: credentials, projects, jobs and the requests that made them. A job is fired by the schedule
-- scheduler0:<id>.

-- part: credential
    id, archived, api_key, coalesce(secret, '') as api_secret, created_at as date_created

-- part: project
    id, name, description, created_at as date_created

-- part: job
-- Of a job j; instants that are not set as scheduler0 writes them.
    j.id, j.project_id, j.spec, j.callback_url, j.data, j.execution_type, j.timezone, j.timezone_offset,
    coalesce(j.start_date, '0001-01-01T00:00:00Z') as start_date,
    coalesce(j.end_date, '0001-01-01T00:00:00Z') as end_date, j.created_at as date_created

-- name: create_credential
-- $1 API key, $2 SHA-256 of the secret, $3 the secret in clear or null.
insert into penstock.scheduler0_credential (api_key, secret_hash, secret) values ($1, $2, $3)
returning
{credential};

-- name: find_credential
-- $1 API key. The one that is in use.
select id, secret_hash from penstock.scheduler0_credential where api_key = $1 and not archived;

-- name: list_credentials
-- Newest first. $1 limit, $2 offset.
select
{credential}
from penstock.scheduler0_credential order by id desc limit $1 offset $2;

-- name: count_credentials
select count(*) from penstock.scheduler0_credential;

-- name: read_credential
-- $1 id.
select
{credential}
from penstock.scheduler0_credential where id = $1;

-- name: read_credential_digest
-- $1 id. Its API key and the digest of its secret.
select api_key, secret_hash from penstock.scheduler0_credential where id = $1;

-- name: archive_credential
-- $1 id, $2 whether it is archived.
update penstock.scheduler0_credential set archived = $2 where id = $1
returning
{credential};

-- name: delete_credential
-- $1 id.
delete from penstock.scheduler0_credential where id = $1;

-- name: create_project
-- $1 name, $2 description. No row: the name is taken.
insert into penstock.scheduler0_project (name, description) values ($1, $2)
on conflict (name) do nothing returning
{project};

-- name: list_projects
-- Oldest first. $1 limit, $2 offset.
select
{project}
from penstock.scheduler0_project order by id limit $1 offset $2;

-- name: count_projects
select count(*) from penstock.scheduler0_project;

-- name: read_project
-- $1 id.
select
{project}
from penstock.scheduler0_project where id = $1;

-- name: find_projects
-- $1 ids. Those that there are.
select id from penstock.scheduler0_project where id = any($1::bigint[]);

-- name: update_project
-- $1 id, $2 name, $3 description or null for what it is.
update penstock.scheduler0_project set name = $2, description = coalesce($3, description) where id = $1
returning
{project};

-- name: delete_project
-- $1 id. One that has jobs is refused by the reference of theirs.
delete from penstock.scheduler0_project where id = $1;

-- name: reserve_job_ids
-- $1 how many. Ascending, with the present instant; what is reserved and not used is lost.
select nextval(pg_get_serial_sequence('penstock.scheduler0_job', 'id')) as id, now() as now
from generate_series(1, $1::int) order by 1;

-- name: create_request
-- $1 its name, $2 import id, $3 body, $4 its jobs with their ids, as answers have them (JSON). Adds the jobs too.
with made as (
    insert into penstock.scheduler0_job (id, project_id, import_id, spec, timezone, timezone_offset, callback_url, data,
                                         execution_type, start_date, end_date, created_at)
    select id, "projectId", $2, spec, timezone, coalesce("timezoneOffset", 0), coalesce("callbackUrl", ''),
           coalesce(data, ''), "executionType", nullif("startDate", '0001-01-01T00:00:00Z'),
           nullif("endDate", '0001-01-01T00:00:00Z'), "dateCreated"
    from json_to_recordset($4::text::json) as j (
        id bigint, "projectId" bigint, spec text, timezone text, "timezoneOffset" bigint, "callbackUrl" text, data text,
        "executionType" text, "startDate" timestamptz, "endDate" timestamptz, "dateCreated" timestamptz)
)
insert into penstock.scheduler0_request (request_id, import_id, input, output) values ($1, $2, $3, $4) returning id;

-- name: count_jobs
-- $1 project id. By scheduler0_job_project.
select count(*) from penstock.scheduler0_job where project_id = $1;

-- name: list_jobs_of_project
-- In the order of their making. $1 project id, $2 limit, $3 offset. Ids of the page first, by the index alone: what is
-- passed over is not read.
with page as materialized (
    select id from penstock.scheduler0_job where project_id = $1 order by id limit $2 offset $3
)
select
{job},
    coalesce(c.last_at, '0001-01-01T00:00:00Z') as last_execution_date
from page
join penstock.scheduler0_job j on j.id = page.id
left join penstock.schedule s on s.name = 'scheduler0:' || j.id
left join penstock.schedule_clock c on c.schedule_id = s.id
order by j.id;

-- name: read_callback_job
-- $1 id.
select
{job},
    coalesce(c.last_at, '0001-01-01T00:00:00Z') as last_execution_date
from penstock.scheduler0_job j
left join penstock.schedule s on s.name = 'scheduler0:' || j.id
left join penstock.schedule_clock c on c.schedule_id = s.id
where j.id = $1;

-- name: lock_callback_job
-- $1 id. The job, locked, and whether the import that makes its schedule is still at work.
select
{job},
    exists (select from penstock.schedule_import i where i.id = j.import_id and i.finished_at is null) as making
from penstock.scheduler0_job j where j.id = $1 for update of j;

-- name: find_jobs_of_import
-- $1 names, $2 import id. Those of the names that schedules of jobs have, which the import is to make.
select s.name from unnest($1::text[]) s (name)
join penstock.scheduler0_job j
    on j.id = case when s.name ~ '^scheduler0:(0|[1-9][0-9]{0,17})$' then substr(s.name, 12)::bigint end
where j.import_id = $2;

-- name: update_callback_job
-- $1 id, $2 URL, $3 data, $4 execution type.
update penstock.scheduler0_job set callback_url = $2, data = $3, execution_type = $4 where id = $1;

-- name: delete_callback_job
-- $1 id.
delete from penstock.scheduler0_job where id = $1;

-- part: this_request
-- $1 its name, or its number, with which POST /jobs answers.
    (r.request_id = $1 or r.id = case when $1 ~ '^[0-9]{1,18}$' then $1::text::bigint end)

-- name: find_request
-- $1 as above. What a wait for it looks at, again and again: its progress as answers have it. A deleted import had finished.
select case when i.finished_at is null and i.seen = 0 then 0 when i.finished_at is null and i.seen > 0 then 1
            when i.refused > 0 then 3 else 2 end as progress
from penstock.scheduler0_request r left join penstock.schedule_import i on i.id = r.import_id
where
{this_request};

-- name: read_request
-- $1 as above.
select r.id, r.request_id, r.input, r.output, r.created_at, i.errors::text as errors
from penstock.scheduler0_request r left join penstock.schedule_import i on i.id = r.import_id
where
{this_request};

-- name: delete_old_requests
-- $1 seconds, $2 how many. Those whose import is done, or gone.
with gone as (
    delete from penstock.scheduler0_request where id in (
        select r.id from penstock.scheduler0_request r
        where r.created_at < now() - make_interval(secs => $1)
          and not exists (select from penstock.schedule_import i where i.id = r.import_id and i.finished_at is null)
        order by r.created_at limit $2 for update of r skip locked)
    returning 1
) select count(*) from gone;

-- part: executions
-- Runs of jobs whose task is still known: $1 from, $2 until, of when they were fired, or null; $3 project or null; $4
-- states of tasks or null. The name of a schedule leads to its job; a cast of what is no number would fail, whatever
-- else is asked.
    select r.schedule_id, r.scheduled_at, r.fired_at, r.task_id, k.state, k.updated_at, s.timezone, s.expression,
           coalesce(s.start_at, s.created_at) as anchor, j.id as job_id
    from penstock.schedule_run r
    join penstock.schedule s on s.id = r.schedule_id and s.action = 'scheduler0.callback'
    join penstock.scheduler0_job j
        on j.id = case when s.name ~ '^scheduler0:[0-9]{1,18}$' then substr(s.name, 12)::bigint end
    cross join lateral (
        select t.state::text as state, t.updated_at from penstock.task t where t.id = r.task_id
        union all
        select h.state::text, h.finished_at from penstock.task_history h where h.id = r.task_id
    ) k
    where r.outcome = 'FIRED'
      and ($1::timestamptz is null or r.fired_at >= $1) and ($2::timestamptz is null or r.fired_at <= $2)
      and ($3::bigint is null or j.project_id = $3) and ($4::text[] is null or k.state = any($4))

-- name: list_executions
-- Newest first; $1 to $4 as above, $5 limit, $6 offset. By schedule_run_fired_at.
{executions}
order by r.fired_at desc, r.task_id desc limit $5 offset $6;

-- name: count_executions
-- $1 to $4 as above, $5 how far is counted.
select count(*) from (
{executions}
limit $5) counted;

-- name: list_executions_of_job
-- $1 to $4 as above, $5 limit, $6 offset, $7 job. Newest first, by the primary key of schedule_run.
{executions}
  and r.schedule_id = (select id from penstock.schedule where name = 'scheduler0:' || $7::bigint)
order by r.scheduled_at desc limit $5 offset $6;

-- name: count_executions_of_job
-- $1 to $4 as above, $5 how far is counted, $6 job.
select count(*) from (
{executions}
  and r.schedule_id = (select id from penstock.schedule where name = 'scheduler0:' || $6::bigint)
limit $5) counted;
