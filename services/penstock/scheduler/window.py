"""How many tasks may be claimed and unsettled.

SQS has no priority, so the shorter the queue, the sooner an urgent task runs; but workers must never wait for the
scheduler. The window is about a second of what is being settled, plus what the run time of the tasks keeps busy
(Little's law), and follows both.
"""

from __future__ import annotations

from datetime import datetime

from penstock.protocol.task import BEGINNING
from penstock.tasks.records import InFlight

_FRESH_SECONDS = 1.0  # of a count, while it leaves room
_MEMORY_SECONDS = 0.3  # over which the rate is smoothed
_REST = 20  # counting takes at most this part of the time
_SHARE = 0.05  # of the window that should be free before the next count
_WHOLE_SECONDS = 1.0  # at least, between two counts that begin with the oldest task


class Window:
    """The window of one scheduler; times are monotonic seconds.

    A count covers only recent claims, because dead entries of older ones cost as much as live ones; the older tasks in
    flight, usually few, are carried over and counted again now and then. Only a whole count sees which of these have
    settled, so the rate is also taken from the attempts that ended. Each scheduler counts the tasks of all and adds its
    own claims since, so the claims of others since then may exceed the bound.
    floor, limit: of the size. seconds: of throughput that it holds. size: now. in_flight: as counted, plus claims
    since. reserved: room set aside for a running claim.
    """

    def __init__(self, *, floor: int, limit: int, seconds: float) -> None:
        self._floor = min(floor, limit)
        self._limit = limit
        self._seconds = seconds
        self._rate = 0.0
        self._pace = 0.0
        self._run_seconds = 0.0
        self._counted_at: float | None = None
        self._rest_until = float("-inf")
        self._older = 0
        self._since = BEGINNING.run_at
        self._whole_at = float("-inf")
        self._whole_rest_until = float("-inf")
        self._is_whole = True
        self.size = self._floor
        self.in_flight = 0
        self.reserved = 0

    @property
    def room(self) -> int:
        return max(0, self.size - self.in_flight - self.reserved)

    def wants_count(self, now: float) -> bool:
        """Whether the tasks in flight should be counted now."""
        if self._counted_at is None:
            return True
        if now < self._rest_until:
            return False
        return now - self._counted_at >= _FRESH_SECONDS or self.in_flight >= self.size * (1 - _SHARE)

    def full_for_seconds(self, now: float) -> float:
        """For how long there is no room and no new count; 0 when there is room or may be."""
        has_room = self._counted_at is None or self.in_flight < self.size
        return 0.0 if has_room else max(0.0, self._rest_until - now)

    def count_since(self, now: float) -> datetime:
        """The instant of the first claim that the next count covers."""
        self._is_whole = now >= max(self._whole_at + _WHOLE_SECONDS, self._whole_rest_until)
        return BEGINNING.run_at if self._is_whole else self._since

    def counted(self, found: InFlight, started: float, ended: float) -> None:
        """Take a count of tasks claimed at ``count_since`` or later; the size follows its rate."""
        rest = _REST * (ended - started)
        if self._is_whole:
            self._older = 0
            self._whole_at, self._whole_rest_until = ended, ended + rest
        in_flight = self._older + found.count
        self._older += found.aged
        self._since = found.aged_before
        # A whole count also misses older ones that settled before the last count.
        if self._counted_at is not None and ended > self._counted_at and not self._is_whole:
            self._learn_rate(max(0, self.in_flight - in_flight) / (ended - self._counted_at), ended - self._counted_at)
        self._counted_at = ended
        self.in_flight = in_flight
        rate = max(self._rate, self._pace)
        self.size = round(min(self._limit, max(self._floor, rate * (self._seconds + 2 * self._run_seconds))))
        # Little is free before a share of the window has settled; and counting must stay cheap.
        until_share = _SHARE * self.size / rate if rate else 0.0
        self._rest_until = ended + max(0.0 if self._is_whole else rest, min(until_share, _SHARE * self._seconds))

    def claimed(self, tasks: int) -> None:
        self.in_flight += tasks

    def learn_throughput(self, ended_per_second: float, run_seconds: float) -> None:
        """Set how many attempts ended per second lately, and their mean run time; twice that is kept in flight, so that
        a fleet of unknown size is filled within a few rounds."""
        self._pace = ended_per_second
        self._run_seconds = run_seconds

    def _learn_rate(self, seen: float, over_seconds: float) -> None:
        weight = min(1.0, over_seconds / _MEMORY_SECONDS)
        self._rate += (seen - self._rate) * weight
