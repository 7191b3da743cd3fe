"""latency: single enqueues over HTTP at a steady rate on an idle pipeline, from the beginning of the call.

All times are this machine's clock. Two stacks for each figure's sake: in the first no worker runs and this process
takes the messages itself, because their sent timestamp, which the endpoint gives in whole milliseconds, is the only
witness of when a message went out. In the second a worker runs: its handler returns the time of its own start.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from asyncpg.pool import PoolConnectionProxy

from benchmarks.harness.actions import now_us
from benchmarks.harness.connections import Connections
from benchmarks.harness.measure import percentiles_ms
from benchmarks.harness.producers import LATENCY_CONNECTIONS, Call, call_steadily
from benchmarks.harness.rig import Bench, Rig, rig_up
from penstock.brokers.base import Outgoing
from penstock.brokers.sqs import SqsTransport

_WARM_UP_TASKS = 20
_WARM_UP_PER_SECOND = 50.0
_RECEIVERS = 3
_LOOK_SECONDS = 0.005
_WATCHED_PER_SECOND = 50.0


async def latency(bench: Bench) -> dict[str, Any]:
    """From the call to the message sent, to the handler's start and to SUCCESS visible in the table, by rate."""
    async with rig_up(bench, workers=0) as rig:
        sent = {rate: await _until_sent(rig, rate) for rate in bench.options.rates}
    figures: dict[str, Any] = {}
    async with rig_up(bench) as rig:
        for rate in bench.options.rates:
            figures[f"at_{rate:g}_per_second"] = await _until_success(rig, rate, sent[rate])
    return {"workers": bench.options.workers, "schedulers": bench.options.schedulers} | figures


def _tasks(bench: Bench, rate: float) -> int:
    """The number asked for, else what the rate gives in the time."""
    return bench.options.tasks or max(1, round(rate * bench.options.seconds))


async def _until_sent(rig: Rig, rate: float) -> dict[str, float | int]:
    tasks = _tasks(rig.bench, rate)
    total = await rig.settled() + _WARM_UP_TASKS + tasks
    async with _worker_here(rig) as waits, Connections(rig.api, LATENCY_CONNECTIONS) as connections:
        await call_steadily(connections, tasks=_WARM_UP_TASKS, per_second=_WARM_UP_PER_SECOND)
        await rig.wait_settled(total - tasks, "warming up")
        waits.clear()
        advance = rig.bench.bar(f"{rate:g} a second, until sent", tasks)
        await call_steadily(connections, tasks=tasks, per_second=rate, on_call=lambda call: advance(1))
        await rig.wait_settled(total)
    return percentiles_ms(list(waits.values()))


@contextlib.asynccontextmanager
async def _worker_here(rig: Rig) -> AsyncIterator[dict[str, float]]:
    """Serve the outbound queue from this process; yields seconds from call to sent, by claim."""
    state = rig.stack.state()
    transport = SqsTransport(rig.settings)
    outbound = transport.queue(state["queues"]["outbound"], label="outbound")
    results = transport.queue(state["queues"]["results"], label="results")
    waits: dict[str, float] = {}

    async def serve() -> None:
        while True:
            messages = await outbound.receive(wait_seconds=1, visibility_seconds=30)
            answers = []
            for message in messages:
                assert message.sent_at is not None
                decoded = msgspec.json.decode(message.body)
                for call in decoded if isinstance(decoded, list) else [decoded]:
                    waits[call["id"]] = message.sent_at - call["params"]["at"] / 1e6
                    answers.append({"jsonrpc": "2.0", "result": None, "id": call["id"]})
            if messages:
                await results.send([Outgoing(msgspec.json.encode(answers).decode())])
                await outbound.delete(messages)

    tasks = [asyncio.create_task(serve(), name=f"serve-{number}") for number in range(_RECEIVERS)]
    try:
        yield waits
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await transport.close()


async def _until_success(rig: Rig, rate: float, sent: dict[str, float | int]) -> dict[str, Any]:
    tasks = _tasks(rig.bench, rate)
    async with Connections(rig.api, LATENCY_CONNECTIONS) as connections:
        settled = await rig.settled()
        await call_steadily(connections, tasks=_WARM_UP_TASKS, per_second=_WARM_UP_PER_SECOND)
        await rig.wait_settled(settled + _WARM_UP_TASKS, "warming up")
        await rig.begin()
        calls, visible = await call_watched(rig, connections, tasks, rate)
        used = await rig.end(tasks)
    started = await rig.database.fetch(
        "select (result::text)::bigint - (payload ->> 'at')::bigint as wait_us from penstock.task_history"
        " where state = 'SUCCESS' and id = any($1::bigint[])",
        [call.task_id for call in calls],
    )
    return {
        "tasks": tasks,
        "enqueue_call_ms": percentiles_ms([call.seconds for call in calls]),
        "call_to_sent_ms": sent,
        "call_to_handler_start_ms": percentiles_ms([row["wait_us"] / 1e6 for row in started]),
        "call_to_success_visible_ms": percentiles_ms(visible),
        "cost": used,
    }


async def call_watched(rig: Rig, connections: Connections, tasks: int, rate: float) -> tuple[list[Call], list[float]]:
    """Enqueue at a steady rate until all have settled; returns the calls, and seconds to SUCCESS of those watched."""
    total = await rig.settled() + tasks
    advance = rig.bench.bar(f"{rate:g} a second, until SUCCESS", tasks)
    async with _watcher(rig, every=max(1, round(rate / _WATCHED_PER_SECOND))) as watch:

        def on_call(call: Call) -> None:
            advance(1)
            watch.add(call)

        calls = await call_steadily(connections, tasks=tasks, per_second=rate, on_call=on_call)
        await rig.wait_settled(total)
        await watch.empty.wait()
    return calls, watch.seconds


class _Watch:
    """Looks in the table, every 5 ms, which of the tasks added have become SUCCESS: at 500 a second for every tenth."""

    def __init__(self, connection: PoolConnectionProxy[Any], every: int) -> None:
        self.seconds: list[float] = []
        self.empty = asyncio.Event()
        self._connection = connection
        self._every = every
        self._added = 0
        self._open: dict[int, Call] = {}

    def add(self, call: Call) -> None:
        if self._added % self._every == 0:
            self._open[call.task_id] = call
            self.empty.clear()
        self._added += 1

    async def run(self) -> None:
        while True:
            if self._open:
                rows = await self._connection.fetch(
                    "select id from penstock.task_history where state = 'SUCCESS' and id = any($1::bigint[])",
                    list(self._open),
                )
                now = now_us()
                self.seconds += [(now - self._open.pop(row["id"]).begun_us) / 1e6 for row in rows]
            if not self._open:
                self.empty.set()
            await asyncio.sleep(_LOOK_SECONDS)


@contextlib.asynccontextmanager
async def _watcher(rig: Rig, every: int) -> AsyncIterator[_Watch]:
    async with rig.database.acquire() as connection, asyncio.TaskGroup() as group:
        watch = _Watch(connection, every)
        running = group.create_task(watch.run(), name="watch")
        yield watch
        running.cancel()
