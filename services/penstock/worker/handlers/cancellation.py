"""Cancellation of a running handler, seen from the loop or from a thread."""

from __future__ import annotations

import asyncio
import threading

_lock = threading.Lock()  # one for all tasks: it is held briefly


class TaskCancelled(Exception):
    """Raised by ``ctx.raise_if_cancelled()``: this attempt's result would be ignored."""


class Cancellation:
    """Set once, when a task's claim has ended; ``is_set`` may be read, and ``wait`` awaited, from any thread."""

    __slots__ = ("_waiting", "is_set")

    def __init__(self) -> None:
        self.is_set = False
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def set(self) -> None:
        """Set it, and wake every waiter."""
        with _lock:
            self.is_set = True
            waiting, self._waiting = self._waiting, []
        for loop, event in waiting:
            try:
                loop.call_soon_threadsafe(event.set)
            except RuntimeError:
                pass  # that loop is closed

    async def wait(self) -> None:
        """Wait until it is set."""
        event = asyncio.Event()
        with _lock:
            if self.is_set:
                return
            entry = asyncio.get_running_loop(), event
            self._waiting.append(entry)
        try:
            await event.wait()
        finally:
            with _lock:
                if entry in self._waiting:
                    self._waiting.remove(entry)
