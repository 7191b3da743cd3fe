"""What may be claimed now, for the queue of each route.

Each route has a window of its own. The throughput and run times that all windows follow are read once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from time import monotonic

from penstock.db.pool import Store
from penstock.protocol.task import Claimed
from penstock.runtime import metrics
from penstock.scheduler.packing import RunTimes
from penstock.scheduler.window import Window
from penstock.settings.model import Settings
from penstock.tasks import claim
from penstock.tasks.records import ActionThroughput

_SPAN_SECONDS = 10.0  # run times are the means over so long
_READ_EVERY_SECONDS = 0.5


class Throughput:
    """How fast attempts end, and how long they run, by action and by route. times: the run times by action."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._throughput: list[ActionThroughput] = []
        self._read_at = float("-inf")
        self._route_of: dict[str, str | None] = {}
        self.times = RunTimes()

    async def refresh(self) -> None:
        """Read the figures again when they are old."""
        if monotonic() - self._read_at < _READ_EVERY_SECONDS:
            return
        self._read_at = monotonic()
        async with self._store.session() as session:
            self._throughput = await claim.read_throughput(session, _SPAN_SECONDS)
        self.times.learn(self._throughput)

    def saw(self, tasks: Iterable[Claimed]) -> None:
        """Learn the routes of actions; most have none."""
        for task in tasks:
            if task.route is not None or task.action in self._route_of:
                self._route_of[task.action] = task.route

    def of(self, route: str | None) -> tuple[float, float]:
        """Of a route: attempts that end per second, and the mean run time in seconds."""
        mine = [one for one in self._throughput if self._route_of.get(one.action) == route]
        timed = sum(one.timed for one in mine)
        return (
            sum(one.ended for one in mine) / _SPAN_SECONDS,
            sum(one.seconds for one in mine) / timed if timed else 0.0,
        )


class ClaimWindow:
    """Room for claims. ``route``: None for the outbound queue."""

    def __init__(self, *, store: Store, settings: Settings, throughput: Throughput, route: str | None) -> None:
        self._store = store
        self._settings = settings
        self._throughput = throughput
        self._route = route
        self._reserving = asyncio.Lock()
        self.window = Window(
            floor=settings.in_flight_floor, limit=settings.in_flight_limit, seconds=settings.in_flight_seconds
        )

    @asynccontextmanager
    async def reserved(self) -> AsyncIterator[int]:
        """Room set aside for one claim, as a number of tasks; may be 0."""
        window = self.window
        async with self._reserving:  # one at a time: room is counted, then set aside
            limit = min(self._settings.claim_batch_size, await self._room())
            window.reserved += limit
        try:
            yield limit
        finally:
            window.reserved -= limit

    def claimed(self, tasks: list[Claimed]) -> None:
        self.window.claimed(len(tasks))
        self._throughput.saw(tasks)

    def full_for_seconds(self) -> float:
        return self.window.full_for_seconds(monotonic())

    async def _room(self) -> int:
        """How many tasks may be claimed now; counts those in flight when the last count is old."""
        now = monotonic()
        window = self.window
        if window.full_for_seconds(now):
            return 0
        await self._throughput.refresh()
        window.learn_throughput(*self._throughput.of(self._route))
        if window.wants_count(now):
            async with self._store.session() as session:
                started = monotonic()
                since = window.count_since(started)
                found = await claim.count_in_flight(
                    session, self._settings.in_flight_limit, since=since, route=self._route
                )
                window.counted(found, started, monotonic())
            if self._route is None:
                metrics.IN_FLIGHT.set(window.in_flight)
                metrics.WINDOW.set(window.size)
        return window.room
