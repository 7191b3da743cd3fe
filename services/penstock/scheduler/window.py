"""How many tasks may be claimed and unsettled, in each route. See docs/decisions/012-window-and-packing.md."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from datetime import datetime
from time import monotonic
from typing import Any

from penstock.db.pool import Store
from penstock.protocol.task import BEGINNING, Claimed
from penstock.runtime import metrics
from penstock.settings.model import Settings
from penstock.tasks import claim
from penstock.tasks.claim import InFlight

_FRESH_SECONDS = 1.0  # of a count, while it leaves room
_MEMORY_SECONDS = 0.5  # over which the rate is smoothed
_LOW_SHARE = 0.25  # of the window: with less in flight at a count, workers may have waited
_LOW_SECONDS = 0.1  # over which the rate is taken then, at least
_GROWTH = 10  # of the window at most then
_REST = 20  # counting takes at most this part of the time, unless the window could run low meanwhile
_SHARE = 0.05  # of the window that should be free before the next count
_MOST_SHARE = 0.25  # that may be, before a slow count is repeated
_WHOLE_SECONDS = 1.0  # at least, between two counts that begin with the oldest task
_SPAN_SECONDS = 10.0  # run times are the means over so long
_READ_EVERY_SECONDS = 0.5
_ROUTES_KEPT = 10_000  # of as many actions, whose names callers choose


class Throughput:
    """How fast attempts end, by action and by route. run_seconds: of recent attempts, the mean by action."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._throughput: list[Any] = []  # rows of ``read_throughput``
        self._read_at = float("-inf")
        self._route_of: dict[str, str | None] = {}
        self.run_seconds: dict[str, float] = {}

    async def refresh(self) -> None:
        """Read the figures again when they are old."""
        if monotonic() - self._read_at < _READ_EVERY_SECONDS:
            return
        self._read_at = monotonic()
        self._throughput = await self._store.fetch("read_throughput", _SPAN_SECONDS)
        # An action that did not run lately keeps its last figure.
        self.run_seconds |= {row["action"]: row["seconds"] / row["timed"] for row in self._throughput if row["timed"]}

    def saw(self, tasks: Iterable[Claimed]) -> None:
        """Learn the routes of actions; most have none."""
        for task in tasks:
            if task.route is not None or task.action in self._route_of:
                self._route_of[task.action] = task.route
        while len(self._route_of) > _ROUTES_KEPT:
            del self._route_of[next(iter(self._route_of))]

    def of(self, route: str | None) -> tuple[float, float]:
        """Of a route: attempts that end per second, and the mean run time in seconds."""
        mine = [row for row in self._throughput if self._route_of.get(row["action"]) == route]
        ended, timed, seconds = (sum(row[name] for row in mine) for name in ("ended", "timed", "seconds"))
        return ended / _SPAN_SECONDS, seconds / timed if timed else 0.0


