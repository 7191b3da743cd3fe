"""Queues of brokers that have no visibility timeout: this process leases the messages, and ends the leases by time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from time import monotonic
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from penstock.brokers.base import Depth, Limits, Message, Outgoing, SendReport
from penstock.protocol.errors import Unavailable
from penstock.protocol.json_text import utf8_size
from penstock.runtime import metrics
from penstock.runtime.logs import get_logger

_LOOK_SECONDS = 0.2

log = get_logger()

T = TypeVar("T")
Unsent = tuple[str, bool]  # the reason, and whether the broker will never take the message


class MessageLeases(Generic[T]):
    """Leased messages by receipt. ended: called with those whose lease was neither removed nor extended in time."""

    def __init__(self, ended: Callable[[list[T]], Awaitable[None]]) -> None:
        self._ended = ended
        self._leases: dict[str, tuple[T, float]] = {}
        self._watching: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._leases)

    def add(self, receipt: str, message: T, seconds: float) -> None:
        self._leases[receipt] = (message, monotonic() + seconds)
        if self._watching is None:
            self._watching = asyncio.get_running_loop().create_task(self._watch(), name="end leases")

    def extend(self, receipt: str, seconds: float) -> bool:
        """Lease for so many seconds from now; False once the lease has ended."""
        found = self._leases.get(receipt)
        if found is None:
            return False
        self._leases[receipt] = (found[0], monotonic() + seconds)
        return True

    def remove(self, receipts: Sequence[str]) -> dict[str, T]:
        """End leases; returns the messages of those that had not ended before."""
        return {receipt: self._leases.pop(receipt)[0] for receipt in receipts if receipt in self._leases}

    def drop(self, of: Callable[[T], bool]) -> int:
        """End the leases of matching messages without a call of ``ended``; returns their number."""
        return len(self.remove([receipt for receipt, (message, _) in self._leases.items() if of(message)]))

    async def _watch(self) -> None:
        try:
            while self._leases:
                await asyncio.sleep(_LOOK_SECONDS)
                now = monotonic()
                over = [receipt for receipt, (_, until) in self._leases.items() if until <= now]
                if over:
                    await self._ended(list(self.remove(over).values()))
        finally:
            self._watching = None

    def close(self) -> None:
        self._leases.clear()
        if self._watching is not None:
            self._watching.cancel()


class Reader(Protocol):
    """Receives from one queue and leases the messages. closed: why it receives no more."""

    closed: str | None
    leases: MessageLeases[Any]

    async def receive(self, wait_seconds: float, visibility_seconds: float) -> list[Message]:
        """Raises Unavailable."""
        ...

    async def delete(self, receipts: Sequence[str]) -> Collection[str]:
        """Acknowledge; returns the receipts that were leased."""
        ...

    async def release(self, receipts: Sequence[str]) -> Collection[str]:
        """Give back for anyone to receive; returns the receipts that were leased."""
        ...

    async def close(self) -> None: ...


class LeasedQueue:
    """A queue read by a :class:`Reader`; see :class:`penstock.brokers.base.Queue` for the contract.

    broker, sending: names of the broker and of its sends in metrics. header_bytes: of each header, beside name and
    value.
    """

    broker: ClassVar[str]
    sending: ClassVar[str]
    header_bytes: ClassVar[int]

    def __init__(self, name: str, label: str, limits: Limits) -> None:
        self.label = label
        self.limits = limits
        self._name = name
        self._reader: Reader | None = None
        self._opening = asyncio.Lock()

    async def _publish(self, messages: Sequence[Outgoing]) -> Sequence[Unsent | None]:
        """Send; returns None for each message that the broker has."""
        raise NotImplementedError  # abstract

    async def _open_reader(self) -> Reader:
        """Raises QueueMissing, Unavailable."""
        raise NotImplementedError  # abstract

    async def _count_ready(self) -> int:
        """Raises QueueMissing, Unavailable."""
        raise NotImplementedError  # abstract

    async def send(self, messages: Sequence[Outgoing]) -> SendReport:
        limit = self.limits.max_message_bytes
        sizes = [self._size(message) for message in messages]
        fitting = [message for message, size in zip(messages, sizes, strict=True) if size <= limit]
        published = iter(await self._publish(fitting) if fitting else ())
        unsent: dict[int, Unsent] = {}
        for position, size in enumerate(sizes):
            too_large = f"a message of {size} bytes is over the limit of {limit}", True
            outcome = next(published) if size <= limit else too_large
            if outcome is not None:
                unsent[position] = outcome
        sent = len(messages) - len(unsent)
        self._count(self.sending, ok=sent, failed=len(unsent))
        if sent:
            metrics.MESSAGES.labels(self.label, "sent").inc(sent)
        reason = next((reason for reason, _ in unsent.values()), None)
        refused = frozenset(position for position, (_, is_final) in unsent.items() if is_final)
        return SendReport(list(unsent), reason, refused)

    def _size(self, message: Outgoing) -> int:
        headers = (utf8_size(name + value) + self.header_bytes for name, value in message.attributes.items())
        return utf8_size(message.body) + sum(headers)

    async def receive(self, *, wait_seconds: int, visibility_seconds: int) -> list[Message]:
        messages = await self._counted("receive", self._receive(wait_seconds, visibility_seconds))
        if messages:
            metrics.MESSAGES.labels(self.label, "received").inc(len(messages))
        return messages

    async def _receive(self, wait_seconds: int, visibility_seconds: int) -> list[Message]:
        async with self._opening:
            if self._reader is None or self._reader.closed is not None:
                self._reader = await self._open_reader()
            reader = self._reader
        return await reader.receive(wait_seconds, visibility_seconds)

    async def delete(self, messages: Sequence[Message]) -> list[Message]:
        receipts = [message.receipt for message in messages]
        return self._settled(messages, await self._reader.delete(receipts) if self._reader else (), "deleted")

    async def release(self, messages: Sequence[Message]) -> None:
        receipts = [message.receipt for message in messages]
        self._settled(messages, await self._reader.release(receipts) if self._reader else (), "released")

    def _settled(self, messages: Sequence[Message], done: Collection[str], direction: str) -> list[Message]:
        """The messages whose leases had ended."""
        if done:
            metrics.MESSAGES.labels(self.label, direction).inc(len(done))
        stale = [message for message in messages if message.receipt not in done]
        if stale:
            log.debug("receipts_stale", queue=self.label, messages=len(stale))
        return stale

    async def extend(self, messages: Sequence[Message], seconds: int) -> list[Message]:
        reader = self._reader
        return [m for m in messages if reader is None or not reader.leases.extend(m.receipt, seconds)]

    async def depth(self) -> Depth:
        return Depth(visible=await self._counted("depth", self._count_ready()), in_flight=None, delayed=0)

    async def close(self) -> None:
        """End the leases, and stop receiving."""
        reader, self._reader = self._reader, None
        if reader is not None:
            await reader.close()

    async def _counted(self, operation: str, call: Awaitable[T]) -> T:
        try:
            answer = await call
        except Unavailable:
            self._count(operation, failed=1)
            raise
        self._count(operation, ok=1)
        return answer

    def _count(self, operation: str, *, ok: int = 0, failed: int = 0) -> None:
        for outcome, number in (("ok", ok), ("failed", failed)):
            if number:
                metrics.TRANSPORT_CALLS.labels(self.broker, operation, self.label, outcome).inc(number)
