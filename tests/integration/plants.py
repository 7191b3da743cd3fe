"""A whole pipeline, moved by the processes' own passes: api, submitter, scheduler, worker, resulter."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx

from penstock.brokers.base import Message, Queue
from penstock.brokers.opening import open_transport, queue_names
from penstock.db.pool import Store
from penstock.payloads.codec import PayloadCodec
from penstock.resulter import Resulter
from penstock.scheduler.process import Scheduler
from penstock.settings.model import Settings
from penstock.submitter import Submitter
from penstock.supervisor.payloads import PayloadObjects
from penstock.worker.handlers.actions import Registry
from penstock.worker.process import Worker
from penstock.workflows.advancer import WorkflowAdvancer
from tests.integration.apis import JSON, running

PATIENCE_SECONDS = 60.0


class Plant:
    """The processes of a pipeline. ``seen``: every message that was received from any of the queues, as text."""

    def __init__(self, settings: Settings, store: Store, queues: dict[str, Queue], registry: Registry) -> None:
        self.settings = settings
        self.store = store
        self.registry = registry
        self.seen: list[str] = []
        self.queues = queues
        self.submitter = Submitter(store=store, inbound=queues["inbound"], settings=settings)
        self.scheduler = Scheduler(
            store=store, outbound=queues["outbound"], settings=settings, open_queue=lambda name, label: queues[label]
        )
        self.resulter = Resulter(store=store, results=queues["results"], settings=settings)
        self.objects = PayloadObjects(store=store, settings=settings)
        self.http: httpx.AsyncClient | None = None
        self._watch()

    def _watch(self) -> None:
        for queue in self.queues.values():
            receive: Callable[..., Awaitable[list[Message]]] = queue.receive

            async def seeing(_receive: Any = receive, **options: Any) -> list[Message]:
                messages: list[Message] = await _receive(**options)
                self.seen += [message.body for message in messages]
                return messages

            queue.receive = seeing  # type: ignore[method-assign, assignment]

    async def call(self, method: str, **params: Any) -> Any:
        """One request over HTTP; its result, or its error as a dict with ``code``."""
        assert self.http is not None
        body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        answer = (await self.http.post("/rpc", json=body, headers=JSON)).json()
        return answer["result"] if "result" in answer else answer["error"]

    async def status(self, task_id: int) -> Any:
        return await self.call("status", id=task_id, detail=True)

    @asynccontextmanager
    async def worker(self, **changes: Any) -> AsyncIterator[Worker]:
        """A worker with its side tasks running."""
        worker = Worker(
            outbound=self.queues["outbound"],
            results=self.queues["results"],
            settings=self.settings.model_copy(update=changes),
            registry=self.registry,
        )
        sides = [asyncio.ensure_future(run()) for run in worker.side_tasks().values()]
        try:
            yield worker
        finally:
            for task in sides:
                task.cancel()
            await asyncio.gather(*sides, return_exceptions=True)
            await worker.close()

    async def work(self, messages: int = 1, **changes: Any) -> None:
        """Claim and send what is due, have a worker take so many messages, record what it says."""
        await until(self.scheduler.run_once, "something to send")
        async with self.worker(**changes) as worker:
            taken = 0
            deadline = time.monotonic() + PATIENCE_SECONDS
            while taken < messages:
                assert time.monotonic() < deadline, f"{messages - taken} messages did not come"
                taken += await asyncio.wait_for(worker.run_once(), PATIENCE_SECONDS)
            await asyncio.wait_for(worker.settle(), PATIENCE_SECONDS)
        await until(self.resulter.run_once, "results")

    async def advance(self) -> None:
        """Move workflows on until none has events."""
        from penstock.db.notify import Notifier

        advancing = WorkflowAdvancer(store=self.store, notifier=Notifier(self.store), settings=self.settings)
        while await advancing.run_once() is not None:
            pass


async def until(condition: Callable[[], Awaitable[Any]], what: str) -> Any:
    """What the condition comes to as soon as it is true."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (found := await condition()):
        assert time.monotonic() < deadline, f"waited for {what}"
        await asyncio.sleep(0.02)
    return found


@asynccontextmanager
async def plant(settings: Settings, registry: Registry) -> AsyncIterator[Plant]:
    """A plant whose api listens."""
    assert settings.database_url is not None
    async with AsyncExitStack() as stack:
        store = Store(
            settings.database_url.get_secret_value(), application_name="penstock-test", codec=PayloadCodec(settings)
        )
        stack.push_async_callback(store.close)
        transport = open_transport(settings)
        stack.push_async_callback(transport.close)
        queues = {label: transport.queue(name, label=label) for label, name in queue_names(settings).items()}
        made = Plant(settings, store, queues, registry)
        api = await stack.enter_async_context(running(store, settings))
        made.http = await stack.enter_async_context(httpx.AsyncClient(base_url=api.url, timeout=60))
        yield made
