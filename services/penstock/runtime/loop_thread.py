"""An event loop in a thread of its own, for callers in other threads."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from penstock.runtime.daemon_threads import DaemonThreads

T = TypeVar("T")


def new_loop() -> asyncio.AbstractEventLoop:
    """An event loop of uvloop, where there is a build of it for the platform. Its executor has daemon threads."""
    try:
        import uvloop
    except ImportError:
        loop = asyncio.new_event_loop()
    else:
        loop = uvloop.new_event_loop()
    loop.set_default_executor(DaemonThreads())
    return loop


class LoopThread(threading.Thread):
    """Runs coroutines from its construction until :meth:`stop`."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._loop = new_loop()
        self._stop_asked = asyncio.Event()
        self.start()

    def run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._stop_asked.wait())

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine, which is cancelled with its caller."""
        # By callbacks of two loops: a concurrent future between them would cost half as much again.
        caller = asyncio.get_running_loop()
        outcome: asyncio.Future[asyncio.Task[T]] = caller.create_future()
        started: list[asyncio.Task[T]] = []

        def start() -> None:
            task = self._loop.create_task(coroutine)
            started.append(task)
            task.add_done_callback(end)

        def end(task: asyncio.Task[T]) -> None:
            with suppress(RuntimeError):  # the caller's loop is closed
                caller.call_soon_threadsafe(tell, task)

        def tell(task: asyncio.Task[T]) -> None:
            if not outcome.done():
                outcome.set_result(task)
            elif not task.cancelled():
                task.exception()  # is retrieved, though its caller has left

        self._loop.call_soon_threadsafe(start)
        try:
            return (await outcome).result()
        finally:
            if outcome.cancelled():
                with suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(lambda: started[0].cancel())

    def stop(self, seconds: float | None = None) -> None:
        """Cancel what still runs, and wait for its end, at most so long; blocks."""
        with suppress(RuntimeError):  # its loop is closed
            self._loop.call_soon_threadsafe(self._stop_asked.set)
        self.join(seconds)