class ClaimWindow:
    """The window of one scheduler, in a route or, for None, in the outbound queue; times are monotonic seconds.

    Each scheduler counts the tasks of all in Postgres and adds its own claims since, so the claims of others since then
    may exceed the bound.
    """

    def __init__(self, store: Store, settings: Settings, throughput: Throughput, route: str | None) -> None:
        self._store = store
        self._settings = settings
        self._throughput = throughput
        self._route = route
        self._reserving = asyncio.Lock()
        self._floor = min(settings.in_flight_floor, settings.in_flight_limit)
        self._rate = 0.0
        self._counted_at = float("-inf")
        self._begun_at = float("inf")  # the first count
        self._rest_until = float("-inf")
        self._older = 0
        self._since = BEGINNING.run_at
        self._next_whole_at = float("-inf")
        self._is_whole = True
        self.pace = 0.0  # attempts that end per second
        self.run_seconds = 0.0  # their mean run time
        self.size = self._floor
        self.in_flight = 0  # as counted, plus claims since
        self.reserved = 0  # room set aside for a running claim

    @property
    def room(self) -> int:
        return max(0, self.size - self.in_flight - self.reserved)

    def wants_count(self, now: float) -> bool:
        """Whether the tasks in flight should be counted now."""
        is_old = now - self._counted_at >= _FRESH_SECONDS
        return now >= self._rest_until and (is_old or self.in_flight >= self.size * (1 - _SHARE))

    @property
    def is_full(self) -> bool:
        """Whether there is no room, as far as is known."""
        return self.in_flight >= self.size

    def full_for_seconds(self, now: float) -> float:
        """For how long there is no room and no new count; 0 when there is room or may be."""
        return max(0.0, self._rest_until - now) if self.is_full else 0.0

    def count_since(self, now: float) -> datetime:
        """The instant of the first claim that the next count covers."""
        self._is_whole = now >= self._next_whole_at
        return BEGINNING.run_at if self._is_whole else self._since

    def counted(self, found: InFlight, started: float, ended: float) -> None:
        """Take a count of tasks claimed at ``count_since`` or later; the size follows its rate."""
        rest = _REST * (ended - started)
        if self._is_whole:
            self._older = 0
            self._next_whole_at = ended + max(_WHOLE_SECONDS, rest)
        in_flight = self._older + found.tasks
        self._older += found.aged
        self._since = found.aged_before
        # A whole count also misses older ones that settled before the last count.
        if ended > self._counted_at and not self._is_whole:
            over_seconds = ended - self._counted_at
            gone = max(0, self.in_flight - in_flight)
            self._rate += (gone / over_seconds - self._rate) * min(1.0, over_seconds / _MEMORY_SECONDS)
            if in_flight < _LOW_SHARE * self.size < gone:
                # Smoothed, the rate would take a second to follow workers that are faster than what they were given.
                seen = min(gone / max(over_seconds, _LOW_SECONDS), _GROWTH * self.size / self._span_seconds)
                self._rate = max(self._rate, seen)
        self._counted_at = ended
        self._begun_at = min(self._begun_at, ended)
        self.in_flight = in_flight
        rate = max(self._rate, self.pace)
        self.size = round(min(self._settings.in_flight_limit, max(self._floor, rate * self._span_seconds)))
        # Little is free before a share of the window has settled; counting must stay cheap, also if nothing does.
        until_share = _SHARE * self.size / rate if rate else ended - self._begun_at
        if self._is_whole:
            rest = 0.0
        elif rate:  # a count is slow where the machine is busy, too, and workers that wait cost more than counting
            rest = min(rest, _MOST_SHARE * self.size / rate)
        self._rest_until = ended + max(rest, min(until_share, _SHARE * self._settings.in_flight_seconds))

    @property
    def _span_seconds(self) -> float:
        """Of throughput that the window holds: twice a run time fills a fleet of unknown size in a few rounds."""
        return self._settings.in_flight_seconds + 2 * self.run_seconds

    @asynccontextmanager
    async def reserve(self) -> AsyncIterator[int]:
        """Room set aside for one claim, as a number of tasks; may be 0."""
        async with self._reserving:  # one at a time: room is counted, then set aside
            limit = min(self._settings.claim_batch_size, await self._read_room())
            self.reserved += limit
        try:
            yield limit
        finally:
            self.reserved -= limit

    def note_claim(self, tasks: list[Claimed]) -> None:
        self.in_flight += len(tasks)
        self._throughput.saw(tasks)

    async def _read_room(self) -> int:
        """How many tasks may be claimed now; counts those in flight when the last count is old."""
        now = monotonic()
        if self.full_for_seconds(now):
            return 0
        await self._throughput.refresh()
        self.pace, self.run_seconds = self._throughput.of(self._route)
        if self.wants_count(now):
            async with self._store.session() as session:
                started = monotonic()
                limit, since = self._settings.in_flight_limit, self.count_since(started)
                found = await claim.count_in_flight(session, limit, since=since, route=self._route)
                self.counted(found, started, monotonic())
            if self._route is None:
                metrics.IN_FLIGHT.set(self.in_flight)
                metrics.WINDOW.set(self.size)
        return self.room
