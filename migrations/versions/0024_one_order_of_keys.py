"""Bodies that name a unique key again take all their keys by one statement, in one order."""

from __future__ import annotations

from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None

# What penstock.enqueue_tasks learns, each place of its text with what stands there from now on; see 0012. As
# store.enqueuing._first_of_each_key_first: what names a key again comes behind all that names one first, and is
# answered as that. A key under two scopes may have two answers; there the order stays.
_CHANGES = [
    ("    earlier int[];\n", "    earlier int[];\n    places int[];\n"),
    (
        """
            earlier := array(
                select lag(t.n) over (partition by t.action, t.key order by t.n)
                from unnest(actions, unique_keys) with ordinality t (action, key, n) order by t.n);
""",
        """
            if not exists (
                select from unnest(actions, tenants, unique_keys, are_live, unique_since)
                    t (action, tenant, key, live, since)
                where t.key is not null group by t.action, t.tenant, t.key
                having count(distinct (t.live, t.since)) > 1
            ) then
                -- The first of each key and what has none, then what names a key again: so the first statement takes
                -- all keys in their sorted order, and two such calls cannot deadlock.
                select array_agg(t.n::int), array_agg(t.action), array_agg(t.payload), array_agg(t.run_at),
                       array_agg(t.delay), array_agg(t.priority), array_agg(t.attempts), array_agg(t.timeout),
                       array_agg(t.key), array_agg(t.ordering_key), array_agg(t.labels), array_agg(t.expires_at),
                       array_agg(t.expires_in), array_agg(t.limit_key), array_agg(t.live and t.times = 1),
                       array_agg(case when t.times = 1 then t.since end), array_agg(t.tenant), array_agg(t.trace),
                       array_agg(t.policy), array_agg(t.given_priority)
                into places, actions, payloads, run_ats, delays, priorities, attempts, timeouts, unique_keys,
                     ordering_keys, all_labels, expiries, expiry_seconds, limit_keys, are_live, unique_since, tenants,
                     traces, policies, given_priorities
                from (
                    select u.*, case when u.key is null then 1 else row_number() over (
                        partition by u.action, u.tenant, u.key order by u.n) end as times
                    from unnest(actions, payloads, run_ats, delays, priorities, attempts, timeouts, unique_keys,
                                ordering_keys, all_labels, expiries, expiry_seconds, limit_keys, are_live,
                                unique_since, tenants, traces, policies, given_priorities)
                        with ordinality u (action, payload, run_at, delay, priority, attempts, timeout, key,
                                           ordering_key, labels, expires_at, expires_in, limit_key, live,
                                           since, tenant, trace, policy, given_priority, n)
                    order by times, u.n) t;
            end if;
            earlier := array(
                select lag(t.n) over (partition by t.action, t.tenant, t.key order by t.n)
                from unnest(actions, tenants, unique_keys) with ordinality t (action, tenant, key, n) order by t.n);
""",
    ),
    (
        "'state', states[last], 'place', last)::text",
        "'state', states[last], 'place', coalesce(places[last], last))::text",
    ),
    (
        """
    return query select t.n::int, t.id, t.state, not t.fresh, t.replaced
        from unnest(ids, states, fresh, were_replaced) with ordinality t (id, state, fresh, replaced, n) order by t.n;
""",
        """
    return query select coalesce(places[t.n], t.n::int), t.id, t.state, not t.fresh, t.replaced
        from unnest(ids, states, fresh, were_replaced) with ordinality t (id, state, fresh, replaced, n) order by 1;
""",
    ),
]


def _rewrite(changes: list[tuple[str, str]]) -> str:
    """A statement that changes the text of penstock.enqueue_tasks, or fails where it is not what it is taken for."""
    lines = [
        f"if strpos(body, $a${before}$a$) = 0 then raise exception 'penstock.enqueue_tasks is another one'; "
        f"end if;\n    body := replace(body, $a${before}$a$, $a${after}$a$);"
        for before, after in changes
    ]
    return (
        "do $do$ declare body text := pg_get_functiondef('penstock.enqueue_tasks'::regproc); begin\n    "
        + "\n    ".join(lines)
        + "\n    execute body;\nend $do$"
    )


def upgrade() -> None:
    op.execute(_rewrite(_CHANGES))


def downgrade() -> None:
    op.execute(_rewrite([(after, before) for before, after in reversed(_CHANGES)]))
