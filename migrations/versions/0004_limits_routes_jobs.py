"""Limits, routes, expiry, labels, jobs over many tasks; unique keys that become free, ordering keys that are held."""

from __future__ import annotations

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

UPGRADE = [
    "alter table penstock.task add column labels jsonb, add column expires_at timestamptz, "
    "add column limit_key text, add column route text, add column gate text",
    "alter table penstock.task_history add column labels jsonb, add column expires_at timestamptz, "
    "add column limit_key text, add column reason text",
    "alter table penstock.unique_key add column taken_at timestamptz not null default now()",
    "alter table penstock.ordering_head add column held boolean not null default false",
    "create index ordering_head_held on penstock.ordering_head (key) where held",
    # Of those that wait alone: a task enters it once, where each version of its row would, and the next of a key is
    # found without passing those that have gone. Room in the pages of heads lets these change without a new entry.
    "drop index penstock.task_ordering",
    "create index task_ordering on penstock.task (ordering_key, id) "
    "where ordering_key is not null and state = 'WAITING'",
    "alter table penstock.ordering_head set (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, "
    "autovacuum_vacuum_threshold = 5000)",
    # What goes by a route or through a gate leaves the order of all others, so that none of these is passed on the way
    # to a task that may go now. Predicates begin with what is false of most tasks: they are tried for each row written.
    "drop index penstock.task_ready",
    """
    create index task_ready on penstock.task (priority desc, run_at, id)
        where state in ('SCHEDULED', 'ERROR') and route is null and gate is null
    """,
    """
    create index task_ready_by_route on penstock.task (route, priority desc, run_at, id)
        where route is not null and gate is null and state in ('SCHEDULED', 'ERROR')
    """,
    """
    create index task_ready_by_gate on penstock.task (gate, priority desc, run_at, id)
        where gate is not null and state in ('SCHEDULED', 'ERROR')
    """,
    """
    create index task_acquired_by_route on penstock.task (route, claimed_at)
        where route is not null and state = 'ACQUIRED'
    """,
    "create index task_acquired_by_gate on penstock.task (action, gate) where gate is not null and state = 'ACQUIRED'",
    "create index task_expiring on penstock.task (expires_at) where expires_at is not null and state <> 'ACQUIRED'",
    """
    create table penstock.action (
        name              text primary key,
        paused            boolean not null default false,
        max_in_flight     int,
        rate              double precision,
        burst             int,
        key_max_in_flight int,
        key_rate          double precision,
        key_burst         int,
        tokens            double precision,
        refilled_at       timestamptz,
        updated_at        timestamptz not null default now(),
        constraint action_limits_make_sense check (
            least(max_in_flight, key_max_in_flight) >= 1 and least(rate, key_rate) > 0
            and least(burst, key_burst) >= 1)
    )
    """,
    """
    create table penstock.gate (
        name        text primary key,
        action      text not null,
        tokens      double precision,
        refilled_at timestamptz,
        next_at     timestamptz not null default now()
    )
    """,
    "create index gate_by_action on penstock.gate (action, next_at)",
    """
    create table penstock.route (
        name       text primary key,
        queue      text not null,
        actions    text[] not null,
        labels     jsonb not null default '{}',
        position   int not null default 0,
        updated_at timestamptz not null default now()
    )
    """,
    """
    create table penstock.job (
        id          bigint generated always as identity primary key,
        kind        text not null,
        params      jsonb not null,
        state       text not null default 'RUNNING',
        cursor      jsonb,
        total       bigint,
        seen        bigint not null default 0,
        changed     bigint not null default 0,
        refused     bigint not null default 0,
        errors      jsonb not null default '[]',
        created_at  timestamptz not null default now(),
        updated_at  timestamptz not null default now(),
        finished_at timestamptz,
        constraint job_state_known check (state in ('RUNNING', 'DONE', 'FAILED', 'CANCELLED'))
    )
    """,
    "create index job_running on penstock.job (id) where state = 'RUNNING'",
    "comment on column penstock.task.labels is 'Object of text by text, as given by the producer'",
    "comment on column penstock.task.expires_at is 'Not claimed from then on; cancelled by the supervisor'",
    "comment on column penstock.task.limit_key is 'Which of its action''s limits by key it counts against'",
    "comment on column penstock.task.route is 'The route by which it goes, once a scheduler has seen that it has one'",
    "comment on column penstock.task.gate is 'The gate that it waits at, once a scheduler has seen that it is limited'",
    "comment on column penstock.task_history.reason is 'Why it was cancelled'",
    "comment on column penstock.unique_key.taken_at is 'Since when the task holds the key'",
    "comment on column penstock.ordering_head.held is 'Its task ended in CRITICAL_ERROR, and those behind it wait'",
    "comment on table penstock.action is 'What is asked of an action: paused, limits; no row for one that runs freely'",
    "comment on column penstock.action.rate is 'Tasks a second; burst: how many may go at once after a rest'",
    "comment on table penstock.gate is 'Where tasks of a limited action wait, one for each limit key'",
    "comment on column penstock.gate.next_at is 'Not worth a look before'",
    "comment on table penstock.route is 'Which tasks go to a queue of their own; the lowest position that fits counts'",
    "comment on column penstock.route.actions is 'Patterns of LIKE'",
    "comment on table penstock.job is 'Work on many records, done in batches by the supervisor'",
]

DOWNGRADE = [
    "drop table penstock.job, penstock.route, penstock.gate, penstock.action",
    "drop index penstock.task_expiring, penstock.task_acquired_by_gate, penstock.task_acquired_by_route, "
    "penstock.task_ready_by_gate, penstock.task_ready_by_route, penstock.task_ready",
    "create index task_ready on penstock.task (priority desc, run_at, id) where state in ('SCHEDULED', 'ERROR')",
    "alter table penstock.ordering_head reset (fillfactor, autovacuum_vacuum_scale_factor, "
    "autovacuum_vacuum_threshold)",
    "drop index penstock.task_ordering",
    "create index task_ordering on penstock.task (ordering_key, id) where ordering_key is not null",
    "alter table penstock.ordering_head drop column held",
    "alter table penstock.unique_key drop column taken_at",
    "alter table penstock.task_history drop column labels, drop column expires_at, drop column limit_key, "
    "drop column reason",
    "alter table penstock.task drop column labels, drop column expires_at, drop column limit_key, drop column route, "
    "drop column gate",
]


def upgrade() -> None:
    for statement in UPGRADE:
        op.execute(statement)


def downgrade() -> None:
    for statement in DOWNGRADE:
        op.execute(statement)
