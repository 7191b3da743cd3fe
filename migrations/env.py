"""Alembic environment: online over asyncpg with connections made by penstock.migrate, offline as SQL text.

Online it works through a pooler in transaction mode too: settings and locks are of transactions, statements unnamed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from alembic import context
from penstock_tables import metadata
from sqlalchemy import Connection, event, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

_SCHEMA = context.config.attributes["schema"]
_OPTIONS = {
    "target_metadata": metadata,
    "version_table_schema": _SCHEMA,
    "include_schemas": True,
    "transaction_per_migration": True,
}


def _run(connection: Connection) -> None:
    limit = f"set local lock_timeout = {int(context.config.attributes['lock_seconds'] * 1000)}"
    event.listen(connection, "begin", lambda begun: begun.exec_driver_sql(limit))
    connection.execute(text(f"create schema if not exists {_SCHEMA}"))
    connection.commit()
    context.configure(connection=connection, **_OPTIONS)
    with context.begin_transaction():
        context.run_migrations()


def _lock(connection: Connection) -> None:
    """Take the lock of those that migrate, kept until the transaction of this connection ends.

    Several processes may migrate at once (a rolling deploy); the second waits and finds nothing to do. The lock comes
    first of all: two that create the schema at once collide, its "if not exists" notwithstanding. It is asked for
    again and again: a statement that waits holds a snapshot, and an index made concurrently would wait for that.
    """
    connection.execute(text("set local idle_in_transaction_session_timeout = 0"))
    while not connection.scalar(text("select pg_try_advisory_xact_lock(hashtext('penstock migrate'))")):
        time.sleep(0.2)


async def _online(connect: Callable[[], Awaitable[Any]]) -> None:
    unnamed = {"prepared_statement_cache_size": 0, "prepared_statement_name_func": str}
    engine = create_async_engine(
        "postgresql+asyncpg://",
        connect_args={"async_creator_fn": lambda **_: connect(), **unnamed},
        poolclass=NullPool,
    )
    try:
        async with engine.connect() as holder, engine.connect() as connection:
            await holder.run_sync(_lock)
            await connection.run_sync(_run)
            await connection.commit()
    finally:
        await engine.dispose()


if context.is_offline_mode():
    # Named parameters, or every % of the statements would come out doubled.
    context.configure(dialect_name="postgresql", dialect_opts={"paramstyle": "named"}, literal_binds=True, **_OPTIONS)
    with context.begin_transaction():
        context.execute(f"create schema if not exists {_SCHEMA}")
        context.run_migrations()
else:
    asyncio.run(_online(context.config.attributes["connect"]))
