"""Servers that are lost, slow to answer or read-only, and the connections of a process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest

from penstock.db.connecting import connect
from penstock.db.migrate import upgrade
from penstock.db.pool import Store
from penstock.local.postgres import EmbeddedPostgres
from penstock.protocol.errors import Unavailable
from penstock.protocol.task import NewTask
from penstock.tasks import enqueue
from tests.failover import Address, url_of_hosts


@pytest.fixture
async def address(postgres: EmbeddedPostgres) -> AsyncIterator[Address]:
    async with Address(postgres.port) as address:
        yield address


async def test_half_open_connections_end_long_before_a_statement_times_out(
    database_url: str, address: Address, postgres: EmbeddedPostgres
) -> None:
    store = Store(address.leads_to(database_url), pool_size=4, statement_timeout_seconds=3600)
    begun = [asyncio.Event(), asyncio.Event()]

    async def wait_for_an_answer() -> None:
        async with store.session() as session:
            begun[0].set()
            await session._connection.fetch("select pg_sleep(3600)")

    async def commit() -> None:
        async with store.transaction() as session:
            await enqueue.enqueue(session, [NewTask("never committed")])
            begun[1].set()
            await lost.wait()

    lost = asyncio.Event()
    calls = [asyncio.ensure_future(call()) for call in (wait_for_an_answer, commit)]
    await asyncio.gather(*(event.wait() for event in begun))
    address.lose()
    lost.set()
    async with asyncio.timeout(600):
        assert [type(exc) for exc in await asyncio.gather(*calls, return_exceptions=True)] == [Unavailable, Unavailable]
        address.point_to(postgres.port)
        await store.ping()
    await store.close()


async def test_an_attempt_that_hangs_does_not_keep_a_later_one_from_the_new_server(
    database_url: str, address: Address, postgres: EmbeddedPostgres
) -> None:
    address.lose()
    connecting = asyncio.ensure_future(connect(address.leads_to(database_url), timeout=300))
    await asyncio.sleep(0.1)
    assert not connecting.done()
    address.point_to(postgres.port)
    connection = await connecting
    assert await connection.fetchval("select 1") == 1
    await connection.close()


async def test_a_host_that_does_not_answer_does_not_hide_the_next(database_url: str, address: Address) -> None:
    address.lose()
    connection = await connect(url_of_hosts(address.leads_to(database_url), database_url), timeout=300)
    assert await connection.fetchval("select 1") == 1
    await connection.close()


async def test_of_several_hosts_none_that_takes_no_writes_is_chosen(
    database_url: str, sql: Any, address: Address
) -> None:
    both = [address.leads_to(database_url), database_url]
    await sql.execute(
        f"alter database {await sql.fetchval('select current_database()')} set default_transaction_read_only = on"
    )
    store = Store(url_of_hosts(*both))
    with pytest.raises(Unavailable, match="read-write"):
        await store.ping()
    reading = await connect(url_of_hosts(*both, query="target_session_attrs=any"))
    assert await reading.fetchval("show default_transaction_read_only") == "on"
    await reading.close()
    await sql.execute("set default_transaction_read_only = off")
    await sql.execute(
        f"alter database {await sql.fetchval('select current_database()')} reset default_transaction_read_only"
    )
    await store.ping()
    await store.close()


async def test_a_wrong_password_is_reported_at_once_and_no_other_host_is_tried(database_url: str) -> None:
    parts = urlsplit(database_url)
    wrong = parts._replace(netloc=f"{parts.username}:wrong@{parts.netloc.rpartition('@')[2]}").geturl()
    with pytest.raises(asyncpg.InvalidPasswordError):
        await connect(url_of_hosts(wrong, wrong))


async def test_all_hosts_refused_is_the_refusal(database_url: str) -> None:
    parts = urlsplit(database_url)
    with pytest.raises(OSError):
        await connect(parts._replace(netloc=f"{parts.netloc.rpartition('@')[0]}@127.0.0.1:1,127.0.0.1:2").geturl())


async def test_a_migration_finds_the_host_that_takes_writes(database_url: str, address: Address, sql: Any) -> None:
    name = await sql.fetchval("select current_database()")
    address.lose()
    await asyncio.to_thread(upgrade, url_of_hosts(address.leads_to(database_url), database_url))
    await sql.execute(f"alter database {name} set default_transaction_read_only = on")
    with pytest.raises(asyncpg.TargetServerAttributeNotMatched):
        await asyncio.to_thread(upgrade, url_of_hosts(database_url, database_url))


async def test_a_server_that_takes_no_connection_is_no_slow_statement(database_url: str, address: Address) -> None:
    address.lose()
    store = Store(address.leads_to(database_url))
    with pytest.raises(Unavailable, match="took no connection within") as caught:
        await store.ping()
    assert type(caught.value) is Unavailable
