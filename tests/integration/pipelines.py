"""The processes that run tasks, in this process and over real queues, behind an api named by `penstock.connect`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import penstock
from penstock.api.process import Api
from penstock.brokers.sqs import SqsQueue
from penstock.db.pool import Store
from penstock.resulter import Resulter
from penstock.scheduler.process import Scheduler
from penstock.settings.model import Settings
from penstock.worker.handlers.actions import Registry
from penstock.worker.process import Worker
from tests.integration.apis import running
from tests.integration.test_pipeline_by_transport import passing


@asynccontextmanager
async def pipeline(
    store: Store, settings: Settings, outbound: SqsQueue, results: SqsQueue, registry: Registry
) -> AsyncIterator[Api]:
    services = (
        Scheduler(store=store, outbound=outbound, settings=settings, open_queue=lambda *_: outbound),
        Worker(outbound=outbound, results=results, settings=settings, registry=registry),
        Resulter(store=store, results=results, settings=settings),
    )
    async with running(store, settings) as api, passing(*services):
        penstock.connect(api.url)
        yield api
