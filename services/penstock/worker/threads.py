"""Threads for handlers that are plain functions.

Not a ThreadPoolExecutor: at its end the process waits for the executor's threads, so that one stuck handler would keep
a stopped worker alive; a thread left behind after a timeout would keep its place permanently; and an executor accepts
more calls than it has threads, so that a call's time would run while it waits.
"""

import asyncio
import contextvars
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

from penstock.runtime import metrics

Outcome = tuple[Any, BaseException | None]


@dataclass(slots=True, eq=False)
class Call:
    """A function under way in a thread; ``outcome`` gives (result, None) or (None, what was raised)."""

    function: Callable[[], Any]
    outcome: asyncio.Future[Outcome]
    is_left: bool = False
    thread_id: int | None = None

    def run(self) -> Outcome:
        self.thread_id = threading.get_ident()
        try:
            return self.function(), None
        except BaseException as exc:  # SystemExit too: it would end the thread without a word
            return None, exc
        finally:
            self.thread_id = None


def stack_of(thread_id: int | None, entries: int | None = None) -> str | None:
    """Where a thread is now; None for none. entries: how many of the innermost."""
    frame = sys._current_frames().get(thread_id or 0)
    return None if frame is None else "".join(traceback.format_stack(frame, entries))


class Threads:
    """At most ``size`` calls at once. All methods are for the event loop's thread.

    A call that is left behind gives its place to a new thread, as long as no more than ``size`` are left; after that
    each keeps its place permanently, and ``exhausted`` is set when none remains.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.left = 0
        self._busy = 0
        self._idle_threads = 0
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self.exhausted = asyncio.Event()
        metrics.THREADS.labels("idle").set_function(lambda: max(0, self.size - self._busy))
        metrics.THREADS.labels("busy").set_function(lambda: self._busy)
        metrics.THREADS.labels("left").set_function(lambda: self.left)

    @property
    def has_room(self) -> bool:
        return self._busy < self.size

    def reserve(self) -> None:
        """Reserve a place, to start a call in it or release it."""
        self._busy += 1

    def release(self) -> None:
        self._busy -= 1

    def start(self, function: Callable[[], Any]) -> Call:
        """Run a function in the reserved place and the caller's context. Raises RuntimeError if no thread can start."""
        loop = asyncio.get_running_loop()
        call = Call(partial(contextvars.copy_context().run, function), loop.create_future())
        if self._idle_threads:
            self._idle_threads -= 1
        else:
            threading.Thread(target=self._work, args=(loop,), name="handler", daemon=True).start()
        self._calls.put(call)
        return call

    def leave(self, call: Call) -> None:
        """Stop waiting for a call; its thread cannot be stopped and goes on."""
        call.is_left = True
        self.left += 1
        if self.left <= self.size:
            self.release()
        elif self.left >= 2 * self.size:
            self.exhausted.set()

    def close(self) -> None:
        """Let idle threads end; busy ones end with the process."""
        for _ in range(self._idle_threads):
            self._calls.put(None)
        self._idle_threads = 0

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        while (call := self._calls.get()) is not None:
            outcome = call.run()
            try:
                loop.call_soon_threadsafe(self._done, call, outcome)
            except RuntimeError:  # the loop is closed
                return
            del call, outcome  # a thread that waits must not keep the last task's values alive

    def _done(self, call: Call, outcome: Outcome) -> None:
        if call.is_left and self.left <= self.size:
            self._calls.put(None)  # its place went to another thread, so there is one too many now
        else:
            self._idle_threads += 1
            self._busy -= 1
        if call.is_left:
            self.left -= 1
        if not call.outcome.done():
            call.outcome.set_result(outcome)
