"""Tenants: whose a task, a schedule, a workflow and an API key are, and limits of each tenant."""

from __future__ import annotations

from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

# sql/enqueue.sql, with the tenants. A test holds the two texts together.
_STATEMENT = r"""
-- Any mixture of keys, labels and expiries; each unique key once, unless all that name it keep it and return the first.
-- $10 labels as JSON text or null, $11 expires_at or null, $12 expires in so many seconds or null, $13 limit keys or
-- null; $14 whether a unique key is free when the task that has it is settled, $15 or was taken so many seconds ago;
-- $16 tenants or null. Keys of a tenant are its own: they are kept behind its name.
-- The two upserts change nothing in a row that somebody has: they lock it and return it, which a plain DO NOTHING would
-- not for a row committed after this statement's snapshot. Keys are taken in sorted order, so two such batches cannot
-- deadlock. A task behind a live one of its ordering key starts as WAITING.
-- A key is free only on evidence that its task has settled: its record is in the history, and the row of the key is the
-- one that this snapshot knows. "Not among the live" would be true of a task committed after the snapshot, and a record
-- may just have been taken back by a retry, which moves taken_at. The record is looked up by a scalar subquery, for an
-- EXISTS may be hashed, and that reads the whole history. $15 is looked up in an object, made once: a search of the
-- input for each row would take the square of their number.
-- Returns (place from 1, id, state or null, fresh) per task; a duplicate has the first task's id and no state.
with input as materialized (
    select nextval('penstock.task_id_seq') as id, i.*,
           coalesce(i.tenant || E'\x1f', '') || i.own_unique_key as unique_key,
           coalesce(i.tenant || E'\x1f', '') || i.own_ordering_key as ordering_key
    from unnest($1::text[], $2::text[], $3::timestamptz[], $4::float8[], $5::int2[], $6::int2[], $7::float8[],
                $8::text[], $9::text[], $10::text[], $11::timestamptz[], $12::float8[], $13::text[], $14::bool[],
                $15::float8[], $16::text[])
        with ordinality as i (action, payload, run_at, delay, priority, max_attempts, timeout, own_unique_key,
                              own_ordering_key, labels, expires_at, expires_in, limit_key, unless_live, unless_since,
                              tenant, place)
    order by i.place
), keyed as (
    insert into penstock.unique_key as k (action, key, task_id, taken_at)
    select distinct on (action, unique_key) action, unique_key, id, now()
    from input where unique_key is not null
    order by action, unique_key, place
    on conflict (action, key) do update set (task_id, taken_at) = (
        select case when free then excluded.task_id else k.task_id end,
               case when free then excluded.taken_at else k.taken_at end
        from (select case
            when excluded.task_id in (select id from input where unless_live)
                then (select h.id from penstock.task_history h where h.id = k.task_id) is not null
                    and (select (s.task_id, s.taken_at) from penstock.unique_key s
                         where s.action = k.action and s.key = k.key) = (k.task_id, k.taken_at)
            else coalesce(k.taken_at <= now() - make_interval(secs => (
                (select jsonb_object_agg(id, unless_since) from input where unless_since is not null)
                ->> excluded.task_id::text)::float8), false)
            end as free) told)
    returning k.action, k.key, k.task_id
), fresh as (
    select i.* from input i left join keyed k on k.action = i.action and k.key = i.unique_key
    where i.unique_key is null or k.task_id = i.id
), heads as (
    insert into penstock.ordering_head as h (key, task_id)
    select distinct on (ordering_key) ordering_key, id
    from fresh where ordering_key is not null
    order by ordering_key, place
    on conflict (key) do update set task_id = h.task_id
    returning h.key, h.task_id
), inserted as (
    insert into penstock.task (id, state, action, payload, run_at, priority, max_attempts, timeout_seconds,
                               unique_key, ordering_key, labels, expires_at, limit_key, tenant, created_at, updated_at)
    select f.id, case when h.task_id <> f.id then 'WAITING' else 'SCHEDULED' end::penstock.task_state,
           f.action, f.payload::json, coalesce(f.run_at, now() + make_interval(secs => coalesce(f.delay, 0))),
           f.priority, f.max_attempts, f.timeout, f.unique_key, f.ordering_key, f.labels::jsonb,
           coalesce(f.expires_at, now() + make_interval(secs => f.expires_in)), f.limit_key, f.tenant, now(), now()
    from fresh f left join heads h on h.key = f.ordering_key
    returning id, state, action
), tallied as (
    insert into penstock.tally (action, event, count)
    select action, 'ENQUEUED', count(*) from inserted group by action
)
select i.place, coalesce(k.task_id, i.id) as id, t.state::text as state, t.id is not null as fresh
from input i
left join keyed k on k.action = i.action and k.key = i.unique_key
left join inserted t on t.id = i.id
order by i.place
"""
_NEW_IN_STATEMENT = [
    (
        "so many seconds ago;\n-- $16 tenants or null. Keys of a tenant are its own: they are kept behind its name.\n",
        "so many seconds ago.\n",
    ),
    (
        """ i.*,
           coalesce(i.tenant || E'\\x1f', '') || i.own_unique_key as unique_key,
           coalesce(i.tenant || E'\\x1f', '') || i.own_ordering_key as ordering_key
""",
        " i.*\n",
    ),
    ("$15::float8[], $16::text[])", "$15::float8[])"),
    ("own_unique_key,\n", "unique_key,\n"),
    (" own_ordering_key, labels", " ordering_key, labels"),
    ("unless_live, unless_since,\n                              tenant, place)", "unless_live, unless_since, place)"),
    ("limit_key, tenant, created_at", "limit_key, created_at"),
    ("f.limit_key, f.tenant, now()", "f.limit_key, now()"),
]  # fmt: skip
_STATEMENT_BEFORE = _STATEMENT
for _now, _before in _NEW_IN_STATEMENT:
    _STATEMENT_BEFORE = _STATEMENT_BEFORE.replace(_now, _before)
