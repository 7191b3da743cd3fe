"""The example's own database: the objects, their exports, and a ledger of every write to an export.

It has nothing to do with Penstock's tables. EXPORT_DATABASE_URL names it; `penstock up` makes one, and sets
that for its workers.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import asyncpg

from examples.export.objects import made_up
from penstock import Batcher
from penstock.protocol.errors import SettingsError

if TYPE_CHECKING:
    from asyncpg.pool import PoolConnectionProxy

    Connection = asyncpg.Connection[asyncpg.Record] | PoolConnectionProxy[asyncpg.Record]

DATABASE_URL = "EXPORT_DATABASE_URL"
SAMPLES = 100
INT8_MAX = 2**63 - 1
_LOCK = 0x7065_6E65  # of our own, so that two that find no tables do not both create them

_TABLES = """
create table if not exists t_object (
    id   bigint primary key,
    data jsonb not null
);

create table t_exported_object (
    object_id   bigint primary key,
    name        text not null,
    country     text,
    item_count  integer not null,
    total_cents bigint not null,
    checksum    text not null,
    exported_at timestamptz not null default clock_timestamp()
);
comment on column t_exported_object.checksum is 'SHA-256 of the object''s data as exported, in hex';

create table t_export_ledger (
    object_id bigint not null,
    operation text not null,
    at        timestamptz not null default clock_timestamp()
);
comment on table t_export_ledger is 'Every write to t_exported_object, noted by triggers: one INSERT an object';

create function note_export() returns trigger language plpgsql as $$
begin
    insert into t_export_ledger (object_id, operation) select object_id, tg_op from written;
    return null;
end $$;

create trigger note_insert after insert on t_exported_object
    referencing new table as written for each statement execute function note_export();
create trigger note_update after update on t_exported_object
    referencing new table as written for each statement execute function note_export();
create trigger note_delete after delete on t_exported_object
    referencing old table as written for each statement execute function note_export();
