"""Sweeps: when a scan of an index by time begins at its front.

While an old transaction is open, vacuum cannot remove the index entries of deleted rows, and a scan from the front
passes all of them. So between two sweeps a scan covers only rows that came due lately. A sweep finds the others: those
committed late, or set to an instant that had passed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

RECENT_SECONDS = 10.0  # covered by a scan between two sweeps


class Sweeps:
    def __init__(self) -> None:
        self._next_at = float("-inf")

    @contextmanager
    def look(self) -> Iterator[float | None]:
        """How many seconds back from now the scan begins; None: at the front."""
        started = monotonic()
        if started < self._next_at:
            yield RECENT_SECONDS
            return
        yield None
        ended = monotonic()
        # After a sweep, none for 50 times its time, and at most for as long as the scans until then reach back.
        self._next_at = ended + min(max(50 * (ended - started), 1.0), RECENT_SECONDS)

    def found(self, late_seconds: float) -> None:
        """Record how long a found row was due. After one that only a sweep finds, the next scan is a sweep."""
        if late_seconds >= RECENT_SECONDS:
            self._next_at = float("-inf")
