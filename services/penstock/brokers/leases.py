"""Queues of brokers that have no visibility timeout: this process leases the messages, and ends the leases by time."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Any, ClassVar, Generic, TypeVar

from penstock.brokers.base import Depth, Limits, Message, Outgoing, SendReport, Unsent
from penstock.protocol.errors import Unavailable
from penstock.protocol.json_text import utf8_size
from penstock.runtime import metrics
from penstock.runtime.logs import log

_LOOK_SECONDS = 0.2
_BLOCKED_SECONDS = 1.0  # between two looks: a handler blocked the event loop

T = TypeVar("T")


class Reader(ABC, Generic[T]):
    """Receives from one queue and leases the messages, each as a T. closed: why it receives no more. leases: messages
    and the ends of their leases, by receipt; one that is neither ended nor extended in time is given back."""

    def __init__(self) -> None:
        self.closed: str | None = None
        self.leases: dict[str, tuple[T, float]] = {}
        self._watching: asyncio.Task[None] | None = None

    @abstractmethod
    async def receive(self, wait_seconds: float, visibility_seconds: float) -> list[Message]:
        """Raises Unavailable."""

    @abstractmethod
    async def settle(self, messages: Sequence[T], *, delete: bool) -> bool:
        """Acknowledge messages whose leases have ended, or give them back for anyone to receive; whether it worked."""

    @abstractmethod
    async def close(self) -> None: ...

    def lease(self, receipt: str, message: T, seconds: float) -> None:
        self.leases[receipt] = (message, monotonic() + seconds)
        if self._watching is None:
            self._watching = asyncio.get_running_loop().create_task(self._watch(), name="end leases")

    def extend_lease(self, receipt: str, seconds: float) -> bool:
        """Lease for so many seconds from now; False once the lease has ended."""
        if receipt in self.leases:
            self.leases[receipt] = (self.leases[receipt][0], monotonic() + seconds)
        return receipt in self.leases

    def end_leases(self, receipts: Sequence[str]) -> dict[str, T]:
        """Returns the messages of those that had not ended before, which are to be settled."""
        return {receipt: self.leases.pop(receipt)[0] for receipt in receipts if receipt in self.leases}

    def drop_all_leases(self) -> None:
        self.leases.clear()
        if self._watching is not None:
            self._watching.cancel()

    async def _watch(self) -> None:
        try:
            now = monotonic()
            while self.leases:
                await asyncio.sleep(_LOOK_SECONDS)
                before, now = now, monotonic()
                if now - before > _BLOCKED_SECONDS:
                    # Nothing could be extended meanwhile, so this time does not count.
                    gap = now - before
                    self.leases = {receipt: (m, until + gap) for receipt, (m, until) in self.leases.items()}
                over = [receipt for receipt, (_, until) in self.leases.items() if until <= now]
                if over:
                    await self.settle(list(self.end_leases(over).values()), delete=False)
        finally:
            self._watching = None


class LeasingTransport(ABC):
    """The transport of such a broker. broker, sending: names in metrics. header_bytes: beside name and value."""

    broker: ClassVar[str]
    sending: ClassVar[str]
    header_bytes: ClassVar[int]

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._queues: list[LeasedQueue] = []

    def queue(self, name: str, *, label: str) -> LeasedQueue:
        """The queue of that name; it is made, or looked up, at the first call."""
        queue = LeasedQueue(self, name, label)
        self._queues.append(queue)
        return queue

    @abstractmethod
    async def publish(self, name: str, messages: Sequence[Outgoing]) -> Sequence[Unsent | None]:
        """Send; returns None for each message that the broker has."""

    @abstractmethod
    async def open_reader(self, name: str) -> Reader[Any]:
        """Raises QueueMissing, Unavailable."""

    @abstractmethod
    async def count_ready(self, name: str) -> int:
        """Raises QueueMissing, Unavailable."""

    async def close(self) -> None:
        await asyncio.gather(*(queue.close() for queue in self._queues))


class LeasedQueue:
    """A queue read by a :class:`Reader`; see :class:`penstock.brokers.base.Queue` for the contract."""

    def __init__(self, transport: LeasingTransport, name: str, label: str) -> None:
        self.label = label
        self.limits = transport.limits
        self._transport = transport
        self._name = name
        self._reader: Reader[Any] | None = None
        self._opening = asyncio.Lock()

    async def send(self, messages: Sequence[Outgoing]) -> SendReport:
        limit, header_bytes = self.limits.max_message_bytes, self._transport.header_bytes
        unsent: dict[int, Unsent] = {}
        fitting: dict[int, Outgoing] = {}
        for position, message in enumerate(messages):
            headers = (utf8_size(name + value) + header_bytes for name, value in message.attributes.items())
            size = utf8_size(message.body) + sum(headers)
            if size > limit:
                unsent[position] = f"a message of {size} bytes is over the limit of {limit}", True
            else:
                fitting[position] = message
        if fitting:
            outcomes = await self._transport.publish(self._name, [*fitting.values()])
            unsent |= {at: outcome for at, outcome in zip(fitting, outcomes, strict=True) if outcome is not None}
        sent = len(messages) - len(unsent)
        metrics.MESSAGES.labels(self.label, "sent").inc(sent)
        self._count(self._transport.sending, ok=sent, failed=len(unsent))
        return SendReport.of(unsent)

    async def receive(self, *, wait_seconds: int, visibility_seconds: int) -> list[Message]:
        with self._counting("receive"):
            async with self._opening:
                if self._reader is None or self._reader.closed is not None:
                    self._reader = await self._transport.open_reader(self._name)
                reader = self._reader
            messages = await reader.receive(wait_seconds, visibility_seconds)
        metrics.MESSAGES.labels(self.label, "received").inc(len(messages))
        return messages

    async def delete(self, messages: Sequence[Message]) -> list[Message]:
        return await self._settle(messages, delete=True)

    async def release(self, messages: Sequence[Message]) -> None:
        await self._settle(messages, delete=False)

    async def _settle(self, messages: Sequence[Message], *, delete: bool) -> list[Message]:
        """End leases; returns the messages whose leases had ended before."""
        done: dict[str, Any] = {}
        if self._reader is not None:
            leased = self._reader.end_leases([message.receipt for message in messages])
            if await self._reader.settle([*leased.values()], delete=delete):
                done = leased
        metrics.MESSAGES.labels(self.label, "deleted" if delete else "released").inc(len(done))
        stale = [message for message in messages if message.receipt not in done]
        if stale:
            log.debug("receipts_stale", queue=self.label, messages=len(stale))
        return stale

    async def extend(self, messages: Sequence[Message], seconds: int) -> list[Message]:
        reader = self._reader
        return [m for m in messages if reader is None or not reader.extend_lease(m.receipt, seconds)]

    async def depth(self) -> Depth:
        with self._counting("depth"):
            return Depth(visible=await self._transport.count_ready(self._name), in_flight=None, delayed=0)

    async def close(self) -> None:
        """End the leases, and stop receiving."""
        reader, self._reader = self._reader, None
        if reader is not None:
            await reader.close()

    @contextmanager
    def _counting(self, operation: str) -> Iterator[None]:
        try:
            yield
        except Unavailable:
            self._count(operation, failed=1)
            raise
        self._count(operation, ok=1)

    def _count(self, operation: str, **outcomes: int) -> None:
        for outcome, number in outcomes.items():
            if number:
                metrics.TRANSPORT_CALLS.labels(self._transport.broker, operation, self.label, outcome).inc(number)
