-- Limits and pauses of actions and tenants, the gates that their tasks wait at, routes.

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
);
comment on table penstock.action is 'What is asked of an action: paused, limits; no row for one that runs freely';
comment on column penstock.action.rate is 'Tasks a second; burst: how many may go at once after a rest';

create table penstock.gate (
    name        text primary key,
    action      text not null,
    tokens      double precision,
    refilled_at timestamptz,
    next_at     timestamptz not null default now(),
    tenant      text
);
create index gate_by_action on penstock.gate (action, next_at);
create index gate_by_tenant on penstock.gate (tenant) where tenant is not null;
comment on table penstock.gate is 'Where tasks of a limited action wait, one for each limit key';
comment on column penstock.gate.next_at is 'Not worth a look before';
comment on column penstock.gate.tenant is 'Of the tasks that wait at it';

create table penstock.route (
    name       text primary key,
    queue      text not null,
    actions    text[] not null,
    labels     jsonb not null default '{}',
    position   int not null default 0,
    updated_at timestamptz not null default now()
);
comment on table penstock.route is 'Which tasks go to a queue of their own; the lowest position that fits counts';
comment on column penstock.route.actions is 'Patterns of LIKE';

create table penstock.tenant (
    name          text primary key,
    paused        boolean not null default false,
    own           boolean not null default false,
    max_in_flight int,
    rate          double precision,
    burst         int,
    updated_at    timestamptz not null default now(),
    constraint tenant_limits_make_sense check (max_in_flight >= 1 and rate > 0 and burst >= 1),
    constraint tenant_default_is_own check (name <> '*' or (own and not paused))
);
comment on table penstock.tenant is 'What is asked of a tenant; *: of all without limits of their own';
comment on column penstock.tenant.own is 'Its limits count, not those of *';
comment on column penstock.tenant.rate is 'Tasks a second; burst: how many may go at once after a rest';

create table penstock.tenant_pace (
    name        text primary key,
    tokens      double precision,
    refilled_at timestamptz
);
comment on table penstock.tenant_pace is 'What a tenant''s rate leaves; locked to let its tasks through';
