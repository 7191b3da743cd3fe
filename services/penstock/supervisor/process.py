"""Supervisor: upkeep, one module per duty. Several supervisors are safe: every repair is guarded by its claim."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from penstock.brokers.base import Queue
from penstock.db.notify import Listener, Notifier
from penstock.db.pool import Store
from penstock.runtime.loop import Service, SideTask
from penstock.settings.model import Settings
from penstock.supervisor.bulk_jobs import BulkJobs
from penstock.supervisor.duties import Duty, DutyGuard, expiry, wait_timeouts
from penstock.supervisor.gauges import Gauges
from penstock.supervisor.limits import LimitUpkeep
from penstock.supervisor.payload_objects import PayloadObjects
from penstock.supervisor.payload_retention import PayloadRetention
from penstock.supervisor.repair import Repair
from penstock.supervisor.retention import Retention
from penstock.supervisor.schedules import Imports, NamesOfImport, ScheduleFiring
from penstock.supervisor.workflows import WorkflowAdvancer
from penstock.tasks.promotion import Promotions

_MAKE_TASKS_DUE = ("Rules", "Repair", "Expiry", "Waits")  # duties after which schedulers are woken


class Addition(Protocol):
    """What is added to a supervisor: tasks that run beside its rounds."""

    @property
    def side_tasks(self) -> Mapping[str, SideTask]: ...


class MakeAddition(Protocol):
    def __call__(self, *, store: Store, notifier: Notifier, listener: Listener) -> Addition: ...


class Supervisor(Service):
    """One supervisor process; ``run_once`` is one round of every duty.

    open_queue: makes a queue of a name, or URL, and a label, for routes. additions: tasks that other packages have.
    names_of_import: reserved names of schedules that an import may use.
    """

    name = "supervisor"

    def __init__(
        self,
        *,
        store: Store,
        queues: Mapping[str, Queue],
        settings: Settings,
        open_queue: Callable[[str, str], Queue],
        dead_letters: Mapping[str, Queue] | None = None,
        additions: Sequence[MakeAddition] = (),
        names_of_import: NamesOfImport | None = None,
    ) -> None:
        self._store = store
        self._interval_seconds = settings.supervisor_interval_seconds
        self._notifier = Notifier(store)
        self._guard = DutyGuard()
        self._limits = LimitUpkeep(store=store, outbound=queues["outbound"], open_queue=open_queue)
        self._jobs = BulkJobs(store=store, changed=self._notifier.wake)
        self._firing = ScheduleFiring(store=store, notifier=self._notifier, settings=settings)
        self._imports = Imports(store=store, settings=settings, names_of_import=names_of_import)
        self._advancing = WorkflowAdvancer(store=store, notifier=self._notifier, settings=settings)
        self._promotions = Promotions(store=store, notifier=self._notifier)
        self._additions = [
            make(store=store, notifier=self._notifier, listener=self._advancing.listener) for make in additions
        ]
        # By the names that metrics and log lines have.
        self._duties: dict[str, Duty] = {
            "Rules": self._limits,
            "Repair": Repair(store=store, queue_of=self._limits.queue_of, results=queues["results"], settings=settings),
            "Expiry": expiry(store),
            "Waits": wait_timeouts(store, settings),
            "Retention": Retention(store=store, settings=settings),
            "Emptying": PayloadRetention(store=store, settings=settings),
            "Objects": PayloadObjects(store=store, settings=settings),
            "Gauges": Gauges(
                store=store,
                queues=queues,
                dead_letters=dead_letters or {},
                by_route=lambda: self._limits.queues,
            ),
        }

    async def open(self) -> None:
        await self._store.open()

    def side_tasks(self) -> Mapping[str, SideTask]:
        return {
            "notify": self._notifier.run,
            "schedules": self._firing.run,
            "imports": self._imports.run,
            "jobs": self._jobs.run,
            "workflows": self._advancing.run,
            "listen": self._advancing.listener.run,
            "turns": self._promotions.run,
            **{name: run for addition in self._additions for name, run in addition.side_tasks.items()},
        }

    async def run_once(self) -> int:
        """One round; a duty that fails stops no other. Raises Unavailable."""
        for name, duty in self._duties.items():
            changed = await self._guard.run(name, duty.run_once)
            if changed and name in _MAKE_TASKS_DUE:
                self._notifier.wake()
        self._guard.end_round()
        return 0

    async def wait_for_work(self) -> None:
        # Jitter keeps several supervisors from meeting at the same rows each time.
        await asyncio.sleep(self._interval_seconds * random.uniform(0.8, 1.2))
