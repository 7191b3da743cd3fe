"""Enqueue inside the caller's own transaction: the task is there if and only if the transaction commits.

The database function ``penstock_enqueue_many`` does it; here the options are checked as the api checks them. The module
of the connection's class identifies the driver, so no driver is imported that the caller has not imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC
from functools import cache
from typing import Any

import msgspec

from penstock.protocol import trace_context
from penstock.protocol.errors import DuplicateTask, InvalidParams
from penstock.protocol.jsonable import dumps
from penstock.protocol.method import decode
from penstock.protocol.requests import prepared, task_params
from penstock.protocol.task import Enqueued, NewTask, State
from penstock.settings.model import Settings, load_settings
from penstock.tasks.new_task import new_task
from penstock.tasks.params import EnqueueParams

_STATEMENT = "select id, state, duplicate, replaced from public.penstock_enqueue_many({}, {}) order by place"
_ASYNC = "asyncpg Connection, SQLAlchemy AsyncConnection or AsyncSession, psycopg AsyncConnection or AsyncCursor"
_SYNC = "SQLAlchemy Connection or Session, psycopg Connection or Cursor"
_SQLALCHEMY_ASYNC = {"AsyncConnection", "AsyncSession", "async_scoped_session"}
_SQLALCHEMY_SYNC = {"Connection", "Session", "scoped_session"}
# What to do about an error, by its SQLSTATE
_ADVICE = {
    "42883": "the database lacks penstock_enqueue_many: run `penstock migrate` against it",
    "42501": "grant it: grant execute on function penstock_enqueue, penstock_enqueue_many to <role>",
}


async def enqueue(
    connection: Any, action: str, payload: Any = None, *, settings: Settings | None = None, **options: Any
) -> dict[str, Any]:
    """Add a task in the transaction of an asyncpg, SQLAlchemy or psycopg connection (session, cursor) for asyncio.

    It is stored when the caller commits; without a transaction, at once. Options and answer are those of
    `Client.enqueue`. settings: limits and defaults, None for those of the environment. Raises TypeError for another
    kind of connection, InvalidParams and TooLarge before anything is sent, DuplicateTask; what the database refuses
    comes as the driver's own error.
    """
    tasks = [_read(task_params(action, payload, options), settings)]
    (answer,) = await _ask(connection, tasks, settings)
    return _or_raise(answer)


async def enqueue_many(
    connection: Any, tasks: Iterable[Mapping[str, Any]], *, settings: Settings | None = None
) -> list[Any]:
    """Add tasks, each a mapping of ``action`` and what else `enqueue` takes, by one statement; all or none.

    Returns their answers in order, DuplicateTask standing for a task that asked to be refused. Raises as `enqueue`.
    """
    read = [_read(prepared(task), settings) for task in tasks]
    return await _ask(connection, read, settings)


def enqueue_sync(
    connection: Any, action: str, payload: Any = None, *, settings: Settings | None = None, **options: Any
) -> dict[str, Any]:
    """As `enqueue`, in the transaction of a SQLAlchemy Connection or Session, or a psycopg Connection or Cursor."""
    tasks = [_read(task_params(action, payload, options), settings)]
    (answer,) = _ask_sync(connection, tasks, settings)
    return _or_raise(answer)


def enqueue_many_sync(
    connection: Any, tasks: Iterable[Mapping[str, Any]], *, settings: Settings | None = None
) -> list[Any]:
    """As `enqueue_many`, on the connections that `enqueue_sync` takes."""
    read = [_read(prepared(task), settings) for task in tasks]
    return _ask_sync(connection, read, settings)


def _or_raise(answer: Any) -> dict[str, Any]:
    if isinstance(answer, DuplicateTask):
        raise answer
    stored: dict[str, Any] = answer
    return stored


def _read(params: Mapping[str, Any], settings: Settings | None) -> NewTask:
    task = new_task(decode(EnqueueParams, dumps(params).encode()), settings or _settings(), large=True)
    if task.offered is not None:
        raise InvalidParams("sealed_payload", "cannot be taken in a transaction of yours: give the payload itself")
    return task


@cache
def _settings() -> Settings:
    return load_settings()


async def _ask(connection: Any, tasks: Sequence[NewTask], settings: Settings | None) -> list[Any]:
    family, kind = _kind_of(connection)
    body, limit_bytes = _parameters(tasks, settings or _settings())
    rows: Iterable[Any]
    try:
        if family == "asyncpg" and hasattr(connection, "fetch"):
            rows = await connection.fetch(_STATEMENT.format("$1::text", "$2::int"), body, limit_bytes)
        elif family == "sqlalchemy" and kind in _SQLALCHEMY_ASYNC:
            rows = (await connection.execute(*_for_sqlalchemy(connection, body, limit_bytes))).all()
        elif family == "psycopg" and kind.startswith("Async"):
            async with _psycopg_cursor(connection) as cursor:
                await cursor.execute(_STATEMENT.format("%s::text", "%s::int"), (body, limit_bytes))
                rows = await cursor.fetchall()
        else:
            raise _wrong(connection, _ASYNC, "enqueue_sync", _SYNC)
    except Exception as exc:
        _advise(exc)
        raise
    return _answers(tasks, rows)


def _ask_sync(connection: Any, tasks: Sequence[NewTask], settings: Settings | None) -> list[Any]:
    family, kind = _kind_of(connection)
    body, limit_bytes = _parameters(tasks, settings or _settings())
    rows: Iterable[Any]
    try:
        if family == "sqlalchemy" and kind in _SQLALCHEMY_SYNC:
            rows = connection.execute(*_for_sqlalchemy(connection, body, limit_bytes)).all()
        elif family == "psycopg" and not kind.startswith("Async"):
            with _psycopg_cursor(connection) as cursor:
                cursor.execute(_STATEMENT.format("%s::text", "%s::int"), (body, limit_bytes))
                rows = cursor.fetchall()
        else:
            raise _wrong(connection, _SYNC, "enqueue", _ASYNC)
    except Exception as exc:
        _advise(exc)
        raise
    return _answers(tasks, rows)


def _kind_of(connection: Any) -> tuple[str, str]:
    """Driver and class of a connection or of a class it inherits from; two empty texts for anything else."""
    for base in type(connection).__mro__:
        family = base.__module__.partition(".")[0]
        if family == "asyncpg" and base.__name__ in ("Connection", "PoolConnectionProxy"):
            return family, base.__name__
        if family == "sqlalchemy" and base.__name__ in _SQLALCHEMY_ASYNC | _SQLALCHEMY_SYNC:
            return family, base.__name__
        if family == "psycopg" and base.__name__ in ("AsyncConnection", "AsyncCursor", "Connection", "Cursor"):
            return family, base.__name__
    return "", ""


def _for_sqlalchemy(connection: Any, body: str, limit_bytes: int) -> tuple[Any, dict[str, Any]]:
    from sqlalchemy import text

    dialect = (connection if hasattr(connection, "dialect") else connection.get_bind()).dialect.name
    if dialect != "postgresql":
        raise TypeError(f"the tasks are in Postgres, and this {type(connection).__name__} is one of {dialect}")
    statement = _STATEMENT.format("cast(:tasks as text)", "cast(:limit_bytes as int)")
    return text(statement), {"tasks": body, "limit_bytes": limit_bytes}


def _psycopg_cursor(connection: Any) -> Any:
    """A new cursor, whose rows are tuples; the caller's may have other rows, or unfetched ones."""
    from psycopg.rows import tuple_row

    of = connection if hasattr(connection, "cursor") else connection.connection
    return of.cursor(row_factory=tuple_row)


