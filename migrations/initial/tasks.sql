-- Live tasks and their keys, claims, counts, messages and jobs.

create type penstock.task_state as enum
    ('WAITING', 'SCHEDULED', 'ACQUIRED', 'ERROR', 'SUCCESS', 'CRITICAL_ERROR', 'CANCELLED');

create sequence penstock.task_id_seq;

-- One sequence for all claims: a token names one claim of one task, so `id = any` and `claim = any` fence exactly.
-- No cache: with one, a connection that claims a task again may hold smaller numbers than the one before it.
create sequence penstock.claim_seq;

create table penstock.task (
    id              bigint primary key default nextval('penstock.task_id_seq'),
    state           penstock.task_state not null,
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
    failures        jsonb,
    heartbeat_at    timestamptz,
    suspect         boolean not null default false,
    labels          jsonb,
    expires_at      timestamptz,
    limit_key       text,
    route           text,
    gate            text,
    workflow        bigint,
    tenant          text,
    trace           text,
    worker          text,
    constraint task_state_is_live check (state in ('WAITING', 'SCHEDULED', 'ACQUIRED', 'ERROR')),
    constraint task_claimed_at_iff_acquired check (
        (state = 'ACQUIRED' or (state = 'WAITING' and attempts > 0)) = (claimed_at is not null)),
    constraint task_heartbeat_only_while_acquired check (heartbeat_at is null or state = 'ACQUIRED'),
    constraint task_attempts_within_cap check (attempts between 0 and max_attempts),
    constraint task_attempts_fit_state check (
        -- an ERROR at its cap could not be claimed, and its refusal would stop the claims of all others
        case state when 'ACQUIRED' then attempts > 0
                   when 'ERROR' then attempts > 0 and attempts < max_attempts
                   when 'WAITING' then true
                   else attempts = 0 end),
    constraint task_claimed_has_token check (claimed_at is null or claim > 0),
    constraint task_waiting_has_key check (
        state <> 'WAITING' or ordering_key is not null or workflow is not null or attempts > 0)
) with (
    fillfactor = 85,
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_cost_delay = 0,
    autovacuum_analyze_scale_factor = 0,
    autovacuum_analyze_threshold = 20000
);
create index task_acquired on penstock.task (claimed_at) where state = 'ACQUIRED';
create index task_ordering on penstock.task (ordering_key, id) where ordering_key is not null and state = 'WAITING';
create index task_ready on penstock.task (priority desc, run_at, id)
    where state in ('SCHEDULED', 'ERROR') and route is null and gate is null;
create index task_ready_by_route on penstock.task (route, priority desc, run_at, id)
    where route is not null and gate is null and state in ('SCHEDULED', 'ERROR');
create index task_ready_by_gate on penstock.task (gate, priority desc, run_at, id)
    where gate is not null and state in ('SCHEDULED', 'ERROR');
create index task_acquired_by_route on penstock.task (route, claimed_at)
    where route is not null and state = 'ACQUIRED';
create index task_acquired_by_gate on penstock.task (action, gate) where gate is not null and state = 'ACQUIRED';
create index task_expiring on penstock.task (expires_at) where expires_at is not null and claimed_at is null;
create index task_acquired_by_tenant on penstock.task (tenant)
    where tenant is not null and gate is not null and state = 'ACQUIRED';
comment on table penstock.task is 'Live tasks; a settled task moves to task_history in the settling statement';
comment on column penstock.task.claim is
    'Token of the newest claim, from claim_seq, shared by all that one statement claimed; grows and never falls';
comment on column penstock.task.timeout_seconds is 'Seconds one attempt may run; null = the action''s default';
comment on column penstock.task.heartbeat_at is 'Last sign of life from the worker that holds the claim';
comment on column penstock.task.failures is 'Array of {attempt, claim, at, error}, oldest first';
comment on column penstock.task.suspect is 'A worker fell silent with it: from now on it is sent alone';
comment on column penstock.task.labels is 'Object of text by text, as given by the producer';
comment on column penstock.task.expires_at is 'Not claimed from then on; cancelled by the supervisor';
comment on column penstock.task.limit_key is 'Which of its action''s limits by key it counts against';
comment on column penstock.task.route is 'The route by which it goes, once a scheduler has seen that it has one';
comment on column penstock.task.gate is 'The gate that it waits at, once a scheduler has seen that it is limited';
comment on column penstock.task.workflow is 'The workflow of which it is a step; null for all other tasks';
comment on column penstock.task.tenant is 'For whom it is; its keys stand behind this and \x1f';
comment on column penstock.task.trace is
    'Context of its enqueue, as W3C traceparent, a space and tracestate where there is one; null: it is not traced';
comment on column penstock.task.worker is
    'Worker that told a sign of life or the end of the newest claim, as it named itself; null: none has told';

