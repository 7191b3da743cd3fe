"""Producers: tasks straight into the table, over HTTP in batches or one by one at a steady rate, through SQS."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from benchmarks.harness.actions import CLOCK, NOOP, NOOP_INBOUND, now_us
from benchmarks.harness.connections import Connections
from penstock.client.inbound import InboundClient
from penstock.db.pool import Store
from penstock.protocol.task import NewTask
from penstock.tasks import enqueue

INSERT_BATCH = 2000
HTTP_BATCH = 500
INBOUND_BATCH = 1000
LATENCY_CONNECTIONS = 32

Advance = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Call:
    """One enqueue: when it began (epoch microseconds), the task, and how long the call took."""

    begun_us: int
    task_id: int
    seconds: float


def plain_noop(number: int) -> NewTask:
    return NewTask(NOOP, f'{{"n":{number}}}')


async def insert_noops(
    store: Store, tasks: int, advance: Advance = lambda count: None, task: Callable[[int], NewTask] = plain_noop
) -> None:
    """Put no-op tasks into the table itself, as a transactional producer does. task: makes each of its number."""
    for start, end in cuts(tasks, INSERT_BATCH):
        async with store.session() as session:
            await enqueue.enqueue(session, [task(n) for n in range(start, end)])
        advance(end - start)


async def post_batches(
    connections: Connections, tasks: int, senders: int, advance: Advance = lambda count: None
) -> list[float]:
    """No-op tasks over HTTP in JSON-RPC batches, ``senders`` at once; returns the seconds of each call."""
    todo = cuts(tasks, HTTP_BATCH)
    seconds: list[float] = []

    async def send() -> None:
        for start, end in todo:  # one iterator, shared by all
            requests = [enqueue_request(NOOP, {"n": n}, number=n) for n in range(start, end)]
            body = msgspec.json.encode(requests)
            began = time.perf_counter()
            await connections.enqueue_batch(body, end - start)
            seconds.append(time.perf_counter() - began)
            advance(end - start)

    await _all(send, senders)
    return seconds


async def post_singles(
    connections: Connections, tasks: int, senders: int, advance: Advance = lambda count: None
) -> list[float]:
    """No-op tasks over HTTP, one a request; returns the seconds of each call."""
    todo = iter(range(tasks))
    seconds: list[float] = []

    async def send() -> None:
        for n in todo:
            began = time.perf_counter()
            await connections.call("enqueue", {"action": NOOP, "payload": {"n": n}})
            seconds.append(time.perf_counter() - began)
            advance(1)

    await _all(send, senders)
    return seconds


async def send_inbound(client: InboundClient, tasks: int, senders: int, advance: Advance = lambda count: None) -> None:
    """No-op tasks through the inbound queue by the client's ``enqueue_many``."""
    todo = cuts(tasks, INBOUND_BATCH)

    async def send() -> None:
        for start, end in todo:
            await client.enqueue_many({"action": NOOP_INBOUND, "payload": {"n": n}} for n in range(start, end))
            advance(end - start)

    await _all(send, senders)


async def call_steadily(
    connections: Connections,
    *,
    tasks: int,
    per_second: float,
    params: Sequence[tuple[str, Any]] = (),
    on_call: Callable[[Call], None] = lambda call: None,
) -> list[Call]:
    """Single enqueues of the clock task over HTTP, begun at a steady rate however long each takes.

    A task's payload carries when its call began, the wait for a free connection included.
    """
    calls: list[Call] = []

    async def one() -> None:
        began = time.perf_counter()
        begun_us = now_us()
        answer = await connections.call("enqueue", {"action": CLOCK, "payload": {"at": begun_us}, **dict(params)})
        call = Call(begun_us, answer["id"], time.perf_counter() - began)
        calls.append(call)
        on_call(call)

    start = time.perf_counter()
    async with together() as group:
        for number in range(tasks):
            await asyncio.sleep(max(0.0, start + number / per_second - time.perf_counter()))
            group.create_task(one())
    return calls


def enqueue_request(action: str, payload: Any, *, number: int, **options: Any) -> dict[str, Any]:
    """One enqueue as a JSON-RPC request."""
    return {
        "jsonrpc": "2.0",
        "method": "enqueue",
        "id": number,
        "params": {"action": action, "payload": payload, **options},
    }


def cuts(total: int, size: int) -> Iterator[tuple[int, int]]:
    """(start, end) of pieces no larger than ``size``."""
    return ((start, min(start + size, total)) for start in range(0, total, size))


@asynccontextmanager
async def together() -> AsyncIterator[asyncio.TaskGroup]:
    """A task group whose first error comes out as itself, so that the command can word it."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from several


async def _all(send: Callable[[], Any], senders: int) -> None:
    async with together() as group:
        for _ in range(senders):
            group.create_task(send())
