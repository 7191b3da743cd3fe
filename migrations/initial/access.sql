-- API keys, the audit log, sessions of the dashboard.

create table penstock.api_key (
    id           bigint generated always as identity primary key,
    name         text not null,
    prefix       text not null,
    hash         bytea not null,
    permissions  text[] not null,
    created_at   timestamptz not null default now(),
    expires_at   timestamptz,
    revoked_at   timestamptz,
    last_used_at timestamptz,
    tenant       text,
    actions      text[],
    constraint api_key_hash_is_sha256 check (octet_length(hash) = 32),
    constraint api_key_permissions_known check (
        permissions <@ array['enqueue', 'read', 'admin', 'worker', 'scaling'] and cardinality(permissions) > 0)
);
create unique index api_key_hash on penstock.api_key (hash);
create unique index api_key_name on penstock.api_key (name) where revoked_at is null;
comment on table penstock.api_key is 'Keys of the api; the api reads them every few seconds';
comment on column penstock.api_key.prefix is 'Beginning of the secret, to tell keys apart';
comment on column penstock.api_key.hash is 'SHA-256 of the secret, which itself is nowhere';
comment on column penstock.api_key.last_used_at is 'To the minute or so';
comment on column penstock.api_key.tenant is 'Whose tasks alone the key sees; null: all';
comment on column penstock.api_key.actions is
    'Patterns of the actions that the key may enqueue; null: all, with a tenant all but the built-in ones';

create table penstock.audit (
    id       bigint generated always as identity primary key,
    at       timestamptz not null default now(),
    who      text not null,
    address  text not null,
    door     text not null,
    method   text not null,
    params   text not null,
    outcome  text,
    ended_at timestamptz,
    constraint audit_ends_with_outcome check ((outcome is null) = (ended_at is null))
);
create index audit_at on penstock.audit (at);
comment on table penstock.audit is 'What was changed by hand: noted before it is done, its outcome afterwards';
comment on column penstock.audit.who is 'Name of the API key; empty where none is asked for';
comment on column penstock.audit.door is 'By which way it came: dashboard or http';
comment on column penstock.audit.params is 'As JSON, payloads left out and long ones cut';
comment on column penstock.audit.outcome is 'ok, or the error; null: under way, or the api died in the middle';

create table penstock.dashboard_session (
    token_hash bytea primary key,
    key_hash   bytea not null,
    created_at timestamptz not null default now(),
    expires_at timestamptz not null
);
create index dashboard_session_expires_at on penstock.dashboard_session (expires_at);
comment on table penstock.dashboard_session is 'Browsers that have signed in, until expires_at';
comment on column penstock.dashboard_session.token_hash is 'SHA-256 of the cookie';
comment on column penstock.dashboard_session.key_hash is 'SHA-256 of the API key that was shown';
