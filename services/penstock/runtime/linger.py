"""How long to wait for more before a batch goes."""

from __future__ import annotations

from time import monotonic

_RATE_MEMORY_SECONDS = 0.25
_SHORTEST_DELAY_SECONDS = 0.002


class Linger:
    """An adaptive batching delay (Kafka's linger), which grows with the rate of items; none below a certain rate.

    full: items in a call worth waiting for. longest_seconds: the wait at the rate that brings ``full`` items within it.
    """

    def __init__(self, full: int, *, longest_seconds: float) -> None:
        self._full = full
        self._longest_seconds = longest_seconds
        self._rate = 0.0
        self._seen_at = monotonic()

    def record(self, items: int) -> None:
        """Count items sent since the last call."""
        now = monotonic()
        gone = max(now - self._seen_at, 1e-3)
        self._seen_at = now
        self._rate += (items / gone - self._rate) * min(1.0, gone / _RATE_MEMORY_SECONDS)

    def seconds(self, waiting: int) -> float:
        """The delay now, in seconds, with so many items waiting."""
        if waiting >= self._full:
            return 0.0
        wait = self._longest_seconds * min(1.0, self._rate * self._longest_seconds / self._full)
        return wait if wait >= _SHORTEST_DELAY_SECONDS else 0.0
