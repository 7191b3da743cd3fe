"""How long to wait for more before a batch goes."""

from time import monotonic

_RATE_MEMORY_SECONDS = 0.25
_SHORTEST_DELAY_SECONDS = 0.002
_SHARING = 12  # items of a send: with more, its calls cost next to nothing


class Linger:
    """Kafka's linger: a delay that grows with the rate, to longest_seconds where that brings ``full`` items."""

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

    @property
    def fill_seconds(self) -> float:
        """The time that brings ``full`` items."""
        return self._full / max(self._rate, 1e-3)

    def seconds(self, waiting: int) -> float:
        """The delay now, in seconds, with so many items waiting."""
        if waiting >= self._full:
            return 0.0
        wait = self._longest_seconds * min(1.0, self._rate * self._longest_seconds / self._full)
        return wait if wait >= _SHORTEST_DELAY_SECONDS else 0.0


class Pace:
    """The time between two sends: that of a dozen items, at most longest_seconds, and none at a low rate."""

    def __init__(self, longest_seconds: float) -> None:
        self._linger = Linger(_SHARING, longest_seconds=longest_seconds)
        self._next_at = float("-inf")

    def record(self, items: int) -> None:
        self._linger.record(items)

    def turn_seconds(self) -> float:
        """Take the next turn to send; returns the seconds until then."""
        now = monotonic()
        at = max(now, self._next_at)
        self._next_at = at + min(self._linger.seconds(0), self._linger.fill_seconds)
        return at - now
