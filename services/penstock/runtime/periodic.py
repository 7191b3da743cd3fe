"""Work that repeats beside the passes of a process, in bounded batches, until a time or an event."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from penstock.protocol.errors import Unavailable
from penstock.runtime.backoff import Pauses
from penstock.runtime.logs import get_logger

log = get_logger()


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
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False


async def in_batches(work: Callable[[], Awaitable[int]], *, full: int, most: int) -> int:
    """Call ``work`` up to ``most`` times, until a batch has fewer than ``full`` records; returns their total."""
    total = 0
    for _ in range(most):
        count = await work()
        total += count
        if count < full:
            break
    return total
