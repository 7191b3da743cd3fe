"""Message queues: ``base`` is the contract, each broker a module beside it."""

from penstock.transports.base import (
    DEAD_LETTER_SUFFIX,
    MAX_RECEIVES,
    ORIGINAL_ID_ATTRIBUTE,
    Depth,
    Limits,
    Message,
    Outgoing,
    Queue,
    QueueMissing,
    SendReport,
    Transport,
)
from penstock.transports.opening import create_queues, open_transport, queue_names

__all__ = [
    "DEAD_LETTER_SUFFIX",
    "MAX_RECEIVES",
    "ORIGINAL_ID_ATTRIBUTE",
    "Depth",
    "Limits",
    "Message",
    "Outgoing",
    "Queue",
    "QueueMissing",
    "SendReport",
    "Transport",
    "create_queues",
    "open_transport",
    "queue_names",
]
