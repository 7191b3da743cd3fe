"""Running statements of ``penstock.db.statements`` on one connection."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from time import perf_counter
from typing import Any

import asyncpg

from penstock.db.driver_errors import Translated
from penstock.db.statements import SQL
from penstock.payloads.codec import PayloadCodec
from penstock.protocol.fence import Fence
from penstock.runtime import metrics
from penstock.runtime.chaos import Faults

LOST_REPLY = "the reply of Postgres is lost, after the commit"
_MANY_ROWS = 50
_LIFTED_SECONDS = 3600.0
_PARTITION = re.compile(r"task_(success|critical_error|cancelled)(_[0-9]{8}|_default)?")


class Session:
    """Statements by their names, on one connection.

    codec: encodes payloads before they are stored; None: stored as given. fence: makes claim ids, see
    ``Store.read_fence``. settled_steps: a task of a workflow was settled. left_keys: ordering keys were left for later.
    settled_workflows: of each step that was settled, if that is known. wakes: tasks may have come due, or a
    caller waits for what was settled.
    """

    def __init__(
        self,
        connection: Any,
        codec: PayloadCodec | None = None,
        fence: Fence | None = None,
        statement_timeout_seconds: float = 30.0,
    ) -> None:
        self._connection = connection
        self.codec = codec or PayloadCodec()
        self.fence = fence or Fence()
        self._statement_timeout_ms = round(statement_timeout_seconds * 1000)
        self.settled_steps = False
        self.settled_workflows: list[int] = []
        self._timeout_seconds: float | None = None  # the connection's own
        self.left_keys = False
        self.wakes = False

    async def fetch(self, name: str, *args: Any, partition: str | None = None) -> list[asyncpg.Record]:
        """Run the statement of that name and return its rows. partition: of the history, for a statement about one."""
        statement = SQL[name]
        if partition is not None:  # no parameter can carry the name of a table
            if _PARTITION.fullmatch(partition) is None:
                raise ValueError(f"{partition!r} is no partition of the history")
            statement = statement.replace("{partition}", partition)
        started = perf_counter()
        rows = await self._run(statement, *args)
        metrics.STATEMENT_SECONDS.labels(name).observe(perf_counter() - started)
        return rows

    async def value(self, name: str, *args: Any, partition: str | None = None) -> Any:
        """As ``fetch``; return the first column of the first row, or None."""
        rows = await self.fetch(name, *args, partition=partition)
        return rows[0][0] if rows else None

    async def _run(self, statement: str, *args: Any) -> list[asyncpg.Record]:
        rows: list[asyncpg.Record] = await self._connection.fetch(statement, *args, timeout=self._timeout_seconds)
        return rows

    async def lift_timeout(self) -> None:
        """Let the statements that follow in this transaction take up to an hour."""
        await self.fetch("lift_statement_timeout")
        self._timeout_seconds = _LIFTED_SECONDS

    @asynccontextmanager
    async def savepoint(self, *, hurried: bool = False) -> AsyncIterator[None]:
        """Part of a transaction, undone when the block raises. hurried: as of ``Store.transaction``."""
        with Translated():
            async with self._connection.transaction():
                if hurried:
                    await self._connection.fetch(SQL["shorten_waits"], self._statement_timeout_ms)
                yield

    async def plan_for(self, rows: int) -> None:
        """Plan the next statements of this transaction for arrays of that size.

        A cached plan assumes ten elements and joins by nested loops: over a thousand rows, at ten times the cost. For a
        few rows the cached plan is right, and planning would cost more than running.
        """
        if rows >= _MANY_ROWS:
            await self._connection.execute("set local plan_cache_mode = force_custom_plan")


class FaultySession(Session):
    """Statements that may fail before they run; those that commit each may lose their reply too."""

    faults: Faults
    commits_each: bool

    async def _run(self, statement: str, *args: Any) -> list[asyncpg.Record]:
        await self.faults.delay()
        self.faults.fail("postgres", "Postgres refuses the statement")
        rows = await super()._run(statement, *args)
        if self.commits_each:
            self.faults.fail("commit", LOST_REPLY)
        return rows


OpenSession = Callable[[], AbstractAsyncContextManager[Session]]
