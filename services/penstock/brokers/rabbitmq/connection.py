"""A connection to RabbitMQ: opened again when it is lost, its calls bounded in time, its errors worded."""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from time import monotonic
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import aiormq
from aiormq import exceptions, spec
from pamqp.common import FieldTable
from yarl import URL

from penstock.brokers.base import MAX_RECEIVES, QueueMissing
from penstock.protocol.errors import Unavailable
from penstock.protocol.version import __version__
from penstock.runtime import metrics
from penstock.runtime.logs import log
from penstock.settings.broker_urls import DEAD_LETTER_SUFFIX, BrokerUrl, parse_broker_url

ANSWER_SECONDS = 10.0  # of any call but a wait for messages
_AWAY = (exceptions.AMQPError, RuntimeError, OSError, TimeoutError, EOFError)  # RuntimeError: of what is closed already
_MOST_PUBLISHERS = 32
_NO_LIMIT = 1_000_000_000  # deliveries of a dead letter, which is received often; newer brokers have a default
_REST_SECONDS = 0.5  # after a connection that failed, before the next try
_FRAME_BYTES = 20  # of the frame with a message's properties, beside them
_SIZE_LIMIT = re.compile(r"message size \d+ is larger than (?:configured )?max size (\d+)")

logging.getLogger("aiormq").setLevel(logging.CRITICAL)  # it logs what it raises, and so do we

T = TypeVar("T")
_read_properties = spec.Basic.Properties.unmarshal


def _read_what_can_be(properties: spec.Basic.Properties, flags: int, data: bytes) -> None:
    with suppress(ValueError, OverflowError, OSError, TypeError):
        _read_properties(properties, flags, data)


# The library ends the connection, and with it all leases, over an id that is not UTF-8 or a time that no calendar has.
spec.Basic.Properties.unmarshal = _read_what_can_be  # type: ignore[assignment]


class TooLargeForBroker(Unavailable):
    """The message is larger than the broker is set to take."""


