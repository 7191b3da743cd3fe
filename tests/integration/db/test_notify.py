from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest
import structlog

from penstock.db import notify
from penstock.db.notify import CHANNEL, Listener, Notifier
from penstock.db.pool import Store
from penstock.local.postgres import EmbeddedPostgres
from penstock.protocol.errors import Unavailable
from tests.integration.doors import postgres_away


@pytest.fixture
async def listener(store: Store, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Listener]:
    """Listening already, its first wake-up taken."""
    monkeypatch.setattr(notify, "_RECONNECT_SECONDS", 0.05)
    monkeypatch.setattr(notify, "_WATCHDOG_SECONDS", 3600)
    listener = Listener(store)
    task = asyncio.create_task(listener.run())
    await heard(listener)
    yield listener
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
async def notifier(store: Store) -> AsyncIterator[Notifier]:
    notifier = Notifier(store)
    task = asyncio.create_task(notifier.run())
    yield notifier
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
async def other(database_url: str) -> AsyncIterator[Any]:
    """A connection of another program."""
    connection = await asyncpg.connect(database_url)
    yield connection
    await connection.close()


async def listening(other: Any) -> list[int]:
    """The server's processes of the connections that listen."""
    rows = await other.fetch(
        "select pid from pg_stat_activity where application_name = 'penstock-test-listen'"
        " and datname = current_database()"
    )
    return [row["pid"] for row in rows]


async def heard(listener: Listener) -> None:
    """Wait for a wake-up and take it."""
    await asyncio.wait_for(listener.event.wait(), 30)
    listener.event.clear()


async def test_a_wake_up_reaches_a_listener_on_another_connection(
    notifier: Notifier, listener: Listener, other: Any
) -> None:
    senders: asyncio.Queue[int] = asyncio.Queue()
    await other.add_listener(CHANNEL, lambda _connection, pid, *_: senders.put_nowait(pid))
    notifier.wake()
    await heard(listener)
    async with asyncio.timeout(30):
        sender = await senders.get()
    assert sender not in await listening(other)
    assert not listener.event.is_set()


async def test_many_wakes_at_once_are_one_wake_up(notifier: Notifier, listener: Listener, other: Any) -> None:
    wake_ups: asyncio.Queue[str] = asyncio.Queue()
    await other.add_listener(CHANNEL, lambda *_: wake_ups.put_nowait("wake-up"))
    await other.add_listener("end", lambda *_: wake_ups.put_nowait("end"))
    for _ in range(1000):
        notifier.wake()
    await heard(listener)
    await other.execute('notify "end"')
    assert [await asyncio.wait_for(wake_ups.get(), 30) for _ in range(2)] == ["wake-up", "end"]


async def test_a_listener_wakes_once_unasked_for_what_came_before_it_listened(store: Store, listener: Listener) -> None:
    async with store.session() as session:
        await session.fetch("notify_work", CHANNEL, "")
    await heard(listener)
    late = Listener(store)
    assert not late.event.is_set()
    task = asyncio.create_task(late.run())
    await heard(late)
    async with store.session() as session:
        await session.fetch("notify_work", CHANNEL, "")
    await heard(listener)
    await heard(late)
    assert not late.event.is_set()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_listener_whose_connection_is_killed_wakes_and_listens_again(
    notifier: Notifier, listener: Listener, other: Any
) -> None:
    (killed,) = await listening(other)
    assert await other.fetchval("select pg_terminate_backend($1, 10000)", killed)
    await heard(listener)  # connected again: whatever came meanwhile
    (again,) = await listening(other)
    assert again != killed
    notifier.wake()
    await heard(listener)
    assert not listener.event.is_set()


async def test_both_survive_an_outage_of_postgres(
    store: Store, notifier: Notifier, listener: Listener, postgres: EmbeddedPostgres, database_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    refused = 0
    connect = store.connect

    async def counted() -> Any:
        nonlocal refused
        try:
            return await connect()
        except Unavailable:
            refused += 1
            raise

    monkeypatch.setattr(store, "connect", counted)
    async with postgres_away(postgres, database_url):
        notifier.wake()
        async with asyncio.timeout(30):
            while refused < 2:
                await asyncio.sleep(0.02)
        assert not listener.event.is_set()
    await heard(listener)
    notifier.wake()
    await heard(listener)


async def test_a_half_open_connection_is_found_by_a_question(
    store: Store, monkeypatch: pytest.MonkeyPatch, other: Any
) -> None:
    monkeypatch.setattr(notify, "_WATCHDOG_SECONDS", 0.02)
    listener = Listener(store)
    task = asyncio.create_task(listener.run())
    await heard(listener)
    (pid,) = await listening(other)
    asked = "select query_start from pg_stat_activity where pid = $1 and query = 'show transaction_read_only'"
    times = set()
    async with asyncio.timeout(30):
        while len(times) < 2:
            times |= {row["query_start"] for row in await other.fetch(asked, pid)}
            await asyncio.sleep(0.02)
    assert await listening(other) == [pid]  # answered, it stays as it is
    assert not listener.event.is_set()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_server_that_takes_no_writes_any_more_is_left(
    store: Store, monkeypatch: pytest.MonkeyPatch, other: Any
) -> None:
    monkeypatch.setattr(notify, "_WATCHDOG_SECONDS", 0.02)
    monkeypatch.setattr(notify, "_RECONNECT_SECONDS", 0.05)
    listener = Listener(store)
    task = asyncio.create_task(listener.run())
    await heard(listener)
    (pid,) = await listening(other)
    try:
        # An old primary of which the name leads to another one by now: no connection to it ends.
        await other.execute("alter system set default_transaction_read_only = on")
        await other.execute("select pg_reload_conf()")
        async with asyncio.timeout(30):
            while pid in await listening(other):
                await asyncio.sleep(0.02)
    finally:
        await other.execute("alter system reset default_transaction_read_only")
        await other.execute("select pg_reload_conf()")
    await heard(listener)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_notifier_goes_on_while_the_queue_of_notifications_is_full(
    notifier: Notifier, listener: Listener, other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture = structlog.testing.LogCapture()
    monkeypatch.setattr(notify, "log", structlog.wrap_logger(None, processors=[capture]))
    await other.execute("alter function pg_catalog.pg_notify(text, text) rename to notify_really")
    await other.execute(
        """create function public.pg_notify(text, text) returns void language plpgsql as $$ begin
        raise 'too many notifications in the NOTIFY queue' using errcode = 'program_limit_exceeded'; end $$"""
    )
    async with asyncio.timeout(30):
        while not capture.entries:
            notifier.wake()
            await asyncio.sleep(0.02)
    await other.execute("drop function public.pg_notify(text, text)")
    await other.execute("alter function pg_catalog.notify_really(text, text) rename to pg_notify")
    listener.event.clear()
    notifier.wake()
    await heard(listener)
    assert [(line["event"], line["log_level"]) for line in capture.entries] == [("notify_failed", "warning")]
    assert "too many notifications" in capture.entries[0]["reason"]
