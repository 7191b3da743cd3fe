"""Alembic environment: online over asyncpg with the URL handed in by penstock.migrate, offline as SQL text."""

from __future__ import annotations

import asyncio
import time

import asyncpg
from alembic import context
from penstock_tables import SCHEMA, metadata
from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

_OPTIONS = {
    "target_metadata": metadata,
    "version_table_schema": SCHEMA,
    "include_schemas": True,
    "transaction_per_migration": True,
}


def _run(connection: Connection) -> None:
    # Several processes may migrate at once (a rolling deploy); the second waits and finds nothing to do. The lock comes
    # first of all: two that create the schema at once collide, its "if not exists" notwithstanding. It is asked for
    # again and again: a statement that waits holds a snapshot, and an index made concurrently would wait for that.
    while not connection.scalar(text("select pg_try_advisory_lock(hashtext('penstock migrate'))")):
        time.sleep(0.2)
        connection.rollback()
    connection.execute(text(f"create schema if not exists {SCHEMA}"))
    # After it, for others may hold it for as long as they migrate.
    connection.execute(text(f"set lock_timeout = {int(context.config.attributes['lock_seconds'] * 1000)}"))
    connection.commit()
    context.configure(connection=connection, **_OPTIONS)
    with context.begin_transaction():
        context.run_migrations()


async def _online(url: str) -> None:
    # The driver reads the URL itself, so that it means here what it means to every process.
    engine = create_async_engine(
        "postgresql+asyncpg://", async_creator=lambda: asyncpg.connect(url), poolclass=NullPool
    )
    try:
        async with engine.connect() as connection:
            await connection.run_sync(_run)
            await connection.commit()
    finally:
        await engine.dispose()


if context.is_offline_mode():
    # Named parameters, or every % of the statements would come out doubled.
    context.configure(dialect_name="postgresql", dialect_opts={"paramstyle": "named"}, literal_binds=True, **_OPTIONS)
    with context.begin_transaction():
        context.execute(f"create schema if not exists {SCHEMA}")
        context.run_migrations()
else:
    asyncio.run(_online(context.config.attributes["url"]))
