"""Supervisor: upkeep, one module per duty. Several supervisors are safe: every repair is guarded by its claim."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

from penstock.brokers.base import Queue
from penstock.db.notify import Listener, Notifier
from penstock.db.pool import Store
from penstock.runtime.loop import Service, SideTask
from penstock.runtime.periodic import repeat
from penstock.schedules.firing import Imports, ScheduleFiring
from penstock.settings.model import Settings
from penstock.supervisor.bulk_jobs import BulkJobs
from penstock.supervisor.duties import DutyGuard, expire, time_out_waits
from penstock.supervisor.gauges import Gauges
from penstock.supervisor.limits import LimitUpkeep
from penstock.supervisor.payloads import PayloadObjects, PayloadRetention
from penstock.supervisor.repair import Repair
from penstock.supervisor.retention import Retention
from penstock.tasks.ordering import Promotions
from penstock.workflows.advancer import WorkflowAdvancer


class Supervisor(Service):
    """One supervisor process; ``run_once`` is one round of every duty. additions: run beside the rounds."""

    name = "supervisor"

    def __init__(
        self,
        *,
        store: Store,
        queues: Mapping[str, Queue],
        settings: Settings,
        open_queue: Callable[[str, str], Queue],
        dead_letters: Mapping[str, Queue] | None = None,
        additions: Sequence[Callable[[Store, Notifier, Listener], Mapping[str, SideTask]]] = (),
    ) -> None:
        self._store = store
        self._guard = DutyGuard()
        self.idle_seconds = settings.supervisor_interval_seconds
        notifier = self._notifier = Notifier(store)
        limits = LimitUpkeep(store=store, outbound=queues["outbound"], open_queue=open_queue)
        repair = Repair(store=store, queue_of=limits.queue_of, results=queues["results"], settings=settings)
        gauges = Gauges(store=store, queues=queues, dead_letters=dead_letters or {}, by_route=lambda: limits.queues)
        self.advancing = WorkflowAdvancer(store=store, notifier=notifier, settings=settings)
        self.firing = ScheduleFiring(store=store, notifier=notifier, settings=settings)
        self.imports = Imports(store=store, settings=settings)
        self.jobs = BulkJobs(store=store, changed=notifier.wake)
        self.promotions = Promotions(store=store, notifier=notifier)
        # By the names that metrics and log lines have.
        self._duties: dict[str, Callable[[], Awaitable[int | None]]] = {
            "Rules": limits.run_once,
            "Repair": repair.run_once,
            "Expiry": partial(expire, store),
            "Waits": partial(time_out_waits, store, settings),
            "Retention": Retention(store=store, settings=settings).run_once,
            "Emptying": PayloadRetention(store=store, settings=settings).run_once,
            "Objects": PayloadObjects(store=store, settings=settings).run_once,
            "Gauges": gauges.run_once,
        }
        self._side_tasks: dict[str, SideTask] = {
            "notify": notifier.run,
            "schedules": partial(repeat, "schedules", self.firing.fire_or_wait),
            "imports": partial(repeat, "imports", self.imports.work_or_wait),
            "jobs": partial(repeat, "bulk jobs", self.jobs.work_then_rest),
            "workflows": partial(repeat, "workflows", self.advancing.advance_or_wait),
            "listen": self.advancing.listener.run,
            "turns": partial(repeat, "turns", self.promotions.work_or_wait),
        }
        for addition in additions:
            self._side_tasks |= addition(store, notifier, self.advancing.listener)

    async def open(self) -> None:
        await self._store.open()

    def side_tasks(self) -> Mapping[str, SideTask]:
        return self._side_tasks

    async def run_once(self) -> int:
        """One round; a duty that fails stops no other. Raises Unavailable."""
        async for name, changed in self._guard.run(self._duties):
            if changed and name in ("Rules", "Repair", "Expiry", "Waits", "Retention"):  # which make tasks due
                self._notifier.wake()
        return 0