def _wrong(connection: Any, taken: str, other: str, taken_by_other: str) -> TypeError:
    kind = type(connection)
    return TypeError(
        f"{kind.__module__}.{kind.__qualname__} is no connection that can be used here: give a {taken}; "
        f"penstock.{other} takes a {taken_by_other}"
    )


def _advise(exc: Exception) -> None:
    """Add advice to an error of a missing function or grant."""
    cause = getattr(exc, "orig", exc)  # of SQLAlchemy
    advice = _ADVICE.get(getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None) or "")
    if advice is not None:
        exc.add_note(advice)


class _Task(msgspec.Struct, omit_defaults=True):
    """A task as the function takes it; defaults are left out."""

    action: str
    payload: msgspec.Raw
    max_attempts: int
    run_at: str | None = None
    delay: float | None = None
    priority: int | None = None
    unique_key: str | None = None
    ordering_key: str | None = None
    timeout: float | None = None
    labels: msgspec.Raw | None = None
    expires_at: str | None = None
    expires_in: float | None = None
    limit_key: str | None = None
    unique: str | float = "retained"
    on_duplicate: str = "return"
    tenant: str | None = None
    traceparent: str | None = None
    tracestate: str | None = None


def _parameters(tasks: Sequence[NewTask], settings: Settings) -> tuple[str, int]:
    """The function's arguments: the tasks, with the caller's trace context if traces are on, and the limit."""
    trace = trace_context.current() if settings.traces else None
    headers = {} if trace is None else trace.headers
    entries = [
        _Task(
            action=task.action,
            payload=msgspec.Raw(task.payload.encode()),
            max_attempts=task.max_attempts,
            run_at=None if task.run_at is None else task.run_at.astimezone(UTC).isoformat(),
            delay=task.delay_seconds,
            priority=task.priority if task.priority or task.replaces_priority else None,
            unique_key=task.unique_key,
            ordering_key=task.ordering_key,
            timeout=task.timeout_seconds,
            labels=None if task.labels is None else msgspec.Raw(task.labels.encode()),
            expires_at=None if task.expires_at is None else task.expires_at.astimezone(UTC).isoformat(),
            expires_in=task.expires_in_seconds,
            limit_key=task.limit_key,
            unique=task.unique,
            # "error" is raised here: by the database, it would end the caller's transaction.
            on_duplicate="replace" if task.on_duplicate == "replace" else "return",
            tenant=task.tenant,
            **headers,
        )
        for task in tasks
    ]
    return msgspec.json.encode(entries).decode(), settings.payload_limit_bytes


def _answers(tasks: Sequence[NewTask], rows: Iterable[Any]) -> list[Any]:
    answers: list[Any] = []
    for task, row in zip(tasks, rows, strict=True):
        enqueued = Enqueued(row[0], State(row[1]), row[2], row[3])
        if enqueued.duplicate and task.on_duplicate == "error":
            answers.append(DuplicateTask(enqueued.id, enqueued.state))
            continue
        answer = {"id": enqueued.id, "state": str(enqueued.state), "duplicate": enqueued.duplicate}
        answers.append(answer if enqueued.replaced is None else answer | {"replaced": enqueued.replaced})
    return answers
