"""Leases of outbound messages that this worker has received and not yet deleted.

A message stays hidden from other workers while any of its tasks runs or waits here, and is deleted when the responses
to all its tasks are in the results queue.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from time import monotonic, time

from penstock.brokers.base import Message, Queue
from penstock.protocol.errors import Unavailable
from penstock.runtime import metrics
from penstock.runtime.logs import get_logger
from penstock.worker.linger import Linger

_SHORTEST_LINGER_SECONDS = 0.005  # messages that finish within it are deleted by one call
_LONGEST_LINGER_SECONDS = 0.05
_DELETE_TRIES = 5

log = get_logger()


class Lease:
    """A leased message, and the number of its tasks without a response.

    begun: one of its tasks has started. sent_ago: seconds from sent to received; None: unknown to the broker.
    until: end of the lease by this process's clock. lost: the lease has ended, and another worker may receive the
    message.
    """

    __slots__ = ("begun", "delete_tries", "lost", "message", "received_at", "sent_ago", "unanswered", "until")

    def __init__(self, message: Message, tasks: int, visibility_seconds: float) -> None:
        self.message = message
        self.unanswered = tasks
        self.begun = False
        self.lost = False
        self.delete_tries = 0
        self.received_at = monotonic()
        self.until = self.received_at + visibility_seconds
        self.sent_ago = None if message.sent_at is None else max(0.0, time() - message.sent_at)

    def begin(self) -> None:
        """Record the start of the message's first task."""
        self.begun = True
        if self.sent_ago is not None:
            metrics.OUTBOUND_WAIT_SECONDS.observe(self.sent_ago + monotonic() - self.received_at)


class Leases:
    """The leases of a worker; :meth:`extend_unfinished` and :meth:`delete_finished` are side tasks."""

    def __init__(self, queue: Queue, *, visibility_seconds: int) -> None:
        self._queue = queue
        self._visibility_seconds = visibility_seconds
        self._linger = Linger(queue.limits.max_call_messages, longest_seconds=_LONGEST_LINGER_SECONDS)
        self._leases: dict[str, Lease] = {}
        self._finished: list[Lease] = []
        self._any_finished = asyncio.Event()
        self._all_deleted = asyncio.Event()
        self._all_deleted.set()
        self._empty = asyncio.Event()
        self._empty.set()
        metrics.HELD_MESSAGES.set_function(lambda: len(self._leases))

    def __len__(self) -> int:
        return len(self._leases)

    def add(self, message: Message, tasks: int) -> Lease:
        """Lease a message just received."""
        lease = Lease(message, tasks, self._visibility_seconds)
        self._leases[message.id] = lease
        self._empty.clear()
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
            self._all_deleted.clear()

    async def wait_deleted(self) -> None:
        """Wait until every finished message is deleted."""
        await self._all_deleted.wait()

    async def wait_empty(self) -> None:
        """Wait until no message is leased."""
        await self._empty.wait()

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
                self._all_deleted.set()

    async def _delete(self, finished: Sequence[Lease]) -> list[Lease]:
        """Returns the leases to retry. A message given up is redelivered, and the claim fence rejects its responses."""
        messages = [lease.message for lease in finished]
        try:
            failed = await self._queue.delete(messages) if messages else []
        except Unavailable:
            failed = messages
        if not failed:
            return []
        receipts = {message.receipt for message in failed}
        again = []
        for lease in finished:
            if lease.message.receipt in receipts:
                lease.delete_tries += 1
                if lease.delete_tries < _DELETE_TRIES:
                    again.append(lease)
                else:
                    log.warning("message_not_deleted", message_id=lease.message.id, tries=lease.delete_tries)
        return again

    async def extend_unfinished(self) -> None:
        """Extend the leases of unfinished messages; a side task."""
        interval = self._visibility_seconds / 3
        while True:
            await asyncio.sleep(interval)
            soon = monotonic() + self._visibility_seconds - interval / 2
            # Leases that are long enough wait for the next round.
            due = [
                lease for lease in self._leases.values() if lease.unanswered and not lease.lost and lease.until < soon
            ]
            if due:
                await self._extend(due)

    async def _extend(self, due: Sequence[Lease]) -> None:
        now = monotonic()
        longest = self._queue.limits.max_extend_seconds
        if self._queue.limits.deletes_overdue:
            overdue = [lease for lease in due if now + self._visibility_seconds / 2 > lease.received_at + longest]
            if overdue:
                await self._delete_overdue(overdue)
            due = [lease for lease in due if not lease.lost]
        by_seconds: dict[int, list[Lease]] = defaultdict(list)
        for lease in due:
            by_seconds[min(self._visibility_seconds, int(lease.received_at + longest - now))].append(lease)
        for seconds, group in by_seconds.items():
            failed = (
                await self._extend_by(seconds, group) if seconds > 0 else {lease.message.receipt for lease in group}
            )
            for lease in group:
                if lease.message.receipt not in failed:
                    lease.until = now + seconds
                elif monotonic() >= lease.until:
                    # Its tasks go on: the claim decides whose response counts.
                    lease.lost = True
                    log.warning(
                        "message_lease_lost", message_id=lease.message.id, unanswered=lease.unanswered,
                        held_seconds=round(monotonic() - lease.received_at),
                    )  # fmt: skip

    async def _delete_overdue(self, overdue: Sequence[Lease]) -> None:
        """Delete messages at the broker's longest lease. Their tasks go on, and the supervisor watches their
        heartbeats."""
        await self._delete(overdue)
        for lease in overdue:
            lease.lost = True
            log.info("message_deleted_early", message_id=lease.message.id, unanswered=lease.unanswered)

    async def _extend_by(self, seconds: int, group: Sequence[Lease]) -> set[str]:
        """Returns the receipts that were not extended."""
        messages = [lease.message for lease in group]
        try:
            failed = await self._queue.extend(messages, seconds)
        except Unavailable:
            failed = messages
        return {message.receipt for message in failed}

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
            self._empty.set()
