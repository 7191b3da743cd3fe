"""Lane: the tasks that go to one queue, and how many of them may be claimed now.

A lane has a window of its own. What the windows follow, the rates and run times of actions, is read once for all lanes.
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
from penstock.tasks.records import Pace

_PACE_SECONDS = 10.0  # run times are the means over so long
_PACE_EVERY_SECONDS = 0.5


class Paces:
    """How fast attempts end, and how long they run, by action and by route. ``times``: the run times by action."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._paces: list[Pace] = []
        self._read_at = float("-inf")
        self._route_of: dict[str, str | None] = {}
        self.times = RunTimes()

    async def refresh(self) -> None:
        """Read them anew when it is time to."""
        if monotonic() - self._read_at < _PACE_EVERY_SECONDS:
            return
        self._read_at = monotonic()
        async with self._store.session() as session:
            self._paces = await claim.read_pace(session, _PACE_SECONDS)
        self.times.learn(self._paces)

    def saw(self, tasks: Iterable[Claimed]) -> None:
        """Learn by which route actions go; most go by none."""
        for task in tasks:
            if task.route is not None or task.action in self._route_of:
                self._route_of[task.action] = task.route

    def of(self, route: str | None) -> tuple[float, float]:
        """Of the tasks of a route: attempts that end a second, and the seconds that one runs on the average."""
        mine = [pace for pace in self._paces if self._route_of.get(pace.action) == route]
        timed = sum(pace.timed for pace in mine)
        return (
            sum(pace.ended for pace in mine) / _PACE_SECONDS,
            sum(pace.seconds for pace in mine) / timed if timed else 0.0,
        )


class Lane:
    """Room for claims. ``route``: None for the lane of the outbound queue."""

    def __init__(self, *, store: Store, settings: Settings, paces: Paces, route: str | None) -> None:
        self._store = store
        self._settings = settings
        self._paces = paces
        self._route = route
        self._reserving = asyncio.Lock()
        self.window = Window(
            floor=settings.in_flight_floor, limit=settings.in_flight_limit, seconds=settings.in_flight_seconds
        )

    @asynccontextmanager
    async def reserved(self) -> AsyncIterator[int]:
        """Room set aside for one claim, as a number of tasks; none may be free."""
        window = self.window
        async with self._reserving:  # one at a time: room is counted, then set aside
            limit = min(self._settings.claim_batch_size, await self._room())
            window.reserved += limit
        try:
            yield limit
        finally:
            window.reserved -= limit

    def claimed(self, tasks: list[Claimed]) -> None:
        """They are in flight now."""
        self.window.claimed(len(tasks))
        self._paces.saw(tasks)

    def full_for_seconds(self) -> float:
        """How long there is no room by what is known."""
        return self.window.full_for_seconds(monotonic())

    async def _room(self) -> int:
        """How many tasks may be claimed now; counts what is in flight when it is time to."""
        now = monotonic()
        window = self.window
        if window.full_for_seconds(now):
            return 0
        await self._paces.refresh()
        window.learn_pace(*self._paces.of(self._route))
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