class Link:
    """One connection: a channel for publishing, one for questions, and those that readers ask for. known: queues that
    exist; one that turns out to be gone is taken from it, and looked for when it is used next."""

    def __init__(self, connection: Any, url: BrokerUrl) -> None:
        self._connection = connection
        self._url = url
        self.known: set[str] = set()
        self._declaring = asyncio.Lock()
        self._publishing: dict[str, Any] = {}  # by exchange, the one that was used last at the end
        self._turns: WeakValueDictionary[tuple[str, str | None], asyncio.Lock] = WeakValueDictionary()
        self._asking: Any = None
        self._opening = asyncio.Lock()

    @property
    def is_lost(self) -> bool:
        return bool(self._connection.is_closed or self._connection.closing.done())

    @property
    def product(self) -> str:
        properties = self._connection.server_properties or {}
        return f"{properties.get('product', 'an AMQP broker')} {properties.get('version', '')}".strip()

    async def close(self, channel: Any = None) -> None:
        """Close the connection, or a channel of it."""
        try:
            await self.call((channel or self._connection).close(), "the end of a connection or channel")
        except Unavailable as exc:
            log.debug("amqp_close_failed", reason=str(exc))

    async def call(self, operation: Awaitable[T], what: str = "a call") -> T:
        """Await an operation of the library. Raises Unavailable."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await operation
        except exceptions.PublishError as exc:
            raise QueueMissing(f"{what} came back from RabbitMQ at {self._url.shown}: no queue takes it") from exc
        except exceptions.ChannelNotFoundEntity as exc:
            raise QueueMissing(self._worded(what, exc)) from exc
        except _AWAY as exc:
            raise Unavailable(self._worded(what, exc)) from exc
        except asyncio.CancelledError as exc:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # The library cancels calls on a channel that it loses.
            raise Unavailable(self._worded(what, exc)) from exc

    def _worded(self, what: str, exc: BaseException) -> str:
        return f"RabbitMQ at {self._url.shown} is unavailable or rejected {what}: {self._url.scrub(reason_of(exc))}"

    async def channel(self, *, prefetch: int, closed: Callable[[str], None]) -> Any:
        """A channel of its owner alone. closed: called with the reason when it is lost. Raises Unavailable."""
        channel = await self.call(self._connection.channel(publisher_confirms=False), "a channel")

        def ended(done: Any) -> None:
            failure = None if done.cancelled() else done.exception()
            closed(self._worded("the channel", failure or ConnectionError("it was closed")))

        channel.closing.add_done_callback(ended)
        await self.call(channel.basic_qos(prefetch_count=prefetch), "a prefetch")
        return channel

    async def ensure(self, name: str, *, make: bool) -> None:
        """Check once that the queue exists, with its dead-letter queue. Raises QueueMissing, Unavailable."""
        async with self._declaring:
            if name in self.known:
                return
            if make:
                if not name.endswith(DEAD_LETTER_SUFFIX):
                    await self._declare(name + DEAD_LETTER_SUFFIX)
                await self._declare(name)
            else:
                await self.count(name)
            self.known.add(name)

    async def _declare(self, name: str) -> None:
        arguments: FieldTable = {"x-queue-type": "quorum"}
        if name.endswith(DEAD_LETTER_SUFFIX):
            arguments["x-delivery-limit"] = _NO_LIMIT
        else:
            arguments |= {
                # Counted are returns: the last delivery is the one after so many.
                "x-delivery-limit": MAX_RECEIVES - 1,
                "x-dead-letter-exchange": "",
                "x-dead-letter-routing-key": name + DEAD_LETTER_SUFFIX,
                # Kept until the dead-letter queue has confirmed it, which a queue that drops its head cannot promise.
                "x-dead-letter-strategy": "at-least-once",
                "x-overflow": "reject-publish",
            }
        channel = await self.call(self._connection.channel(publisher_confirms=False), "a channel")
        try:
            await self.call(channel.queue_declare(name, durable=True, arguments=arguments), f"queue {name!r}")
        except Unavailable as exc:
            cause = exc.__cause__
            if not isinstance(cause, exceptions.ChannelAccessRefused | exceptions.ChannelPreconditionFailed):
                raise
            await self.count(name)  # made by others, in their way
            level = logging.INFO if isinstance(cause, exceptions.ChannelAccessRefused) else logging.WARNING
            log.log(level, "queue_not_declared", queue=name, reason=self._url.scrub(reason_of(cause)))
        finally:
            await self.close(channel)

    async def count(self, name: str) -> int:
        """Messages that are ready. Raises QueueMissing, Unavailable."""
        async with self._opening:
            if self._asking is None or self._asking.is_closed:
                self._asking = await self.call(self._connection.channel(publisher_confirms=False), "a channel")
            channel = self._asking
        try:
            declared = await self.call(channel.queue_declare(name, passive=True), f"a look at queue {name!r}")
        except QueueMissing as exc:
            self.known.discard(name)
            raise QueueMissing(
                f"queue {name!r} does not exist at {self._url.shown}: make it with `penstock create-queues`, or let "
                "the user of PENSTOCK_TRANSPORT_URL configure queues of this name"
            ) from exc
        return int(declared.message_count or 0)

    async def publish(
        self, name: str, body: bytes, properties: spec.Basic.Properties, *, exchange: str = "", mandatory: bool = True
    ) -> Unavailable | None:
        """Publish to a queue, or by an exchange, and wait for the confirmation; returns why there is none."""
        # The broker closes the connection over a larger frame.
        size, most = _FRAME_BYTES + len(properties.marshal()), self._connection.connection_tune.frame_max
        if 0 < most < size:
            return TooLargeForBroker(f"RabbitMQ takes headers in one frame of up to {most} bytes, not of {size}")
        what = f"a message for exchange {exchange!r}" if exchange else f"a message for queue {name!r}"
        try:
            # The library knows a message that comes back by its id alone, and of several with one id takes the last.
            async with self._turns.setdefault((exchange, properties.message_id), asyncio.Lock()):
                channel = await self._publisher(exchange)
                published = channel.basic_publish(
                    body, exchange=exchange, routing_key=name, properties=properties, mandatory=mandatory
                )
                await self.call(published, what)
        except Unavailable as exc:
            if isinstance(exc, QueueMissing):
                self.known.discard(name)
            cause = exc.__cause__
            limit = _SIZE_LIMIT.search(str(cause)) if isinstance(cause, exceptions.ChannelPreconditionFailed) else None
            if limit is None:
                return exc
            # The broker has closed the channel, which fails all messages under way on it.
            if len(body) > int(limit[1]):
                return TooLargeForBroker(f"RabbitMQ takes messages of up to {limit[1]} bytes, not of {len(body)}")
            return Unavailable(f"RabbitMQ closed the channel because of another message: {cause}")
        return None

    async def _publisher(self, exchange: str) -> Any:
        """A channel for each exchange: a broker closes the channel on which an unknown exchange is named."""
        async with self._opening:
            channel = self._publishing.pop(exchange, None)
            if channel is None or channel.is_closed:
                channel = await self.call(self._connection.channel(publisher_confirms=True), "a channel")
            self._publishing[exchange] = channel
            is_full = len(self._publishing) > _MOST_PUBLISHERS
            dropped = self._publishing.pop(next(iter(self._publishing))) if is_full else None
        if dropped is not None:
            await self.close(dropped)
        return channel


class Links:
    """Opens a link, and another one when it is lost; several callers share it. label: of connects, in metrics."""

    def __init__(self, url: str, *, setting: str, heartbeat_seconds: int, label: str = "") -> None:
        self._label = label
        self.url: BrokerUrl = parse_broker_url(url)
        self._setting = setting
        query = {"heartbeat": str(heartbeat_seconds), **URL(url).query, "name": f"penstock/{__version__}"}
        self._target = URL(url).with_query(query)
        self._link: Link | None = None
        self._opening = asyncio.Lock()
        self._failure = ""
        self._rest_until = float("-inf")

    async def link(self) -> Link:
        """Raises Unavailable."""
        async with self._opening:
            if self._link is None or self._link.is_lost:
                if monotonic() < self._rest_until:
                    raise Unavailable(self._failure)
                try:
                    async with asyncio.timeout(ANSWER_SECONDS):
                        connection = await aiormq.connect(self._target)
                except _AWAY as exc:
                    problem = f"cannot be reached: {self.url.scrub(reason_of(exc))}"
                    if isinstance(exc, exceptions.AuthenticationError | exceptions.ProbableAuthenticationError):
                        problem = f"refuses the user, the password or the virtual host: correct {self._setting}"
                    self._failure = f"RabbitMQ at {self.url.shown} {problem}"
                    self._rest_until = monotonic() + _REST_SECONDS
                    metrics.TRANSPORT_CALLS.labels("amqp", "connect", self._label, "failed").inc()
                    raise Unavailable(self._failure) from exc
                metrics.TRANSPORT_CALLS.labels("amqp", "connect", self._label, "ok").inc()
                self._link = Link(connection, self.url)
            return self._link

    async def close(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            await link.close()


def reason_of(exc: BaseException) -> str:
    return str(exc).strip() or type(exc).__name__
