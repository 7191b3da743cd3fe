"""Looking into a queue that cannot be browsed: its messages are received, held for a short while and given back."""

import secrets
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from time import monotonic

from penstock.brokers.base import Message, Queue
from penstock.protocol.errors import QueueAway, Unavailable
from penstock.runtime.logs import log

LEASE_SECONDS = 60  # until a message comes back if this process dies
LOOK_SECONDS = 12.0  # of one call to the api, well within what its caller waits and what a message is held


class LeasedMessages:
    """Messages that only this caller sees until the block of :func:`lease_messages` ends.

    ``total`` and ``elsewhere``: messages in the queue, and those of them held by others, as counted at the beginning
    where the queue counts them; its counts are approximate. ``held``: messages taken and not removed, by id.
    """

    def __init__(self, queue: Queue, total: int, elsewhere: int) -> None:
        self._queue = queue
        self._total = total
        self.elsewhere = elsewhere
        self._ends_at = monotonic() + LOOK_SECONDS
        self.held: dict[str, Message] = {}
        self.removed: set[str] = set()

    @property
    def seen(self) -> int:
        return len(self.held) + len(self.removed)

    @property
    def total(self) -> int:
        return max(self._total, self.seen + self.elsewhere)

    async def take(self) -> list[Message]:
        """A few messages not seen before; none at the end of the queue or of the time. Raises QueueAway."""
        while monotonic() < self._ends_at:
            with _reported(self._queue):
                # A wait makes SQS ask all its servers; without one it may say that there is nothing where there is.
                messages = await self._queue.receive(wait_seconds=1, visibility_seconds=LEASE_SECONDS)
            if not messages:
                break
            again = [message for message in messages if message.id in self.removed]
            if again:
                await self._queue.delete(again)  # its first deletion came too late for the queue
            fresh = [message for message in messages if message.id not in self.held.keys() | self.removed]
            for message in messages:
                if message.id not in self.removed:
                    self.held[message.id] = replace(message, body="")  # its receipt is what giving back needs
            if fresh:
                return fresh
        return []

    async def remove(self, messages: Sequence[Message]) -> None:
        """Delete from the queue; those that could not be deleted are still held."""
        left = await self._queue.delete([self.held[message.id] for message in messages])
        for message_id in {message.id for message in messages} - {message.id for message in left}:
            del self.held[message_id]
            self.removed.add(message_id)

    def not_seen(self, ids: Iterable[str]) -> list[str]:
        return [wanted for wanted in dict.fromkeys(ids) if wanted not in self.held.keys() | self.removed]


@asynccontextmanager
async def lease_messages(queue: Queue) -> AsyncIterator[LeasedMessages]:
    """Take messages of a queue; those not removed are released when the block ends. Raises QueueAway."""
    with _reported(queue):
        depth = await queue.depth()
    leased = LeasedMessages(queue, depth.total, depth.in_flight or 0)
    try:
        yield leased
    finally:
        await queue.release(list(leased.held.values()))


@contextmanager
def _reported(queue: Queue) -> Iterator[None]:
    """Raise QueueAway to the caller for a queue that is unavailable, and log the reason."""
    try:
        yield
    except Unavailable as exc:
        raise queue_away(queue.label, str(exc)) from exc


def queue_away(label: str, reason: str) -> QueueAway:
    """The error of a queue that cannot be used; the reason goes to the log alone."""
    reference = secrets.token_hex(8)
    log.warning("queue_away", queue=label, reason=reason, ref=reference)
    return QueueAway(label, reference)
