"""RabbitMQ by aiormq: quorum queues, publisher confirms, receives that take no more than they return.

Facts relied on (RabbitMQ 3.10 to 4): a message that is returned more often than ``x-delivery-limit`` goes to the
dead-letter exchange; a channel whose messages stay unacknowledged for longer than ``consumer_timeout`` is closed, and
all that it holds is delivered anew; a passive declaration counts the messages that are ready, not those that are held.

A receive consumes with a prefetch of what it may return, and cancels when something has come: a consumer that stays
would go on taking messages into a process that is busy, where nobody else can reach them.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from aiormq import spec
from aiormq.abc import DeliveredMessage

from penstock.brokers.base import MAX_RECEIVES, MESSAGE_ID, Depth, Limits, Message, Outgoing, QueueMissing, SendReport
from penstock.brokers.leases import MessageLeases
from penstock.brokers.rabbitmq.connection import Link, Links, TooLargeForBroker
from penstock.protocol.errors import Unavailable
from penstock.protocol.json_text import utf8_size
from penstock.runtime import metrics
from penstock.runtime.logs import get_logger

DEFAULT_CONSUMER_TIMEOUT_SECONDS = 1800
LIMITS = Limits(
    max_message_bytes=4 * 1024 * 1024,
    max_call_bytes=4 * 1024 * 1024,
    max_call_messages=10,
    max_wait_seconds=20,
    max_extend_seconds=int(DEFAULT_CONSUMER_TIMEOUT_SECONDS * 0.8),
    max_receives=MAX_RECEIVES,
    counts_held=False,
    deletes_overdue=True,
    outlives_connection=False,
    makes_queues=True,
)
SENT_HEADER = "penstock_sent_ms"  # epoch; AMQP's own timestamp has whole seconds
_DELIVERIES_HEADER = "x-delivery-count"  # of quorum queues: how often it was returned
_HEADER_BYTES = 6  # of each, beside name and value
_IN_ONE_GO = 100  # publishes that wait for their confirmation at once
_LATE_TAGS = 8  # consumers that are cancelled, and whose last deliveries may still come

log = get_logger()


class AmqpTransport:
    """One connection, made when first used and again when it is lost.

    heartbeat_seconds: a peer that is silent for twice as long is given up, and what it held is others'.
    consumer_timeout_seconds: as the broker is set. makes_queues: make a queue that is missing, when it is first used.
    """

    def __init__(
        self,
        url: str,
        *,
        heartbeat_seconds: int = 30,
        consumer_timeout_seconds: float = DEFAULT_CONSUMER_TIMEOUT_SECONDS,
        makes_queues: bool = True,
    ) -> None:
        self.limits = _limits(consumer_timeout_seconds)
        self._links = Links(url, heartbeat_seconds=heartbeat_seconds, makes_queues=makes_queues)
        self._queues: list[AmqpQueue] = []

    def queue(self, name: str, *, label: str) -> AmqpQueue:
        """The queue of that name; it is made, or looked up, at the first call."""
        queue = AmqpQueue(self._links, name, label, self.limits)
        self._queues.append(queue)
        return queue

    async def make_queues(self, names: Mapping[str, str]) -> dict[str, str]:
        """See :class:`penstock.brokers.base.Transport`."""
        link = await self._links.link()
        for name in names.values():
            await link.ensure(name, make=True)
        return {label: f"{self._links.shown}{'' if self._links.has_path else '/'}#{n}" for label, n in names.items()}

    async def greet(self) -> str:
        """Product and version of the broker. Raises Unavailable."""
        link = await self._links.link()
        return f"{link.product} at {self._links.shown}"

    async def close(self) -> None:
        for queue in self._queues:
            queue.forget()
        await self._links.close()


class AmqpQueue:
    """One RabbitMQ queue; see :class:`penstock.brokers.base.Queue` for the contract."""

    def __init__(self, links: Links, name: str, label: str, limits: Limits) -> None:
        self.label = label
        self.limits = limits
        self._links = links
        self._name = name
        self._reader: _Reader | None = None
        self._opening = asyncio.Lock()

    async def send(self, messages: Sequence[Outgoing]) -> SendReport:
        failed: set[int] = set()
        refused: set[int] = set()
        reasons: list[str] = []
        going = []
        for position, message in enumerate(messages):
            size = _size(message)
            if size <= self.limits.max_message_bytes:
                going.append(position)
                continue
            failed.add(position)
            refused.add(position)
            reasons.append(f"a message of {size} bytes is over the limit of {self.limits.max_message_bytes}")
        for start in range(0, len(going), _IN_ONE_GO):
            some = going[start : start + _IN_ONE_GO]
            outcomes = await self._publish([messages[position] for position in some])
            if any(isinstance(outcome, TooLargeForBroker) for outcome in outcomes):
                # It has closed the channel, whoever was to blame.
                outcomes = [(await self._publish([messages[position]]))[0] for position in some]
            for position, outcome in zip(some, outcomes, strict=True):
                if outcome is not None:
                    failed.add(position)
                    reasons.append(str(outcome))
                    if isinstance(outcome, TooLargeForBroker):
                        refused.add(position)
        sent = len(messages) - len(failed)
        self._count("publish", sent=sent, failed=len(failed))
        if sent:
            metrics.MESSAGES.labels(self.label, "sent").inc(sent)
        return SendReport(sorted(failed), next(iter(reasons), None), frozenset(refused))

    async def _publish(self, messages: Sequence[Outgoing]) -> list[Unavailable | None]:
        """Of each message, why it did not go."""
        try:
            link = await self._links.link()
            await link.ensure(self._name)
        except Unavailable as exc:
            return [exc] * len(messages)
        outcomes = await asyncio.gather(
            *(link.publish(self._name, message.body.encode("utf-8", "surrogatepass"), _properties(message))
              for message in messages),
            return_exceptions=True,
        )  # fmt: skip
        told: list[Unavailable | None] = []
        for outcome in outcomes:
            if outcome is None or isinstance(outcome, Unavailable):
                told.append(outcome)
            else:
                raise outcome
        return told

    async def receive(self, *, wait_seconds: int, visibility_seconds: int) -> list[Message]:
        try:
            reader = await self._open_reader()
            messages = await reader.receive(wait_seconds, visibility_seconds)
        except Unavailable:
            self._count("receive", failed=1)
            raise
        self._count("receive", sent=1)
        if messages:
            metrics.MESSAGES.labels(self.label, "received").inc(len(messages))
        return messages

    async def delete(self, messages: Sequence[Message]) -> list[Message]:
        failed = await self._settle(messages, delete=True)
        if len(messages) > len(failed):
            metrics.MESSAGES.labels(self.label, "deleted").inc(len(messages) - len(failed))
        return failed

    async def extend(self, messages: Sequence[Message], seconds: int) -> list[Message]:
        reader = self._reader
        return [m for m in messages if reader is None or not reader.extend(m.receipt, seconds)]

    async def release(self, messages: Sequence[Message]) -> None:
        failed = await self._settle(messages, delete=False)
        if len(messages) > len(failed):
            metrics.MESSAGES.labels(self.label, "released").inc(len(messages) - len(failed))

    async def depth(self) -> Depth:
        try:
            link = await self._links.link()
            await link.ensure(self._name)
            ready = await link.count(self._name)
        except Unavailable:
            self._count("depth", failed=1)
            raise
        self._count("depth", sent=1)
        return Depth(visible=ready, in_flight=None, delayed=0)

    def forget(self) -> None:
        """Nothing is held here any more."""
        if self._reader is not None:
            self._reader.close()

    async def _settle(self, messages: Sequence[Message], *, delete: bool) -> list[Message]:
        """Acknowledge or give back; returns those that are not held here any more."""
        reader = self._reader
        failed = list(messages) if reader is None else await reader.settle(messages, delete=delete)
        if failed:
            log.debug("receipts_stale", queue=self.label, messages=len(failed))
        return failed

    async def _open_reader(self) -> _Reader:
        async with self._opening:
            if self._reader is None or self._reader.closed is not None:
                link = await self._links.link()
                await link.ensure(self._name)
                self._reader = _Reader(link, self._name, self.limits.max_call_messages)
                await self._reader.open()
            return self._reader

    def _count(self, operation: str, *, sent: int = 0, failed: int = 0) -> None:
        for outcome, number in (("ok", sent), ("failed", failed)):
            if number:
                metrics.TRANSPORT_CALLS.labels("amqp", operation, self.label, outcome).inc(number)


class _Reader:
    """A channel on which messages of one queue are received and held; what it holds is lost with it.

    closed: why it is of no more use.
    """

    def __init__(self, link: Link, name: str, most: int) -> None:
        self.closed: str | None = None
        self._link = link
        self._name = name
        self._most = most
        self._token = secrets.token_hex(4)
        self._channel: Any = None
        self._came: deque[tuple[str, DeliveredMessage]] = deque()
        self._any_came = asyncio.Event()
        self._leases: MessageLeases[int] = MessageLeases(self._overdue)
        self._seconds = 30.0
        self._numbers = 0
        self._late: deque[str] = deque()
        self._fetches: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Raises Unavailable."""
        self._channel = await self._link.channel(prefetch=self._most, closed=self._lost)
        self._channel.on_consumer_cancel_callbacks.add(self._queue_gone)

    async def receive(self, wait_seconds: float, visibility_seconds: float) -> list[Message]:
        """Raises Unavailable when the channel is lost meanwhile."""
        self._seconds = visibility_seconds
        if not self._came:
            # Cut off in the middle of a call, the channel would be closed, and with it all holds.
            fetch = asyncio.get_running_loop().create_task(self._fetch(wait_seconds), name="receive")
            self._fetches.add(fetch)
            fetch.add_done_callback(self._fetches.discard)
            try:
                await asyncio.shield(fetch)
            except asyncio.CancelledError:
                self._any_came.set()
                fetch.add_done_callback(lambda done: done.cancelled() or done.exception())
                raise
        messages: list[Message] = []
        while self._came and len(messages) < self._most:
            receipt, delivered = self._came.popleft()
            if self._leases.extend(receipt, visibility_seconds):
                messages.append(_message(receipt, delivered))
        if not messages and self.closed is not None:
            raise Unavailable(self.closed)
        return messages

    async def _fetch(self, wait_seconds: float) -> None:
        self._numbers += 1
        tag = f"{self._token}-{self._numbers}"
        self._any_came.clear()
        try:
            consume = self._channel.basic_consume(self._name, self._deliver, consumer_tag=tag)
            await self._link.call(consume, f"a receive from queue {self._name!r}")
        except QueueMissing:
            self._link.unknown(self._name)
            raise
        try:
            if wait_seconds and not self._came and self.closed is None:
                async with asyncio.timeout(wait_seconds):
                    await self._any_came.wait()
        except TimeoutError:
            pass
        finally:
            if self.closed is None:
                await self._link.call(self._channel.basic_cancel(tag))
                # What was under way is taken too: nobody else is told of it.
                self._channel.consumers[tag] = self._deliver
                self._late.append(tag)
                if len(self._late) > _LATE_TAGS:
                    self._channel.consumers.pop(self._late.popleft(), None)

    async def _deliver(self, delivered: DeliveredMessage) -> None:
        tag = delivered.delivery_tag or 0
        receipt = f"{self._token}:{tag}"
        self._leases.add(receipt, tag, self._seconds)
        self._came.append((receipt, delivered))
        self._any_came.set()

    def extend(self, receipt: str, seconds: float) -> bool:
        return self.closed is None and self._leases.extend(receipt, seconds)

    async def settle(self, messages: Sequence[Message], *, delete: bool) -> list[Message]:
        """Acknowledge or give back; returns those that are not held. The broker answers to neither."""
        tags = {message.receipt: self._leases.remove(message.receipt) for message in messages}
        said = await self._say([tag for tag in tags.values() if tag is not None], delete=delete)
        return [message for message in messages if not said or tags[message.receipt] is None]

    async def _overdue(self, tags: list[int]) -> None:
        await self._say(tags, delete=False)

    async def _say(self, tags: Sequence[int], *, delete: bool) -> bool:
        """Returns when all of it is on its way, so that a connection which is closed next takes it along."""
        if self.closed is not None:
            return False
        method = self._channel.basic_ack if delete else self._channel.basic_nack
        try:
            for position, tag in enumerate(tags, 1):
                await self._link.call(method(tag, wait=position == len(tags)))
        except Unavailable:
            return False
        return True

    def _lost(self, reason: str) -> None:
        if self.closed is None:
            if self._leases:
                log.warning("holds_lost", queue=self._name, messages=len(self._leases), reason=reason)
            self.closed = reason
            self.close()

    def _queue_gone(self, _: Any) -> None:
        self._link.unknown(self._name)
        self._any_came.set()

    def close(self) -> None:
        """Hold nothing any more."""
        self.closed = self.closed or "the queue is closed"
        self._came.clear()
        self._leases.close()
        self._any_came.set()


