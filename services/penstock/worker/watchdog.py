"""Watchdog: a thread that detects a handler that blocks the event loop, and with it the other handlers and results."""

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from penstock.runtime import metrics
from penstock.runtime.logs import log
from penstock.worker.attempt import Attempt

_BLOCKED_AFTER_SECONDS = 1.0
_INTERVAL_SECONDS = _BLOCKED_AFTER_SECONDS / 4
_STACK_ENTRIES = 12


class Watchdog:
    """Counts the time for which the loop is blocked, and logs each action's first block, while it lasts."""

    def __init__(self, attempts_of: Callable[[asyncio.Task[Any]], Sequence[Attempt]]) -> None:
        self._attempts_of = attempts_of
        self._turned_at = 0.0
        self._logged: set[str | None] = set()

    async def run(self) -> None:
        """The watching; a side task."""
        self._turned_at = time.monotonic()
        ended = threading.Event()
        watched = asyncio.get_running_loop(), threading.get_ident()
        threading.Thread(target=self._watch, args=(*watched, ended), name="watchdog", daemon=True).start()
        try:
            while True:
                await asyncio.sleep(_INTERVAL_SECONDS)
                self._turned_at = time.monotonic()
        finally:
            ended.set()

    def _watch(self, loop: asyncio.AbstractEventLoop, thread_id: int, ended: threading.Event) -> None:
        looked_at, used = time.monotonic(), time.process_time()
        counted_until = looked_at
        while not ended.wait(_INTERVAL_SECONDS):
            now, now_used = time.monotonic(), time.process_time()
            gap, gap_used = now - looked_at, now_used - used
            looked_at, used = now, now_used
            if gap > 2 * _INTERVAL_SECONDS and gap_used < gap / 2:
                # The whole process was suspended or got no CPU time, this thread included.
                self._turned_at = counted_until = now
                continue
            turned_at = self._turned_at
            if now - turned_at < _BLOCKED_AFTER_SECONDS:
                continue
            metrics.LOOP_BLOCKED_SECONDS.inc(now - max(turned_at, counted_until))
            counted_until = now
            self._report(loop, thread_id, now - turned_at)

    def _report(self, loop: asyncio.AbstractEventLoop, thread_id: int, seconds: float) -> None:
        task = asyncio.current_task(loop)
        frame = sys._current_frames().get(thread_id)
        attempts = () if task is None else self._attempts_of(task)
        action = attempts[0].handler.name if attempts else None
        if action in self._logged:
            return
        self._logged.add(action)
        log.warning(
            "event_loop_blocked", action=action, seconds=round(seconds, 1),
            hint="no other handler runs and no result goes out meanwhile: make the handler a plain def, which runs in "
            "a thread, or put what computes into asyncio.to_thread",
            stack="".join(traceback.format_stack(frame, _STACK_ENTRIES)) if frame else None,
        )  # fmt: skip
