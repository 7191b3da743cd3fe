"""What integration tests take: the store and the three queues of the test's own settings."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from penstock.brokers.sqs import SqsQueue, SqsTransport
from penstock.db.connecting import connect
from penstock.db.pool import Store
from penstock.settings.model import Settings


@pytest.fixture
async def store(application_url: str) -> AsyncIterator[Store]:
    store = Store(application_url, application_name="penstock-test")
    yield store
    await store.close()


@pytest.fixture
async def sql(database_url: str) -> AsyncIterator[Any]:
    """A connection of its own, for what no statement of ours does, such as making a row older than it is."""
    connection = await connect(database_url)
    yield connection
    await connection.close()


@pytest.fixture
async def transport(settings: Settings) -> AsyncIterator[SqsTransport]:
    transport = SqsTransport(settings)
    yield transport
    await transport.close()


@pytest.fixture
def inbound(transport: SqsTransport, settings: Settings) -> SqsQueue:
    return transport.queue(settings.inbound_queue, label="inbound")


@pytest.fixture
def outbound(transport: SqsTransport, settings: Settings) -> SqsQueue:
    return transport.queue(settings.outbound_queue, label="outbound")


@pytest.fixture
def results(transport: SqsTransport, settings: Settings) -> SqsQueue:
    return transport.queue(settings.results_queue, label="results")


@pytest.fixture
def task_of(store: Store) -> Callable[[int], Any]:
    """A task's whole row, live or settled, as a record; None when there is none."""

    async def read(task_id: int) -> Any:
        async with store.session() as session:
            rows = await session.fetch("read_tasks", [task_id])
        return rows[0] if rows else None

    return read
