"""The whole pipeline in one process: its real passes over a Postgres, with queues in memory."""

import asyncio
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

from penstock.api.access import Caller
from penstock.api.dispatch import Methods
from penstock.api.rpc import Dispatcher
from penstock.brokers.base import Outgoing
from penstock.brokers.opening import queue_names
from penstock.brokers.sqs import LIMITS
from penstock.db.notify import Notifier
from penstock.db.pool import Store
from penstock.protocol.answers import TaskDetail
from penstock.protocol.api_key import ALL_PERMISSIONS
from penstock.protocol.checks import MAX_LIST
from penstock.protocol.record import read
from penstock.protocol.task import State
from penstock.resulter import Resulter
from penstock.scheduler.process import Scheduler
from penstock.settings.model import Settings, load_settings
from penstock.submitter import Submitter
from penstock.supervisor.process import Supervisor
from penstock.testing.clock import Clock
from penstock.testing.faults import ALONE, ONE_AT_A_TIME, Faults, matches, run_worker
from penstock.testing.queue import MemoryQueue
from penstock.worker.handlers.actions import REGISTRY, Registry

# Of tasks whose last claim has failed: one that sleeps, or was put off, is in ERROR too if an earlier one has.
_NEXT_RETRY = (
    "select min(run_at) from penstock.task where state = 'ERROR' and run_at > $1 "
    "and (failures -> -1 ->> 'claim')::bigint = claim"
)


class Pipeline:
    """What the fixture `penstock_pipeline` gives. database_url: for connections of the test's own.

    moved: called with the clock's offset. settings: others than the defaults of a test.
    """

    def __init__(
        self, database_url: str, moved: Callable[[timedelta], None], registry: Registry = REGISTRY, **settings: Any
    ) -> None:
        self.database_url = database_url
        self.clock = Clock(moved)
        self.faults = Faults()
        self.fail = self.faults.fail
        self.crash = self.faults.crash
        self._registry = registry
        self.settings: Settings = load_settings(**{**ALONE, "database_url": database_url, **settings})
        self._queues: dict[str, MemoryQueue] = {}  # by name

    def _queue(self, name: str, label: str) -> MemoryQueue:
        limits = ONE_AT_A_TIME if label == "outbound" else LIMITS
        return self._queues.setdefault(name, MemoryQueue(label, self.clock.seconds, limits=limits))

    @property
    def _by_label(self) -> dict[str, MemoryQueue]:
        return {label: self._queue(name, label) for label, name in queue_names(self.settings).items()}

    def _store(self) -> Store:
        """Of the running loop: a test may have several, one after the other or in threads."""
        return Store(self.database_url, pool_size=4)

    # Running

    async def drain(self, *, retries: bool = True) -> None:
        """Run every process until there is nothing to do: schedules fire, workflows advance, due tasks run.

        retries: the clock moves on to the next attempt of a failed task, as often as it has attempts left. Delays and
        waits end, and schedules come due, by `clock.advance` alone.
        """
        async with self._store() as store:
            while True:
                while await self._pass(store):
                    pass
                async with store.session() as session:
                    again = await session._connection.fetchval(_NEXT_RETRY, self.clock.now())
                if again is None or not retries:
                    return
                self.clock.advance_to(again)

    def drain_sync(self, *, retries: bool = True) -> None:
        """As `drain`, in a test that is no coroutine."""
        asyncio.run(self.drain(retries=retries))

    async def _pass(self, store: Store) -> int:
        """One pass of each process; returns how much was done."""
        queues, settings = self._by_label, self.settings
        submitter = Submitter(store=store, inbound=queues["inbound"], settings=settings)
        supervisor = Supervisor(store=store, queues=queues, settings=settings, open_queue=self._queue)
        done = await submitter.run_once()
        await supervisor.run_once()
        done += await supervisor.imports.run_once()
        done += (await supervisor.firing.run_once()).schedules
        done += await supervisor.jobs.run_once()
        done += await supervisor.advancing.run_once() or 0
        while not await supervisor.promotions.run_once():
            pass
        scheduler = Scheduler(store=store, outbound=queues["outbound"], settings=settings, open_queue=self._queue)
        done += await scheduler.run_once()
        for queue in list(self._queues.values()):
            if queue.label == "outbound" and queue.visible():
                await run_worker(queue, queues["results"], settings, self._registry, self.faults)
                done += 1
        resulter = Resulter(store=store, results=queues["results"], settings=settings)
        while passed := await resulter.run_once():
            done += passed
        return done

    # Looking

    def enqueued(self, action: str | None = None, payload: Any = None) -> list[TaskDetail]:
        """Tasks of this action and payload, oldest first. payload: an object matches by the given members."""
        listed: list[int] = []
        cursor = None
        while True:
            page = self._ask("list", action=action, limit=MAX_LIST, cursor=cursor)
            listed += [task["id"] for task in page["tasks"]]
            if (cursor := page["cursor"]) is None:
                break
        found = [self._ask("status", id=task_id, detail=True) for task_id in sorted(listed)]
        return [read(TaskDetail, task) for task in found if matches(task["payload"], payload)]

    def _ask(self, method: str, **params: Any) -> Any:
        return self.answer(json.dumps({"jsonrpc": "2.0", "method": method, "params": params, "id": 0}))["result"]

    # In the place of the api and the inbound queue

    def answer(self, body: str) -> Any:
        asked = json.loads(body)
        requests = asked if isinstance(asked, list) else [asked]
        for request in requests:
            if request["method"] == "result":
                request["params"] = {**request["params"], "timeout": 0}
        with ThreadPoolExecutor(1) as thread:  # which has no loop yet
            answered = thread.submit(asyncio.run, self._answer(json.dumps(asked))).result()
        answers = answered if isinstance(answered, list) else [answered]
        for request, answer in zip(requests, answers, strict=True):
            if request["method"] == "result" and "result" in answer:
                told, any_will_do = answer["result"], request["params"].get("wait") == "any"
                outcomes = told if isinstance(told, list) else [told]
                pending = [one for one in outcomes if one["state"] is not None and not State(one["state"]).final]
                if len(pending) == len(outcomes) if any_will_do else pending:
                    # A test that waited for it would wait for ever.
                    problem = f"task {pending[0]['id']} is {pending[0]['state']}" if pending else "none of the tasks is"
                    raise AssertionError(f"{problem}, not settled: drain() first")
        return answered

    async def _answer(self, body: str) -> Any:
        async with self._store() as store:
            queues = self._by_label
            methods = Methods(store, Notifier(store), self.settings, queues=queues, dead_letters={})
            dispatcher = Dispatcher(methods.handlers, batch_limit=self.settings.batch_limit)
            _, answered = await dispatcher.answer(body.encode(), Caller("test", ALL_PERMISSIONS, None))
            await methods.drain()
            return json.loads(answered or b"null")

    def ask(self, verb: str, arguments: Sequence[Any]) -> None:
        """The connection of the caller is one to this database."""

    def send(self, bodies: Sequence[str]) -> None:
        for body in bodies:
            self._by_label["inbound"].put(Outgoing(body))
