"""Enqueue inside the caller's own transaction: the task is there if and only if the transaction commits.

The database function ``penstock_enqueue_many`` does it; here the options are checked as the api checks them. No driver
is imported that the caller has not imported: the module of the connection's class identifies it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, Unpack

import msgspec

from penstock.payloads.codec import PayloadCodec, aad_of
from penstock.protocol import in_process, trace_context
from penstock.protocol.answers import Accepted
from penstock.protocol.errors import DuplicateTask, InvalidParams, TooLarge
from penstock.protocol.json_text import dumps, foreign, replace_unstorable
from penstock.protocol.method import decode
from penstock.protocol.options import EnqueueOptions
from penstock.protocol.requests import given, prepared, task_params
from penstock.protocol.schema import renamed
from penstock.protocol.sealed import escape_plain
from penstock.protocol.task import NewTask
from penstock.tasks.params import EnqueueParams, new_task

if TYPE_CHECKING:
    from penstock.settings.model import Settings


_STATEMENTS = {
    "enqueue": "select id, state, duplicate, replaced "
    "from public.penstock_enqueue_many(cast({} as text), cast({} as int)) order by place",
    "settle": "select public.penstock_settle(cast({} as text), cast(cast({} as text) as json)) "
    "where set_config('penstock.result_limit_bytes', cast({} as text), true) is not null",  # before the function
}
_GRANTED = {"enqueue": "penstock_enqueue, penstock_enqueue_many", "settle": "penstock_settle"}  # what a grant names
_ASYNC = "asyncpg Connection, SQLAlchemy AsyncConnection or AsyncSession, psycopg AsyncConnection or AsyncCursor"
_SYNC = "SQLAlchemy Connection or Session, psycopg Connection or Cursor, connection of Django"
_ASYNC_CLASSES = {
    "asyncpg": {"Connection", "PoolConnectionProxy"},
    "sqlalchemy": {"AsyncConnection", "AsyncSession", "async_scoped_session"},
    "psycopg": {"AsyncConnection", "AsyncCursor"},
}
_SYNC_CLASSES = {
    "sqlalchemy": {"Connection", "Session", "scoped_session"},
    "psycopg": {"Connection", "Cursor"},
    "django": {"BaseDatabaseWrapper", "ConnectionProxy"},
}


@cache
def _settings() -> Settings:
    from penstock.settings.model import load_settings  # with the first task: it takes longer to load than all else here

    return load_settings()


async def enqueue(
    connection: Any, action: str, payload: Any = None, *, settings: Settings | None = None,
    **options: Unpack[EnqueueOptions],
) -> Accepted:  # fmt: skip
    """Add a task in the transaction of an asyncpg, SQLAlchemy or psycopg connection (session, cursor) for asyncio.

    It is stored when the caller commits; without a transaction, at once. Options and answer are those of
    `Client.enqueue`. settings: limits and defaults, None for those of the environment. Raises TypeError for another
    kind of connection, InvalidParams and TooLarge before anything is sent, DuplicateTask; what the database refuses
    comes as the driver's own error.
    """
    return _only(await enqueue_many(connection, [task_params(action, payload, options)], settings=settings))


async def enqueue_many(
    connection: Any, tasks: Iterable[Mapping[str, Any]], *, settings: Settings | None = None
) -> list[Accepted | DuplicateTask]:
    """Add tasks, each a mapping of ``action`` and what else `enqueue` takes, by one statement; all or none.

    Returns their answers in order, DuplicateTask standing for a task that asked to be refused. Raises as `enqueue`.
    """
    settings = settings or _settings()
    read, arguments = _read(tasks, settings)
    return _answers(read, await _ask(connection, "enqueue", settings, arguments))


def enqueue_sync(
    connection: Any, action: str, payload: Any = None, *, settings: Settings | None = None,
    **options: Unpack[EnqueueOptions],
) -> Accepted:  # fmt: skip
    """As `enqueue`, in the transaction of a SQLAlchemy Connection or Session, a psycopg Connection or Cursor, or a
    connection of Django: `django.db.connection`."""
    return _only(enqueue_many_sync(connection, [task_params(action, payload, options)], settings=settings))


def enqueue_many_sync(
    connection: Any, tasks: Iterable[Mapping[str, Any]], *, settings: Settings | None = None
) -> list[Accepted | DuplicateTask]:
    """As `enqueue_many`, on the connections that `enqueue_sync` takes."""
    settings = settings or _settings()
    read, arguments = _read(tasks, settings)
    return _answers(read, _ask_sync(connection, "enqueue", settings, arguments))


async def settle(connection: Any, ctx: Attempt, result: Any = None, *, settings: Settings | None = None) -> bool:
    """Record the result of a handler's attempt in the handler's own transaction: both commit, or neither does.

    connection: as of `enqueue`, to the database that holds the tasks. False: the attempt no longer holds its task, so
    roll back. The worker sends no result either way; an error that the handler raises afterwards is reported as usual,
    and counts unless the transaction was committed. settings: keys and limits, None for those of the environment.
    Raises TypeError for another kind of connection, TypeError or ValueError for a result that is not JSON or together
    with ``ctx.spawn``, TooLarge.
    """
    settings = settings or _settings()
    ((holds,),) = await _ask(connection, "settle", settings, _settling(ctx, result, settings))
    ctx.note_settled(holds=holds)
    return bool(holds)


def settle_sync(connection: Any, ctx: Attempt, result: Any = None, *, settings: Settings | None = None) -> bool:
    """As `settle`, on the connections that `enqueue_sync` takes."""
    settings = settings or _settings()
    ((holds,),) = _ask_sync(connection, "settle", settings, _settling(ctx, result, settings))
    ctx.note_settled(holds=holds)
    return bool(holds)


class Attempt(Protocol):
    """What `settle` needs of a handler's Context."""

    spawned: list[str]

    @property
    def task_id(self) -> int: ...

    @property
    def claim(self) -> int: ...

    def note_settled(self, *, holds: bool) -> None:
        """The attempt is settled, or holds its task no more."""


