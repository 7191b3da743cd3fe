"""Watchdog: detects, from the lease thread, a handler that blocks the event loop, and so other handlers and results."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from penstock.runtime import metrics
from penstock.runtime.logs import log
from penstock.worker.attempt import Attempt
from penstock.worker.threads import stack_of

_BLOCKED_AFTER_SECONDS = 1.0
_INTERVAL_SECONDS = _BLOCKED_AFTER_SECONDS / 4
_STACK_ENTRIES = 12


async def watch_loop(
    loop: asyncio.AbstractEventLoop,
    thread_id: int,
    attempts_of: Callable[[asyncio.Task[Any] | None], Sequence[Attempt]],
) -> None:
    """Count the time for which a loop of another thread is blocked; log each action's first block, while it lasts."""
    logged: set[str | None] = set()
    looked_at, used = time.monotonic(), time.process_time()
    turned_at = counted_until = looked_at

    def turn() -> None:
        nonlocal turned_at
        turned_at = time.monotonic()

    while True:
        loop.call_soon_threadsafe(turn)
        await asyncio.sleep(_INTERVAL_SECONDS)
        now, now_used = time.monotonic(), time.process_time()
        gap, gap_used = now - looked_at, now_used - used
        looked_at, used = now, now_used
        if gap > 2 * _INTERVAL_SECONDS and gap_used < gap / 2:
            # The whole process was suspended or got no CPU time, this thread included.
            turned_at = counted_until = now
        blocked = now - turned_at
        if blocked < _BLOCKED_AFTER_SECONDS:
            continue
        metrics.LOOP_BLOCKED_SECONDS.inc(now - max(turned_at, counted_until))
        counted_until = now
        attempts = attempts_of(asyncio.current_task(loop))
        action = attempts[0].handler.name if attempts else None
        if action not in logged:
            logged.add(action)
            log.warning(
                "event_loop_blocked", action=action, seconds=round(blocked, 1),
                hint="no other handler runs and no result goes out meanwhile: make the handler a plain def, which runs "
                "in a thread, or put what computes into asyncio.to_thread",
                stack=stack_of(thread_id, _STACK_ENTRIES),
            )  # fmt: skip
