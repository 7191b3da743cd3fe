"""A store whose statements are refused, and whose commits lose their replies, on purpose."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg

from penstock.db.pool import Store
from penstock.db.session import Session
from penstock.payloads.codec import PayloadCodec
from penstock.protocol.fence import Fence
from penstock.runtime.chaos import Faults


class _FaultySession(Session):
    """Statements that may fail before they run; autocommitted ones may lose their reply too."""

    def __init__(
        self, connection: Any, codec: PayloadCodec, fence: Fence, faults: Faults, *, commits_each: bool
    ) -> None:
        super().__init__(connection, codec, fence)
        self._faults = faults
        self._commits_each = commits_each

    async def fetch(self, name: str, *args: Any) -> list[asyncpg.Record]:
        await self._before()
        rows = await super().fetch(name, *args)
        self._after()
        return rows

    async def fetch_of(self, name: str, *args: Any, partition: str) -> list[asyncpg.Record]:
        await self._before()
        rows = await super().fetch_of(name, *args, partition=partition)
        self._after()
        return rows

    async def _before(self) -> None:
        await self._faults.delay()
        self._faults.fail("postgres", "Postgres refuses the statement")

    def _after(self) -> None:
        if self._commits_each:
            self._faults.fail("commit", "the reply of Postgres is lost, after the commit")


class FaultyStore(Store):
    """A store before which faults are put. A lost reply comes after the commit: what was written stays."""

    def __init__(self, database_url: str, *, faults: Faults, **options: Any) -> None:
        super().__init__(database_url, **options)
        self._faults = faults

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Session]:
        async with super().session() as session:
            faulty = _FaultySession(session._connection, session.codec, session.fence, self._faults, commits_each=True)
            yield faulty
            session.has_told |= faulty.has_told
            session.has_left |= faulty.has_left

    @asynccontextmanager
    async def transaction(
        self, *, hurried: bool = False, lock_wait_seconds: float | None = None
    ) -> AsyncIterator[Session]:
        async with super().transaction(hurried=hurried, lock_wait_seconds=lock_wait_seconds) as session:
            faulty = _FaultySession(session._connection, session.codec, session.fence, self._faults, commits_each=False)
            yield faulty
            session.has_told |= faulty.has_told
            session.has_left |= faulty.has_left
        self._faults.fail("commit", "the reply of Postgres is lost, after the commit")
