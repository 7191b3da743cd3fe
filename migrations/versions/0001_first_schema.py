"""The first schema: live tasks in one narrow table, settled ones in partitions by state and day."""

from __future__ import annotations

from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_COLUMNS = """
    action          text not null,
    payload         json not null,
    priority        smallint not null,
    run_at          timestamptz not null,
    attempts        smallint not null default 0,
    max_attempts    smallint not null,
    claim           bigint not null default 0,
    claimed_at      timestamptz,
    created_at      timestamptz not null,
    updated_at      timestamptz not null,
    timeout_seconds double precision,
    unique_key      text,
    ordering_key    text,
    progress        json,
    failures        jsonb
"""

UPGRADE = [
    """
    create type penstock.task_state as enum
        ('WAITING', 'SCHEDULED', 'ACQUIRED', 'ERROR', 'SUCCESS', 'CRITICAL_ERROR', 'CANCELLED')
    """,
    "create sequence penstock.task_id_seq",
    # One sequence for all claims: a token names one claim of one task, so `id = any` and `claim = any` fence exactly.
    # No cache: with one, a connection that claims a task again may hold smaller numbers than the one before it.
    "create sequence penstock.claim_seq",
    f"""
    create table penstock.task (
        id              bigint primary key default nextval('penstock.task_id_seq'),
        state           penstock.task_state not null,
        {_COLUMNS},
        heartbeat_at    timestamptz,
        constraint task_state_is_live check (state in ('WAITING', 'SCHEDULED', 'ACQUIRED', 'ERROR')),
        constraint task_claimed_at_iff_acquired check ((state = 'ACQUIRED') = (claimed_at is not null)),
        constraint task_heartbeat_only_while_acquired check (heartbeat_at is null or state = 'ACQUIRED'),
        constraint task_attempts_within_cap check (attempts between 0 and max_attempts),
        constraint task_attempts_fit_state check (
            -- an ERROR at its cap could not be claimed, and its refusal would stop the claims of all others
            case state when 'ACQUIRED' then attempts > 0
                       when 'ERROR' then attempts > 0 and attempts < max_attempts
                       else attempts = 0 end),
        constraint task_claimed_has_token check (state <> 'ACQUIRED' or claim > 0),
        constraint task_waiting_has_key check (state <> 'WAITING' or ordering_key is not null)
    ) with (fillfactor = 85, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000,
            autovacuum_vacuum_cost_delay = 0, autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 20000)
    """,
    """
    create index task_ready on penstock.task (priority desc, run_at, id) where state in ('SCHEDULED', 'ERROR')
    """,
    "create index task_acquired on penstock.task (claimed_at) where state = 'ACQUIRED'",
    "create index task_ordering on penstock.task (ordering_key, id) where ordering_key is not null",
    f"""
    create table penstock.task_history (
        id              bigint not null,
        state           penstock.task_state not null,
        {_COLUMNS},
        finished_at     timestamptz not null,
        result          json,
        constraint history_state_is_final check (state in ('SUCCESS', 'CRITICAL_ERROR', 'CANCELLED')),
        constraint history_result_iff_success check ((state = 'SUCCESS') = (result is not null)),
        constraint history_claimed_if_run check (state = 'CANCELLED' or claimed_at is not null),
        constraint history_failed_if_critical check (state <> 'CRITICAL_ERROR' or failures is not null)
    ) partition by list (state)
    """,
    "create index task_history_id on penstock.task_history (id)",
    "create index task_history_finished_at on penstock.task_history using brin (finished_at)",
    *(
        f"create table penstock.task_{state.lower()} partition of penstock.task_history "
        f"for values in ('{state}') partition by range (finished_at)"
        for state in ("SUCCESS", "CRITICAL_ERROR", "CANCELLED")
    ),
    # Rows are never refused for want of a partition; the supervisor keeps days ahead, this one catches the rest.
    *(
        f"create table penstock.task_{state}_default partition of penstock.task_{state} default"
        for state in ("success", "critical_error", "cancelled")
    ),
    # The supervisor calls it too; here it keeps the first day's rows out of the default partitions.
    """
    create function penstock.ensure_partitions(days_ahead int) returns int language plpgsql as $$
    declare
        parent text;
        day date;
        made int := 0;
    begin
        foreach parent in array array['task_success', 'task_critical_error', 'task_cancelled'] loop
            for day in select (now() at time zone 'utc')::date + n from generate_series(0, days_ahead) n loop
                if to_regclass(format('penstock.%I', parent || to_char(day, '_YYYYMMDD'))) is null then
                    begin
                        execute format(
                            'create table penstock.%I partition of penstock.%I for values from (%L) to (%L)',
                            parent || to_char(day, '_YYYYMMDD'), parent,
                            day::timestamp at time zone 'utc', (day + 1)::timestamp at time zone 'utc');
                        made := made + 1;
                    exception when check_violation then
                        null;  -- the default partition holds rows of that day; they stay there until they expire
                    end;
                end if;
            end loop;
        end loop;
        return made;
    end $$
    """,
    "select penstock.ensure_partitions(3)",
    """
    create table penstock.unique_key (
        action  text not null,
        key     text not null,
        task_id bigint not null,
        primary key (action, key)
    )
    """,
    """
    create table penstock.ordering_head (
        key     text primary key,
        task_id bigint not null
    )
    """,
    """
    create table penstock.dispatch (
        id         bigint generated always as identity primary key,
        task_ids   bigint[] not null,
        claims     bigint[] not null,
        claimed_at timestamptz not null
    )
    """,
    """
    create table penstock.inbound_receipt (
        message_id  text primary key,
        received_at timestamptz not null default now()
    )
    """,
    """
    create table penstock.rejected (
        id     bigint generated always as identity primary key,
        source text not null check (source in ('inbound', 'results')),
        body   bytea not null,
        reason text not null,
        at     timestamptz not null default now()
    )
    """,
    """
    create table penstock.tally (
        at     timestamptz not null default now(),
        action text not null,
        event  text not null,
        count  bigint not null
    )
    """,
    "create index tally_at on penstock.tally (at)",
    "comment on table penstock.task is 'Live tasks; a settled task moves to task_history in the settling statement'",
    "comment on column penstock.task.claim is 'Token of the newest claim, from claim_seq; grows and never falls'",
    "comment on column penstock.task.timeout_seconds is 'Seconds one attempt may run; null = the action''s default'",
    "comment on column penstock.task.heartbeat_at is 'Last sign of life from the worker that holds the claim'",
    "comment on column penstock.task.failures is 'Array of {attempt, claim, at, error}, oldest first'",
    "comment on table penstock.unique_key is 'Which task holds (action, unique key), until its record is cleaned'",
    "comment on table penstock.ordering_head is 'The one live task per ordering key that may run'",
    "comment on table penstock.dispatch is 'Claims whose sending is not yet confirmed; a row left over is released'",
    "comment on table penstock.inbound_receipt is 'Inbound messages already accepted; makes a redelivery harmless'",
    "comment on table penstock.rejected is 'Messages that could not be understood, kept for an operator'",
    "comment on table penstock.tally is 'Signed counts of events, appended per batch and compacted by the supervisor'",
]

DOWNGRADE = [
    "drop function penstock.ensure_partitions(int)",
    "drop table penstock.tally, penstock.rejected, penstock.inbound_receipt, penstock.dispatch, "
    "penstock.ordering_head, penstock.unique_key, penstock.task_history, penstock.task",
    "drop sequence penstock.claim_seq, penstock.task_id_seq",
    "drop type penstock.task_state",
]


def upgrade() -> None:
    for statement in UPGRADE:
        op.execute(statement)


def downgrade() -> None:
    for statement in DOWNGRADE:
        op.execute(statement)
