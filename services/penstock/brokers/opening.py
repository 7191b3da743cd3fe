"""Transports by URL. A broker's library is loaded with its transport, and no other."""

from collections.abc import Mapping, Sequence

from penstock.brokers.base import Transport
from penstock.protocol.errors import needing
from penstock.settings.model import Settings


def open_transport(settings: Settings, *, makes_queues: bool = True) -> Transport:
    """The transport of PENSTOCK_TRANSPORT_URL. makes_queues: missing ones, when first used. Raises SettingsError."""
    kind = settings.transport.kind
    if kind == "sqs":
        with needing("SQS", "worker"):
            from penstock.brokers.sqs import SqsTransport

        return SqsTransport(settings)
    if kind == "amqp":
        with needing("RabbitMQ", "rabbitmq"):
            from penstock.brokers.rabbitmq.queue import AmqpTransport

        return AmqpTransport(settings, makes_queues=makes_queues)
    from penstock.brokers.kafka.queue import KafkaTransport

    return KafkaTransport(settings, makes_queues=makes_queues)


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
