"""What the driver of Postgres raises, told in our terms: away or overloaded, too slow, refused."""

from __future__ import annotations

import asyncpg

from penstock.errors import Refused, TooSlow, Unavailable

# What passes by itself or by an operator's hand; everything else is a mistake of ours and stays loud.
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
    asyncpg.InvalidCachedStatementError,  # a migration has just changed a table; the next call plans anew
    asyncpg.InternalClientError,  # a connection used just as it is being closed, or its cache of types out of date
    asyncpg.InsufficientPrivilegeError,
    asyncpg.PostgresSystemError,
    asyncpg.InvalidAuthorizationSpecificationError,
    asyncpg.InvalidCatalogNameError,
    asyncpg.ObjectNotInPrerequisiteStateError,
    asyncpg.InternalServerError,
)
_TOO_SLOW = (TimeoutError, asyncpg.QueryCanceledError)
_REFUSALS = (asyncpg.DataError, asyncpg.IntegrityConstraintViolationError, asyncpg.ProgramLimitExceededError)
_NO_SCHEMA = (asyncpg.UndefinedTableError, asyncpg.InvalidSchemaNameError, asyncpg.UndefinedColumnError)


class Translated:
    """Turn a driver's error into ours: the text names the kind, never the URL."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, _trace: object) -> None:
        if isinstance(exc, _NO_SCHEMA):
            raise Unavailable(
                "Postgres lacks Penstock's tables, or an older version has them: run `penstock migrate`"
            ) from exc
        # The driver refuses a value before it is sent: an InterfaceError that is a ValueError too.
        unsent = isinstance(exc, asyncpg.InterfaceError) and isinstance(exc, ValueError)
        if unsent or isinstance(exc, _REFUSALS):
            raise Refused(f"Postgres refuses the values: {exc}") from exc
        if isinstance(exc, _TOO_SLOW):
            raise TooSlow(f"Postgres did not answer in time: {str(exc) or type(exc).__name__}") from exc
        if isinstance(exc, TRANSIENT) and not isinstance(exc, Unavailable):
            raise Unavailable(f"Postgres is away or refuses: {type(exc).__name__}: {exc}") from exc
