"""Consumer: what submitter and resulter share. Messages are stored in Postgres, and deleted after the commit."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic

from penstock.brokers.base import Message, Queue
from penstock.brokers.receiving import Deleter, Receiver
from penstock.db.notify import Notifier
from penstock.db.pool import Store
from penstock.protocol.errors import Locked, TooSlow, Unavailable
from penstock.runtime.logs import log
from penstock.runtime.loop import Service, SideTask
from penstock.runtime.periodic import ends_within
from penstock.settings.model import Settings

_LOCKED_AT_ONCE = 10  # tried again in one pass
_LOCKED_PAUSE_SECONDS = 1.0  # between two such passes, while there is other work
_LOCKED_KEPT = 1000  # with more of them, nothing else is received


@dataclass(slots=True)
class Uncommitted:
    """Messages that a commit has not stored, or not whole: they are not deleted."""

    put_off: list[Message] = field(default_factory=list)  # the queue delivers them again later
    locked: list[Message] = field(default_factory=list)  # another transaction holds their rows
    slow: list[Message] = field(default_factory=list)  # Postgres did not finish with them in time
    error: Locked | TooSlow | None = None  # why, of one of them

    def add(self, message: Message, error: Locked | TooSlow) -> None:
        self.error = error
        if message not in (*self.locked, *self.slow):  # of several reports, one may be locked and another slow
            (self.locked if isinstance(error, Locked) else self.slow).append(message)


class Consumer(Service):
    """``run_once`` is one receive, committed by :meth:`commit` and deleted."""

    def __init__(self, *, store: Store, queue: Queue, settings: Settings) -> None:
        self._store = store
        self._notifier = Notifier(store)
        self._queue = queue
        self._receiver = Receiver(queue, settings)
        self._deleter = Deleter(queue, settings)
        self._deletes_later = queue.limits.bills_calls and settings.billed_call_wait_seconds > 0
        self._settings = settings
        self._is_doubtful = False  # the database answers, and does not commit
        self._kept: list[Sequence[Message]] = []
        self._locked: list[Message] = []
        self._locked_next_at = 0.0
        self._in_work: list[Sequence[Message]] = []
        self.idle_seconds = 0.0 if settings.receive_wait_seconds else 0.1

    async def commit(self, messages: Sequence[Message]) -> Uncommitted:
        """Store messages; they are deleted then, except those returned. Raises Unavailable when no single one fails."""
        raise NotImplementedError  # abstract

    def forget(self, messages: Sequence[Message]) -> None:
        """These go back to the queue: forget what was read from them."""

    async def open(self) -> None:
        await self._store.open()
        await self._queue.depth()

    def side_tasks(self) -> Mapping[str, SideTask]:
        return {"notify": self._notifier.run, "hold": self._extend, "delete messages": self._deleter.run}

    async def run_once(self) -> int:
        """Receive, commit, delete; returns how many messages came.

        Each receive counts, and after a few the message is a dead letter. So nothing is received while Postgres is
        unavailable; while it answers but commits nothing (read-only, its disk full), received messages are kept here
        and tried again. So is one whose rows another transaction holds, while its neighbours are stored.
        """
        kept = self._kept.pop() if self._kept else None
        if self._is_doubtful:
            try:
                await self._store.ping()
            except Unavailable:
                if kept is not None:
                    self.forget(kept)
                    await self._queue.release(kept)  # others may reach it
                raise
        messages = kept or await self._receive()
        if not messages:
            return 0
        if kept is not None:
            await self._queue.extend(kept, self._settings.visibility_timeout_seconds)
        self._in_work.append(messages)
        try:
            left = await self.commit(messages)
        except Unavailable:
            self._is_doubtful = True
            self._kept.append(messages)
            raise
        finally:
            self._in_work.remove(messages)
        self._is_doubtful = bool(left.slow)
        if left.locked:
            log.warning("messages_locked", messages=len(left.locked), reason=str(left.error))
            self._locked += left.locked
            self._locked_next_at = monotonic() + _LOCKED_PAUSE_SECONDS
        if left.slow and len(messages) == 1:  # back to the queue, which counts its deliveries
            self.forget(messages)
            await self._queue.release(messages)
        else:
            self._kept += [[message] for message in left.slow]
        rest = [*left.put_off, *left.locked, *left.slow]
        stored = [message for message in messages if message not in rest] if rest else messages
        if self._deletes_later:
            self._deleter.add(stored)
        else:
            await self._queue.delete(stored)
        if left.error is not None and not stored:
            raise left.error
        return len(messages)

    async def _receive(self) -> Sequence[Message]:
        """New messages, or some that were locked when last tried: each second, and while nothing new comes."""
        is_time = self._locked and (monotonic() >= self._locked_next_at or len(self._locked) >= _LOCKED_KEPT)
        if not is_time:
            messages = await self._receiver.receive(wait_seconds=0 if self._locked else None)
            if messages or not self._locked:
                return messages
        locked, self._locked = self._locked[:_LOCKED_AT_ONCE], self._locked[_LOCKED_AT_ONCE:]
        await self._queue.extend(locked, self._settings.visibility_timeout_seconds)
        return locked

    async def _extend(self) -> None:
        """Extend the leases of all messages here; a side task."""
        seconds = self._settings.visibility_timeout_seconds
        while True:
            await asyncio.sleep(seconds / 3)
            messages = [message for part in (*self._in_work, *self._kept, self._locked) for message in part]
            try:
                # One whose lease has ended is delivered again; committed twice, it changes nothing.
                await self._queue.extend(messages, seconds)
            except Unavailable as exc:
                log.warning("messages_not_held", messages=len(messages), reason=str(exc))

    def stop_taking(self) -> None:
        self._receiver.stop()

    async def drain(self, seconds: float) -> None:
        """Delete what is stored, and give back kept messages; the passes have ended."""
        await ends_within(seconds / 2, self._deleter.flush())
        for messages in (*self._kept, self._locked):
            if messages:
                self.forget(messages)
                await self._queue.release(messages)
        self._kept, self._locked = [], []
