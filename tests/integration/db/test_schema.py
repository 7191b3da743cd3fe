"""Two installations side by side in one database, each in a schema of its own."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import asyncpg
import pytest

from penstock.cli.doctor.database import examine_database, examine_stored
from penstock.cli.doctor.findings import Report
from penstock.db.migrate import downgrade, grant, upgrade
from penstock.db.notify import Listener, Notifier
from penstock.db.pool import Store, open_store
from penstock.local.postgres import EmbeddedPostgres
from penstock.protocol.task import NewTask
from penstock.settings.model import load_settings
from penstock.supervisor.retention import Retention
from penstock.tasks import claim as claims
from penstock.tasks import enqueue, settle, transactional

SCHEMAS = ("penstock", "orders")
PARAMETER = re.compile(r"\bpenstock\.(notify|max_attempts|payload_limit_bytes|result_limit_bytes)")

# What a schema consists of, without its own name.
CATALOG = """
select 'table ' || c.relname || ' ' || c.relkind::text || ' ' || coalesce(obj_description(c.oid, 'pg_class'), '')
from pg_class c where relnamespace = to_regnamespace($1)
union all
select 'column ' || attrelid::regclass || '.' || attname || ' ' || format_type(atttypid, atttypmod)
from pg_attribute a join pg_class c on c.oid = attrelid where relnamespace = to_regnamespace($1) and attnum > 0
union all
select 'index ' || indexdef from pg_indexes where schemaname = $1
union all
select 'constraint ' || conrelid::regclass || ' ' || pg_get_constraintdef(oid) from pg_constraint
where connamespace = to_regnamespace($1)
union all
select 'function ' || pg_get_functiondef(oid) from pg_proc
where pronamespace = to_regnamespace($1) or pronamespace = 'public'::regnamespace and proname like $1 || '\\_%'
union all
select 'trigger ' || pg_get_triggerdef(t.oid) from pg_trigger t join pg_class c on c.oid = tgrelid
where relnamespace = to_regnamespace($1) and not tgisinternal
"""


async def catalog(connection: Any, schema: str) -> list[str]:
    found = [row[0] for row in await connection.fetch(CATALOG, schema)]
    named = (PARAMETER.sub(r"the.\1", text) for text in found)
    return sorted(re.sub(rf"\b{schema}(?=[._'])", "S", text) for text in named)


@pytest.fixture
def other() -> str:
    return SCHEMAS[1]


@pytest.fixture
def both(empty_database_url: str, other: str) -> str:
    for schema in (SCHEMAS[0], other):
        upgrade(empty_database_url, schema=schema)
    return empty_database_url


async def ids_of(store: Store) -> list[int]:
    async with store.session() as session:
        (page,) = await session.fetch("list_tasks", 2**63 - 1, 100, 100, None, 0, *[None] * 4)
    return list(page["ids"])


async def test_both_have_the_same_tables_and_functions(both: str) -> None:
    connection = await asyncpg.connect(both, server_settings={"search_path": ""})  # so every name is qualified
    usual, other = [await catalog(connection, schema) for schema in SCHEMAS]
    await connection.close()
    assert len(usual) > 500
    assert usual == other


@pytest.mark.parametrize("other", ["orders", "penstock_staging"])
async def test_tasks_of_one_are_neither_seen_nor_run_nor_woken_by_the_other(both: str, other: str) -> None:
    stores = {
        schema: open_store(load_settings(database_url=both, database_schema=schema), "x")
        for schema in ("penstock", other)
    }
    listeners = {schema: Listener(store) for schema, store in stores.items()}
    listening = [asyncio.ensure_future(listener.run()) for listener in listeners.values()]
    for listener in listeners.values():
        await asyncio.wait_for(listener.event.wait(), 30)  # it listens
        listener.event.clear()
    notifier = Notifier(stores[other])
    sending = asyncio.ensure_future(notifier.run())
    async with stores[other].session() as session:
        first = (await enqueue.enqueue(session, [NewTask("a")]))[0].id
    notifier.wake()
    await asyncio.wait_for(listeners[other].event.wait(), 30)
    assert not listeners["penstock"].event.is_set()

    connection = await asyncpg.connect(both)
    settings = load_settings(database_url=both, database_schema=other)
    async with connection.transaction():
        second = (await transactional.enqueue(connection, "b", settings=settings))["id"]
    assert await ids_of(stores[other]) == [second, first]
    assert await ids_of(stores["penstock"]) == []

    async with stores["penstock"].transaction() as session:
        assert await claims.claim(session, 10) is None
    async with stores[other].transaction() as session:
        dispatch = await claims.claim(session, 10)
        assert dispatch is not None
        assert sorted(task.id for task in dispatch.tasks) == [first, second]
        assert await settle.finish(session, {(first, dispatch.id): "1"}) == 1
    async with connection.transaction():
        answer = await connection.fetchval(f"select public.{other}_settle($1, '2')", f"{second}:{dispatch.id}")
        assert answer is True
    assert await connection.fetchval(f"select count(*) from {other}.task_success") == 2
    await connection.close()
    for task in (*listening, sending):
        task.cancel()
    for store in stores.values():
        await store.close()


async def test_upkeep_of_both_goes_on_at_the_same_time(both: str) -> None:
    stores = [open_store(load_settings(database_url=both, database_schema=schema), "x") for schema in SCHEMAS]
    async with stores[0].transaction() as session, stores[1].transaction() as other:
        for either in (session, other):
            assert await either.value("try_upkeep_lock")
            assert await either.value("lock_publishing")
            await either.fetch("lock_delayed_record_keys", ["source"], [b"key"])
            await either.fetch("hold_results_lock")
        held = (
            "select count(distinct (classid, objid)) from pg_locks where locktype = 'advisory' and database = $1::oid"
        )
        connection = await asyncpg.connect(both)
        name = await connection.fetchval("select oid from pg_database where datname = current_database()")
        assert await connection.fetchval(held, name) == 2 * 4
        await connection.close()
    connection = await asyncpg.connect(both)
    parts = "select relname::text from pg_class where relnamespace = to_regnamespace($1) and relname ~ $2"
    days = "^task_success_[0-9]*$"
    kept = {row[0] for row in await connection.fetch(parts, "penstock", days)}
    await connection.execute(f"drop table orders.{max(kept)}")
    await Retention(store=stores[1], settings=load_settings(database_url=both, database_schema="orders")).run_once()
    assert {row[0] for row in await connection.fetch(parts, "orders", days)} == kept
    await connection.close()
    for store in stores:
        await store.close()


async def test_doctor_looks_at_the_schema_that_is_set(both: str) -> None:
    report = Report()
    await examine_database(load_settings(database_url=both, database_schema="orders"), report)
    found = {finding.what: finding for finding in report.findings}
    assert found["schema"].level == "ok"
    assert found["privileges"].level == "ok"
    report = Report()
    await examine_database(load_settings(database_url=both, database_schema="missing"), report)
    assert {finding.what: finding.fix for finding in report.findings}["schema"] == "run `penstock migrate`"


async def test_the_fix_of_a_broken_invariant_names_the_schema_that_is_set(both: str) -> None:
    settings = load_settings(database_url=both, database_schema="orders")
    async with open_store(settings, "x") as store, store.session() as session:
        await enqueue.enqueue(session, [NewTask("a")])
    connection = await asyncpg.connect(both)
    await connection.execute("update orders.task set claim = 1000")
    await connection.close()
    report = Report()
    await examine_stored(settings, report)
    (found,) = [finding for finding in report.findings if finding.what == "every claim has a token of its own"]
    assert found.level == "error"
    assert "setval('orders.claim_seq'" in found.fix
    assert "penstock." not in found.fix


def test_one_is_dropped_without_the_other_and_granted_apart(both: str, postgres: EmbeddedPostgres) -> None:
    database = both.rpartition("/")[2]
    postgres.execute("create role penstock_runner login")
    try:
        asyncio.run(grant(both, "penstock_runner", schema="orders"))
        for schema, expected in (("orders", True), ("penstock", False)):
            query = "select has_schema_privilege('penstock_runner', $1, 'usage')"
            assert postgres.fetch_value(query, schema, database=database) is expected
        downgrade(both, "base", schema="orders")
        count = "select count(*) from pg_class where relnamespace = to_regnamespace($1) and relkind in ('r', 'p')"
        assert postgres.fetch_value(count, "orders", database=database) == 1  # of the revision
        assert postgres.fetch_value(count, "penstock", database=database) > 30
        functions = (
            "select array_agg(proname::text order by 1) from pg_proc where pronamespace = 'public'::regnamespace"
        )
        assert all(name.startswith("penstock_") for name in postgres.fetch_value(functions, database=database))
    finally:
        postgres.execute("drop owned by penstock_runner", database)
        postgres.execute("drop role penstock_runner")