create table penstock.unique_key (
    action   text not null,
    key      text not null,
    task_id  bigint not null,
    taken_at timestamptz not null default now(),
    primary key (action, key)
);
comment on table penstock.unique_key is 'Which task holds (action, unique key), until its record is cleaned';
comment on column penstock.unique_key.taken_at is 'Since when the task holds the key';

create table penstock.ordering_head (
    key     text primary key,
    task_id bigint not null,
    held    boolean not null default false
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000);
create index ordering_head_held on penstock.ordering_head (key) where held;
comment on table penstock.ordering_head is 'Of each ordering key the task that has it, or one that had it';
comment on column penstock.ordering_head.held is 'Its task ended in CRITICAL_ERROR, and those behind it wait';

create table penstock.turn (
    id       bigint generated always as identity primary key,
    priority smallint not null,
    run_at   timestamptz not null,
    task_id  bigint not null,
    size     int not null,
    task_ids bigint[] not null,
    run_ats  timestamptz[] not null,
    keys     text[] not null,
    ends_at  timestamptz not null
) with (
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 1000,
    autovacuum_vacuum_cost_delay = 0
);
create index turn_ends_at on penstock.turn (ends_at);
alter table penstock.turn alter task_ids set storage external, alter run_ats set storage external,
    alter keys set storage external;

create table penstock.dispatch (
    id         bigint primary key,
    claimed_at timestamptz not null
);
comment on table penstock.dispatch is
    'Claims whose sending is not yet confirmed, by their token; what a row left over names is released';

create table penstock.claim_key (
    id             bigint generated always as identity primary key,
    secret         bytea not null,
    accepted_until timestamptz
);

-- The key that claim ids are made by.
insert into penstock.claim_key (secret)
values (sha256(uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid())));
comment on table penstock.claim_key is 'What the tokens of claim ids are made by; of several the newest';

create table penstock.tally (
    at      timestamptz not null default now(),
    action  text not null,
    event   text not null,
    count   bigint not null,
    seconds double precision not null default 0
);
create index tally_at on penstock.tally (at);
alter table penstock.tally replica identity full;
comment on table penstock.tally is 'Signed counts of events, appended per batch and compacted by the supervisor';
comment on column penstock.tally.seconds is 'Run time of the counted attempts, for the event RAN';

create table penstock.inbound_receipt (
    message_id  text primary key,
    received_at timestamptz not null default now()
);
create index inbound_receipt_received_at on penstock.inbound_receipt (received_at);
comment on table penstock.inbound_receipt is 'Inbound messages already accepted; makes a redelivery harmless';

create table penstock.rejected (
    id     bigint generated always as identity primary key,
    source text not null check (source in ('inbound', 'results', 'kafka-source')),
    body   bytea not null,
    reason text not null,
    at     timestamptz not null default now()
);
comment on table penstock.rejected is 'Messages that could not be understood, kept for an operator';

create table penstock.payload_object (
    name      text not null,
    task_id   bigint not null,
    looked_at timestamptz not null default now(),
    doomed    boolean not null default false,
    primary key (name, task_id)
);
create index payload_object_looked_at on penstock.payload_object (looked_at) where not doomed;
create index payload_object_doomed on penstock.payload_object (name) where doomed;
comment on table penstock.payload_object is 'Objects in the bucket of large payloads and results, by task';
comment on column penstock.payload_object.name is 'Behind the prefix of PENSTOCK_PAYLOAD_BUCKET';
comment on column penstock.payload_object.task_id is '0: of no task';
comment on column penstock.payload_object.looked_at is 'When it was last asked whether its task still names it';
comment on column penstock.payload_object.doomed is 'To be deleted from the bucket';

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
);
create index job_running on penstock.job (id) where state = 'RUNNING';
comment on table penstock.job is 'Work on many records, done in batches by the supervisor';

create table penstock.resulter (
    name     text primary key,
    lag      double precision,
    since    timestamptz not null default now(),
    noted_at timestamptz not null default now()
) with (fillfactor = 20);
comment on table penstock.resulter is 'How far the results that each resulter reads are behind';
comment on column penstock.resulter.lag is
    'Seconds since the oldest result was sent that it holds, or recorded lately; null where the queue does not tell';
comment on column penstock.resulter.since is 'From when on it has read and recorded without interruption';

create table penstock.emptying (
    what         text primary key,
    upto         timestamptz not null,
    step_seconds double precision not null,
    constraint emptying_known check (what in ('payload', 'result', 'orphans')),
    constraint emptying_steps check (step_seconds > 0)
);
comment on table penstock.emptying is 'How far payloads and results of settled tasks were emptied';
comment on column penstock.emptying.upto is 'Tasks that settled until then have been seen to';
comment on column penstock.emptying.step_seconds is 'So much further goes the next look';
