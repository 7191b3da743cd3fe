-- Workflows and their steps; tasks that wait for an event.

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
    tenant      text,
    constraint workflow_state_known check (state in ('RUNNING', 'FAILING', 'SUCCESS', 'FAILED', 'CANCELLED')),
    constraint workflow_open_within_steps check (open between 0 and steps),
    constraint workflow_finished_iff_final check (
        (finished_at is not null) = (state in ('SUCCESS', 'FAILED', 'CANCELLED')))
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
create index workflow_by_state on penstock.workflow (state, id);
create index workflow_finished on penstock.workflow (finished_at) where finished_at is not null;
comment on table penstock.workflow is 'Tasks that wait for each other; its row is locked by the process that advances it';
comment on column penstock.workflow.definition is 'SHA-256 of what it was created with';
comment on column penstock.workflow.open is 'Steps that are not done';
comment on column penstock.workflow.undo is
    'Set when what has succeeded is to be undone: the action for steps that name none of their own, or empty';
comment on column penstock.workflow.tenant is 'For whom it is; its key stands behind this and \x1f';

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
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000);
create index workflow_step_task on penstock.workflow_step (task_id) where task_id is not null;
create index workflow_step_children on penstock.workflow_step (workflow_id, parent) where parent is not null;
comment on column penstock.workflow_step.pending is 'Predecessors that are not done';
comment on column penstock.workflow_step.state is
    'Of its own task as last seen: WAITING for predecessors, SCHEDULED once released, then the final state';
comment on column penstock.workflow_step.done is 'It and all its children have ended';
comment on column penstock.workflow_step.passed is 'It is done, and lets its successors go';
comment on column penstock.workflow_step.ended is 'The event that told of its end; grows with time';

create table penstock.workflow_edge (
    workflow_id bigint not null,
    predecessor int not null,
    successor   int not null,
    primary key (workflow_id, predecessor, successor)
);

create table penstock.workflow_event (
    workflow_id bigint not null,
    id          bigint generated always as identity,
    task_id     bigint not null,
    claim       bigint not null,
    state       penstock.task_state not null,
    children    text,
    primary key (workflow_id, id)
) with (
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 1000,
    autovacuum_vacuum_cost_delay = 0
);
comment on table penstock.workflow_event is 'Settled steps that their workflow has not taken note of yet';

create table penstock.wait (
    token      text primary key,
    task_id    bigint,
    claim      bigint,
    deadline   timestamptz,
    policy     jsonb,
    answer     text,
    digest     bytea,
    updated_at timestamptz not null default now(),
    constraint wait_names_claim check ((task_id is null) = (claim is null)),
    constraint wait_is_active_or_answered check (deadline is null or (task_id is not null and answer is null)),
    constraint wait_keeps_what_it_knows check (answer is null or digest is not null)
);
create index wait_deadline on penstock.wait (deadline) where deadline is not null;
create index wait_task on penstock.wait (task_id) where task_id is not null;
create index wait_ended on penstock.wait (updated_at) where deadline is null;
comment on table penstock.wait is
    'Tokens that tasks wait for or have waited for, and answers that came before their task waited';
comment on column penstock.wait.task_id is 'The task that waits or waited; null for an answer that is kept';
comment on column penstock.wait.deadline is 'Until when it waits; null: it does not, or no more';
comment on column penstock.wait.policy is 'How its failure is retried, as the worker told: see Hints in protocol/reports.py';
comment on column penstock.wait.answer is 'A member of a JSON-RPC response, result or error, until a task waits';
comment on column penstock.wait.digest is 'SHA-256 of the answer, by which one that comes twice is known';
