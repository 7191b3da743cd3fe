"""Running statements of ``penstock.db.statements`` on one connection."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import perf_counter
from typing import Any

import asyncpg

from penstock.db.driver_errors import Translated
from penstock.db.statements import SQL
from penstock.payloads.codec import PayloadCodec
from penstock.protocol.fence import Fence
from penstock.runtime import metrics

_MANY_ROWS = 50
_LIFTED_SECONDS = 3600.0
_PARTITION = re.compile(r"task_(success|critical_error|cancelled)(_[0-9]{8}|_default)?")


class Session:
    """Statements by their names, on one connection.

    codec: encodes payloads before they are stored; None: stored as given. fence: what claim ids are made by, see
    ``Store.read_fence``. has_told: a statement has settled a task that belongs to a workflow. has_left: ordering keys
    were left to be looked at later.
    """

    def __init__(self, connection: Any, codec: PayloadCodec | None = None, fence: Fence | None = None) -> None:
        self._connection = connection
        self.codec = codec or PayloadCodec()
        self.fence = fence or Fence()
        self.has_told = False
        self._timeout_seconds: float | None = None  # the connection's own
        self.has_left = False

    async def fetch(self, name: str, *args: Any) -> list[asyncpg.Record]:
        """Run the statement of that name and return its rows."""
        started = perf_counter()
        rows: list[asyncpg.Record] = await self._connection.fetch(SQL[name], *args, timeout=self._timeout_seconds)
        metrics.STATEMENT_SECONDS.labels(name).observe(perf_counter() - started)
        return rows

    async def value(self, name: str, *args: Any) -> Any:
        """Run the statement of that name and return the first column of its first row, or None."""
        rows = await self.fetch(name, *args)
        return rows[0][0] if rows else None

    async def fetch_of(self, name: str, *args: Any, partition: str) -> list[asyncpg.Record]:
        """As ``fetch``, for a statement about one partition, whose name no parameter can carry."""
        if _PARTITION.fullmatch(partition) is None:
            raise ValueError(f"{partition!r} is no partition of the history")
        text = SQL[name].replace("{partition}", partition)
        rows: list[asyncpg.Record] = await self._connection.fetch(text, *args, timeout=self._timeout_seconds)
        return rows

    async def value_of(self, name: str, *args: Any, partition: str) -> Any:
        """As ``value``, for a statement about one partition."""
        return (await self.fetch_of(name, *args, partition=partition))[0][0]

    async def lift_timeout(self) -> None:
        """Let the statements that follow in this transaction take up to an hour."""
        await self.fetch("lift_statement_timeout")
        self._timeout_seconds = _LIFTED_SECONDS

    @asynccontextmanager
    async def savepoint(self, *, hurried: bool = False) -> AsyncIterator[None]:
        """Part of a transaction: when the block raises, what it did is undone and the rest may go on.

        hurried: from here on its statements wait shortly, see ``in_halves``.
        """
        with Translated():
            async with self._connection.transaction():
                if hurried:
                    await self.hurry()
                yield

    async def hurry(self) -> None:
        """Have the statements of this transaction wait shortly, for locks and for their own end."""
        await self._connection.fetch(SQL["shorten_waits"])

    async def plan_for(self, rows: int) -> None:
        """Have the statements that follow in this transaction planned for the arrays that they are given.

        A plan that is kept for any array takes it for ten elements and joins by nested loops: over a thousand rows, at
        ten times the price. For a few rows the kept plan is right, and planning would cost more than running.
        """
        if rows >= _MANY_ROWS:
            await self._connection.execute("set local plan_cache_mode = force_custom_plan")
