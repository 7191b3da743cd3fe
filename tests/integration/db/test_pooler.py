"""A real PgBouncer before Postgres: it is found, and nothing stays behind on its connections to the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import nullcontext
from typing import Any

import asyncpg
import pytest

from penstock.db.migrate import head_revision, upgrade
from penstock.db.notify import Listener
from penstock.db.pool import Store, open_store
from penstock.db.pooler import PooledConnection
from penstock.db.statements import SQL
from penstock.local.postgres import EmbeddedPostgres
from penstock.protocol.errors import Locked, Unavailable
from penstock.protocol.task import NewTask
from penstock.settings.model import load_settings
from penstock.tasks import claim as claims
from penstock.tasks.enqueue import enqueue
from tests.pgbouncer import WHY_NOT, pgbouncer_before, through, version

STARTUP_PARAMETERS = "statement_timeout,lock_timeout,idle_in_transaction_session_timeout,jit,enable_seqscan"

pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))


@pytest.fixture
def narrow_url(database_url: str, postgres: EmbeddedPostgres) -> Any:
    """The database through a PgBouncer with one connection to the server."""
    with pgbouncer_before(postgres.dsn(), default_pool_size="1") as found:
        yield through(database_url, found.port)


@pytest.fixture
async def pooled(narrow_url: str) -> AsyncIterator[Store]:
    store = Store(narrow_url, statement_timeout_seconds=7)
    yield store
    await store.close()


async def in_force(session: Any, asked: Mapping[str, str]) -> bool:
    return not await session.fetch("find_ignored_settings", [*asked], [*asked.values()], "")


async def test_a_direct_connection_is_none_of_a_pooler(store: Store) -> None:
    async with (await store.open()).acquire() as connection:
        assert PooledConnection not in type(connection._con).__mro__
    assert not store.is_pooled


async def test_a_pooler_is_found_and_every_statement_runs_under_the_settings(pooled: Store) -> None:
    async with pooled.session() as session:
        assert await in_force(session, pooled.asked)
    async with pooled.transaction() as session:
        assert await in_force(session, pooled.asked)
        async with session.savepoint(hurried=True):
            assert await in_force(session, {"lock_timeout": "20", "statement_timeout": "700"})
            assert not await in_force(session, pooled.asked)
    assert pooled.is_pooled


async def test_nothing_stays_behind_on_the_connection_of_the_server(pooled: Store, narrow_url: str) -> None:
    async with pooled.session() as session:
        await enqueue(session, [NewTask("demo", "{}") for _ in range(60)])
        assert await claims.claim(session, 60) is not None
    with pytest.raises(Locked):
        async with pooled.transaction() as session:
            await session.fetch("try_upkeep_lock")
            raise Locked("as a lock does")
    other = await asyncpg.connect(narrow_url, statement_cache_size=0)
    try:
        async with other.transaction():
            for name in pooled.asked:
                reset = await other.fetchval("select reset_val from pg_settings where name = $1", name)
                assert await other.fetchval("select setting from pg_settings where name = $1", name) == reset
            named = "select name from pg_prepared_statements where name not like 'PGBOUNCER\\_%' and name <> ''"
            assert await other.fetch(named) == []
            assert await other.fetchval("select count(*) from pg_locks where locktype = 'advisory'") == 0
    finally:
        await other.close()


async def test_statements_stay_prepared_where_the_pooler_keeps_them(pooled: Store) -> None:
    async with pooled.session() as session:
        for _ in range(3):
            await session.fetch("read_states", [1])
    async with pooled.transaction() as session:
        rows = await session._connection.fetch(
            "select statement from pg_prepared_statements where name like 'PGBOUNCER\\_%'"
        )
        found = {row["statement"].rstrip() for row in rows}
    assert pooled.keeps_statements == (version() >= (1, 21))
    assert (SQL["read_states"] in found) == pooled.keeps_statements


async def test_a_statement_whose_result_a_migration_changes_is_planned_again(
    narrow_url: str, pooled: Store, sql: Any
) -> None:
    others = [Store(narrow_url), Store(narrow_url)]
    await sql.execute("create table penstock.changing (a int); insert into penstock.changing values (1)")
    query = "select * from penstock.changing"
    for store in (pooled, *others):
        async with store.session() as session:
            assert len(await session._connection.fetch(query)) == 1
    await sql.execute("alter table penstock.changing alter a type text")
    for store in (pooled, *others):
        async with store.session() as session:
            assert (await session._connection.fetch(query))[0]["a"] == "1"
    await sql.execute("alter table penstock.changing add b int")
    with nullcontext() if not pooled.keeps_statements else pytest.raises(Unavailable):
        async with pooled.transaction() as session:
            await session._connection.fetch(query)
    async with pooled.transaction() as session:
        assert list((await session._connection.fetch(query))[0].keys()) == ["a", "b"]
    for store in others:
        await store.close()


async def test_more_clients_than_connections_of_the_server(narrow_url: str) -> None:
    stores = [Store(narrow_url, pool_size=2) for _ in range(4)]

    async def work(store: Store) -> None:
        for _ in range(5):
            async with store.transaction() as session:
                await enqueue(session, [NewTask("demo", "{}")])

    await asyncio.gather(*(work(store) for store in stores for _ in range(2)))
    async with stores[0].session() as session:
        found = await claims.claim(session, 100)
    assert found is not None
    assert len(found.tasks) == 40
    for store in stores:
        await store.close()


async def test_wake_ups_come_by_the_url_that_passes_the_pooler(database_url: str, narrow_url: str) -> None:
    settings = load_settings(database_url=narrow_url, database_listen_url=database_url)
    store = open_store(settings, "penstock-test")
    listener = Listener(store)
    listening = asyncio.create_task(listener.run())
    await listener.event.wait()  # it listens
    listener.event.clear()
    await store.fetch("notify_work", "penstock_work", "")
    await asyncio.wait_for(listener.event.wait(), 20)
    listening.cancel()
    await store.close()


async def test_without_that_url_no_connection_listens(pooled: Store) -> None:
    assert await pooled.connect() is None


async def test_a_pooler_in_session_mode_keeps_prepared_statements_if_it_is_named(
    database_url: str, postgres: EmbeddedPostgres
) -> None:
    ignored = {"pool_mode": "session", "ignore_startup_parameters": STARTUP_PARAMETERS}
    with pgbouncer_before(postgres.dsn(), **ignored) as before:
        url = through(database_url, before.port)
        store, found = Store(url, pooler="session", pool_size=1), Store(url, pool_size=1)
        for name, value in store.asked.items():  # as the page says, there for the role
            postgres.execute(f"alter database {url.rpartition('/')[2]} set {name} = '{value}'")
        async with store.session() as session:
            assert await in_force(session, store.asked)
        assert not store.is_pooled
        await found.ping()
        assert found.is_pooled  # the settings would not be in force otherwise
        await store.close()
        await found.close()


async def test_one_named_in_session_mode_that_refuses_the_settings_is_an_error(narrow_url: str) -> None:
    store = Store(narrow_url, pooler="session")
    with pytest.raises(Unavailable, match="unsupported startup parameter"):
        await store.ping()


async def test_a_statement_waits_for_a_lock_no_longer_than_on_a_direct_connection(pooled: Store, sql: Any) -> None:
    async with sql.transaction():
        await sql.execute("lock table penstock.task")
        with pytest.raises(Locked):
            await pooled.fetch("read_states", [1])
    assert await pooled.fetch("read_states", [1]) == []


def test_the_schema_is_migrated_through_a_pooler(empty_database_url: str, postgres: EmbeddedPostgres) -> None:
    name = empty_database_url.rpartition("/")[2]
    with pgbouncer_before(postgres.dsn()) as before:
        for _ in range(2):
            upgrade(through(empty_database_url, before.port))
        held = "select count(*) from pg_locks where locktype = 'advisory'"
        assert postgres.fetch_value(held, database=name) == 0
    found = postgres.fetch_value("select version_num from penstock.alembic_version", database=name)
    assert found == head_revision()
