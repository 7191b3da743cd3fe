"""Connections through a pooler in transaction mode, where each transaction may run on another connection of the server.

Nothing may outlive a transaction: each one brings its settings, statements stay unnamed, and no connection listens.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Literal

import asyncpg

Pooler = Literal["transaction", "session"]
_BEGIN = "BEGIN;"  # as the driver begins a transaction

# How poolers refuse the settings that a connection asks for at its start.
REFUSALS = (asyncpg.ProtocolViolationError, asyncpg.FeatureNotSupportedError)


class PooledConnection(asyncpg.Connection):
    """A client's connection to the pooler. A statement alone is a transaction, which begins with ``settings``."""

    settings = ""

    async def execute(self, query: str, *args: Any, timeout: float | None = None) -> str:
        if query == _BEGIN:
            query += self.settings  # in one call, which saves a round trip
        return await super().execute(query, *args, timeout=timeout)

    async def fetch(self, query: str, *args: Any, timeout: float | None = None, record_class: Any = None) -> list[Any]:
        async with nullcontext() if self.is_in_transaction() else self.transaction():
            rows: list[Any] = await super().fetch(query, *args, timeout=timeout, record_class=record_class)
            return rows


def set_local(settings: dict[str, str]) -> str:
    """Statements that set these for the transaction."""
    return "".join(f" set local {name} = '{value}';" for name, value in settings.items())


async def is_direct(connection: Any) -> bool:
    """Whether the process that runs the statements is the one that answered when the connection was made."""
    transaction = connection.transaction()  # in which the unnamed statement finds the server that has it
    await transaction.start()
    try:
        statement = await connection.prepare("select pg_backend_pid()", name="")
        return bool(await statement.fetchval() == connection.get_server_pid())
    finally:
        await transaction.rollback()
