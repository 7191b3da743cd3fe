"""Workflows: their steps, what comes after what, and the outbox of settled steps."""

from __future__ import annotations

from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

UPGRADE = [
    "alter table penstock.task add column workflow bigint",
    "alter table penstock.task_history add column workflow bigint",
    # A step waits for its predecessors without an ordering key; it takes its place behind one when they are done.
    "alter table penstock.task drop constraint task_waiting_has_key",
    "alter table penstock.task add constraint task_waiting_has_key "
    "check (state <> 'WAITING' or ordering_key is not null or workflow is not null)",
    """
    create table penstock.workflow (
        id          bigint generated always as identity primary key,
        key         text unique,
        name        text not null,
        definition  bytea not null,
        state       text not null default 'RUNNING',
        steps       int not null,
        open        int not null,
        reason      text,
        undo        text,
        compensated boolean not null default false,
        created_at  timestamptz not null default now(),
        updated_at  timestamptz not null default now(),
        finished_at timestamptz,
        constraint workflow_state_known check (state in ('RUNNING', 'FAILING', 'SUCCESS', 'FAILED', 'CANCELLED')),
        constraint workflow_open_within_steps check (open between 0 and steps),
        constraint workflow_finished_iff_final check (
            (finished_at is not null) = (state in ('SUCCESS', 'FAILED', 'CANCELLED')))
    ) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000)
    """,
    "create index workflow_by_state on penstock.workflow (state, id)",
    "create index workflow_finished on penstock.workflow (finished_at) where finished_at is not null",
    # What changes while a workflow runs stands in no index, so the updates are HOT.
    """
    create table penstock.workflow_step (
        workflow_id   bigint not null,
        number        int not null,
        name          text not null,
        kind          text not null,
        action        text,
        task_id       bigint,
        parent        int,
        after         int[] not null default '{}',
        pending       int not null default 0,
        children      int not null default 0,
        open_children int not null default 0,
        state         penstock.task_state not null default 'WAITING',
        done          boolean not null default false,
        passed        boolean not null default false,
        on_failure    text not null default 'fail',
        undo          text,
        results_as    text,
        errors_as     text,
        options       json,
        ended         bigint,
        reason        text,
        primary key (workflow_id, number),
        constraint workflow_step_kind_known check (kind in ('task', 'map', 'join', 'compensation')),
        constraint workflow_step_counts_make_sense check (
            pending >= 0 and children >= 0 and open_children between 0 and children),
        constraint workflow_step_done_is_final check (
            not done or (open_children = 0 and state in ('SUCCESS', 'CRITICAL_ERROR', 'CANCELLED'))),
        constraint workflow_step_passed_is_done check (done or not passed)
    ) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000)
    """,
    "create index workflow_step_task on penstock.workflow_step (task_id) where task_id is not null",
    "create index workflow_step_children on penstock.workflow_step (workflow_id, parent) where parent is not null",
    """
    create table penstock.workflow_edge (
        workflow_id bigint not null,
        predecessor int not null,
        successor   int not null,
        primary key (workflow_id, predecessor, successor)
    )
    """,
    """
    create table penstock.workflow_event (
        workflow_id bigint not null,
        id          bigint generated always as identity,
        task_id     bigint not null,
        claim       bigint not null,
        state       penstock.task_state not null,
        children    text,
        primary key (workflow_id, id)
    ) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 0)
    """,
    "comment on column penstock.task.workflow is 'The workflow of which it is a step; null for all other tasks'",
    "comment on table penstock.workflow is 'Tasks that wait for each other; its row is locked by whoever moves it on'",
    "comment on column penstock.workflow.definition is 'SHA-256 of what it was created with'",
    "comment on column penstock.workflow.open is 'Steps that are not done'",
    "comment on column penstock.workflow.undo is 'Set when what has succeeded is to be undone: the action for steps "
    "that name none of their own, or empty'",
    "comment on column penstock.workflow_step.pending is 'Predecessors that are not done'",
    "comment on column penstock.workflow_step.state is 'Of its own task as last seen: WAITING for predecessors, "
    "SCHEDULED once let go, then the final state'",
    "comment on column penstock.workflow_step.done is 'It and all its children have ended'",
    "comment on column penstock.workflow_step.passed is 'It is done, and lets its successors go'",
    "comment on column penstock.workflow_step.ended is 'The event that told of its end; grows with time'",
    "comment on table penstock.workflow_event is 'Settled steps that their workflow has not taken note of yet'",
]

DOWNGRADE = [
    "drop table penstock.workflow_event, penstock.workflow_edge, penstock.workflow_step, penstock.workflow",
    # What waits for a predecessor that nobody knows any more would wait for ever, and is not allowed to.
    "update penstock.task set state = 'SCHEDULED' where state = 'WAITING' and ordering_key is null",
    "alter table penstock.task drop constraint task_waiting_has_key",
    "alter table penstock.task add constraint task_waiting_has_key "
    "check (state <> 'WAITING' or ordering_key is not null)",
    "alter table penstock.task_history drop column workflow",
    "alter table penstock.task drop column workflow",
]


def upgrade() -> None:
    for statement in UPGRADE:
        op.execute(statement)


def downgrade() -> None:
    for statement in DOWNGRADE:
        op.execute(statement)
