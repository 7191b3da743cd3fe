"""Connections through a pooler in transaction mode, where each transaction may run on another connection of the server.

Nothing may outlive a transaction: each one brings its settings, and no connection listens. Statements stay unnamed,
unless the pooler has them on whatever connection comes next.
"""

from contextlib import nullcontext
from typing import Any, Literal

import asyncpg

Pooler = Literal["transaction", "session"]
_BEGIN = "BEGIN;"  # as the driver begins a transaction

# How poolers refuse the settings that a connection asks for at its start.
REFUSALS = (asyncpg.ProtocolViolationError, asyncpg.FeatureNotSupportedError)


class PooledConnection(asyncpg.Connection):
    """A client's connection to the pooler. A statement alone is a transaction, which begins with ``settings``."""

    settings = ""  # statements, as of ``set local``
    again = ""  # of blanks behind each statement: the pooler knows statements by their text

    async def execute(self, query: str, *args: Any, timeout: float | None = None) -> str:
        if query == _BEGIN:
            query += self.settings  # in one call, which saves a round trip
        return await super().execute(query, *args, timeout=timeout)

    async def fetch(self, query: str, *args: Any, timeout: float | None = None, record_class: Any = None) -> list[Any]:
        alone = not self.is_in_transaction()
        try:
            async with self.transaction() if alone else nullcontext():
                text = query + PooledConnection.again
                rows: list[Any] = await super().fetch(text, *args, timeout=timeout, record_class=record_class)
                return rows
        except asyncpg.InvalidCachedStatementError:  # after a migration; the same text would find the same old plan
            PooledConnection.again += " "
            if not alone:
                raise
        return await self.fetch(query, *args, timeout=timeout, record_class=record_class)


async def is_direct(connection: Any) -> bool:
    """Whether the process that runs the statements is the one that answered when the connection was made."""
    transaction = connection.transaction()  # in which the unnamed statement finds the server that has it
    await transaction.start()
    try:
        statement = await connection.prepare("select pg_backend_pid()", name="")
        return bool(await statement.fetchval() == connection.get_server_pid())
    finally:
        await transaction.rollback()


async def keeps_statements(connection: Any) -> bool:
    """Whether a named statement is found on every connection of the server: by a name of the pooler's own.

    So does PgBouncer from 1.21 on, unless ``max_prepared_statements`` is 0.
    """
    async with connection.transaction():
        statement = await connection.prepare("select 1", name="pooler_probe")
        query = "select exists (select from pg_prepared_statements where name = $1)"
        is_by_name = bool(await connection.fetchval(query, statement.get_name()))  # and is referenced until now
        if is_by_name:
            await connection.execute("deallocate pooler_probe")
    return not is_by_name
