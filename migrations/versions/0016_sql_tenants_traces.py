"""A tenant and a trace for tasks enqueued by SQL, in the very statements that enqueue them."""

from __future__ import annotations

from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

# sql/traces.sql. A test holds the texts together.
_TRACED = """
-- $1 actions, $2 payloads (JSON text), $3 run_at or null, $4 delay in seconds or null, $5 priorities, $6 max_attempts,
-- $7 timeout in seconds or null, $8 traces or null. As enqueue_plain_tasks in all else.
with inserted as (
    insert into penstock.task (id, state, action, payload, run_at, priority, max_attempts, timeout_seconds, trace,
                               created_at, updated_at)
    select nextval('penstock.task_id_seq'), 'SCHEDULED', i.action, i.payload::json,
           coalesce(i.run_at, now() + make_interval(secs => coalesce(i.delay, 0))),
           i.priority, i.max_attempts, i.timeout, i.trace, now(), now()
    from unnest($1::text[], $2::text[], $3::timestamptz[], $4::float8[], $5::int2[], $6::int2[], $7::float8[],
                $8::text[])
        with ordinality as i (action, payload, run_at, delay, priority, max_attempts, timeout, trace, place)
    order by i.place
    returning id, action
), tallied as (
    insert into penstock.tally (action, event, count)
    select action, 'ENQUEUED', count(*) from inserted group by action
)
select id from inserted order by id
"""
_NOTE = """
-- $1 ids (distinct) of tasks that this transaction has added, $2 traces. Behind enqueue_keyed_tasks. Touches no indexed
-- column, so the update is HOT.
update penstock.task t set trace = i.trace
from (select * from unnest($1::bigint[], $2::text[]) i (id, trace)) i
where t.id = i.id and t.id = any($1::bigint[])
"""
_STATEMENTS = [
    f"""
    create function penstock.enqueue_traced_tasks(
        text[], text[], timestamptz[], float8[], int2[], int2[], float8[], text[])
    returns table (id bigint) language plpgsql as $$
    #variable_conflict use_column
    begin
        return query {_TRACED};
    end $$
    """,
    f"""
    create function penstock.note_traces(bigint[], text[]) returns void language plpgsql as $$
    begin
        {_NOTE};
    end $$
    """,
]

# As tracecontext.parse: what is no context is null, and a state that is none is left out.
_READ_TRACE = r"""
create function penstock.read_trace(traceparent text, tracestate text) returns text language plpgsql immutable as $$
declare
    found constant text[] := regexp_match(btrim(traceparent, E' \t'),
                                          '^([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?$');
    state text;
begin
    if found is null or found[1] = 'ff' or found[2] ~ '^0+$' or found[3] ~ '^0+$'
            or (found[1] = '00' and found[5] is not null) then
        return null;
    end if;
    if length(tracestate) <= 512 then
        select string_agg(m.member, ',' order by m.place) into state
        from (select btrim(s.part, E' \t') as member, s.place
              from unnest(string_to_array(tracestate, ',')) with ordinality s (part, place)) m
        cross join lateral (select split_part(m.member, '=', 1) as key, split_part(m.member, '=', 2) as value) t
        where m.member <> ''
        having count(*) <= 32 and count(*) = count(distinct t.key) and bool_and(
            t.value ~ '^[\u0020-\u002b\u002d-\u003c\u003e-\u007e]+$' and length(t.value) <= 256
            and m.member = t.key || '=' || t.value and (
                (t.key ~ '^[a-z][a-z0-9_*/-]*$' and length(t.key) <= 256)
                or (t.key ~ '^[a-z0-9][a-z0-9_*/-]*@[a-z][a-z0-9_*/-]*$'
                    and length(split_part(t.key, '@', 1)) <= 241 and length(split_part(t.key, '@', 2)) <= 14)));
    end if;
    -- Of the flags two are known; a newer version may mean something else by the others.
    return '00-' || found[2] || '-' || found[3] || '-' || lpad(to_hex(('x' || found[4])::bit(8)::int & 3), 2, '0')
        || coalesce(' ' || state, '');
end $$
"""

