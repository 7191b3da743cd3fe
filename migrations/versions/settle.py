"""penstock_settle: a handler records its result in its own transaction."""

from __future__ import annotations

from alembic import op

revision = "settle"
down_revision = "initial"
branch_labels = None
depends_on = None


# As finish_tasks, of one task, but that the next task of its ordering key is promoted by the next look at turns.
_SETTLE = r"""
create function public.penstock_settle(claim_id text, result json) returns boolean
language plpgsql security definer
set search_path = pg_catalog, pg_temp set enable_seqscan = off set plan_cache_mode = auto as $$
    #variable_conflict use_variable
    declare
        body text := coalesce(result::text, 'null');
        given text := nullif(current_setting('penstock.result_limit_bytes', true), '');
        most int := least(greatest(coalesce(given, '262144')::int, 2), 900000);
        settled record;
    begin
        if claim_id is null or claim_id !~ '^\d{1,18}:\d{1,18}(:[0-9A-Za-z]{1,64})?$' then
            raise exception 'Invalid params: claim_id must be the id of a worker''s request, not %', left(claim_id, 60)
                using errcode = '22023', detail = '{"field": "claim_id", "problem": "is not <task id>:<claim>"}';
        end if;
        if octet_length(body) > most then
            raise exception 'the result is % bytes; the limit is %', octet_length(body), most
                using errcode = '54000', hint = 'penstock.result_limit_bytes is the limit.';
        end if;
        if body ~ '^\s*"penstock\+(?!sealed:|plain:)' then
            body := '"penstock+plain:' || substr(ltrim(body, E' \t\r\n'), 2);  -- no reference to an object
        end if;
        with gone as (
            delete from penstock.task t
            where t.id = split_part(claim_id, ':', 1)::bigint and t.claim = split_part(claim_id, ':', 2)::bigint
              and t.state::text = 'ACQUIRED'
            returning *
        ), moved as (
            insert into penstock.task_history (id, state, action, payload, priority, run_at, attempts, max_attempts,
                claim, claimed_at, created_at, updated_at, timeout_seconds, unique_key, ordering_key, progress,
                failures, labels, expires_at, limit_key, tenant, workflow, trace, finished_at, result, worker)
            select g.id, 'SUCCESS', g.action, g.payload, g.priority, g.run_at, g.attempts, g.max_attempts, g.claim,
                g.claimed_at, g.created_at, now(), g.timeout_seconds, g.unique_key, g.ordering_key, g.progress,
                g.failures, g.labels, g.expires_at, g.limit_key, g.tenant, g.workflow, g.trace, now(),
                body::json, g.worker
            from gone g
        ), notified as (
            insert into penstock.workflow_event (workflow_id, task_id, claim, state)
            select g.workflow, g.id, g.claim, 'SUCCESS' from gone g where g.workflow is not null
        ), tallied as (
            insert into penstock.tally (action, event, count) select g.action, 'SUCCESS', 1 from gone g
        ), later as (
            insert into penstock.turn (priority, run_at, task_id, size, task_ids, run_ats, keys, ends_at)
            select 0, now(), k.id, 1, array[k.id], array[now()], array[k.key], now()
            from (select -nextval('penstock.turn_id_seq') as id, g.ordering_key as key
                  from gone g where g.ordering_key is not null) k
        )
        select g.workflow into settled from gone g;
        if not found then
            return false;
        end if;
        if coalesce(current_setting('penstock.notify', true), '') <> 'off' then
            perform pg_notify('penstock_work', '');  -- delivered by the caller's commit: there is room for another task
            if settled.workflow is not null then
                perform pg_notify('penstock_workflows', '');
            end if;
        end if;
        return true;
    end $$"""


def upgrade() -> None:
    op.execute(_SETTLE)
    op.execute("revoke all on function public.penstock_settle from public")
    op.execute(
        "comment on function public.penstock_settle is "
        "'Records the result of a claimed task in the caller''s transaction; false: the claim holds it no more'"
    )


def downgrade() -> None:
    op.execute("drop function public.penstock_settle")
