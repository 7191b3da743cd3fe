"""Message queues: ``base`` is the contract, each broker a module beside it."""

from penstock.transports.base import (
    DEAD_LETTER_SUFFIX,
    ORIGINAL_ID_ATTRIBUTE,
    Depth,
    Limits,
    Message,
    Outgoing,
    Queue,
    SendReport,
    Transport,
)

__all__ = [
    "DEAD_LETTER_SUFFIX",
    "ORIGINAL_ID_ATTRIBUTE",
    "Depth",
    "Limits",
    "Message",
    "Outgoing",
    "Queue",
    "SendReport",
    "Transport",
]
