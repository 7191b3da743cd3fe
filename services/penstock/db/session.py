"""Running statements of ``penstock.db.statements`` on one connection, and arrays as they take them."""

import re
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from time import perf_counter
from typing import Any

import asyncpg

from penstock.db.statements import SQL
from penstock.payloads.codec import PayloadCodec
from penstock.protocol.errors import Locked, Refused, TooSlow, Unavailable
from penstock.protocol.fence import Fence
from penstock.runtime import metrics
from penstock.runtime.chaos import Faults

LOST_REPLY = "the reply of Postgres is lost, after the commit"
_MANY_ROWS = 50
_VERY_MANY_ROWS = 20_000
_PARTITION = re.compile(r"task_(success|critical_error|cancelled)(_[0-9]{8}|_default)?")

# Errors that pass automatically or by an operator's action; all others are bugs.
TRANSIENT = (
    OSError,
    TimeoutError,
    asyncpg.InterfaceError,
    asyncpg.PostgresConnectionError,
    asyncpg.InsufficientResourcesError,  # too many connections, disk full, out of memory
    asyncpg.OperatorInterventionError,  # shutdown, crash recovery, cancelled by timeout
    asyncpg.TransactionRollbackError,  # deadlock, serialization
    asyncpg.ReadOnlySQLTransactionError,  # a failover in progress
    asyncpg.IdleInTransactionSessionTimeoutError,  # this process stood still in the middle of a transaction
    asyncpg.TransactionTimeoutError,
    asyncpg.InvalidCachedStatementError,  # a migration has just changed a table; the next call plans again
    asyncpg.InternalClientError,  # a connection used just as it is being closed, or its cache of types out of date
    asyncpg.InsufficientPrivilegeError,
    asyncpg.PostgresSystemError,
    asyncpg.InvalidAuthorizationSpecificationError,
    asyncpg.InvalidCatalogNameError,
    asyncpg.ObjectNotInPrerequisiteStateError,
    asyncpg.InternalServerError,
)
_REFUSALS = (asyncpg.DataError, asyncpg.IntegrityConstraintViolationError, asyncpg.ProgramLimitExceededError)

# What Postgres adds to a statement that is cancelled while it waits for the transaction that holds a row.
_WAITED = re.compile(
    r"^while (?:locking|updating|deleting|inserting index|rechecking updated|checking \w+ constraint on) "
    r"(?:tuple|updated version)",
    re.MULTILINE,
)
Pair = tuple[int, int]  # (task id, claim)


class Translated:
    """Turns an error of the driver into ours, whose text has no URL."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, _trace: object) -> None:
        if exc is None:
            return
        if isinstance(exc, (asyncpg.UndefinedTableError, asyncpg.InvalidSchemaNameError, asyncpg.UndefinedColumnError)):
            raise Unavailable(
                "Postgres lacks Penstock's tables, or an older version has them: run `penstock migrate`"
            ) from exc
        # The driver refuses a value before sending it with an InterfaceError that is a ValueError too.
        unsent = isinstance(exc, asyncpg.InterfaceError) and isinstance(exc, ValueError)
        if unsent or isinstance(exc, _REFUSALS):
            raise Refused(f"Postgres rejected the values: {exc}") from exc
        # A statement that timed out behind a row's lock; behind a table's, the shorter timeout for locks raises.
        waited = isinstance(exc, asyncpg.QueryCanceledError) and _WAITED.search(exc.context or "") is not None
        if waited or isinstance(exc, (asyncpg.LockNotAvailableError, asyncpg.DeadlockDetectedError)):
            raise Locked(f"another transaction holds a lock that is needed: {exc}") from exc
        if isinstance(exc, (TimeoutError, asyncpg.QueryCanceledError)):
            raise TooSlow(f"Postgres did not answer in time: {str(exc) or type(exc).__name__}") from exc
        if isinstance(exc, TRANSIENT) and not isinstance(exc, Unavailable):
            # Of a connection that broke, the driver says only which call of its own is no longer possible.
            broke = isinstance(exc, asyncpg.InterfaceError) and str(exc).startswith("cannot call ")
            what = "the connection was closed" if broke else f"{type(exc).__name__}: {exc}"
            raise Unavailable(f"Postgres is unavailable or rejected the request: {what}") from exc


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
        self._timeout_seconds = 3600.0

    @asynccontextmanager
    async def savepoint(self, *, hurried: bool = False) -> AsyncIterator[None]:
        """Part of a transaction, undone when the block raises. hurried: as of ``Store.transaction``."""
        with Translated():
            async with self._connection.transaction():
                if hurried:
                    await self._connection.fetch(SQL["shorten_waits"], round(self.statement_timeout_seconds * 1000))
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


def columns(pairs: Iterable[Pair]) -> tuple[list[int], list[int]]:
    listed = list(pairs)
    return [pair[0] for pair in listed], [pair[1] for pair in listed]


def columns_of(items: Collection[Any], *names: str) -> list[list[Any]]:
    """An array of each of these members."""
    return [list(map(attrgetter(name), items)) for name in names]
