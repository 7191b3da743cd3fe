"""Holder: the outbound messages that this worker has received and not yet deleted.

They stay hidden from other workers while any of their tasks runs or waits here, and are deleted when the answers to
all their tasks are in the results queue.
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

_SHORTEST_LINGER_SECONDS = 0.005  # what finishes within it is deleted by one call; nobody waits for a delete
_LONGEST_LINGER_SECONDS = 0.05
_DELETE_TRIES = 5

log = get_logger()


class Held:
    """A message and how many of its tasks are not answered yet.

    begun: one of its tasks was started. sent_ago: seconds from sent to received, None if the queue does not tell.
    until: hidden from others so long, by this process's clock. lost: that time has passed without an extension, so
    it belongs to whoever receives it next.
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
        """The first of its tasks starts."""
        self.begun = True
        if self.sent_ago is not None:
            metrics.OUTBOUND_WAIT_SECONDS.observe(self.sent_ago + monotonic() - self.received_at)


class Holder:
    """Extends and deletes in batches; both are side tasks."""

    def __init__(self, queue: Queue, *, visibility_seconds: int) -> None:
        self._queue = queue
        self._visibility_seconds = visibility_seconds
        self._linger = Linger(queue.limits.max_call_messages, longest_seconds=_LONGEST_LINGER_SECONDS)
        self._held: dict[str, Held] = {}
        self._finished: list[Held] = []
        self._any_finished = asyncio.Event()
        self._all_deleted = asyncio.Event()
        self._all_deleted.set()
        self._empty = asyncio.Event()
        self._empty.set()
        metrics.HELD_MESSAGES.set_function(lambda: len(self._held))

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, message: Message, tasks: int) -> Held:
        """From now on the message stays hidden."""
        held = Held(message, tasks, self._visibility_seconds)
        self._held[message.id] = held
        self._empty.clear()
        return held

    def renew(self, message: Message) -> bool:
        """Take the newer receipt of a message whose tasks are here already; False when they are not."""
        held = self._held.get(message.id)
        if held is None:
            return False
        held.message = message
        held.lost = False
        held.until = monotonic() + self._visibility_seconds
        log.warning("message_received_again", message_id=message.id, unanswered=held.unanswered)
        return True

    def answered(self, held: Held) -> None:
        """One more task's answer is in the results queue."""
        held.unanswered -= 1
        if held.unanswered == 0:
            self._finished.append(held)
            self._any_finished.set()
            self._all_deleted.clear()

    async def wait_deleted(self) -> None:
        """Until every message whose tasks are all answered is deleted."""
        await self._all_deleted.wait()

    async def wait_empty(self) -> None:
        """Until no message is held."""
        await self._empty.wait()

    async def delete_finished(self) -> None:
        """The deleting; a side task."""
        while True:
            await self._any_finished.wait()
            if len(self._finished) < self._queue.limits.max_call_messages:
                await asyncio.sleep(max(_SHORTEST_LINGER_SECONDS, self._linger.seconds(len(self._finished))))
            self._any_finished.clear()
            finished, self._finished = self._finished, []
            self._linger.saw(len(finished))
            again = await self._delete([held for held in finished if not held.lost])
            self._forget([held for held in finished if held not in again])
            if again:
                await asyncio.sleep(0.1 * 2 ** max(held.delete_tries for held in again))
                self._finished += again
                self._any_finished.set()
            if not self._finished:
                self._all_deleted.set()

    async def _delete(self, finished: Sequence[Held]) -> list[Held]:
        """Returns those to be tried again; given up, a message comes again, and the fence makes its tasks harmless."""
        messages = [held.message for held in finished]
        try:
            failed = await self._queue.delete(messages) if messages else []
        except Unavailable:
            failed = messages
        if not failed:
            return []
        receipts = {message.receipt for message in failed}
        again = []
        for held in finished:
            if held.message.receipt in receipts:
                held.delete_tries += 1
                if held.delete_tries < _DELETE_TRIES:
                    again.append(held)
                else:
                    log.warning("message_not_deleted", message_id=held.message.id, tries=held.delete_tries)
        return again

    async def extend_held(self) -> None:
        """The extending; a side task."""
        interval = self._visibility_seconds / 3
        while True:
            await asyncio.sleep(interval)
            soon = monotonic() + self._visibility_seconds - interval / 2
            # What was received just now can wait for the next round.
            due = [held for held in self._held.values() if held.unanswered and not held.lost and held.until < soon]
            if due:
                await self._extend(due)

    async def _extend(self, due: Sequence[Held]) -> None:
        now = monotonic()
        longest = self._queue.limits.max_extend_seconds
        if self._queue.limits.deletes_overdue:
            overdue = [held for held in due if now + self._visibility_seconds / 2 > held.received_at + longest]
            if overdue:
                await self._delete_overdue(overdue)
            due = [held for held in due if not held.lost]
        by_seconds: dict[int, list[Held]] = defaultdict(list)
        for held in due:
            by_seconds[min(self._visibility_seconds, int(held.received_at + longest - now))].append(held)
        for seconds, group in by_seconds.items():
            failed = await self._extend_by(seconds, group) if seconds > 0 else {held.message.receipt for held in group}
            for held in group:
                if held.message.receipt not in failed:
                    held.until = now + seconds
                elif monotonic() >= held.until:
                    # Its tasks go on: the claim decides whose answer counts.
                    held.lost = True
                    log.warning(
                        "message_hold_lost", message_id=held.message.id, unanswered=held.unanswered,
                        held_seconds=round(monotonic() - held.received_at),
                    )  # fmt: skip

    async def _delete_overdue(self, overdue: Sequence[Held]) -> None:
        """Delete what the broker lets nobody hold for longer. Its tasks go on, and their signs of life, which have gone
        to the results queue long since, tell the supervisor when they do not."""
        await self._delete(overdue)
        for held in overdue:
            held.lost = True
            log.info("message_let_go", message_id=held.message.id, unanswered=held.unanswered)

    async def _extend_by(self, seconds: int, group: Sequence[Held]) -> set[str]:
        """Returns the receipts that could not be extended; there may be time to try once more."""
        messages = [held.message for held in group]
        try:
            failed = await self._queue.extend(messages, seconds)
        except Unavailable:
            failed = messages
        return {message.receipt for message in failed}

    async def release(self, held: Sequence[Held]) -> None:
        """Give messages back, for any worker to receive at once."""
        messages = [h.message for h in held if not h.lost]
        self._forget(held)
        if messages:
            try:
                await self._queue.release(messages)
            except Unavailable as exc:
                log.warning("messages_not_released", messages=len(messages), reason=str(exc))

    def unfinished(self) -> list[Held]:
        """Messages with tasks that are not answered."""
        return [held for held in self._held.values() if held.unanswered]

    def _forget(self, held: Sequence[Held]) -> None:
        for h in held:
            self._held.pop(h.message.id, None)
        if not self._held:
            self._empty.set()
