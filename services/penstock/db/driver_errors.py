"""Errors of the Postgres driver as ours: unavailable or overloaded, locked, too slow, refused."""

import re

import asyncpg

from penstock.protocol.errors import Locked, Refused, TooSlow, Unavailable

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
_LOCKED = (asyncpg.LockNotAvailableError, asyncpg.DeadlockDetectedError)
_TOO_SLOW = (TimeoutError, asyncpg.QueryCanceledError)
_REFUSALS = (asyncpg.DataError, asyncpg.IntegrityConstraintViolationError, asyncpg.ProgramLimitExceededError)
_NO_SCHEMA = (asyncpg.UndefinedTableError, asyncpg.InvalidSchemaNameError, asyncpg.UndefinedColumnError)

# What Postgres adds to a statement that is cancelled while it waits for the transaction that holds a row.
_WAITED = re.compile(
    r"^while (?:locking|updating|deleting|inserting index|rechecking updated|checking \w+ constraint on) "
    r"(?:tuple|updated version)",
    re.MULTILINE,
)


class Translated:
    """Turns an error of the driver into ours, whose text has no URL."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, _trace: object) -> None:
        if exc is None:
            return
        if isinstance(exc, _NO_SCHEMA):
            raise Unavailable(
                "Postgres lacks Penstock's tables, or an older version has them: run `penstock migrate`"
            ) from exc
        # The driver refuses a value before sending it with an InterfaceError that is a ValueError too.
        unsent = isinstance(exc, asyncpg.InterfaceError) and isinstance(exc, ValueError)
        if unsent or isinstance(exc, _REFUSALS):
            raise Refused(f"Postgres rejected the values: {exc}") from exc
        # A statement that timed out behind a row's lock; behind a table's, the shorter timeout for locks raises.
        waited = isinstance(exc, asyncpg.QueryCanceledError) and _WAITED.search(exc.context or "") is not None
        if waited or isinstance(exc, _LOCKED):
            raise Locked(f"another transaction holds a lock that is needed: {exc}") from exc
        if isinstance(exc, _TOO_SLOW):
            raise TooSlow(f"Postgres did not answer in time: {str(exc) or type(exc).__name__}") from exc
        if isinstance(exc, TRANSIENT) and not isinstance(exc, Unavailable):
            # Of a connection that broke, the driver says only which call of its own is no longer possible.
            broke = isinstance(exc, asyncpg.InterfaceError) and str(exc).startswith("cannot call ")
            what = "the connection was closed" if broke else f"{type(exc).__name__}: {exc}"
            raise Unavailable(f"Postgres is unavailable or rejected the request: {what}") from exc
