"""What Penstock asks of a message queue: a handful of operations, and the limits as data."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

DEAD_LETTER_SUFFIX = "-dlq"  # a queue's dead-letter queue is named as the queue is, and labelled so
ORIGINAL_ID_ATTRIBUTE = "penstock_original_id"  # of a message sent again: the id that it had the first time

_ORIGINAL_ID = re.compile(r"[0-9A-Za-z_-]{1,100}")


@dataclass(frozen=True, slots=True)
class Limits:
    """What one call and one message may hold.

    max_message_bytes: body and attributes, UTF-8. max_call_bytes: all messages of one call together.
    max_extend_seconds: how far a message may be held from others, counted from its receive.
    """

    max_message_bytes: int
    max_call_bytes: int
    max_call_messages: int
    max_wait_seconds: int
    max_extend_seconds: int


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message to send."""

    body: str
    attributes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Message:
    """A received message. ``id`` stays over redeliveries, ``receipt`` is of this one.

    receive_count: 1 for the first delivery. sent_at: epoch seconds by the queue's clock, None if it does not tell.
    """

    id: str
    receipt: str
    body: str
    receive_count: int
    sent_at: float | None
    attributes: Mapping[str, str]

    @property
    def original_id(self) -> str:
        """The id that stays when the message is sent again; one that no id of ours can look like is not believed."""
        given = self.attributes.get(ORIGINAL_ID_ATTRIBUTE, "")
        return given if _ORIGINAL_ID.fullmatch(given) else self.id


@dataclass(frozen=True, slots=True)
class SendReport:
    """Positions of the messages that were not sent, and one reason for an operator (None when all were).

    refused: those among ``failed`` that the queue will never take, such as one above its limit of bytes.
    """

    failed: list[int]
    reason: str | None
    refused: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Depth:
    """Approximate counts: ready to be received, held by a receiver, delayed."""

    visible: int
    in_flight: int
    delayed: int

    @property
    def total(self) -> int:
        return self.visible + self.in_flight + self.delayed


class Queue(Protocol):
    """One queue. Every operation takes any number of messages, cuts them into calls and survives partial failure.

    Raises Unavailable only where nothing at all could be done.
    """

    label: str  # inbound, outbound, results: for metrics and logs
    limits: Limits

    async def send(self, messages: Sequence[Outgoing]) -> SendReport: ...

    async def receive(self, *, wait_seconds: int, visibility_seconds: int) -> list[Message]:
        """Up to one call's worth of messages, hidden from other receivers for ``visibility_seconds``."""
        ...

    async def delete(self, messages: Sequence[Message]) -> list[Message]:
        """Acknowledge; returns those that could not be deleted (they will be delivered again)."""
        ...

    async def extend(self, messages: Sequence[Message], seconds: int) -> list[Message]:
        """Hide for so many seconds from now; returns those whose hold is lost."""
        ...

    async def release(self, messages: Sequence[Message]) -> None:
        """Give back for anyone to receive at once."""
        ...

    async def depth(self) -> Depth: ...


class Transport(Protocol):
    """A connection to a broker, from which queues are taken by name."""

    def queue(self, name: str, *, label: str) -> Queue: ...

    async def close(self) -> None: ...
