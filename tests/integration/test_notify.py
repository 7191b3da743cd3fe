from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest

from penstock import notify
from penstock.local.postgres import EmbeddedPostgres
from penstock.notify import CHANNEL, Listener, Notifier
from penstock.store import Store
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
    """A connection of somebody else."""
    connection = await asyncpg.connect(database_url)
    yield connection
    await connection.close()


async def heard(listener: Listener) -> None:
    """Wait for a wake-up and take it."""
    await asyncio.wait_for(listener.event.wait(), 30)
    listener.event.clear()


async def test_a_poke_wakes_a_listener_of_another_process(notifier: Notifier, listener: Listener) -> None:
    notifier.poke()
    await heard(listener)


async def test_many_pokes_at_once_are_one_nudge(notifier: Notifier, listener: Listener, other: Any) -> None:
    nudges: asyncio.Queue[str] = asyncio.Queue()
    await other.add_listener(CHANNEL, lambda *_: nudges.put_nowait("nudge"))
    await other.add_listener("end", lambda *_: nudges.put_nowait("end"))
    for _ in range(1000):
        notifier.poke()
    await heard(listener)
    await other.execute('notify "end"')
    assert [await asyncio.wait_for(nudges.get(), 30) for _ in range(2)] == ["nudge", "end"]


async def test_a_listener_wakes_once_by_itself_for_what_came_before_it_listened(store: Store) -> None:
    listener = Listener(store)
    task = asyncio.create_task(listener.run())
    await heard(listener)
    task.cancel()


async def test_a_listener_whose_connection_is_killed_wakes_and_listens_again(
    notifier: Notifier, listener: Listener, other: Any
) -> None:
    killed = await other.fetchval(
        "select count(pg_terminate_backend(pid)) from pg_stat_activity where application_name = 'penstock-test-listen'"
        " and datname = current_database()"
    )
    assert killed == 1
    await heard(listener)  # connected anew: whatever came meanwhile
    notifier.poke()
    await heard(listener)


async def test_both_survive_an_outage_of_postgres(
    notifier: Notifier, listener: Listener, postgres: EmbeddedPostgres, database_url: str
) -> None:
    async with postgres_away(postgres, database_url):
        notifier.poke()
        await asyncio.sleep(0.2)  # several failed tries to connect
        assert not listener.event.is_set()
    await heard(listener)
    notifier.poke()
    await heard(listener)


async def test_a_half_open_connection_is_found_by_a_question(
    store: Store, monkeypatch: pytest.MonkeyPatch, other: Any
) -> None:
    monkeypatch.setattr(notify, "_WATCHDOG_SECONDS", 0.02)
    listener = Listener(store)
    task = asyncio.create_task(listener.run())
    await heard(listener)
    asked = (
        "select count(*) from pg_stat_activity where application_name = 'penstock-test-listen' and query = 'select 1'"
    )
    async with asyncio.timeout(30):
        while not await other.fetchval(asked + " and datname = current_database()"):
            await asyncio.sleep(0.02)
    task.cancel()
