"""Window: how many tasks may be claimed and unsettled.

SQS knows no priority, so the less stands in the queue, the sooner an urgent task is at its turn; but workers must never
wait for the scheduler either. The window is about a second of what is being settled, plus what the run time of the
tasks keeps busy (Little's law), and follows both as they change.
"""

from __future__ import annotations

from datetime import datetime

from penstock.protocol.task import BEGINNING
from penstock.tasks.records import InFlight

_FRESH_SECONDS = 1.0  # a count is good for so long, as long as there is room by it
_MEMORY_SECONDS = 0.3  # over which the rate is smoothed
_REST = 20  # counting takes at most one part in so many of the time
_SHARE = 0.05  # of the window: so much should have become free before it is worth counting again
_WHOLE_SECONDS = 1.0  # between two counts that begin with the oldest task, at the least


class Window:
    """The window of one scheduler; times are monotonic seconds.

    A count looks only at what was claimed lately, for dead entries of what was claimed before cost as much as live
    ones; the older tasks in flight, few as a rule, are carried over from it, and counted anew now and then. What is
    settled of these, no count but the whole one sees, so the rate is also taken from what has ended of late.
    With several schedulers, each counts what all have in flight and adds what it has claimed itself since, so the
    bound may be passed by what the others have claimed since.
    floor, limit: the window is never smaller or larger. seconds: of throughput that it holds.
    size: now. in_flight: as counted, plus what was claimed since. reserved: room set aside for a claim under way.
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
        """How long there is no room by what is known, and no new count; 0 when there is room or may be."""
        has_room = self._counted_at is None or self.in_flight < self.size
        return 0.0 if has_room else max(0.0, self._rest_until - now)

    def count_since(self, now: float) -> datetime:
        """Of tasks claimed since when the next count should be."""
        self._is_whole = now >= max(self._whole_at + _WHOLE_SECONDS, self._whole_rest_until)
        return BEGINNING.run_at if self._is_whole else self._since

    def counted(self, found: InFlight, started: float, ended: float) -> None:
        """Take the count of tasks claimed at ``count_since`` or later, begun and ended then; the size follows the rate
        that it shows."""
        rest = _REST * (ended - started)
        if self._is_whole:
            self._older = 0
            self._whole_at, self._whole_rest_until = ended, ended + rest
        in_flight = self._older + found.count
        self._older += found.aged
        self._since = found.aged_before
        # A whole count also finds the older ones gone, over a longer time than since the last count.
        if self._counted_at is not None and ended > self._counted_at and not self._is_whole:
            self._learn_rate(max(0, self.in_flight - in_flight) / (ended - self._counted_at), ended - self._counted_at)
        self._counted_at = ended
        self.in_flight = in_flight
        rate = max(self._rate, self._pace)
        self.size = round(min(self._limit, max(self._floor, rate * (self._seconds + 2 * self._run_seconds))))
        # Nothing much is free before a share of the window has been settled; and counting must stay cheap.
        until_share = _SHARE * self.size / rate if rate else 0.0
        self._rest_until = ended + max(0.0 if self._is_whole else rest, min(until_share, _SHARE * self._seconds))

    def claimed(self, tasks: int) -> None:
        """So many were claimed."""
        self.in_flight += tasks

    def learn_throughput(self, ended_per_second: float, run_seconds: float) -> None:
        """Take note of how many attempts ended lately, and how long each ran, on the average; twice that is kept in
        flight, so that a fleet whose size nobody knows is filled within a few rounds of its tasks."""
        self._pace = ended_per_second
        self._run_seconds = run_seconds

    def _learn_rate(self, seen: float, over_seconds: float) -> None:
        weight = min(1.0, over_seconds / _MEMORY_SECONDS)
        self._rate += (seen - self._rate) * weight
