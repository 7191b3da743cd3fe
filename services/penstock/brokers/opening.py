"""Transports by URL. A broker's library is loaded with its transport, and no other."""

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, cast

from penstock.brokers.base import Queue, Transport
from penstock.protocol.errors import needing
from penstock.runtime.loop_thread import LoopThread
from penstock.settings.model import Settings


def open_transport(settings: Settings, *, makes_queues: bool = True, is_blocked_at_times: bool = False) -> Transport:
    """The transport of PENSTOCK_TRANSPORT_URL. makes_queues: missing ones, when first used. is_blocked_at_times:
    handlers may block the event loop. A connection that holds leases must not notice: it is served by a thread of its
    own then (decisions/061). Raises SettingsError."""
    kind = settings.transport.kind
    if kind == "sqs":
        with needing("SQS", "worker"):
            from penstock.brokers.sqs import SqsTransport

        transport: Transport = SqsTransport(settings)
    elif kind == "amqp":
        with needing("RabbitMQ", "rabbitmq"):
            from penstock.brokers.rabbitmq.queue import AmqpTransport

        transport = AmqpTransport(settings, makes_queues=makes_queues)
    else:
        from penstock.brokers.kafka.queue import KafkaTransport

        transport = KafkaTransport(settings, makes_queues=makes_queues)
    if is_blocked_at_times and not transport.limits.outlives_connection:
        return cast(Transport, _ThreadedTransport(transport, LoopThread("broker")))
    return transport


def queue_names(settings: Settings) -> Mapping[str, str]:
    """Names, or URLs, of the three queues by label."""
    return {"inbound": settings.inbound_queue, "outbound": settings.outbound_queue, "results": settings.results_queue}


async def create_queues(settings: Settings, *, more: Sequence[str] = ()) -> dict[str, str]:
    """Make the three queues, those in ``more`` and dead-letter queues; returns where each is. Raises Unavailable."""
    transport = open_transport(settings)
    try:
        return await transport.make_queues({**queue_names(settings), **{name: name for name in more}})
    finally:
        await transport.close()


class _Threaded:
    """A queue or a transport whose operations are done in a thread; they may be called from any event loop."""

    def __init__(self, target: Queue | Transport, thread: LoopThread) -> None:
        self._target: Any = target
        self._thread = thread

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._target, name)
        if not callable(operation):  # its label or limits
            return operation

        def call(*arguments: Any, **named: Any) -> Awaitable[Any]:
            return self._thread.call(operation(*arguments, **named))

        setattr(self, name, call)  # so that it is made once
        return call


class _ThreadedTransport(_Threaded):
    def queue(self, name: str, *, label: str) -> Queue:
        return cast(Queue, _Threaded(self._target.queue(name, label=label), self._thread))

    async def close(self) -> None:
        if self._thread.is_alive():
            await self._thread.call(self._target.close())
            await asyncio.to_thread(self._thread.stop, seconds=1.0)
