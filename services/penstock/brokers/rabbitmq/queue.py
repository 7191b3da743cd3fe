"""RabbitMQ by aiormq: quorum queues, publisher confirms, receives that take no more than they return.

Facts relied on (RabbitMQ 3.10 to 4): a message that is returned more often than ``x-delivery-limit`` goes to the
dead-letter exchange; a channel whose messages stay unacknowledged for longer than ``consumer_timeout`` is closed, and
all its messages are delivered again; a passive declaration counts the messages that are ready, not the leased ones.
"""

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from aiormq import spec
from aiormq.abc import DeliveredMessage

from penstock.brokers.base import MESSAGE_ID, Limits, Message, Outgoing, QueueMissing, Unsent
from penstock.brokers.leases import LeasingTransport, Reader
from penstock.brokers.rabbitmq.connection import Link, Links, TooLargeForBroker
from penstock.protocol.errors import Unavailable
from penstock.protocol.json_text import body_bytes
from penstock.runtime.logs import log
from penstock.runtime.periodic import is_set_within
from penstock.settings.model import Settings

LIMITS = Limits(
    max_message_bytes=4 * 1024 * 1024,
    max_call_messages=10,
    max_extend_seconds=int(1800 * 0.8),  # of the broker's default consumer_timeout
    counts_held=False,
    deletes_overdue=True,
    outlives_connection=False,
    makes_queues=True,
)
SENT_HEADER = "penstock_sent_ms"  # epoch; AMQP's own timestamp has whole seconds
_IN_ONE_GO = 100  # publishes that wait for their confirmation at once
_LATE_TAGS = 8  # cancelled consumers whose last deliveries may still come


