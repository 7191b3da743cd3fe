"""Consumer: what the submitter and the resulter share, a queue emptied into Postgres, deleted only after the commit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.errors import TooSlow, Unavailable
from penstock.loop import Service, SideTask
from penstock.notify import Notifier
from penstock.settings import Settings
from penstock.store import Store
from penstock.transports import Message, Queue


class Consumer(Service):
    """``run_once`` is one receive, committed by :meth:`commit` and deleted."""

    def __init__(self, *, store: Store, queue: Queue, settings: Settings) -> None:
        self._store = store
        self._queue = queue
        self._settings = settings
        self._notifier = Notifier(store)
        self._store_is_doubtful = False
        self._kept: list[Sequence[Message]] = []
        self.idle_seconds = 0.0 if settings.receive_wait_seconds else 0.1

    async def commit(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Store what the messages say; when this returns they are deleted, but for those that it returns.

        Raises Unavailable.
        """
        raise NotImplementedError  # abstract

    async def open(self) -> None:
        await self._store.open()
        await self._queue.depth()

    def side_tasks(self) -> Mapping[str, SideTask]:
        return {"notify": self._notifier.run}

    async def run_once(self) -> int:
        """Receive, commit, delete; returns how many messages came.

        Each receive counts, and after a few the queue gives a message up. So nothing is received while Postgres is
        away; and while it answers but commits nothing (read-only, its disk full), what was received is kept here and
        tried again.
        """
        kept = self._kept.pop() if self._kept else None
        if self._store_is_doubtful:
            try:
                await self._store.ping()
            except Unavailable:
                if kept is not None:
                    await self._queue.release(kept)  # others may reach it
                raise
        messages = kept or await self._queue.receive(
            wait_seconds=self._settings.receive_wait_seconds,
            visibility_seconds=self._settings.visibility_timeout_seconds,
        )
        if not messages:
            return 0
        if kept is not None:
            # One whose hold is lost comes again; committed here as well, it changes nothing.
            await self._queue.extend(kept, self._settings.visibility_timeout_seconds)
        try:
            left = await self.commit(messages)
        except TooSlow:
            # It may be these messages that ask too much. The queue counts how often, and gives them up.
            self._store_is_doubtful = True
            await self._queue.release(messages)
            raise
        except Unavailable:
            self._store_is_doubtful = True
            self._kept.append(messages)
            raise
        self._store_is_doubtful = False
        await self._queue.delete([message for message in messages if message not in left] if left else messages)
        return len(messages)

    async def drain(self, seconds: float) -> None:
        """Give back what was kept; the passes have ended."""
        kept, self._kept = self._kept, []
        for messages in kept:
            await self._queue.release(messages)
