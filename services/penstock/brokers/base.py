"""The contract of a message queue: a handful of operations, and the limits as data."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self

from penstock.protocol.errors import Unavailable

ORIGINAL_ID_ATTRIBUTE = "penstock_original_id"  # of a message sent again: the id that it had the first time

MESSAGE_ID = re.compile(r"[0-9A-Za-z_-]{1,100}")  # what a message id given by its sender may look like
MAX_RECEIVES = 5  # deliveries before a message goes to the dead-letter queue


class QueueMissing(Unavailable):
    """The queue does not exist, and was not made."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a message and a receive may hold, and what the queue can do.

    max_message_bytes: body and attributes, UTF-8. max_call_messages: in one receive.
    max_extend_seconds: the longest lease of a message, counted from its receive.
    max_receives: deliveries of a message; after the last it goes to the dead-letter queue.
    counts_held: a depth counts leased messages. Where False, the messages of a queue that looks empty may all be
    leased, none for longer than ``max_extend_seconds``.
    deletes_overdue: a receiver deletes a message at the end of its longest lease, and relies on the heartbeats of its
    tasks: kept, it would hold up all others of the connection. Where False, others receive the message again.
    outlives_connection: a lease survives the loss of the connection to the broker.
    makes_queues: processes make missing queues, unless they may not.
    bills_calls: each call costs money, so calls that can wait share one.
    fair_groups: the queue knows the group of a message and keeps a group with many messages from delaying others.
    Where False, groups are not sent.
    """

    max_message_bytes: int
    max_call_messages: int
    max_extend_seconds: int
    max_receives: int = MAX_RECEIVES
    counts_held: bool = True
    deletes_overdue: bool = False
    outlives_connection: bool = True
    makes_queues: bool = False
    bills_calls: bool = False
    fair_groups: bool = False


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message to send. group: any text, for queues that are fair between groups."""

    body: str
    attributes: Mapping[str, str] = field(default_factory=dict)
    group: str | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """A received message. ``id`` stays over redeliveries, ``receipt`` is of this one.

    receive_count: 1 for the first delivery; RabbitMQ counts one more for a message that arrives just as a receive ends
    and is handed to a later one. sent_at: epoch seconds by the queue's clock, None if unknown. group: as it was sent.
    sender: as the broker itself names it, None if it does not.
    """

    id: str
    receipt: str
    body: str
    receive_count: int
    sent_at: float | None
    attributes: Mapping[str, str]
    group: str | None = None
    sender: str | None = None

    @property
    def original_id(self) -> str:
        """The id that stays when the message is sent again; a given one that no message can have is ignored."""
        given = self.attributes.get(ORIGINAL_ID_ATTRIBUTE, "")
        return given if MESSAGE_ID.fullmatch(given) else self.id


Unsent = tuple[str, bool]  # the reason, and whether the broker will never take the message


@dataclass(frozen=True, slots=True)
class SendReport:
    """Positions not sent, and one reason (None: all were). refused: those that the queue never takes, as too large."""

    failed: list[int]
    reason: str | None
    refused: frozenset[int] = frozenset()

    @classmethod
    def of(cls, unsent: Mapping[int, Unsent]) -> Self:
        """The report on unsent messages, given by position."""
        reason = next((reason for reason, _ in unsent.values()), None)
        refused = frozenset(position for position, (_, is_final) in unsent.items() if is_final)
        return cls(sorted(unsent), reason, refused)


@dataclass(frozen=True, slots=True)
class Depth:
    """Approximate counts: ready to be received, leased (None if unknown), delayed. See :class:`Limits` on ``total``."""

    visible: int
    in_flight: int | None
    delayed: int

    @property
    def total(self) -> int:
        return self.visible + (self.in_flight or 0) + self.delayed


class Queue(Protocol):
    """One queue. Operations take any number of messages. Raises Unavailable where nothing at all could be done."""

    label: str
    limits: Limits

    async def send(self, messages: Sequence[Outgoing]) -> SendReport: ...

    async def receive(self, *, wait_seconds: int, visibility_seconds: int) -> list[Message]:
        """Up to one call's worth of messages, hidden from other receivers for ``visibility_seconds``."""

    async def delete(self, messages: Sequence[Message]) -> list[Message]:
        """Acknowledge; returns those that could not be deleted (they will be delivered again)."""

    async def extend(self, messages: Sequence[Message], seconds: int) -> list[Message]:
        """Hide for so many seconds from now; returns those whose lease has ended."""

    async def release(self, messages: Sequence[Message]) -> None:
        """Give back for anyone to receive at once."""

    async def depth(self) -> Depth: ...


class Transport(Protocol):
    """A connection to a broker, from which queues are taken by name."""

    limits: Limits

    def queue(self, name: str, *, label: str) -> Queue: ...

    async def make_queues(self, names: Mapping[str, str]) -> dict[str, str]:
        """Make missing queues, given by label, with dead-letter queues; returns their URLs. Raises Unavailable."""

    async def greet(self) -> str:
        """What the broker is, for an operator. Raises Unavailable."""

    async def close(self) -> None: ...