def _limits(consumer_timeout_seconds: float) -> Limits:
    return replace(LIMITS, max_extend_seconds=max(1, int(consumer_timeout_seconds * 0.8)))


def _size(message: Outgoing) -> int:
    return utf8_size(message.body) + sum(utf8_size(k + v) + _HEADER_BYTES for k, v in message.attributes.items())


def _properties(message: Outgoing) -> spec.Basic.Properties:
    headers: dict[str, Any] = dict(message.attributes)
    headers[SENT_HEADER] = round(time.time() * 1000)
    return spec.Basic.Properties(
        content_type="application/json", delivery_mode=2, message_id=secrets.token_hex(16), headers=headers
    )


def _message(receipt: str, delivered: DeliveredMessage) -> Message:
    properties = delivered.header.properties
    headers: Mapping[str, Any] = properties.headers or {}
    sent = headers.get(SENT_HEADER)
    returned = headers.get(_DELIVERIES_HEADER, 0)
    given = properties.message_id or ""
    if properties.timestamp is not None and not isinstance(sent, int):
        sent = int(properties.timestamp.timestamp() * 1000)
    return Message(
        # Without an id of its sender there is none that stays; a redelivery is then taken for another message.
        id=given if MESSAGE_ID.fullmatch(given) else secrets.token_hex(16),
        receipt=receipt,
        body=delivered.body.decode("utf-8", "surrogateescape"),
        receive_count=1 + (returned if isinstance(returned, int) else 0),
        sent_at=sent / 1000 if isinstance(sent, int) else None,
        attributes={
            key: value for key, value in headers.items() if isinstance(value, str) and not key.startswith("x-")
        },
    )
