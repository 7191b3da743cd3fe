"""sql.execute: a named statement of the operator's, in one transaction; it shares nothing with Penstock's storage."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from typing import Any

import asyncpg

from penstock.protocol.errors import SettingsError
from penstock.settings.model import NamedStatement, Settings
from penstock.settings.values import PREFIX
from penstock.worker.deliveries.errors import NotDelivered, Undeliverable
from penstock.worker.deliveries.registry import Deliveries
from penstock.worker.handlers.context import Context

ACTION = "sql.execute"
_CONNECTIONS = 10  # to one database
_CONNECT_SECONDS = 10.0
_ANSWER_SECONDS = 5.0  # beyond the statement's own time, which the server keeps
_ENVELOPE_BYTES = 1024  # of a result, for what is no row
# JSON has no types for them: they go and come as text, which Postgres itself reads and writes.
_AS_TEXT = (
    "bytea", "cidr", "date", "inet", "interval", "macaddr", "money", "numeric", "time", "timestamp", "timestamptz",
    "timetz", "uuid", "xml",
)  # fmt: skip
# Classes of SQLSTATE that another attempt would meet again: data that does not fit, and constraints.
_FINAL = ("22", "23")


def add_to(deliveries: Deliveries) -> None:
    if not deliveries.settings.sql_statements:
        raise SettingsError(
            f"{PREFIX}DELIVERIES names {ACTION}, and {PREFIX}SQL_STATEMENTS names no statement that it may run"
        )
    statements = Statements(deliveries.settings)
    deliveries.at_close(statements.close)
    deliveries.action(ACTION, statements.execute, bad_params_attempts=1)


class Statements:
    """The handler, and its connections."""

    def __init__(self, settings: Settings) -> None:
        self._statements = settings.sql_statements
        self._result_limit_bytes = settings.result_limit_bytes
        self._pools: dict[str, tuple[asyncpg.Pool[Any], asyncio.Semaphore]] = {}
        self._opening = asyncio.Lock()

    async def execute(self, ctx: Context, /, *, statement: str, parameters: list[Any] | None = None) -> dict[str, Any]:
        """Run the statement of that name; returns its rows, or else its status."""
        named = self._statements.get(statement)
        if named is None:
            raise Undeliverable(
                f"there is no statement {statement[:100]!r} in {PREFIX}SQL_STATEMENTS; there is "
                + ", ".join(sorted(self._statements))
            )
        own: list[Any] = [ctx.task_id] if named.with_task_id else []
        if named.with_tenant:
            own.append(ctx.tenant)
        values = [*own, *(parameters or ())]
        try:
            pool, turns = await self._pool(named)
            # Waiting for a turn may take as long as the attempt: it says nothing against the database.
            async with (
                turns,
                asyncio.timeout(named.timeout_seconds + _CONNECT_SECONDS + _ANSWER_SECONDS),
                pool.acquire(timeout=_CONNECT_SECONDS) as connection,
                connection.transaction(),
            ):
                return await self._run(connection, named, statement, values)
        except asyncpg.PostgresError as exc:
            text = f"{statement}: {exc.as_dict().get('message') or type(exc).__name__} (SQLSTATE {exc.sqlstate})"
            kind = Undeliverable if str(exc.sqlstate)[:2] in _FINAL else NotDelivered
            raise kind(text) from None
        except asyncpg.InterfaceError as exc:
            # A ValueError is the driver's word for parameters that it cannot write down, and for its settings.
            is_final = isinstance(exc, ValueError) and not isinstance(exc, asyncpg.ClientConfigurationError)
            kind = Undeliverable if is_final else NotDelivered
            raise kind(f"{statement}: {exc}") from None
        except TimeoutError:
            raise NotDelivered(f"{statement}: the database gave no answer in time") from None
        except OSError as exc:
            raise NotDelivered(f"{statement}: the database cannot be reached: {exc}") from None

    async def _run(self, connection: Any, named: NamedStatement, name: str, values: Sequence[Any]) -> dict[str, Any]:
        milliseconds = max(1, math.ceil(named.timeout_seconds * 1000))
        await connection.execute(f"set local statement_timeout = {milliseconds}")
        # Unnamed: with a name it would stay on a pooler's connection to the server, or meet that of another client.
        prepared = await connection.prepare(named.statement, name="")
        wanted = len(prepared.get_parameters())
        if wanted != len(values):
            own = named.with_task_id + named.with_tenant
            raise Undeliverable(f"{name} takes {wanted - own} parameters, and was given {len(values) - own}")
        if not prepared.get_attributes():
            return {"status": await connection.execute(named.statement, *values)}
        cursor = await prepared.cursor(*values)
        rows = await cursor.fetch(named.max_rows + 1)
        kept: list[dict[str, Any]] = []
        room = self._result_limit_bytes - _ENVELOPE_BYTES
        for row in rows[: named.max_rows]:
            shown = _value(row)
            room -= len(json.dumps(shown)) + 1
            if room < 0:
                break  # the statement must not fail for its rows
            kept.append(shown)
        return {"rows": kept, "truncated": len(kept) < len(rows)}

    async def _pool(self, named: NamedStatement) -> tuple[asyncpg.Pool[Any], asyncio.Semaphore]:
        dsn = named.dsn.get_secret_value()
        async with self._opening:
            if dsn not in self._pools:
                pool = await asyncpg.create_pool(
                    dsn, min_size=0, max_size=_CONNECTIONS, init=_as_json, timeout=_CONNECT_SECONDS,
                    statement_cache_size=0,  # as a pooler in transaction mode needs
                    server_settings={"application_name": "penstock-sql.execute"},
                )  # fmt: skip
                self._pools[dsn] = pool, asyncio.Semaphore(_CONNECTIONS)
            return self._pools[dsn]

    async def close(self) -> None:
        pools, self._pools = self._pools, {}
        for pool, _ in pools.values():
            try:
                async with asyncio.timeout(_ANSWER_SECONDS):
                    await pool.close()
            except TimeoutError:
                pool.terminate()


async def _as_json(connection: Any) -> None:
    """Convert values from and to what JSON can hold."""
    for kinds, encoder, decoder in ((_AS_TEXT, _text_of, str), (("json", "jsonb"), json.dumps, json.loads)):
        for kind in kinds:
            await connection.set_type_codec(kind, schema="pg_catalog", encoder=encoder, decoder=decoder, format="text")


def _text_of(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _value(value: Any) -> Any:
    """A value of JSON; infinite floats and kinds without a codec become text."""
    if value is None or isinstance(value, int | str) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, dict | asyncpg.Record):
        return {key: _value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_value(item) for item in value]
    return str(value)
