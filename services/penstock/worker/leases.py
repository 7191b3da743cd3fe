"""Leases of received messages; one is deleted when the responses to all its tasks are in the results queue."""

import asyncio
import math
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic, time

from penstock.brokers.base import Message, Queue
from penstock.brokers.receiving import Deleter
from penstock.protocol.errors import Unavailable
from penstock.runtime import metrics
from penstock.runtime.logs import log
from penstock.settings.model import Settings


@dataclass(slots=True, eq=False)
class Lease:
    """A leased message, and the number of its tasks without a response.

    unanswered: at least 1 until the message is read. until: end of the lease by this process's clock. pack_id: a name
    of all its tasks, if it has one. begun: one of its tasks has started. lost: the lease has ended, and another worker
    may receive the message. has_lapsed: it has ended once, whatever has extended it since, so that another worker may
    have had the message.
    """

    message: Message
    unanswered: int
    received_at: float
    until: float
    pack_id: str | None = None
    begun: bool = False
    lost: bool = False
    has_lapsed: bool = False

    def is_unbroken(self) -> bool:
        """Whether the lease has held all the time, so that no other worker has received the message since."""
        self.has_lapsed = self.has_lapsed or self.lost or monotonic() >= self.until
        return not self.has_lapsed

    def begin(self) -> None:
        """Record the start of the message's first task."""
        if not self.begun:
            self.begun = True
            if self.message.sent_at is not None:
                metrics.OUTBOUND_WAIT_SECONDS.observe(max(0.0, time() - self.message.sent_at))


class Leases:
    """The leases of a worker. deleter: of the finished messages.

    The table is changed by the event loop's thread alone. Another thread may read copies of it, extend, and add
    messages that the event loop, which a handler may block, has not taken yet.
    """

    def __init__(self, queue: Queue, settings: Settings) -> None:
        self._queue = queue
        self._visibility_seconds = settings.visibility_timeout_seconds
        self.held_until: float | None = None  # where nothing extends them: until when others hold them for this worker
        # A message given up is delivered again, and the claim fence rejects its responses.
        self.deleter = Deleter(queue, settings, self._forget)
        self._leases: dict[str, Lease] = {}
        self._arrived: dict[str, Lease] = {}
        metrics.HELD_MESSAGES.set_function(lambda: len(self._leases) + len(self._arrived))

    def arrive(self, messages: Sequence[Message]) -> None:
        """Hold received messages until they are taken; called from any thread."""
        self._arrived |= {message.id: self._lease(message) for message in messages}

    def _lease(self, message: Message) -> Lease:
        now = monotonic()
        return Lease(message, 1, now, self.held_until or now + self._visibility_seconds)

    def take(self, message: Message) -> Lease | None:
        """The lease of a received message, to be added; None for one that is leased already or not any more."""
        arrived = self._arrived.pop(message.id, None) or self._lease(message)
        lease = self._leases.get(message.id)
        if lease is None:
            return None if arrived.lost and monotonic() >= arrived.until else arrived
        lease.is_unbroken()
        lease.message, lease.until, lease.lost = arrived.message, arrived.until, arrived.lost
        if not lease.unanswered:
            self.deleter.add([message])
        log.warning("message_received_again", message_id=message.id, unanswered=lease.unanswered)
        return None

    def add(self, lease: Lease, tasks: int) -> None:
        lease.unanswered = tasks
        self._leases[lease.message.id] = lease

    def answered(self, lease: Lease) -> None:
        """Count the response of one of the message's tasks as sent."""
        lease.unanswered -= 1
        if lease.unanswered == 0:
            if lease.lost:
                self._forget([lease.message])
            else:
                self.deleter.add([lease.message])

    @staticmethod
    async def _failed(leases: Sequence[Lease], call: Callable[..., Awaitable[list[Message]]]) -> list[Lease]:
        """Call the queue; returns the leases of the messages for which that failed."""
        messages = [lease.message for lease in leases]
        try:
            failed = await call(messages) if messages else []
        except Unavailable:
            failed = messages
        receipts = {message.receipt for message in failed}
        return [lease for lease in leases if lease.message.receipt in receipts] if receipts else []

    async def extend_unfinished(self, queue: Queue) -> None:
        """Extend the leases of unfinished messages; a side task. queue: for calls of the running event loop."""
        interval = self._visibility_seconds / 3
        while True:
            await asyncio.sleep(interval)
            now = monotonic()
            soon = now + self._visibility_seconds - interval / 2  # a later end can wait for the next round
            # One that is to be deleted ends so soon only while the event loop, which deletes it, is blocked.
            at_once = now + interval * 1.15
            due = [
                lease
                for lease in (*self._leases.copy().values(), *self._arrived.copy().values())
                if not lease.lost and lease.until < (soon if lease.unanswered else at_once)
            ]
            if due:
                await self._extend(due, queue)

    async def _extend(self, due: Sequence[Lease], queue: Queue) -> None:
        now = monotonic()
        longest = queue.limits.max_extend_seconds
        if queue.limits.deletes_overdue:
            # The supervisor watches the heartbeats of their tasks.
            overdue = [lease for lease in due if now + self._visibility_seconds / 2 > lease.received_at + longest]
            await self._failed(overdue, queue.delete)
            for lease in overdue:
                lease.lost = True
                lease.until = math.inf  # it cannot come again
                log.info("message_deleted_early", message_id=lease.message.id, unanswered=lease.unanswered)
            due = [lease for lease in due if not lease.lost]
        by_seconds: dict[int, list[Lease]] = defaultdict(list)
        for lease in due:
            lease.is_unbroken()
            by_seconds[min(self._visibility_seconds, int(lease.received_at + longest - now))].append(lease)
        for seconds, group in by_seconds.items():
            extend = partial(queue.extend, seconds=seconds)
            failed = set(await self._failed(group, extend) if seconds > 0 else group)
            for lease in group:
                if lease not in failed:
                    lease.until = now + seconds
                elif monotonic() >= lease.until:
                    # Its tasks go on: the claim decides whose response counts.
                    lease.lost = True
                    log.warning(
                        "message_lease_lost", message_id=lease.message.id, unanswered=lease.unanswered,
                        held_seconds=round(monotonic() - lease.received_at),
                    )  # fmt: skip

    async def release(self, leases: Collection[Lease]) -> None:
        """Give messages back, for any worker to receive at once."""
        messages = [lease.message for lease in leases if not lease.lost]
        self._forget([lease.message for lease in leases])
        if messages:
            try:
                await self._queue.release(messages)
            except Unavailable as exc:
                log.warning("messages_not_released", messages=len(messages), reason=str(exc))

    def finished(self) -> list[Lease]:
        """Leases of messages that are to be deleted."""
        return [lease for lease in self._leases.copy().values() if not lease.unanswered]

    def unfinished(self) -> list[Lease]:
        """Leases of messages with tasks that have no response."""
        return [lease for lease in (*self._leases.values(), *self._arrived.values()) if lease.unanswered]

    def _forget(self, messages: Sequence[Message]) -> None:
        for message in messages:
            self._leases.pop(message.id, None)
            self._arrived.pop(message.id, None)
