"""A whole pipeline in this process, by hand: scheduler, a worker with deliveries, resulter, over real edges."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from penstock.brokers.sqs import SqsTransport
from penstock.compat.actions import MODULES
from penstock.db.pool import Store
from penstock.protocol.task import NewTask
from penstock.resulter import Resulter
from penstock.scheduler.process import Scheduler
from penstock.settings.model import Settings
from penstock.tasks import enqueue as enqueuing
from penstock.worker.deliveries.registry import Deliveries
from penstock.worker.handlers.actions import Registry
from penstock.worker.process import Worker
from tests.integration.doors import no_routes

_PATIENCE_SECONDS = 60


class Line:
    """What runs tasks. registry: of the worker, for actions of a test's own."""

    def __init__(
        self, store: Store, scheduler: Scheduler, worker: Worker, resulter: Resulter, registry: Registry
    ) -> None:
        self._store = store
        self._passes = (scheduler.run_once, worker.run_once, worker.settle, resulter.run_once)
        self.registry = registry

    async def enqueue(self, action: str, *payloads: Mapping[str, Any], **options: Any) -> list[int]:
        tasks = [NewTask(action, json.dumps(payload), **options) for payload in payloads]
        async with self._store.session() as session:
            return [answer.id for answer in await enqueuing.enqueue(session, tasks)]

    async def run_once(self) -> None:
        """One pass of each process, the worker's to the end of what it took."""
        for run in self._passes:
            await asyncio.wait_for(run(), _PATIENCE_SECONDS)

    async def read(self, task_id: int) -> dict[str, Any]:
        """A task's row, its result and error decoded."""
        async with self._store.session() as session:
            (row,) = await session.fetch("read_tasks", [task_id])
        found = dict(row)
        return found | {name: json.loads(found[name]) for name in ("result", "error") if found[name] is not None}

    async def until(self, task_id: int, *states: str) -> dict[str, Any]:
        """Run until a task is in one of these states, and return its row."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while (row := await self.read(task_id))["state"] not in states:
            assert time.monotonic() < deadline, f"task {task_id} did not come to {states}; it is {row}"
            await self.run_once()
        return row


@asynccontextmanager
async def running(
    store: Store, settings: Settings, stores: Mapping[str, Store] | None = None, **changes: Any
) -> AsyncIterator[Line]:
    """A line whose worker has the deliveries of the settings. stores: of processes that have their own."""
    stores = {"scheduler": store, "resulter": store} | dict(stores or {})
    registry = Registry()
    settings = Settings.model_validate(settings.model_dump() | changes)
    deliveries = Deliveries(settings, registry, MODULES)
    transport = SqsTransport(settings)
    outbound = transport.queue(settings.outbound_queue, label="outbound")
    results = transport.queue(settings.results_queue, label="results")
    scheduler = Scheduler(open_queue=no_routes, store=stores["scheduler"], outbound=outbound, settings=settings)
    worker = Worker(outbound=outbound, results=results, settings=settings, registry=registry)
    resulter = Resulter(store=stores["resulter"], results=results, settings=settings)
    sides = [asyncio.ensure_future(run()) for run in worker.side_tasks().values()]
    try:
        yield Line(store, scheduler, worker, resulter, registry)
        assert not [task for task in sides if task.done()]
    finally:
        for task in sides:
            task.cancel()
        await asyncio.gather(*sides, return_exceptions=True)
        await worker.close()
        await deliveries.close()
        await transport.close()