# What the function behind both doors learns, each place of its text with what stands there from now on; see 0012.
_CHANGES = [
    ("    is_usual bool := true;\n", "    is_usual bool := true;\n    is_traced bool := false;\n"),
    (
        "    tenant text; unique_scope text;",
        "    tenant text; traceparent text; tracestate text; read_parent text; read_state text; trace text;\n"
        "    unique_scope text;",
    ),
    ("tenants text[]; limit_keys text[];", "tenants text[]; traces text[]; limit_keys text[];"),
    (
        "tenant := null; limit_key := null;",
        "tenant := null; traceparent := null; tracestate := null;\n            limit_key := null;",
    ),
    (
        "                when 'labels' then\n",
        "                when 'traceparent' then\n"
        "                    -- Never a problem: a trace is not worth a task.\n"
        "                    traceparent := case when kind = 'string' then word end;\n"
        "                when 'tracestate' then\n"
        "                    tracestate := case when kind = 'string' then word end;\n"
        "                when 'labels' then\n",
    ),
    (
        "            tenants[count] := tenant;\n",
        "            tenants[count] := tenant;\n"
        "            if traceparent is not null then\n"
        "                if traceparent is distinct from read_parent or tracestate is distinct from read_state then\n"
        "                    -- Once for all that belong to one span, as tasks of one call mostly do.\n"
        "                    trace := penstock.read_trace(traceparent, tracestate);\n"
        "                    read_parent := traceparent; read_state := tracestate;\n"
        "                end if;\n"
        "                traces[count] := trace;\n"
        "                is_traced := is_traced or trace is not null;\n"
        "            else\n"
        "                traces[count] := null;\n"
        "            end if;\n",
    ),
    (
        "        ids := array(select p.id from penstock.enqueue_plain_tasks(\n"
        "            actions, payloads, run_ats, delays, priorities, attempts, timeouts) p order by p.id);\n",
        "        if is_traced then\n"
        "            ids := array(select p.id from penstock.enqueue_traced_tasks(\n"
        "                actions, payloads, run_ats, delays, priorities, attempts, timeouts, traces) p\n"
        "                order by p.id);\n"
        "        else\n"
        "            ids := array(select p.id from penstock.enqueue_plain_tasks(\n"
        "                actions, payloads, run_ats, delays, priorities, attempts, timeouts) p order by p.id);\n"
        "        end if;\n",
    ),
    (
        "        if false = any(fresh) then\n",
        "        if is_traced then\n"
        "            perform penstock.note_traces(\n"
        "                array(select t.id from unnest(ids, fresh, traces) t (id, fresh, trace)\n"
        "                      where t.fresh and t.trace is not null order by t.id),\n"
        "                array(select t.trace from unnest(ids, fresh, traces) t (id, fresh, trace)\n"
        "                      where t.fresh and t.trace is not null order by t.id));\n"
        "        end if;\n"
        "        if false = any(fresh) then\n",
    ),
]
_DOOR_CHANGES = [
    (
        "on_duplicate text DEFAULT NULL::text)",
        "on_duplicate text DEFAULT NULL::text, tenant text DEFAULT NULL::text, traceparent text DEFAULT NULL::text, "
        "tracestate text DEFAULT NULL::text)",
    ),
    (
        "            ('on_duplicate', to_json(on_duplicate))) m",
        "            ('on_duplicate', to_json(on_duplicate)), ('tenant', to_json(tenant)),\n"
        "            ('traceparent', to_json(traceparent)), ('tracestate', to_json(tracestate))) m",
    ),
]


def _replaced(function: str, changes: list[tuple[str, str]]) -> str:
    """Statements of PL/pgSQL that change a function's definition in ``body``, or fail where it is another one."""
    return "\n    ".join(
        f"if strpos(body, $a${before}$a$) = 0 then raise exception '{function} is another one'; end if;\n"
        f"    body := replace(body, $a${before}$a$, $a${after}$a$);"
        for before, after in changes
    )


def _rewrite(changes: list[tuple[str, str]]) -> str:
    """Change the function behind the doors."""
    return f"""
do $do$
declare
    body text := pg_get_functiondef('penstock.enqueue_tasks'::regproc);
begin
    {_replaced("penstock.enqueue_tasks", changes)}
    execute body;
end $do$
"""


def _new_door(changes: list[tuple[str, str]]) -> str:
    """Put a penstock_enqueue with other arguments in place of the one that is there.

    Beside it, each call of either could mean both. Whoever might call the old one may call the new one: nobody who
    enqueues has to be granted anything anew. Statements prepared before are planned anew by the server.
    """
    return f"""
do $do$
declare
    was constant oid := 'public.penstock_enqueue'::regproc;
    body text := pg_get_functiondef(was);
    given record;
begin
    {_replaced("public.penstock_enqueue", changes)}
    alter function public.penstock_enqueue rename to penstock_enqueue_before;
    execute body;
    revoke all on function public.penstock_enqueue from public;
    for given in
        select case when a.grantee = 0 then 'public' else a.grantee::regrole::text end as role, a.is_grantable
        from pg_proc p cross join aclexplode(p.proacl) a where p.oid = was and a.grantee <> p.proowner
    loop
        execute format('grant execute on function public.penstock_enqueue to %s', given.role)
            || case when given.is_grantable then ' with grant option' else '' end;
    end loop;
    drop function public.penstock_enqueue_before;
    comment on function public.penstock_enqueue is 'Adds a task in the caller''s transaction';
end $do$
"""


_FUNCTIONS = ["penstock.enqueue_traced_tasks", "penstock.note_traces", "penstock.read_trace"]

UPGRADE = [
    *_STATEMENTS,
    _READ_TRACE,
    *(f"revoke all on function {name} from public" for name in _FUNCTIONS),
    _rewrite(_CHANGES),
    _new_door(_DOOR_CHANGES),
    "comment on function public.penstock_note_trace is "
    "'Of the version before, whose programs call it: penstock_enqueue_many takes traceparent with each task'",
]

DOWNGRADE = [
    "comment on function public.penstock_note_trace is 'Has tasks that this transaction added belong to a trace'",
    _new_door([(after, before) for before, after in reversed(_DOOR_CHANGES)]),
    _rewrite([(after, before) for before, after in reversed(_CHANGES)]),
    *(f"drop function {name}" for name in reversed(_FUNCTIONS)),
]


def upgrade() -> None:
    for statement in UPGRADE:
        op.execute(statement)


def downgrade() -> None:
    for statement in DOWNGRADE:
        op.execute(statement)