def _settling(ctx: Attempt, result: Any, settings: Settings) -> tuple[str, str, str]:
    """The function's arguments, and the limit that it is to keep: an encrypted result is longer."""
    if ctx.spawned:
        raise ValueError("ctx.spawn() goes with a result that the worker sends: enqueue in your transaction instead")
    text = escape_plain(replace_unstorable(dumps(result, foreign)))
    if len(text) > settings.result_limit_bytes:
        raise TooLarge("the result", len(text), settings.result_limit_bytes)
    if settings.payload_keys:
        text = PayloadCodec(settings).encode(text, aad_of("result", ctx.task_id))
    return f"{ctx.task_id}:{ctx.claim}", text, str(max(settings.result_limit_bytes, len(text)))


async def _ask(connection: Any, verb: str, settings: Settings, arguments: Sequence[Any]) -> Sequence[Any]:
    if in_process.substitute and (answer := in_process.substitute.ask(verb, arguments)) is not None:
        return answer
    with _statement(verb, settings.database_schema) as statement:
        match _driver(connection, verb, is_async=True):
            case "asyncpg":
                rows: Sequence[Any] = await connection.fetch(statement.format("$1", "$2", "$3"), *arguments)
            case "sqlalchemy":
                rows = (await connection.execute(*_for_sqlalchemy(connection, statement, arguments))).all()
            case "psycopg":
                async with _cursor(connection) as cursor:
                    await cursor.execute(statement.format("%s", "%s", "%s"), arguments)
                    rows = await cursor.fetchall()
    return rows


def _ask_sync(connection: Any, verb: str, settings: Settings, arguments: Sequence[Any]) -> Sequence[Any]:
    if in_process.substitute and (answer := in_process.substitute.ask(verb, arguments)) is not None:
        return answer
    with _statement(verb, settings.database_schema) as statement:
        match _driver(connection, verb, is_async=False):
            case "sqlalchemy":
                rows: Sequence[Any] = connection.execute(*_for_sqlalchemy(connection, statement, arguments)).all()
            case "psycopg" | "django":
                with _cursor(connection) as cursor:
                    cursor.execute(statement.format("%s", "%s", "%s"), arguments)
                    rows = cursor.fetchall()
    return rows


def _only(answers: list[Accepted | DuplicateTask]) -> Accepted:
    (answer,) = answers
    if isinstance(answer, DuplicateTask):
        raise answer
    return answer


