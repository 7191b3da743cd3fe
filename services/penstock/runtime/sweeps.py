"""Sweeps: when a look through an index by time begins at its front.

While an old transaction is open, vacuum cannot remove the index entries of what has left a table, and a look that
begins at the front passes all of them. So between two sweeps a look covers only what came due lately. A sweep finds the
rest: what was committed late, or set to an instant that had passed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

RECENT_SECONDS = 10.0  # what a look between two sweeps covers
_SHORTEST_SECONDS = 1.0
_LONGEST_SECONDS = 10.0
_REST = 50  # a sweep is followed by so many times its time without one


class Sweeps:
    """Of one kind of look, in one process."""

    def __init__(self) -> None:
        self._next_at = float("-inf")

    @contextmanager
    def look(self) -> Iterator[float | None]:
        """How many seconds back from now the look begins; None: at the front."""
        started = monotonic()
        if started < self._next_at:
            yield RECENT_SECONDS
            return
        yield None
        ended = monotonic()
        self._next_at = ended + min(max(_REST * (ended - started), _SHORTEST_SECONDS), _LONGEST_SECONDS)

    def found(self, late_seconds: float) -> None:
        """Something was due for so long. Behind what only a sweep finds there may be more: the next look is one."""
        if late_seconds >= RECENT_SECONDS:
            self._next_at = float("-inf")
