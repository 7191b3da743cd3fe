"""Leases of received messages; one is deleted when the responses to all its tasks are in the results queue."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic, time

from penstock.brokers.base import Message, Queue
from penstock.protocol.errors import Unavailable
from penstock.runtime import metrics
from penstock.runtime.logs import get_logger

_SHORTEST_LINGER_SECONDS = 0.005  # messages that finish within it are deleted by one call
_LONGEST_LINGER_SECONDS = 0.05
_RATE_MEMORY_SECONDS = 0.25
_SHORTEST_DELAY_SECONDS = 0.002
_DELETE_TRIES = 5

log = get_logger()


class Linger:
    """An adaptive batching delay (Kafka's linger), which grows with the rate of items; none below a certain rate.

    full: items in a call worth waiting for. longest_seconds: the wait at the rate that brings ``full`` items within it.
    """

    def __init__(self, full: int, *, longest_seconds: float) -> None:
        self._full = full
        self._longest_seconds = longest_seconds
        self._rate = 0.0
        self._seen_at = monotonic()

    def record(self, items: int) -> None:
        """Count items sent since the last call."""
        now = monotonic()
        gone = max(now - self._seen_at, 1e-3)
        self._seen_at = now
        self._rate += (items / gone - self._rate) * min(1.0, gone / _RATE_MEMORY_SECONDS)

    def seconds(self, waiting: int) -> float:
        """The delay now, in seconds, with so many items waiting."""
        if waiting >= self._full:
            return 0.0
        wait = self._longest_seconds * min(1.0, self._rate * self._longest_seconds / self._full)
        return wait if wait >= _SHORTEST_DELAY_SECONDS else 0.0


@dataclass(slots=True, eq=False)
class Lease:
    """A leased message, and the number of its tasks without a response.

    until: end of the lease by this process's clock. begun: one of its tasks has started. lost: the lease has ended, and
    another worker may receive the message.
    """

    message: Message
    unanswered: int
    received_at: float
    until: float
    begun: bool = False
    lost: bool = False
    delete_tries: int = 0

    def begin(self) -> None:
        """Record the start of the message's first task."""
        if not self.begun:
            self.begun = True
            if self.message.sent_at is not None:
                metrics.OUTBOUND_WAIT_SECONDS.observe(max(0.0, time() - self.message.sent_at))


class Leases:
    """The leases of a worker; :meth:`delete_finished` is a side task.

    The table is changed by the event loop's thread alone. Another thread may read copies of it, and extend.
    """

    def __init__(self, queue: Queue, *, visibility_seconds: int) -> None:
        self._queue = queue
        self._visibility_seconds = visibility_seconds
        self._linger = Linger(queue.limits.max_call_messages, longest_seconds=_LONGEST_LINGER_SECONDS)
        self._leases: dict[str, Lease] = {}
        self._finished: list[Lease] = []
        self._any_finished = asyncio.Event()
        self.all_deleted = asyncio.Event()
        self.all_deleted.set()
        self.empty = asyncio.Event()
        self.empty.set()
        metrics.HELD_MESSAGES.set_function(lambda: len(self._leases))

    def add(self, message: Message, tasks: int) -> Lease:
        now = monotonic()
        lease = self._leases[message.id] = Lease(message, tasks, now, now + self._visibility_seconds)
        self.empty.clear()
        return lease

    def renew(self, message: Message) -> bool:
        """Take the newer receipt of a leased message; False for any other message."""
        lease = self._leases.get(message.id)
        if lease is None:
            return False
        lease.message = message
        lease.lost = False
        lease.until = monotonic() + self._visibility_seconds
        log.warning("message_received_again", message_id=message.id, unanswered=lease.unanswered)
        return True

    def answered(self, lease: Lease) -> None:
        """Count the response of one of the message's tasks as sent."""
        lease.unanswered -= 1
        if lease.unanswered == 0:
            self._finished.append(lease)
            self._any_finished.set()
            self.all_deleted.clear()

    async def delete_finished(self) -> None:
        """Delete finished messages in batches; a side task."""
        while True:
            await self._any_finished.wait()
            if len(self._finished) < self._queue.limits.max_call_messages:
                await asyncio.sleep(max(_SHORTEST_LINGER_SECONDS, self._linger.seconds(len(self._finished))))
            self._any_finished.clear()
            finished, self._finished = self._finished, []
            self._linger.record(len(finished))
            again = await self._delete([lease for lease in finished if not lease.lost])
            self._forget([lease for lease in finished if lease not in again])
            if again:
                await asyncio.sleep(0.1 * 2 ** max(lease.delete_tries for lease in again))
                self._finished += again
                self._any_finished.set()
            if not self._finished:
                self.all_deleted.set()

    async def _delete(self, finished: Sequence[Lease]) -> list[Lease]:
        """Returns the leases to retry. A message given up is redelivered, and the claim fence rejects its responses."""
        again = []
        for lease in await self._failed(finished, self._queue.delete):
            lease.delete_tries += 1
            if lease.delete_tries < _DELETE_TRIES:
                again.append(lease)
            else:
                log.warning("message_not_deleted", message_id=lease.message.id, tries=lease.delete_tries)
        return again

    @staticmethod
    async def _failed(
        leases: Sequence[Lease], call: Callable[[Sequence[Message]], Awaitable[list[Message]]]
    ) -> list[Lease]:
        """Call the queue; returns the leases of the messages for which that failed."""
        messages = [lease.message for lease in leases]
        try:
            failed = await call(messages) if messages else []
        except Unavailable:
            failed = messages
        receipts = {message.receipt for message in failed}
        return [lease for lease in leases if lease.message.receipt in receipts] if receipts else []

    async def extend_unfinished(self, queue: Queue | None = None) -> None:
        """Extend the leases of unfinished messages; a side task. queue: of the calling thread; None: the worker's."""
        interval = self._visibility_seconds / 3
        while True:
            await asyncio.sleep(interval)
            soon = monotonic() + self._visibility_seconds - interval / 2  # a later end can wait for the next round
            due = [
                lease
                for lease in self._leases.copy().values()
                if lease.unanswered and not lease.lost and lease.until < soon
            ]
            if due:
                await self._extend(due, queue or self._queue)

    async def _extend(self, due: Sequence[Lease], queue: Queue) -> None:
        now = monotonic()
        longest = queue.limits.max_extend_seconds
        if queue.limits.deletes_overdue:
            # The supervisor watches the heartbeats of their tasks.
            overdue = [lease for lease in due if now + self._visibility_seconds / 2 > lease.received_at + longest]
            await self._delete(overdue)
            for lease in overdue:
                lease.lost = True
                log.info("message_deleted_early", message_id=lease.message.id, unanswered=lease.unanswered)
            due = [lease for lease in due if not lease.lost]
        by_seconds: dict[int, list[Lease]] = defaultdict(list)
        for lease in due:
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

    async def release(self, leases: Sequence[Lease]) -> None:
        """Give messages back, for any worker to receive at once."""
        messages = [lease.message for lease in leases if not lease.lost]
        self._forget(leases)
        if messages:
            try:
                await self._queue.release(messages)
            except Unavailable as exc:
                log.warning("messages_not_released", messages=len(messages), reason=str(exc))

    def unfinished(self) -> list[Lease]:
        """Leases of messages with tasks that have no response."""
        return [lease for lease in self._leases.values() if lease.unanswered]

    def _forget(self, leases: Sequence[Lease]) -> None:
        for lease in leases:
            self._leases.pop(lease.message.id, None)
        if not self._leases:
            self.empty.set()
