"""An event loop in a thread of its own, for callers in other threads."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread(threading.Thread):
    """Runs coroutines from its construction until :meth:`stop`."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._loop = asyncio.new_event_loop()
        self._stop_asked = asyncio.Event()
        self.start()

    def run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._stop_asked.wait())

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine, which is cancelled with its caller."""
        return await asyncio.wrap_future(self.submit(coroutine))

    def stop(self, seconds: float | None = None) -> None:
        """Cancel what still runs, and wait for its end, at most so long; blocks."""
        with suppress(RuntimeError):  # its loop is closed
            self._loop.call_soon_threadsafe(self._stop_asked.set)
        self.join(seconds)
