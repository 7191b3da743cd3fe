"""Running statements of ``penstock.db.statements`` on one connection."""

import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
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
_VERY_MANY_ROWS = 20_000
_LIFTED_SECONDS = 3600.0
_PARTITION = re.compile(r"task_(success|critical_error|cancelled)(_[0-9]{8}|_default)?")


@dataclass(eq=False)
class Session:
    """Statements by their names, on one connection."""

    _connection: Any
    codec: PayloadCodec = field(default_factory=PayloadCodec)  # encodes payloads before they are stored
    fence: Fence = field(default_factory=Fence)  # makes claim ids, see ``Store.read_fence``
    statement_timeout_seconds: float = 30.0
    # Statements have them before they run; those that commit each may lose their reply too.
    faults: Faults | None = None
    commits_each: bool = True
    settled_steps: bool = field(init=False, default=False)  # a task of a workflow was settled
    settled_workflows: list[int] = field(init=False, default_factory=list)  # of each such step, if that is known
    left_keys: bool = field(init=False, default=False)  # ordering keys were left for later
    wakes: bool = field(init=False, default=False)  # tasks may have come due, or a caller waits for what was settled
    _timeout_seconds: float | None = field(init=False, default=None)  # the connection's own

    async def fetch(self, name: str, *args: Any, partition: str | None = None) -> list[asyncpg.Record]:
        """Run the statement of that name and return its rows. partition: of the history, for a statement about one."""
        statement = SQL[name]
        if partition is not None:  # no parameter can carry the name of a table
            if _PARTITION.fullmatch(partition) is None:
                raise ValueError(f"{partition!r} is no partition of the history")
            statement = statement.replace("{partition}", partition)
        started = perf_counter()
        if self.faults is not None:
            await self.faults.delay()
            self.faults.fail("postgres", "Postgres refuses the statement")
        rows: list[asyncpg.Record] = await self._connection.fetch(statement, *args, timeout=self._timeout_seconds)
        if self.faults is not None and self.commits_each:
            self.faults.fail("commit", LOST_REPLY)
        metrics.STATEMENT_SECONDS.labels(name).observe(perf_counter() - started)
        return rows

    async def value(self, name: str, *args: Any, partition: str | None = None) -> Any:
        """As ``fetch``; return the first column of the first row, or None."""
        rows = await self.fetch(name, *args, partition=partition)
        return rows[0][0] if rows else None

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
                    timeout_ms = round(self.statement_timeout_seconds * 1000)
                    await self._connection.fetch(SQL["shorten_waits"], timeout_ms)
                yield

    async def plan_for(self, rows: int) -> None:
        """Plan the next statements of this transaction for arrays of that size.

        A cached plan assumes ten elements and joins by nested loops: over a thousand rows, at ten times the cost. For a
        few rows the cached plan is right, and planning would cost more than running. Over very many, as of the steps of
        a workflow, a statement takes the time that it needs: it would time out on every try.
        """
        if rows >= _MANY_ROWS:
            await self._connection.execute("set local plan_cache_mode = force_custom_plan")
        if rows >= _VERY_MANY_ROWS:
            await self.lift_timeout()


OpenSession = Callable[[], AbstractAsyncContextManager[Session]]