_ARGUMENTS = (
    "text[], text[], timestamptz[], float8[], int2[], int2[], float8[], text[], text[], text[], timestamptz[], "
    "float8[], text[], bool[], float8[]"
)
_KEYED = f"""
create function penstock.enqueue_keyed_tasks({_ARGUMENTS}, text[] default null)
returns table (place bigint, id bigint, state text, fresh bool) language plpgsql as $$
#variable_conflict use_column
begin
    return query {_STATEMENT};
end $$
"""
_KEYED_BEFORE = f"""
create function penstock.enqueue_keyed_tasks({_ARGUMENTS})
returns table (place bigint, id bigint, state text, fresh bool) language plpgsql as $$
#variable_conflict use_column
begin
    return query {_STATEMENT_BEFORE};
end $$
"""
# What the function in front learns, each place of its text with what stands there from now on. Its text is changed and
# not repeated: it is long, and nothing else of it changes.
_CHANGES = [
    ("    unique_scope text; unique_seconds", "    tenant text; unique_scope text; unique_seconds"),
    (
        "    expiry_seconds float8[]; limit_keys text[];",
        "    expiry_seconds float8[]; tenants text[]; limit_keys text[];",
    ),
    (
        "            expires_in := null; limit_key := null;",
        "            expires_in := null; tenant := null; limit_key := null;",
    ),
    (
        "                when 'labels' then\n",
        "                when 'tenant' then\n"
        "                    problem := case\n"
        "                        when kind <> 'string' then 'must be text, not ' || kind\n"
        "                        when length(word) not between 1 and 128\n"
        "                            then format('must have 1 to 128 characters, not %s', length(word))\n"
        "                        when word ~ controls then 'holds a control character'\n"
        "                        when word = '*' then 'must not be *, which stands for every tenant in rules' end;\n"
        "                    tenant := word;\n"
        "                when 'labels' then\n",
    ),
    (
        "coalesce(unique_key, ordering_key, labels, limit_key) is null",
        "coalesce(unique_key, ordering_key, labels, limit_key, tenant) is null",
    ),
    (
        "            limit_keys[count] := limit_key;\n",
        "            limit_keys[count] := limit_key;\n            tenants[count] := tenant;\n",
    ),
    (
        "are_live[first:last], unique_since[first:last])",
        "are_live[first:last], unique_since[first:last], tenants[first:last])",
    ),
]


