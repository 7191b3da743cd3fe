"""A transport whose connection is served by a thread of its own, whatever blocks the event loop of its callers."""

import asyncio
from collections.abc import Awaitable, Mapping
from typing import Any, cast

from penstock.brokers.base import Queue, Transport
from penstock.runtime.loop_thread import LoopThread

_CLOSE_SECONDS = 1.0


class ThreadedTransport:
    """Calls another transport in a thread; see :class:`penstock.brokers.base.Transport` for the contract."""

    def __init__(self, transport: Transport) -> None:
        self.limits = transport.limits
        self._transport = transport
        self._thread = LoopThread("broker")

    def queue(self, name: str, *, label: str) -> Queue:
        return cast(Queue, _ThreadedQueue(self._transport.queue(name, label=label), self._thread))

    async def make_queues(self, names: Mapping[str, str]) -> dict[str, str]:
        return await self._thread.call(self._transport.make_queues(names))

    async def greet(self) -> str:
        return await self._thread.call(self._transport.greet())

    async def close(self) -> None:
        if self._thread.is_alive():
            await self._thread.call(self._transport.close())
            await asyncio.to_thread(self._thread.stop, _CLOSE_SECONDS)


class _ThreadedQueue:
    """Its operations may be called from any event loop."""

    def __init__(self, queue: Queue, thread: LoopThread) -> None:
        self.label = queue.label
        self.limits = queue.limits
        self._queue = queue
        self._thread = thread

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._queue, name)

        def call(*arguments: Any, **named: Any) -> Awaitable[Any]:
            return self._thread.call(operation(*arguments, **named))

        setattr(self, name, call)  # so that it is made once
        return call
