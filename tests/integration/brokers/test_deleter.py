"""Deletes that wait for others: ten in a call, none for longer than its lease allows, all of them at the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager

import pytest

from penstock.brokers.base import Depth, Message
from penstock.brokers.receiving import Deleter
from penstock.brokers.sqs import SqsQueue, SqsTransport
from penstock.settings.model import Settings, load_settings
from tests.integration.doors import SqsProxy, put, sqs_proxy, take
from tests.integration.test_sqs_faults import failing

PATIENCE_SECONDS = 30
LONG = 600
EMPTY = Depth(0, 0, 0)


@pytest.fixture
def database_url() -> str:
    """No test here touches Postgres."""
    return "postgresql://nobody@127.0.0.1:1/none"


@pytest.fixture
def proxy(sqs_url: str) -> Iterator[SqsProxy]:
    with sqs_proxy(sqs_url) as proxy:
        yield proxy


@pytest.fixture
async def watched(settings: Settings, proxy: SqsProxy) -> AsyncIterator[SqsQueue]:
    transport = SqsTransport(load_settings(sqs_endpoint_url=proxy.url, aws_region="us-east-1"))
    yield transport.queue(settings.outbound_queue, label="outbound")
    await transport.close()


@asynccontextmanager
async def running(deleter: Deleter) -> AsyncIterator[None]:
    task = asyncio.create_task(deleter.run())
    try:
        yield
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not await condition():
            await asyncio.sleep(0.02)


def patient(visibility_seconds: int) -> Settings:
    """Deletes may wait for a minute."""
    return load_settings(billed_call_wait_seconds=60, visibility_timeout_seconds=visibility_seconds)


def calls(proxy: SqsProxy) -> list[int]:
    return [len(entries) for entries in proxy.entries("DeleteMessageBatch")]


async def warm_up(deleter: Deleter, queue: SqsQueue, proxy: SqsProxy) -> None:
    """Many deletes, so that the next ones are worth waiting for."""
    await put(queue, *(str(n) for n in range(200)))
    messages = await take(queue)
    for message in messages:
        deleter.add([message])
        await asyncio.sleep(0)
    await deleter.flush()
    assert await queue.depth() == EMPTY
    proxy.calls.clear()


async def test_messages_are_deleted_by_tens_and_the_rest_when_the_process_stops(
    watched: SqsQueue, proxy: SqsProxy
) -> None:
    gone: list[str] = []
    deleter = Deleter(watched, patient(LONG), lambda messages: gone.extend(message.id for message in messages))
    async with running(deleter):
        await warm_up(deleter, watched, proxy)
        await put(watched, *(str(n) for n in range(23)))
        messages = await take(watched, visibility_seconds=LONG)
        deleter.add(messages[:3])
        for message in messages[3:]:
            deleter.add([message])
        await eventually(lambda: _has(proxy, 2))
        assert calls(proxy) == [10, 10]
        assert (await watched.depth()).in_flight == 3
        await deleter.flush()
        assert calls(proxy) == [10, 10, 3]
        assert await watched.depth() == EMPTY
    assert set(gone) >= {message.id for message in messages}


async def _has(proxy: SqsProxy, count: int) -> bool:
    return len(calls(proxy)) >= count


async def test_no_delete_waits_beyond_its_lease(watched: SqsQueue, proxy: SqsProxy) -> None:
    deleter = Deleter(watched, patient(5))
    async with running(deleter):
        await warm_up(deleter, watched, proxy)
        await put(watched, "1", "2")
        deleter.add(await take(watched, visibility_seconds=5))

        async def is_empty() -> bool:
            return await watched.depth() == EMPTY

        await eventually(is_empty)
    assert calls(proxy) == [2]
    assert await watched.receive(wait_seconds=0, visibility_seconds=5) == []


async def test_a_message_that_came_again_is_deleted_by_its_newest_receipt(watched: SqsQueue) -> None:
    deleter = Deleter(watched, patient(LONG))
    await put(watched, "1")
    (first,) = await take(watched)
    deleter.add([first])
    await watched.release([first])
    (second,) = await take(watched)
    deleter.add([second])
    async with running(deleter):
        await deleter.flush()
    assert await watched.depth() == EMPTY


@pytest.mark.parametrize(("times", "left"), [(2, 0), (99, 1)], ids=["in the end", "given up"])
async def test_a_delete_that_fails_is_tried_again(
    watched: SqsQueue, proxy: SqsProxy, monkeypatch: pytest.MonkeyPatch, times: int, left: int
) -> None:
    monkeypatch.setattr("penstock.brokers.receiving._FIRST_PAUSE_SECONDS", 0.001)
    gone: list[Message] = []
    deleter = Deleter(watched, patient(LONG), gone.extend)
    await put(watched, "1", "2")
    messages = await take(watched)
    hook, count = failing(0), 0

    def some(operation: str, body: dict, forward: Callable) -> tuple[int, dict]:  # type: ignore[type-arg]
        nonlocal count
        if operation != "DeleteMessageBatch" or count >= times:
            return forward(body)  # type: ignore[no-any-return]
        count += 1
        return hook(operation, body, forward)

    proxy.hook = some
    async with running(deleter):
        deleter.add(messages)
        await deleter.flush()
    assert {message.id for message in gone} == {message.id for message in messages}
    assert (await watched.depth()).total == left