@contextmanager
def _statement(verb: str, schema: str) -> Iterator[str]:
    """The statement; an error of the block gets advice if its function or a grant is missing."""
    try:
        yield renamed(_STATEMENTS[verb], schema)
    except Exception as exc:
        granted = renamed(_GRANTED[verb], schema)
        cause = getattr(exc, "orig", None) or exc.__cause__ or exc  # of SQLAlchemy, of Django
        match getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None):
            case "42883":
                exc.add_note(f"the database lacks {granted.rpartition(' ')[2]}: run `penstock migrate` against it")
            case "42501":
                exc.add_note(f"grant it: grant execute on function {granted} to <role>")
        raise


def _driver(connection: Any, verb: str, *, is_async: bool) -> str:
    """The driver of a connection, by its class or one that it inherits from. Raises TypeError for another kind."""
    kind, classes = type(connection), _ASYNC_CLASSES if is_async else _SYNC_CLASSES
    for base in kind.__mro__:
        driver = base.__module__.partition(".")[0]
        if base.__name__ in classes.get(driver, ()):
            return driver
    taken, other, taken_by_other = (_ASYNC, f"{verb}_sync", _SYNC) if is_async else (_SYNC, verb, _ASYNC)
    raise TypeError(
        f"{kind.__module__}.{kind.__qualname__} is no connection that can be used here: give a {taken}; "
        f"penstock.{other} takes a {taken_by_other}"
    )


def _for_sqlalchemy(connection: Any, statement: str, arguments: Sequence[Any]) -> tuple[Any, dict[str, Any]]:
    dialect = (connection if hasattr(connection, "dialect") else connection.get_bind()).dialect.name
    if dialect != "postgresql":
        raise _elsewhere(connection, dialect)
    return sys.modules["sqlalchemy"].text(statement.format(":a", ":b", ":c")), dict(zip("abc", arguments, strict=False))


def _elsewhere(connection: Any, database: str) -> TypeError:
    return TypeError(f"the tasks are in Postgres, and this {type(connection).__name__} is one of {database}")


def _cursor(connection: Any) -> Any:
    """A new cursor of psycopg or Django, whose rows are tuples; the caller's may have other rows, or unfetched ones."""
    vendor = getattr(connection, "vendor", None)  # of Django
    if vendor is not None:
        if vendor != "postgresql":
            raise _elsewhere(connection, vendor)
        return connection.cursor()
    from psycopg.rows import tuple_row

    of = connection if hasattr(connection, "cursor") else connection.connection
    return of.cursor(row_factory=tuple_row)


def _read(tasks: Iterable[Mapping[str, Any]], settings: Settings) -> tuple[list[NewTask], tuple[str, int]]:
    """The tasks, and the function's arguments: them with the caller's trace context if traces are on, and the limit."""
    trace = trace_context.current() if settings.traces else None
    headers = {} if trace is None else trace.headers
    read, entries = [], []
    for call in tasks:
        params: EnqueueParams = decode(EnqueueParams, dumps(prepared(call)).encode())
        task = new_task(params, settings, large=False)
        if task.offered is not None:
            raise InvalidParams("sealed_payload", "cannot be taken in a transaction of yours: give the payload itself")
        entry = msgspec.structs.asdict(params) | {
            "max_attempts": task.max_attempts,
            "run_at": task.run_at,
            "labels": params.labels or None,
            "expires_at": task.expires_at,
            "unique": None if task.unique == "retained" else task.unique,
            # "error" is raised here: by the database, it would end the caller's transaction.
            "on_duplicate": "replace" if task.on_duplicate == "replace" else None,
        }
        read.append(task)
        entries.append(given(**entry) | headers)
    return read, (msgspec.json.encode(entries).decode(), settings.payload_limit_bytes)


def _answers(tasks: Sequence[NewTask], rows: Iterable[Any]) -> list[Accepted | DuplicateTask]:
    answers: list[Accepted | DuplicateTask] = []
    for task, (task_id, state, is_duplicate, replaced) in zip(tasks, rows, strict=True):
        if is_duplicate and task.on_duplicate == "error":
            answers.append(DuplicateTask(task_id, state))
        else:
            answers.append(Accepted(**given(id=task_id, state=str(state), duplicate=is_duplicate, replaced=replaced)))
    return answers
