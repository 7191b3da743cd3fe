"""The methods about rejected messages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager

from penstock.api import message_views as views
from penstock.api.replay import purge_rejected, retry_rejected
from penstock.db.pool import Store
from penstock.db.session import Session
from penstock.protocol.errors import MessageNotFound
from penstock.settings.model import Settings
from penstock.tasks.commands import ListRejected, PurgeRejected, RetryRejected, ShowRejected

REJECTED_PAGE_BYTES = 8 * 1024 * 1024
_REJECTED_AT_ONCE = 50


class RejectedMessages:
    """Shows rejected messages, reads them again, deletes them.

    session: opens one. turns: waited for before a retry, which opens transactions of its own. changed: called after it,
    for a task may run.
    """

    def __init__(
        self,
        store: Store,
        session: Callable[[], AbstractAsyncContextManager[Session]],
        settings: Settings,
        *,
        turns: asyncio.Semaphore,
        changed: Callable[[], None],
    ) -> None:
        self._store = store
        self._session = session
        self._settings = settings
        self._turns = turns
        self._changed = changed

    async def list(self, command: ListRejected) -> views.RejectedPage:
        """A page, newest first, shorter than asked for where the bodies are large."""
        page: list[views.Rejected] = []
        before, size = command.before, 0
        async with self._session() as session:
            while len(page) < command.limit and size < REJECTED_PAGE_BYTES:
                at_once = min(_REJECTED_AT_ONCE, command.limit - len(page))
                rows = await session.fetch("list_rejected", before, at_once, command.source)
                page += map(views.rejected, rows)
                size += sum(len(row["body"]) for row in rows)
                if len(rows) < at_once:
                    return views.RejectedPage(page, None)
                before = rows[-1]["id"]
        return views.RejectedPage(page, str(before))

    async def show(self, command: ShowRejected) -> views.Rejected:
        async with self._session() as session:
            rows = await session.fetch("read_rejected", command.id)
        if not rows:
            raise MessageNotFound(command.id, "among the rejected")
        return views.rejected(rows[0])

    async def retry(self, command: RetryRejected) -> views.Replayed:
        async with self._session() as session:
            ids, cursor = await _choose(session, command.which)
        async with self._turns:
            replayed = await retry_rejected(self._store, ids, self._settings, cursor=cursor)
        self._changed()
        return replayed

    async def purge(self, command: PurgeRejected) -> views.Purged:
        async with self._session() as session:
            ids, cursor = await _choose(session, command.which)
            return views.Purged(await purge_rejected(session, ids), cursor)


async def _choose(session: Session, which: Sequence[int] | ListRejected) -> tuple[Sequence[int], str | None]:
    """Ids of rejected messages, and where the next page of them begins.

    Newest first, so that what a retry rejects again, as a record of its own, is on no later page.
    """
    if not isinstance(which, ListRejected):
        return which, None
    rows = await session.fetch("list_rejected_ids", which.before, which.limit, which.source)
    ids = [row["id"] for row in rows]
    return ids, str(ids[-1]) if len(ids) == which.limit else None