class AmqpTransport(LeasingTransport):
    """One connection, made when first used and again when it is lost. makes_queues: missing ones, when first used."""

    broker, sending, header_bytes = "amqp", "publish", 6

    def __init__(self, settings: Settings, *, makes_queues: bool = True) -> None:
        longest_lease = max(1, int(settings.amqp_consumer_timeout_seconds * 0.8))
        super().__init__(replace(LIMITS, max_extend_seconds=longest_lease))
        # The broker gives a silent peer up after two of them, as SQS does after the visibility timeout.
        heartbeat_seconds = max(1, min(60, settings.visibility_timeout_seconds // 2))
        url = settings.transport.text
        self._links = Links(url, setting="PENSTOCK_TRANSPORT_URL", heartbeat_seconds=heartbeat_seconds)
        self._makes_queues = makes_queues

    async def make_queues(self, names: Mapping[str, str]) -> dict[str, str]:
        for name in names.values():
            await self._ensured(name)
        url = self._links.url
        return {label: f"{url.shown}{'' if url.path else '/'}#{name}" for label, name in names.items()}

    async def greet(self) -> str:
        return f"{(await self._links.link()).product} at {self._links.url.shown}"

    async def close(self) -> None:
        await super().close()
        await self._links.close()

    async def publish(self, name: str, messages: Sequence[Outgoing]) -> list[Unsent | None]:
        problems: list[Unavailable | None] = []
        for start in range(0, len(messages), _IN_ONE_GO):
            some = messages[start : start + _IN_ONE_GO]
            try:
                link = await self._ensured(name)
                problems += await asyncio.gather(*(_publish(link, name, message) for message in some))
            except Unavailable as exc:
                problems += [exc] * len(some)
        return [None if exc is None else (str(exc), isinstance(exc, TooLargeForBroker)) for exc in problems]

    async def count_ready(self, name: str) -> int:
        return await (await self._ensured(name)).count(name)

    async def open_reader(self, name: str) -> Reader[int]:
        reader = _Reader(await self._ensured(name), name)
        await reader.open()
        return reader

    async def _ensured(self, name: str) -> Link:
        """The connection, on which the queue exists. Raises QueueMissing, Unavailable."""
        link = await self._links.link()
        await link.ensure(name, make=self._makes_queues)
        return link


class _Reader(Reader[int]):
    """A channel on which messages of one queue are received and leased by tag; the leases are lost with it."""

    def __init__(self, link: Link, name: str) -> None:
        super().__init__()
        self._link = link
        self._name = name
        self._token = secrets.token_hex(4)
        self._channel: Any = None
        self._came: deque[tuple[str, DeliveredMessage]] = deque()
        self._any_came = asyncio.Event()
        self._seconds = 30.0
        self._late: deque[str] = deque()
        self._fetches: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Raises Unavailable."""
        self._channel = await self._link.channel(prefetch=LIMITS.max_call_messages, closed=self._lost)
        self._channel.on_consumer_cancel_callbacks.add(self._queue_gone)

    async def receive(self, wait_seconds: float, visibility_seconds: float) -> list[Message]:
        self._seconds = visibility_seconds
        if not self._came:
            # Cut off in the middle of a call, the channel would be closed, and all leases lost.
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
        while self._came and len(messages) < LIMITS.max_call_messages:
            receipt, delivered = self._came.popleft()
            if self.extend_lease(receipt, visibility_seconds):
                messages.append(_message(receipt, delivered))
        if not messages and self.closed is not None:
            raise Unavailable(self.closed)
        return messages

    async def _fetch(self, wait_seconds: float) -> None:
        tag = secrets.token_hex(8)
        self._any_came.clear()
        try:
            consume = self._channel.basic_consume(self._name, self._deliver, consumer_tag=tag)
            await self._link.call(consume, f"a receive from queue {self._name!r}")
        except QueueMissing:
            self._link.known.discard(self._name)
            raise
        try:
            if wait_seconds and not self._came and self.closed is None:
                await is_set_within(self._any_came, wait_seconds)
        finally:
            if self.closed is None:
                await self._link.call(self._channel.basic_cancel(tag))
                # Deliveries under way are taken too: no other receiver gets them.
                self._channel.consumers[tag] = self._deliver
                self._late.append(tag)
                if len(self._late) > _LATE_TAGS:
                    self._channel.consumers.pop(self._late.popleft(), None)

    async def _deliver(self, delivered: DeliveredMessage) -> None:
        tag = delivered.delivery_tag or 0
        receipt = f"{self._token}:{tag}"
        self.lease(receipt, tag, self._seconds)
        self._came.append((receipt, delivered))
        self._any_came.set()

    async def settle(self, messages: Sequence[int], *, delete: bool) -> bool:
        """Acknowledge or give back, without an answer; all is sent then, and closing the connection loses none."""
        if self.closed is not None:
            return False
        method = self._channel.basic_ack if delete else self._channel.basic_nack
        try:
            for position, tag in enumerate(messages, 1):
                await self._link.call(method(tag, wait=position == len(messages)))
        except Unavailable:
            return False
        return True

    def _lost(self, reason: str) -> None:
        if self.leases:
            log.warning("holds_lost", queue=self._name, messages=len(self.leases), reason=reason)
        self._end(reason)

    def _queue_gone(self, _: Any) -> None:
        self._link.known.discard(self._name)
        self._any_came.set()

    async def close(self) -> None:
        self._end("the queue is closed")

    def _end(self, reason: str) -> None:
        self.closed = self.closed or reason
        self._came.clear()
        self.drop_all_leases()
        self._any_came.set()


def _publish(link: Link, name: str, message: Outgoing) -> Awaitable[Unavailable | None]:
    properties = spec.Basic.Properties(
        content_type="application/json",
        delivery_mode=2,
        message_id=secrets.token_hex(16),
        headers={**message.attributes, SENT_HEADER: round(time.time() * 1000)},
    )
    return link.publish(name, body_bytes(message.body), properties)


def _message(receipt: str, delivered: DeliveredMessage) -> Message:
    properties = delivered.header.properties
    headers: Mapping[str, Any] = properties.headers or {}
    sent = headers.get(SENT_HEADER)
    returned = headers.get("x-delivery-count", 0)  # by quorum queues
    given = properties.message_id or ""
    if properties.timestamp is not None and not isinstance(sent, int):
        sent = int(properties.timestamp.timestamp() * 1000)
    return Message(
        # Without an id of its sender none stays, and a redelivery is taken for another message.
        id=given if MESSAGE_ID.fullmatch(given) else secrets.token_hex(16),
        receipt=receipt,
        body=delivered.body.decode("utf-8", "surrogateescape"),
        receive_count=1 + (returned if isinstance(returned, int) else 0),
        sent_at=sent / 1000 if isinstance(sent, int) else None,
        attributes={name: text for name, text in headers.items() if isinstance(text, str) and name[:2] != "x-"},
    )
