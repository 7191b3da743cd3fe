"""When to go on: after growing pauses, at an event, once a batch is worth it; work that repeats, in bounded batches."""

import asyncio
from collections.abc import Awaitable, Callable
from time import monotonic

from penstock.protocol.errors import Unavailable
from penstock.protocol.retry import Backoff
from penstock.runtime.logs import log

_RATE_MEMORY_SECONDS = 0.25
_SHORTEST_DELAY_SECONDS = 0.002


class Pauses:
    """Random pauses, of at least half of a bound that doubles. failures: pauses since the start or last success."""

    def __init__(self, first_seconds: float = 0.2, longest_seconds: float = 10.0) -> None:
        self._backoff = Backoff(min(first_seconds, longest_seconds), 2.0, longest_seconds, jitter=0.5)
        self.failures = 0

    @property
    def is_reported(self) -> bool:
        """Whether to log the failure before the next pause: the first one, then every tenth."""
        return self.failures % 10 == 0

    def next_seconds(self) -> float:
        """Count a failure; returns the pause until the next try."""
        self.failures += 1
        return self._backoff.delay_seconds(self.failures)

    def reset(self) -> None:
        self.failures = 0


async def repeat(duty: str, work: Callable[[], Awaitable[float]]) -> None:
    """Run ``work`` until cancelled, each time after as many seconds as it returns, or growing pauses while it fails."""
    pauses = Pauses()
    while True:
        try:
            seconds = await work()
            pauses.reset()
        except Exception as exc:
            if pauses.is_reported:
                if isinstance(exc, Unavailable):
                    log.warning("backing_off", duty=duty, reason=str(exc), failures=pauses.failures + 1)
                else:
                    log.exception("duty_failed", duty=duty, error=type(exc).__name__, failures=pauses.failures + 1)
            seconds = pauses.next_seconds()
        await asyncio.sleep(seconds)


async def is_set_within(event: asyncio.Event, seconds: float) -> bool:
    """Wait for an event at most that long; returns whether it is set."""
    return await ends_within(seconds, event.wait())


async def ends_within(seconds: float, awaited: Awaitable[object]) -> bool:
    """Whether it ends within so many seconds; else it is cancelled."""
    try:
        async with asyncio.timeout(seconds):
            await awaited
    except TimeoutError:
        return False
    return True


async def in_batches(work: Callable[[], Awaitable[int]], *, full: int, most: int) -> int:
    """Call ``work`` up to ``most`` times, until a batch has fewer than ``full`` records; returns their total."""
    total = 0
    for _ in range(most):
        count = await work()
        total += count
        if count < full:
            break
    return total


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

    def seconds(self, waiting: int) -> float:
        """The delay now, in seconds, with so many items waiting."""
        if waiting >= self._full:
            return 0.0
        wait = self._longest_seconds * min(1.0, self._rate * self._longest_seconds / self._full)
        return wait if wait >= _SHORTEST_DELAY_SECONDS else 0.0


class Pace(Linger):
    """The time between two sends: that of a dozen items, at most longest_seconds, and none at a low rate."""

    def __init__(self, longest_seconds: float) -> None:
        # With more items, the calls of a send cost next to nothing.
        super().__init__(12, longest_seconds=longest_seconds)
        self._next_at = float("-inf")

    def turn_seconds(self) -> float:
        """Take the next turn to send; returns the seconds until then."""
        now = monotonic()
        at = max(now, self._next_at)
        fill_seconds = self._full / max(self._rate, 1e-3)
        self._next_at = at + min(self.seconds(0), fill_seconds)
        return at - now
