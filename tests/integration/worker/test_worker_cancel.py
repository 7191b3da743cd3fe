"""A running task that is cancelled: the worker asks the api, its handler stops, and nothing comes of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from penstock.brokers.base import Outgoing
from penstock.brokers.sqs import SqsQueue
from penstock.db.pool import Store
from penstock.protocol.reports import Succeeded, decode_reports
from penstock.protocol.requests import encode_call, join_batch
from penstock.protocol.task import NewTask
from penstock.settings.model import Settings
from penstock.tasks import claim, enqueue, settle
from penstock.worker.handlers.actions import Registry, action
from penstock.worker.handlers.context import Context
from penstock.worker.process import Worker
from tests.integration import apis
from tests.integration.doors import take


async def sent(store: Store, outbound: SqsQueue, *actions: str) -> list[int]:
    """New tasks of these actions, claimed and sent in one message."""
    async with store.transaction() as session:
        await enqueue.enqueue(session, [NewTask(name) for name in actions])
        batch = await claim.claim(session, len(actions))
        assert batch is not None
        await claim.confirm(session, batch.id)
    calls = [encode_call(task.id, task.claim, task.action, task.payload) for task in batch.tasks]
    assert (await outbound.send([Outgoing(join_batch(calls))])).failed == []
    return [task.id for task in batch.tasks]


@asynccontextmanager
async def running(worker: Worker) -> AsyncIterator[Worker]:
    sides = [asyncio.ensure_future(run()) for run in worker.side_tasks().values()]
    try:
        async with asyncio.timeout(30):
            while not await worker.run_once():
                pass
            yield worker
            await worker.settle()
    finally:
        for side in sides:
            side.cancel()
        await asyncio.gather(*sides, return_exceptions=True)
        await worker.close()


async def outcomes(results: SqsQueue) -> dict[int, Any]:
    reports = [r for message in await take(results) for r in decode_reports(message.body, batch_limit=100)]
    return {report.task_id: report for report in reports if isinstance(report, Succeeded)}


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("kind", ["awaits", "polls", "raises"])
async def test_the_handler_of_a_cancelled_task_stops_and_its_answer_is_dropped(
    store: Store, settings: Settings, outbound: SqsQueue, results: SqsQueue, kind: str
) -> None:
    registry = Registry()
    begun: set[int] = set()
    seen: list[int] = []

    @action("awaits", registry=registry)
    async def awaits(ctx: Context) -> str:
        begun.add(ctx.task_id)
        await ctx.wait_cancelled()
        seen.append(ctx.task_id)
        return "of no use"

    @action("polls", registry=registry)
    def polls(ctx: Context) -> str:
        begun.add(ctx.task_id)
        while not ctx.cancelled:
            time.sleep(0.01)
        seen.append(ctx.task_id)
        return "of no use"

    @action("raises", registry=registry)
    def raises(ctx: Context) -> None:
        begun.add(ctx.task_id)
        try:
            while True:
                ctx.raise_if_cancelled()
                time.sleep(0.01)
        finally:
            seen.append(ctx.task_id)

    @action("neighbour", registry=registry)
    async def neighbour(ctx: Context) -> bool:
        await until(lambda: seen)
        return ctx.cancelled

    async with apis.running(store, settings) as api:
        asking = settings.model_copy(update={"control_url": api.url, "cancel_poll_seconds": 0.1})
        cancelled, other = await sent(store, outbound, kind, "neighbour")
        worker = Worker(outbound=outbound, results=results, settings=asking, registry=registry)
        async with running(worker):
            await until(lambda: begun)
            async with store.transaction() as session:
                await settle.cancel(session, [cancelled])
            await until(lambda: seen)
    assert seen == [cancelled]
    found = await outcomes(results)
    assert {task_id: report.result for task_id, report in found.items()} == {other: "false"}
    assert (await outbound.depth()).total == 0, "its message is deleted"


async def test_without_a_url_nothing_is_asked_and_the_handler_runs_to_its_end(
    store: Store, settings: Settings, outbound: SqsQueue, results: SqsQueue
) -> None:
    registry = Registry()

    @action("slow", registry=registry)
    async def slow(ctx: Context) -> bool:
        await asyncio.sleep(0.3)
        return ctx.cancelled

    worker = Worker(
        outbound=outbound,
        results=results,
        settings=settings.model_copy(update={"cancel_poll_seconds": 0.05}),
        registry=registry,
    )
    assert "poll for lost claims" not in worker.side_tasks()
    (task_id,) = await sent(store, outbound, "slow")
    async with running(worker), store.transaction() as session:
        await settle.cancel(session, [task_id])
    assert (await outcomes(results))[task_id].result == "false"


async def test_an_api_that_is_away_harms_no_task(
    store: Store, settings: Settings, outbound: SqsQueue, results: SqsQueue
) -> None:
    registry = Registry()

    @action("slow", registry=registry)
    async def slow(ctx: Context) -> str:
        await asyncio.sleep(0.5)
        return "done"

    away = settings.model_copy(update={"control_url": "http://127.0.0.1:1", "cancel_poll_seconds": 0.05})
    (task_id,) = await sent(store, outbound, "slow")
    async with running(Worker(outbound=outbound, results=results, settings=away, registry=registry)):
        pass
    assert (await outcomes(results))[task_id].result == '"done"'
