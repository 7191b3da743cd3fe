"""A transport whose connection is served by a thread of its own, whatever blocks the event loop of its callers."""

import asyncio
from collections.abc import Mapping, Sequence

from penstock.brokers.base import Depth, Message, Outgoing, Queue, SendReport, Transport
from penstock.runtime.loop_thread import LoopThread

_CLOSE_SECONDS = 1.0


class ThreadedTransport:
    """Calls another transport in a thread; see :class:`penstock.brokers.base.Transport` for the contract."""

    def __init__(self, transport: Transport) -> None:
        self.limits = transport.limits
        self._transport = transport
        self._thread = LoopThread("broker")

    def queue(self, name: str, *, label: str) -> Queue:
        return _ThreadedQueue(self._transport.queue(name, label=label), self._thread)

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
        self._call = thread.call

    async def send(self, messages: Sequence[Outgoing]) -> SendReport:
        return await self._call(self._queue.send(messages))

    async def receive(self, *, wait_seconds: int, visibility_seconds: int) -> list[Message]:
        receive = self._queue.receive(wait_seconds=wait_seconds, visibility_seconds=visibility_seconds)
        return await self._call(receive)

    async def delete(self, messages: Sequence[Message]) -> list[Message]:
        return await self._call(self._queue.delete(messages))

    async def extend(self, messages: Sequence[Message], seconds: int) -> list[Message]:
        return await self._call(self._queue.extend(messages, seconds))

    async def release(self, messages: Sequence[Message]) -> None:
        await self._call(self._queue.release(messages))

    async def depth(self) -> Depth:
        return await self._call(self._queue.depth())
