-- Schedules, when each is due, what each has run, and imports.

create table penstock.schedule (
    id                   bigint generated always as identity primary key,
    name                 text not null,
    expression           text not null,
    timezone             text not null,
    start_at             timestamptz,
    end_at               timestamptz,
    jitter_seconds       double precision not null default 0,
    missed               text not null default 'one',
    max_missed           int not null default 100,
    max_lateness_seconds double precision,
    overlap              text not null default 'allow',
    action               text not null,
    payload              json not null,
    priority             smallint not null default 0,
    max_attempts         smallint,
    timeout_seconds      double precision,
    ordering_key         text,
    labels               jsonb not null default '{}',
    paused               boolean not null default false,
    created_at           timestamptz not null default now(),
    updated_at           timestamptz not null default now(),
    tenant               text,
    constraint schedule_name_key unique (name),
    constraint schedule_missed_known check (missed in ('skip', 'one', 'all')),
    constraint schedule_overlap_known check (overlap in ('allow', 'skip', 'queue')),
    constraint schedule_ends_after_its_start check (end_at >= start_at)
);
create index schedule_labels on penstock.schedule using gin (labels jsonb_path_ops) where labels <> '{}';
create index schedule_action on penstock.schedule (action, id);
comment on table penstock.schedule is 'Tasks to be made by the clock, again and again';
comment on column penstock.schedule.max_missed is 'With missed = all: so many of the newest are made up for';
comment on column penstock.schedule.max_lateness_seconds is 'An instant is not made up for later than this';
comment on column penstock.schedule.max_attempts is 'Null: the setting''s at the time of the fire';
comment on column penstock.schedule.tenant is 'For whom its tasks are';

create table penstock.schedule_clock (
    schedule_id  bigint primary key,
    next_at      timestamptz,
    due_at       timestamptz,
    last_at      timestamptz,
    last_task_id bigint,
    problem      text,
    constraint schedule_clock_goes_forward check (next_at > last_at),
    constraint schedule_clock_due_with_next check ((next_at is null) = (due_at is null) and due_at >= next_at)
) with (
    fillfactor = 70,
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_cost_delay = 0,
    autovacuum_analyze_scale_factor = 0,
    autovacuum_analyze_threshold = 50000
);
create index schedule_clock_due on penstock.schedule_clock (due_at) where due_at is not null;
comment on table penstock.schedule_clock is 'Where each schedule stands; no next_at: paused, ended or in trouble';
comment on column penstock.schedule_clock.next_at is 'The instant to be fired next';
comment on column penstock.schedule_clock.due_at is 'That instant and its jitter';
comment on column penstock.schedule_clock.last_at is 'The last instant that was dealt with, fired or not';
comment on column penstock.schedule_clock.problem is 'Why it cannot be fired, until it is changed or resumed';

create table penstock.schedule_run (
    schedule_id  bigint not null,
    scheduled_at timestamptz not null,
    outcome      text not null,
    fired_at     timestamptz not null default now(),
    task_id      bigint,
    manual       boolean not null default false,
    since        timestamptz,
    instants     int not null default 1,
    primary key (schedule_id, scheduled_at),
    constraint schedule_run_outcome_known check (outcome in ('FIRED', 'SKIPPED', 'MISSED')),
    constraint schedule_run_task_iff_fired check ((outcome = 'FIRED') = (task_id is not null))
);
create index schedule_run_fired_at on penstock.schedule_run (fired_at);
comment on table penstock.schedule_run is 'What became of each instant; one row of each';
comment on column penstock.schedule_run.since is 'MISSED: the row stands for all instants from this one';
comment on column penstock.schedule_run.instants is 'How many instants the row stands for, 10000 for more';

create table penstock.schedule_import (
    id          bigint generated always as identity primary key,
    replace     boolean not null,
    total       int not null,
    seen        int not null default 0,
    created     int not null default 0,
    replaced    int not null default 0,
    refused     int not null default 0,
    errors      jsonb not null default '[]',
    created_at  timestamptz not null default now(),
    updated_at  timestamptz not null default now(),
    finished_at timestamptz,
    constraint schedule_import_counts_agree check (seen = created + replaced + refused and seen <= total)
);
create index schedule_import_running on penstock.schedule_import (id) where finished_at is null;
comment on table penstock.schedule_import is 'A call of schedule.create_many, carried out by the supervisor';

create table penstock.schedule_import_part (
    import_id bigint not null references penstock.schedule_import (id) on delete cascade,
    place     int not null,
    entries   text not null,
    primary key (import_id, place)
);
comment on table penstock.schedule_import_part is 'Entries of an import still to be read, a JSON array';
comment on column penstock.schedule_import_part.place is 'Place of the first of them in the call, from 0';
