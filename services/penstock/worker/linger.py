"""Linger: how long to wait for company before a call: a busy worker makes few calls, an idle one no pause."""

from __future__ import annotations

from time import monotonic

_MEMORY_SECONDS = 0.25
_SHORTEST_SECONDS = 0.002


class Linger:
    """The more items come, the longer the next call waits for more of them; below a certain rate it does not wait.

    full: items in a call worth waiting for. longest_seconds: the wait at the rate that brings ``full`` items within it.
    """

    def __init__(self, full: int, *, longest_seconds: float) -> None:
        self._full = full
        self._longest_seconds = longest_seconds
        self._rate = 0.0
        self._seen_at = monotonic()

    def saw(self, items: int) -> None:
        """So many items have gone since the last time."""
        now = monotonic()
        gone = max(now - self._seen_at, 1e-3)
        self._seen_at = now
        self._rate += (items / gone - self._rate) * min(1.0, gone / _MEMORY_SECONDS)

    def seconds(self, waiting: int) -> float:
        """How long to wait now, with so many items waiting already; 0 for not at all."""
        if waiting >= self._full:
            return 0.0
        wait = self._longest_seconds * min(1.0, self._rate * self._longest_seconds / self._full)
        return wait if wait >= _SHORTEST_SECONDS else 0.0
