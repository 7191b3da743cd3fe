"""Cancellation: how a handler learns that its task is no longer its own, from the loop or from a thread."""

from __future__ import annotations

import asyncio
import threading

_lock = threading.Lock()  # one for all: it is held for a moment, and a lock for each task would be paid by each


class TaskCancelled(Exception):
    """Raised by ``ctx.raise_if_cancelled()``: nobody waits for this attempt's result any more."""


class Cancellation:
    """Set once, when a task's claim holds no more; ``is_set`` may be read, and ``wait`` awaited, from any thread."""

    __slots__ = ("_waiting", "is_set")

    def __init__(self) -> None:
        self.is_set = False
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def set(self) -> None:
        """Wake whoever waits."""
        with _lock:
            self.is_set = True
            waiting, self._waiting = self._waiting, []
        for loop, event in waiting:
            try:
                loop.call_soon_threadsafe(event.set)
            except RuntimeError:
                pass  # that loop is closed, and nobody waits in it

    async def wait(self) -> None:
        """Until it is set."""
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
