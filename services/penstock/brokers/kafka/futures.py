"""One thread that makes the calls of a client that takes one at a time, and lets others in where a call waits.

A Kafka consumer is such a client: since confluent-kafka 2.16 a call from another thread waits until the one that runs
has ended, and a receive, or a callback about partitions within it, may run for long.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any

_Call = tuple["Future[Any]", Callable[[], Any]]


class CallThread:
    """Makes calls in the order in which they come. :meth:`serve` and :meth:`serve_until` are for calls that wait."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._ended = False
        threading.Thread(target=self._run, name=name, daemon=True).start()

    async def call(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """The call's result, or what it raised. Whoever is cancelled waits for its end: it cannot be broken off."""
        assert not self._ended
        future: Future[Any] = Future()
        self._calls.put((future, partial(call, *arguments)))
        running = asyncio.wrap_future(future)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait([running])
            raise

    def end(self) -> None:
        """Let the thread end after the calls that were given to it."""
        self._ended = True
        self._calls.put(None)

    def serve(self) -> None:
        """Make the calls that wait. From within a call."""
        while not self._calls.empty():
            self._make(self._calls.get())

    def serve_until(self, future: Future[Any], seconds: float) -> Any:
        """Make calls until the future is done, and return its result. From within a call. Raises TimeoutError."""
        future.add_done_callback(lambda _future: self._calls.put(None))
        deadline = monotonic() + seconds
        while not future.done():
            try:
                self._make(self._calls.get(timeout=max(0.0, deadline - monotonic())))
            except Empty:
                raise TimeoutError from None
        return future.result()

    def _run(self) -> None:
        while not (self._ended and self._calls.empty()):
            self._make(self._calls.get())

    def _make(self, given: _Call | None) -> None:
        """None wakes whoever waits for calls, to look whether there is something else to do."""
        if given is None:
            return
        future, call = given
        try:
            future.set_result(call())
        except BaseException as exc:  # whatever it is, it is the caller's
            future.set_exception(exc)
