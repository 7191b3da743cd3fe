"""A store whose statements are refused, and whose commits lose their replies, on purpose."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg

from penstock.db.pool import Store
from penstock.db.session import Session
from penstock.runtime.chaos import Faults

_LOST_REPLY = "the reply of Postgres is lost, after the commit"


class _FaultySession(Session):
    """Statements that may fail before they run; autocommitted ones may lose their reply too."""

    faults: Faults
    commits_each: bool

    async def _run(self, statement: str, *args: Any) -> list[asyncpg.Record]:
        await self.faults.delay()
        self.faults.fail("postgres", "Postgres refuses the statement")
        rows = await super()._run(statement, *args)
        if self.commits_each:
            self.faults.fail("commit", _LOST_REPLY)
        return rows


class FaultyStore(Store):
    """A store with faults. A reply is lost after the commit: what was written stays."""

    def __init__(self, database_url: str, *, faults: Faults, **options: Any) -> None:
        super().__init__(database_url, **options)
        self._faults = faults

    def _session_on(self, connection: Any, *, commits_each: bool) -> Session:
        session = _FaultySession(connection, self.codec, self.fence)
        session.faults = self._faults
        session.commits_each = commits_each
        return session

    @asynccontextmanager
    async def transaction(
        self, *, hurried: bool = False, lock_wait_seconds: float | None = None
    ) -> AsyncIterator[Session]:
        async with super().transaction(hurried=hurried, lock_wait_seconds=lock_wait_seconds) as session:
            yield session
        self._faults.fail("commit", _LOST_REPLY)