def _rewrite(changes: list[tuple[str, str]]) -> str:
    """A statement that changes the text of penstock.enqueue_tasks, or fails where it is not what it is taken for."""
    lines = []
    for before, after in changes:
        lines.append(
            f"if strpos(body, $a${before}$a$) = 0 then raise exception 'penstock.enqueue_tasks is another one'; "
            f"end if;\n    body := replace(body, $a${before}$a$, $a${after}$a$);"
        )
    return (
        "do $do$ declare body text := pg_get_functiondef('penstock.enqueue_tasks'::regproc); begin\n    "
        + "\n    ".join(lines)
        + "\n    execute body;\nend $do$"
    )


UPGRADE = [
    "alter table penstock.task add column tenant text",
    "alter table penstock.task_history add column tenant text",
    "alter table penstock.schedule add column tenant text",
    "alter table penstock.workflow add column tenant text",
    "alter table penstock.api_key add column tenant text",
    "alter table penstock.gate add column tenant text",
    "create index gate_by_tenant on penstock.gate (tenant) where tenant is not null",
    """
    create index task_acquired_by_tenant on penstock.task (tenant)
        where tenant is not null and gate is not null and state = 'ACQUIRED'
    """,
    """
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
    )
    """,
    """
    create table penstock.tenant_pace (
        name        text primary key,
        tokens      double precision,
        refilled_at timestamptz
    )
    """,
    # In place of the old one, with which a call of 15 arguments could mean either.
    f"drop function penstock.enqueue_keyed_tasks({_ARGUMENTS})",
    _KEYED,
    _rewrite(_CHANGES),
    "revoke all on function penstock.enqueue_keyed_tasks from public",
    "comment on column penstock.task.tenant is 'For whom it is; its keys stand behind this and \\x1f'",
    "comment on column penstock.workflow.tenant is 'For whom it is; its key stands behind this and \\x1f'",
    "comment on column penstock.schedule.tenant is 'For whom its tasks are'",
    "comment on column penstock.api_key.tenant is 'Whose tasks alone the key sees; null: all'",
    "comment on column penstock.gate.tenant is 'Of the tasks that wait at it'",
    "comment on table penstock.tenant is 'What is asked of a tenant; *: of all without limits of their own'",
    "comment on column penstock.tenant.own is 'Its limits count, not those of *'",
    "comment on column penstock.tenant.rate is 'Tasks a second; burst: how many may go at once after a rest'",
    "comment on table penstock.tenant_pace is 'What a tenant''s rate leaves; locked to let its tasks through'",
]

DOWNGRADE = [
    _rewrite([(after, before) for before, after in reversed(_CHANGES)]),
    f"drop function penstock.enqueue_keyed_tasks({_ARGUMENTS}, text[])",
    _KEYED_BEFORE,
    "revoke all on function penstock.enqueue_keyed_tasks from public",
    "drop table penstock.tenant_pace, penstock.tenant",
    "drop index penstock.task_acquired_by_tenant, penstock.gate_by_tenant",
    "alter table penstock.gate drop column tenant",
    "alter table penstock.api_key drop column tenant",
    "alter table penstock.workflow drop column tenant",
    "alter table penstock.schedule drop column tenant",
    "alter table penstock.task_history drop column tenant",
    "alter table penstock.task drop column tenant",
]


def upgrade() -> None:
    for statement in UPGRADE:
        op.execute(statement)


def downgrade() -> None:
    for statement in DOWNGRADE:
        op.execute(statement)
