"""Consumer: what the submitter and the resulter share, a queue emptied into Postgres, deleted only after the commit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.errors import Unavailable
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
        self.idle_seconds = 0.0 if settings.receive_wait_seconds else 0.1

    async def commit(self, messages: Sequence[Message]) -> None:
        """Store all that the messages say; when this returns they are deleted. Raises Unavailable."""
        raise NotImplementedError  # abstract

    async def open(self) -> None:
        await self._store.open()
        await self._queue.depth()

    def side_tasks(self) -> Mapping[str, SideTask]:
        return {"notify": self._notifier.run}

    async def run_once(self) -> int:
        """Receive, commit, delete; returns how many messages came.

        While Postgres is away nothing is received: each receive counts, and after a few the queue gives a message up.
        """
        if self._store_is_doubtful:
            await self._store.ping()
            self._store_is_doubtful = False
        messages = await self._queue.receive(
            wait_seconds=self._settings.receive_wait_seconds,
            visibility_seconds=self._settings.visibility_timeout_seconds,
        )
        if not messages:
            return 0
        try:
            await self.commit(messages)
        except Unavailable:
            self._store_is_doubtful = True
            await self._queue.release(messages)
            raise
        await self._queue.delete(messages)
        return len(messages)