"""

# $1 ids. One row for each existing object. Idempotent: an existing export is kept. Ordered, since two statements
# that insert the same ids in different orders would wait for each other.
_EXPORT = """
with made as materialized (
    select object.id, upper(object.data ->> 'name') as name, object.data ->> 'country' as country,
           items.item_count, items.total_cents,
           encode(sha256(convert_to(object.data::text, 'UTF8')), 'hex') as checksum
    from t_object object
    cross join lateral (
        select count(*)::integer as item_count,
               coalesce(sum((item ->> 'quantity')::bigint * (item ->> 'price_cents')::bigint), 0)::bigint as total_cents
        from jsonb_array_elements(object.data -> 'items') item
    ) items
    where object.id = any($1::bigint[])
), written as (
    insert into t_exported_object (object_id, name, country, item_count, total_cents, checksum)
    select id, name, country, item_count, total_cents, checksum from made order by id
    on conflict (object_id) do nothing
    returning object_id
)
select made.id, made.total_cents, made.checksum, written.object_id is not null as written
from made left join written on written.object_id = made.id
"""


class BadObject(Exception):
    """This object cannot be exported; a retry does not help."""


@dataclass(frozen=True)
class Exported:
    """One export. written: whether this call wrote the row, or found it there."""

    object_id: int
    total_cents: int
    checksum: str
    written: bool


class ExportDatabase:
    """Objects and their exports over one pool, which is opened when first used; for one event loop."""

    def __init__(self, url: str, *, pool_size: int = 4) -> None:
        self._url = url
        self._pool_size = pool_size
        self._pool: asyncpg.Pool[asyncpg.Record] | None = None
        self._opening = asyncio.Lock()
        self._exports: Batcher[int, Exported] = Batcher(self._export_many, max_items=500, max_parallel=2)

    async def export(self, object_id: int) -> Exported:
        """Write the export of one object unless it exists; concurrent calls share a statement.

        Raises BadObject when there is no such object or its data cannot be exported.
        """
        return await self._exports.submit(object_id)

    async def add_objects(self, count: int, *, seed: int = 0) -> range:
        """Insert so many new objects, ids above all others; returns the ids."""
        async with self._connection() as connection, connection.transaction():
            await connection.execute("select pg_advisory_xact_lock($1)", _LOCK)
            last = await connection.fetchval("select coalesce(max(id), 0) from t_object")
            ids = range(last + 1, last + 1 + count)
            await _copy_objects(connection, ids, seed)
        return ids

    async def prepare(self, *, samples: int = 0) -> None:
        """Create the tables if they are missing; where there was no t_object either, with so many objects in it."""
        pool = await self._open_pool()
        async with pool.acquire() as connection:
            await _prepare(connection, samples)

    async def close(self) -> None:
        """Close the connections."""
        if self._pool is not None:
            pool, self._pool = self._pool, None
            await pool.close()

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Connection]:
        await self.prepare()
        pool = await self._open_pool()
        async with pool.acquire() as connection:
            yield connection

    async def _open_pool(self) -> asyncpg.Pool[asyncpg.Record]:
        async with self._opening:
            if self._pool is None:
                self._pool = await asyncpg.create_pool(
                    self._url, min_size=1, max_size=self._pool_size, command_timeout=30,
                    server_settings={"application_name": "penstock-example"},
                )  # fmt: skip
            return self._pool

    async def _export_many(self, ids: Sequence[int]) -> list[Exported | Exception]:
        pool = await self._open_pool()
        async with pool.acquire() as connection:
            try:
                answers = await _export(connection, sorted(set(ids)))
            except asyncpg.UndefinedTableError:
                # A new database: a few objects, so that the first task of a new stack succeeds.
                await _prepare(connection, SAMPLES)
                answers = await _export(connection, sorted(set(ids)))
        return [answers.get(object_id) or BadObject(f"there is no object {object_id} in t_object") for object_id in ids]


async def _export(connection: Connection, ids: Sequence[int]) -> dict[int, Exported | Exception]:
    """Export objects; one with malformed data is isolated by halving, so that it does not affect the others."""
    try:
        rows = await connection.fetch(_EXPORT, ids)
    except (asyncpg.DataError, asyncpg.IntegrityConstraintViolationError) as exc:
        if len(ids) == 1:
            return {ids[0]: BadObject(f"the data of object {ids[0]} cannot be exported: {exc}")}
        middle = len(ids) // 2
        return await _export(connection, ids[:middle]) | await _export(connection, ids[middle:])
    return {row["id"]: Exported(row["id"], row["total_cents"], row["checksum"], row["written"]) for row in rows}


async def _prepare(connection: Connection, samples: int) -> None:
    async with connection.transaction():
        await connection.execute("select pg_advisory_xact_lock($1)", _LOCK)
        if await connection.fetchval("select to_regclass('t_export_ledger') is not null"):
            return
        is_new = await connection.fetchval("select to_regclass('t_object') is null")
        await connection.execute(_TABLES)
        if is_new:
            await _copy_objects(connection, range(1, samples + 1), seed=0)


async def _copy_objects(connection: Connection, ids: Iterable[int], seed: int) -> None:
    records = ((object_id, json.dumps(made_up(object_id, seed))) for object_id in ids)
    await connection.copy_records_to_table("t_object", records=records, columns=("id", "data"))


_databases: WeakKeyDictionary[asyncio.AbstractEventLoop, ExportDatabase] = WeakKeyDictionary()


def current_database() -> ExportDatabase:
    """The database that EXPORT_DATABASE_URL names, one object per event loop. Raises SettingsError when it is unset."""
    loop = asyncio.get_running_loop()
    database = _databases.get(loop)
    if database is None:
        url = os.environ.get(DATABASE_URL)
        if not url:
            raise SettingsError(f"{DATABASE_URL} is not set: set it to postgresql://user:password@host:5432/name")
        database = _databases[loop] = ExportDatabase(url)
    return database
