"""Event loops: with an executor whose threads no process waits for at its end, and in a thread of their own."""

import asyncio
import contextvars
import os
import socket
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from time import monotonic
from typing import Any, ParamSpec, TypeVar

from penstock.runtime.logs import log

P = ParamSpec("P")
T = TypeVar("T")

_MOST = min(32, (os.cpu_count() or 1) + 4)  # as of the usual executor
_END_SECONDS = 1.0  # for calls under way when the event loop closes


def new_loop() -> asyncio.AbstractEventLoop:
    """An event loop of uvloop, where there is a build of it for the platform. Its executor has daemon threads, and each
    look-up of a name has one of its own."""
    try:
        import uvloop
    except ImportError:
        loop = asyncio.new_event_loop()
    else:
        loop = uvloop.new_event_loop()
    loop.set_default_executor(DaemonThreads())
    loop.getaddrinfo = look_up  # type: ignore[method-assign]
    return loop


async def look_up(*where: Any, **how: Any) -> Any:
    """As ``getaddrinfo`` of an event loop. uvloop does two at once in the whole process: names whose servers do not
    answer would hold up all others."""
    return await asyncio.wrap_future(in_own_thread(partial(socket.getaddrinfo, *where, **how)))


def run_whole(runner: asyncio.Runner, main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end. SystemExit in a task that a handler has made, which stops the event loop, ends that
    task alone."""
    task = runner.get_loop().create_task(main)
    while True:
        try:
            return runner.run(_result_of(task))
        except SystemExit:
            if task.done():
                raise
            log.exception("exit_in_task", hint="a task that a handler has made called sys.exit(); the worker goes on")


async def _result_of(task: asyncio.Task[T]) -> T:
    return await task


class DaemonThreads(ThreadPoolExecutor):
    """Runs what is given to ``asyncio.to_thread``, and plain functions of durable steps.

    A handler that is cancelled leaves its call running in its thread, and a ThreadPoolExecutor would keep a stopped
    process alive until that ends. It is a subclass because event loops accept no other executor.
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._own: list[threading.Thread] = []
        self._has_ended = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        with self._lock:
            if self._has_ended:
                raise RuntimeError("cannot schedule new futures after shutdown")
            if not self._idle.acquire(blocking=False) and len(self._own) < _MOST:
                thread = threading.Thread(target=self._work, name=f"asyncio_{len(self._own)}", daemon=True)
                thread.start()  # fails where the system refuses a thread: then the call is not to run either
                self._own.append(thread)
            self._calls.put(partial(_call, future, partial(fn, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Let the threads end; wait shortly for what they run, and leave the rest."""
        with self._lock:
            self._has_ended = True
        for _ in self._own:
            self._calls.put(None)
        until = monotonic() + (_END_SECONDS if wait else 0.0)
        for thread in self._own:
            thread.join(max(0.0, until - monotonic()))
        left = sum(thread.is_alive() for thread in self._own)
        if wait and left:
            log.warning("threads_left", threads=left, hint="handlers left calls of asyncio.to_thread running")

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # a thread that waits must not keep the last call's values alive
            self._idle.release()


def _call(future: Future[Any], function: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except StopIteration as exc:  # a coroutine cannot be given one: before Python 3.11.8 its caller waits for ever
        raised = RuntimeError("a call raised StopIteration")
        raised.__cause__ = exc
        future.set_exception(raised)
    except BaseException as exc:
        future.set_exception(exc)
        del future, function  # the traceback holds this frame


def in_own_thread(function: Callable[[], T]) -> Future[T]:
    """A call in a thread of its own, which does not hold up the end of the process, in the caller's context."""
    future: Future[T] = Future()
    call = partial(contextvars.copy_context().run, function)
    threading.Thread(target=_call, args=(future, call), name="asyncio_own", daemon=True).start()
    return future


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
