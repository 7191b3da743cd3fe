"""Tasks enqueued inside the caller's transaction, over every kind of connection, and by SQL alone."""

from __future__ import annotations

import asyncio
import json
import random
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

import asyncpg
import psycopg
import pytest
import sqlalchemy
from psycopg.rows import dict_row
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

import penstock
from penstock.brokers.sqs import SqsQueue
from penstock.db.notify import CHANNEL
from penstock.db.pool import Store
from penstock.db.statements import SQL
from penstock.protocol.errors import DuplicateTask, InvalidParams, TooLarge
from penstock.protocol.task import NewTask
from penstock.protocol.trace_context import parse
from penstock.scheduler.process import Scheduler
from penstock.settings.model import Settings
from penstock.tasks import claim, settle
from penstock.tasks import enqueue as enqueuing
from tests.integration.doors import no_routes, take

TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


class Caller:
    """A transaction of one kind: what a program has in its hands, and how it ends."""

    def __init__(self, connection: Any, savepoint: Any, run: Callable[[str], Awaitable[Any]], *, sync: bool) -> None:
        self.connection = connection
        self.savepoint = savepoint  # an asynchronous context manager that undoes what is in it when it raises
        self.run = run
        self._sync = sync

    async def enqueue(self, *args: Any, **options: Any) -> Any:
        if self._sync:
            return penstock.enqueue_sync(self.connection, *args, **options)
        return await penstock.enqueue(self.connection, *args, **options)

    async def enqueue_many(self, tasks: Any) -> Any:
        if self._sync:
            return penstock.enqueue_many_sync(self.connection, tasks)
        return await penstock.enqueue_many(self.connection, tasks)


class Order(BaseModel):
    id: UUID
    at: datetime


class Undo(Exception):
    pass


@asynccontextmanager
async def asyncpg_connection(url: str) -> AsyncIterator[Caller]:
    connection = await asyncpg.connect(url)
    try:
        async with connection.transaction():
            yield Caller(connection, connection.transaction, connection.execute, sync=False)
    finally:
        await connection.close()


@asynccontextmanager
async def asyncpg_pool(url: str) -> AsyncIterator[Caller]:
    async with asyncpg.create_pool(url, min_size=1, max_size=1) as pool, pool.acquire() as connection:
        # What a program may have set: its own idea of json.
        await connection.set_type_codec("json", encoder=json.dumps, decoder=json.loads, schema="pg_catalog")
        async with connection.transaction():
            yield Caller(connection, connection.transaction, connection.execute, sync=False)


def _sqlalchemy_url(url: str, driver: str) -> str:
    return url.replace("postgresql://", f"postgresql+{driver}://", 1)


@asynccontextmanager
async def sqlalchemy_async_connection(url: str) -> AsyncIterator[Caller]:
    engine = create_async_engine(_sqlalchemy_url(url, "asyncpg"), poolclass=NullPool)
    async with engine.begin() as connection:
        run = lambda text: connection.execute(sqlalchemy.text(text))  # noqa: E731
        yield Caller(connection, connection.begin_nested, run, sync=False)


@asynccontextmanager
async def sqlalchemy_async_session(url: str) -> AsyncIterator[Caller]:
    engine = create_async_engine(_sqlalchemy_url(url, "psycopg"), poolclass=NullPool)
    async with AsyncSession(engine) as session, session.begin():
        run = lambda text: session.execute(sqlalchemy.text(text))  # noqa: E731
        yield Caller(session, session.begin_nested, run, sync=False)


@asynccontextmanager
async def psycopg_async_connection(url: str) -> AsyncIterator[Caller]:
    async with await psycopg.AsyncConnection.connect(url, row_factory=dict_row) as connection:
        yield Caller(connection, connection.transaction, connection.execute, sync=False)


@asynccontextmanager
async def psycopg_async_cursor(url: str) -> AsyncIterator[Caller]:
    async with await psycopg.AsyncConnection.connect(url) as connection, connection.cursor() as cursor:
        yield Caller(cursor, connection.transaction, cursor.execute, sync=False)


def _awaited(begin: Callable[[], Any]) -> Callable[[], Any]:
    @asynccontextmanager
    async def block() -> AsyncIterator[None]:
        with begin():
            yield

    return block


def _soon(run: Callable[[Any], Any]) -> Callable[[str], Awaitable[Any]]:
    async def soon(text: str) -> Any:
        return run(text)

    return soon


@asynccontextmanager
async def sqlalchemy_connection(url: str) -> AsyncIterator[Caller]:
    engine = sqlalchemy.create_engine(_sqlalchemy_url(url, "psycopg"), poolclass=NullPool)
    with engine.begin() as connection:
        run = _soon(lambda text: connection.execute(sqlalchemy.text(text)))
        yield Caller(connection, _awaited(connection.begin_nested), run, sync=True)


@asynccontextmanager
async def sqlalchemy_session(url: str) -> AsyncIterator[Caller]:
    engine = sqlalchemy.create_engine(_sqlalchemy_url(url, "psycopg"), poolclass=NullPool)
    with Session(engine) as session, session.begin():
        run = _soon(lambda text: session.execute(sqlalchemy.text(text)))
        yield Caller(session, _awaited(session.begin_nested), run, sync=True)


@asynccontextmanager
async def psycopg_connection(url: str) -> AsyncIterator[Caller]:
    with psycopg.connect(url) as connection:
        yield Caller(connection, _awaited(connection.transaction), _soon(connection.execute), sync=True)


@asynccontextmanager
async def psycopg_cursor(url: str) -> AsyncIterator[Caller]:
    with psycopg.connect(url) as connection, connection.cursor(row_factory=dict_row) as cursor:
        yield Caller(cursor, _awaited(connection.transaction), _soon(cursor.execute), sync=True)


KINDS = [
    asyncpg_connection, asyncpg_pool, sqlalchemy_async_connection, sqlalchemy_async_session, psycopg_async_connection,
    psycopg_async_cursor, sqlalchemy_connection, sqlalchemy_session, psycopg_connection, psycopg_cursor,
]  # fmt: skip


async def count(sql: Any) -> int:
    found: int = await sql.fetchval("select count(*) from penstock.task")
    return found


@pytest.fixture
async def heard(database_url: str) -> AsyncIterator[list[str]]:
    """Wake-ups of schedulers, as they come."""
    connection = await asyncpg.connect(database_url)
    wake_ups: list[str] = []
    await connection.add_listener(CHANNEL, lambda *args: wake_ups.append(args[3]))
    yield wake_ups
    await connection.close()


async def settle_wake_ups(sql: Any, wake_ups: list[str]) -> int:
    """How many wake-ups have come, those on their way included: a mark of ours comes behind them."""
    mark = f"mark {len(wake_ups)}"
    await sql.execute(f"notify {CHANNEL}, '{mark}'")
    await until(lambda: mark in wake_ups)
    return wake_ups.count("")


@pytest.mark.parametrize("kind", [asyncpg_connection, psycopg_connection])
async def test_models_and_times_are_written_as_json(kind: Any, database_url: str, sql: Any) -> None:
    order = Order(id=UUID(int=7), at=datetime(2026, 1, 2, tzinfo=UTC))
    async with kind(database_url) as caller:
        await caller.enqueue("model", order, delay=timedelta(hours=1))
        await caller.enqueue_many([{"action": "many", "payload": {"orders": [order], UUID(int=8): Decimal("1.10")}}])
    told = {"id": str(UUID(int=7)), "at": "2026-01-02T00:00:00Z"}
    rows = await sql.fetch("select action, payload, run_at > now() + interval '59 minutes' as late from penstock.task")
    assert {row["action"]: (json.loads(row["payload"]), row["late"]) for row in rows} == {
        "model": (told, True),
        "many": ({"orders": [told], str(UUID(int=8)): "1.10"}, False),
    }


@pytest.mark.parametrize("kind", KINDS, ids=[kind.__name__ for kind in KINDS])
async def test_a_task_is_there_if_and_only_if_the_transaction_commits(
    kind: Any, database_url: str, sql: Any, heard: list[str]
) -> None:
    with pytest.raises(Undo):
        async with kind(database_url) as caller:
            await caller.run("create table mine (id int)")
            answer = await caller.enqueue("undone", {"n": 1}, unique_key="k", ordering_key="o")
            assert answer["state"] == "SCHEDULED"
            await caller.enqueue_many([{"action": "undone"}] * 3)
            raise Undo
    assert await count(sql) == 0
    for table in ("task", "unique_key", "ordering_head", "tally"):
        assert await sql.fetchval(f"select count(*) from penstock.{table}") == 0, table
    assert await settle_wake_ups(sql, heard) == 0

    async with kind(database_url) as caller:
        await caller.run("create table mine (id int)")
        answer = await caller.enqueue(
            "kept", {"n": 2, "s": "ü\U0001f600"}, priority=3, unique_key="k", ordering_key="o"
        )
        assert set(answer) == {"id", "state", "duplicate"}
        assert await count(sql) == 0, "others see it before the commit"
        with pytest.raises(Undo):
            async with caller.savepoint():
                await caller.enqueue("undone", {"n": 3})
                raise Undo
        second, third = await caller.enqueue_many(
            [{"action": "kept", "ordering_key": "o"}, {"action": "kept", "unique_key": "k"}]
        )
        assert second["state"] == "WAITING"
        assert third == {"id": answer["id"], "state": "SCHEDULED", "duplicate": True}
    rows = await sql.fetch("select id, action, state::text, payload::text, priority from penstock.task order by id")
    assert [tuple(row) for row in rows] == [
        (answer["id"], "kept", "SCHEDULED", '{"n":2,"s":"\\u00fc\\ud83d\\ude00"}', 3),
        (second["id"], "kept", "WAITING", "{}", 0),
    ]
    await sql.execute("select 1 from mine")
    assert await settle_wake_ups(sql, heard) == 1  # for the whole transaction


@pytest.mark.parametrize("kind", KINDS[::3], ids=[kind.__name__ for kind in KINDS[::3]])
async def test_what_is_refused_leaves_the_transaction_as_it_was(kind: Any, database_url: str, sql: Any) -> None:
    async with kind(database_url) as caller:
        first = await caller.enqueue("a", unique_key="k", on_duplicate="replace")
        assert first["replaced"] is False
        with pytest.raises(InvalidParams, match="priority must be between"):
            await caller.enqueue("a", priority=99_999)
        with pytest.raises(InvalidParams, match="did you mean priority"):
            await caller.enqueue("a", priorty=1)
        with pytest.raises(TooLarge, match="payload is 300008 bytes"):
            await caller.enqueue("a", {"x": "x" * 300_000})
        with pytest.raises(DuplicateTask) as told:
            await caller.enqueue("a", unique_key="k", on_duplicate="error")
        assert told.value.data == {"id": first["id"], "state": "SCHEDULED"}
        again = await caller.enqueue("a", {"v": 2}, unique_key="k", on_duplicate="replace")
        assert again == {"id": first["id"], "state": "SCHEDULED", "duplicate": True, "replaced": True}
    assert [tuple(row) for row in await sql.fetch("select action, payload::text from penstock.task")] == [
        ("a", '{"v":2}')
    ]


async def test_a_bucket_makes_no_payload_larger_that_goes_through_the_database(
    database_url: str, sql: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_PAYLOAD_BUCKET", "s3://bucket")
    async with KINDS[0](database_url) as caller:
        with pytest.raises(TooLarge, match="payload is 300008 bytes; the limit is 262144"):
            await caller.enqueue("a", {"x": "x" * 300_000})
        await caller.enqueue("a")
    assert await count(sql) == 1


async def test_a_connection_that_commits_each_statement_works_too(database_url: str, sql: Any) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        penstock.enqueue_sync(connection, "at-once")
        assert await count(sql) == 1
    await penstock.enqueue(sql, "at-once")
    assert await count(sql) == 2


async def test_something_else_is_told_by_its_name() -> None:
    with sqlite3.connect(":memory:") as lite:
        with pytest.raises(
            TypeError, match=r"sqlite3\.Connection is no connection that can be used here: give a asyncpg"
        ):
            await penstock.enqueue(lite, "a")
        with pytest.raises(TypeError, match=r"give a SQLAlchemy Connection"):
            penstock.enqueue_sync("postgresql://", "a")
    with sqlalchemy.create_engine("sqlite://").connect() as connection:
        with pytest.raises(TypeError, match="the tasks are in Postgres, and this Connection is one of sqlite"):
            penstock.enqueue_sync(connection, "a")
        with pytest.raises(TypeError, match=r"penstock\.enqueue_sync takes a SQLAlchemy"):
            await penstock.enqueue(connection, "a")


async def test_limits_are_those_of_the_settings_that_are_given(database_url: str, sql: Any, settings: Settings) -> None:
    roomy = settings.model_copy(update={"payload_limit_bytes": 400_000, "max_attempts": 3})
    await penstock.enqueue(sql, "large", {"x": "x" * 300_000}, settings=roomy)
    assert await sql.fetchval("select max_attempts from penstock.task") == 3


async def test_a_database_without_the_functions_and_a_role_without_the_grant_say_what_to_do(
    empty_database_url: str, database_url: str, sql: Any
) -> None:
    connection = await asyncpg.connect(empty_database_url)
    with pytest.raises(asyncpg.UndefinedFunctionError) as missing:
        await penstock.enqueue(connection, "a")
    await connection.close()
    assert "penstock migrate" in missing.value.__notes__[0]

    await sql.execute("drop role if exists app")
    await sql.execute("create role app login password 'app'")
    try:
        parts = urlsplit(database_url)
        as_app = parts._replace(netloc=f"app:app@{parts.hostname}:{parts.port}").geturl()
        connection = await asyncpg.connect(as_app)
        with pytest.raises(asyncpg.InsufficientPrivilegeError) as refused:
            await penstock.enqueue(connection, "a")
        assert "grant execute" in refused.value.__notes__[0]
        await sql.execute("grant execute on function penstock_enqueue, penstock_enqueue_many to app")
        await penstock.enqueue(connection, "a")
        assert await connection.fetchval("select state from penstock_enqueue('b', unique_key => 'k')") == "SCHEDULED"
        for forbidden in ("select * from penstock.task", "select penstock.enqueue_tasks('[]', 1)"):
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await connection.execute(forbidden)
        await connection.close()
        assert await count(sql) == 2
    finally:
        await sql.execute("drop owned by app")
        await sql.execute("drop role app")


# By SQL alone


async def test_every_option_of_the_function_reaches_the_task(sql: Any) -> None:
    row = await sql.fetchrow(
        """select * from penstock_enqueue('export', jsonb_build_object('objectID', 7), priority => 5,
            run_at => '2030-01-31 09:00+01', unique_key => 'u', ordering_key => 'o', max_attempts => 4, timeout => 1.5,
            labels => '{"team": "x"}', expires_in => 3600, limit_key => 'l', "unique" => 'live',
            on_duplicate => 'replace', tenant => 'acme', traceparent => $1, tracestate => 'rojo=1')""",
        TRACEPARENT,
    )
    assert tuple(row) == (1, "SCHEDULED", False, False)
    kept = await sql.fetchrow(
        """select action, payload::text, priority, run_at = '2030-01-31T08:00:00Z', unique_key, ordering_key,
           max_attempts, timeout_seconds, labels::text, extract(epoch from expires_at - created_at)::int, limit_key,
           tenant, trace
           from penstock.task"""
    )
    assert tuple(kept) == (
        "export", '{"objectID": 7}', 5, True, "acme\x1fu", "acme\x1fo", 4, 1.5, '{"team": "x"}', 3600, "l", "acme",
        f"{TRACEPARENT} rojo=1",
    )  # fmt: skip
    assert await sql.fetchval("select id from penstock_enqueue('later', delay => 90)") == 2
    assert await sql.fetchval("select run_at - created_at = interval '90 s' from penstock.task where id = 2")


async def test_each_task_of_a_call_has_the_trace_that_stands_beside_it(sql: Any) -> None:
    other = TRACEPARENT.replace("4bf9", "aaaa")
    plain = [
        {"traceparent": TRACEPARENT}, {}, {"traceparent": TRACEPARENT}, {"traceparent": other, "tracestate": "rojo=1"},
        {"traceparent": other}, {"traceparent": "junk"}, {"tracestate": "rojo=1"},
    ]  # fmt: skip
    keyed = [{"unique_key": "k", "traceparent": TRACEPARENT}, {"unique_key": "k", "traceparent": other}, {}]
    for tasks in (plain, keyed):
        await sql.execute(
            "select penstock_enqueue_many($1::text)", json.dumps([{"action": "a"} | one for one in tasks])
        )
    traces = await sql.fetch("select trace from penstock.task order by id")
    of_plain = [TRACEPARENT, None, TRACEPARENT, f"{other} rojo=1", other, None, None]
    assert [row["trace"] for row in traces] == [*of_plain, TRACEPARENT, None]
    # What is already there keeps the trace that it has.
    await sql.execute(
        "select penstock_enqueue('a', unique_key => 'k', on_duplicate => 'replace', traceparent => $1)", other
    )
    assert await sql.fetchval("select trace from penstock.task where unique_key = 'k'") == TRACEPARENT


async def test_what_breaks_the_grammar_of_a_trace_is_left_out_and_the_task_is_taken(sql: Any) -> None:
    states = [
        None, "", "rojo=1, congo=t61 ,,", "fw529a3039@dt=FfAAAAA", "rojo=1,rojo=2", "Rojo=1", "rojo=1=2", "rojo",
        "rojo=", "=1", ",", " \t", "a= b ", "a=b\nc", "a=\u00fc", "k=" + "v" * 256, "k=" + "v" * 257, "k" * 256 + "=v",
        "k" * 257 + "=v", "1a=v", "1a@b=v", "1a@1b=v", "a@b@c=v", f"{'t' * 241}@{'s' * 14}=v", f"{'t' * 242}@s=v",
        f"t@{'s' * 15}=v", ",".join(f"k{n}=v" for n in range(32)), ",".join(f"k{n}=v" for n in range(33)),
        ",".join(f"k{n:03}={'v' * 40}" for n in range(12)),
    ]  # fmt: skip
    trace_id, span_id = TRACEPARENT.split("-")[1:3]
    parents = [
        f" \t{TRACEPARENT}\t", f"{TRACEPARENT}-more", f"{TRACEPARENT}\n", f"\u00a0{TRACEPARENT}", TRACEPARENT.upper(),
        "", f"cc-{trace_id}-{span_id}-ff-what-comes", f"cc-{trace_id}-{span_id}-04", f"01-{trace_id}-{span_id}-01.more",
        f"ff-{trace_id}-{span_id}-01", f"00-{'0' * 32}-{span_id}-01", f"00-{trace_id}-{'0' * 16}-01",
        f"00-{trace_id}-{span_id}", f"00-{trace_id}-{span_id}-1", f"1-{trace_id}-{span_id}-01", "junk",
        f"01-{trace_id}-{span_id}-03-a\nb",
    ]  # fmt: skip
    pairs = [(TRACEPARENT, state) for state in states] + [(parent, "rojo=1") for parent in parents]
    noise = random.Random(7)
    for _ in range(2000):
        text = list(noise.choice(states[2:]) if noise.random() < 0.7 else TRACEPARENT)
        text[noise.randrange(len(text))] = noise.choice("az09AZ_*/-@=, \t\n~\x7f\u00fc-")
        pairs.append((TRACEPARENT, "".join(text)) if noise.random() < 0.8 else ("".join(text)[:60], None))
    read = [parse(*pair) for pair in pairs]
    assert len({None if one is None else one.state for one in read}) > 20
    seen = await sql.fetch(
        "select penstock.read_trace(parent, state) from unnest($1::text[], $2::text[]) with ordinality"
        " i (parent, state, n) order by n",
        *map(list, zip(*pairs, strict=True)),
    )
    found = [(pair, row[0]) for pair, row in zip(pairs, seen, strict=True)]
    assert found == [(pair, one and one.text) for pair, one in zip(pairs, read, strict=True)]
    for junk in ('"00-zz-01"', "7", '{"a": []}', "null"):
        await sql.execute(
            "select penstock_enqueue_many($1::text)",
            f'[{{"action": "a", "traceparent": {junk}, "tracestate": {junk}}}]',
        )
    assert await sql.fetchval("select count(*) filter (where trace is null) from penstock.task") == 4


async def test_the_payload_may_be_json_jsonb_or_text_and_is_kept_as_it_came(sql: Any) -> None:
    given = '{"n": 1.0, "big": 123456789012345678901234567890.5, "more": [1e400, -1E+400000, "1e999\\\\ue123"]}'
    for cast in ("", "::json", "::text"):
        await sql.execute(f"select penstock_enqueue('a', '{given}'{cast})")
    of_jsonb = given.replace("-1E+400000", "1")
    await sql.execute(f"select penstock_enqueue('b', '{of_jsonb}'::jsonb)")
    assert await sql.fetchval("select array_agg(distinct payload::text) from penstock.task where action = 'a'") == [
        given
    ]
    assert "123456789012345678901234567890.5" in await sql.fetchval(
        "select payload::text from penstock.task where action = 'b'"
    )


REFUSED = [
    ("''", "action", "is empty"),
    ("null", "action", "must be text, not null"),
    ("'rpc.x'", "action", "must not begin with rpc., which JSON-RPC reserves"),
    ("repeat(U&'\\+01F600', 151)", "action", "has 604 bytes in UTF-8; the limit is 600"),
    ("'a', unique_key => repeat(U&'\\+01F600', 376)", "unique_key", "has 1504 bytes in UTF-8; the limit is 1500"),
    ("'a', tenant => repeat(U&'\\+01F600', 97)", "tenant", "has 388 bytes in UTF-8; the limit is 384"),
    ("repeat('a', 201)", "action", "is 201 characters long; the limit is 200"),
    ("'a', '[1'", "payload", "is not valid JSON"),
    ("'a', '3'", "payload", "must be an object or an array, not a number"),
    ("'a', '{\"x\": \"\\u0000\"}'", "task", "holds \\u0000 or half a surrogate pair, which no text may hold"),
    ("'a', (repeat('[', 101) || repeat(']', 101))::json", "payload", "is nested deeper than 100 levels"),
    ("'a', row(1, 2)", "payload", "is of another type"),
    ("'a', priority => 99999", "priority", "must be a whole number between -32768 and 32767, not 99999"),
    ("'a', delay => -1", "delay", "must be between 0 and 3162240000 seconds, not -1"),
    ("'a', delay => 'NaN'", "delay", "must be a number of seconds, not string"),
    ("'a', delay => 1, run_at => now()", "delay", "and run_at exclude each other; give one"),
    ("'a', expires_in => 1, expires_at => now()", "expires_in", "and expires_at exclude each other; give one"),
    ("'a', run_at => 'infinity'", "run_at", "must be RFC 3339"),
    ("'a', run_at => '12000-01-01'", "run_at", "must be RFC 3339"),
    ("'a', run_at => '0001-01-01 00:00:00+00'", "run_at", "is out of range"),
    ("'a', unique_key => ''", "unique_key", "must have 1 to 500 characters, not 0"),
    ("'a', ordering_key => E'a\\nb'", "ordering_key", "holds a control character"),
    ("'a', max_attempts => 0", "max_attempts", "must be a whole number between 1 and 1000, not 0"),
    ("'a', timeout => 50000", "timeout", "must be above 0 and at most 43200 seconds, not 50000"),
    ("'a', labels => '[]'", "labels", "must be an object of text by text, not array"),
    ("'a', labels => '{\"a\": 1}'", "labels", "must be text by text; 'a' is not"),
    ("'a', \"unique\" => 'live'", "unique", "goes with unique_key"),
    ("'a', unique_key => 'k', \"unique\" => 'soon'", "unique", "must be retained, live or a number of seconds"),
    ("'a', on_duplicate => 'error'", "on_duplicate", "goes with unique_key"),
    ("'a', tenant => ''", "tenant", "must have 1 to 128 characters, not 0"),
    ("'a', tenant => repeat('x', 129)", "tenant", "must have 1 to 128 characters, not 129"),
    ("'a', tenant => E'a\\nb'", "tenant", "holds a control character"),
    ("'a', tenant => '*'", "tenant", "must not be *, which stands for every tenant in rules"),
    ("'a', unique_key => 'k', on_duplicate => 'x'", "on_duplicate", "must be return, replace or error, not x"),
]  # fmt: skip


async def test_the_function_refuses_what_enqueue_refuses_and_names_the_option(sql: Any) -> None:
    for arguments, field, problem in REFUSED:
        with pytest.raises(asyncpg.InvalidParameterValueError) as refused:
            await sql.execute(f"select penstock_enqueue({arguments})")
        assert refused.value.message.startswith("Invalid params: "), arguments
        detail = json.loads(refused.value.detail)
        assert detail["field"] == field, arguments
        assert detail["problem"].startswith(problem), detail
    with pytest.raises(asyncpg.ProgramLimitExceededError, match="payload is 300009 bytes; the limit is 262144"):
        await sql.execute("select penstock_enqueue('a', jsonb_build_object('x', repeat('x', 300000)))")
    with pytest.raises(asyncpg.InvalidParameterValueError) as refused:
        await sql.execute("""select penstock_enqueue_many('[{"action": "a"}, {"action": "a", "priorty": 3}]')""")
    assert json.loads(refused.value.detail)["place"] == 2
    await sql.execute("select penstock_enqueue('a', unique_key => 'k')")
    with pytest.raises(asyncpg.UniqueViolationError, match="has this unique key already") as duplicate:
        await sql.execute("select penstock_enqueue('a', unique_key => 'k', on_duplicate => 'error')")
    assert json.loads(duplicate.value.detail)["state"] == "SCHEDULED"
    assert await count(sql) == 1


@pytest.mark.parametrize("scopes", [["retained", "live", 30], ["live"], ["retained"], [30]])
async def test_many_tasks_with_keys_that_repeat_are_those_of_the_api(store: Store, sql: Any, scopes: list[Any]) -> None:
    """Each is enqueued by the function and by the store, into one database after the other's rows are gone."""
    tasks = [
        {
            "action": "sync",
            "payload": {"v": n},
            "unique_key": f"k{n % 7}",
            "unique": scopes[n % len(scopes)],
            "on_duplicate": "replace" if n % 2 else "return",
            "ordering_key": f"o{n % 3}",
            "labels": {"n": str(n)},
            **({"priority": n} if n % 5 == 0 else {}),
        }
        for n in range(60)
    ] + [{"action": "plain"}]
    seen = []
    for way in ("function", "store"):
        await sql.execute("truncate penstock.task, penstock.unique_key, penstock.ordering_head, penstock.tally")
        await sql.execute("alter sequence penstock.task_id_seq restart")
        if way == "function":
            answers = await penstock.enqueue_many(sql, tasks)
        else:
            news = [
                NewTask(
                    "sync", json.dumps(t["payload"], separators=(",", ":")), unique_key=t["unique_key"],
                    unique=t["unique"], on_duplicate=t["on_duplicate"], ordering_key=t["ordering_key"],
                    labels=json.dumps(t["labels"]), priority=t.get("priority", 0),
                    replaces_priority=t["on_duplicate"] == "replace" and "priority" in t,
                )
                for t in tasks[:-1]
            ] + [NewTask("plain")]  # fmt: skip
            async with store.session() as session:
                given = await enqueuing.enqueue(session, news)
            answers = [
                {"id": e.id, "state": str(e.state), "duplicate": e.duplicate}
                | ({} if e.replaced is None else {"replaced": e.replaced})
                for e in given
            ]
        rows = await sql.fetch(
            "select id, action, state::text, payload::text, priority, unique_key, ordering_key, labels"
            " from penstock.task order by 1"
        )
        tally = await sql.fetch("select action, event, sum(count) from penstock.tally group by 1, 2 order by 1")
        heads = await sql.fetch("select key, task_id from penstock.ordering_head order by key")
        place_of = {row["id"]: place for place, row in enumerate(rows)}  # ids may have gaps
        told = [{**answer, "id": place_of[answer["id"]]} for answer in answers]
        kept = [(place_of[task_id], *rest) for task_id, *rest in rows]
        seen.append((told, kept, [tuple(r) for r in tally], [(key, place_of[task_id]) for key, task_id in heads]))
    assert seen[0] == seen[1]


async def test_a_trigger_enqueues_with_the_row_or_not_at_all(sql: Any) -> None:
    await sql.execute(
        """
        create table orders (id bigint primary key, status text not null);
        create function order_changed() returns trigger language plpgsql as $$
        begin
            perform penstock_enqueue('ship', jsonb_build_object('order', new.id), unique_key => new.id::text,
                                     ordering_key => 'orders');
            return null;
        end $$;
        create trigger order_paid after update of status on orders for each row
            when (new.status = 'paid' and old.status is distinct from 'paid') execute function order_changed();
        insert into orders select n, 'new' from generate_series(1, 50) n;
        """
    )
    with pytest.raises(asyncpg.DivisionByZeroError):
        async with sql.transaction():
            await sql.execute("update orders set status = 'paid'")
            await sql.execute("select 1 / 0")
    assert await count(sql) == 0
    await sql.execute("update orders set status = 'paid' where id <= 10")
    await sql.execute("update orders set status = 'paid'")
    assert await count(sql) == 50
    states = await sql.fetch("select state::text, count(*) from penstock.task group by 1 order by 1")
    assert [tuple(row) for row in states] == [("SCHEDULED", 1), ("WAITING", 49)]


async def test_transactions_at_once_make_one_task_of_a_unique_key_and_one_head_of_an_ordering_key(
    database_url: str, sql: Any
) -> None:
    async def one(number: int) -> dict[str, Any]:
        connection = await asyncpg.connect(database_url)
        try:
            async with connection.transaction():
                return await penstock.enqueue(connection, "a", {"n": number}, unique_key="k", ordering_key="o")
        finally:
            await connection.close()

    answers = await asyncio.gather(*map(one, range(12)))
    assert len({answer["id"] for answer in answers}) == 1
    assert sorted(answer["duplicate"] for answer in answers) == [False] + [True] * 11


async def test_a_scheduler_is_woken_by_the_commit_and_not_by_the_poll(
    store: Store, outbound: SqsQueue, settings: Settings, database_url: str
) -> None:
    slow = settings.model_copy(update={"poll_seconds": 60.0})
    scheduler = Scheduler(store=store, outbound=outbound, settings=slow, open_queue=no_routes)
    listening = asyncio.create_task(scheduler.side_tasks()["listen"]())
    try:
        await scheduler.run_once()
        await until(scheduler._listener.event.is_set)
        await scheduler.run_once()
        waiting = asyncio.create_task(scheduler.wait_for_work())
        connection = await asyncpg.connect(database_url)
        async with connection.transaction():
            await penstock.enqueue(connection, "now", {"n": 1})
        await connection.close()
        await asyncio.wait_for(waiting, 30)  # half of the poll
        assert await scheduler.run_once() == 1
    finally:
        listening.cancel()
    (message,) = await take(outbound)
    assert json.loads(message.body)["method"] == "now"


async def test_a_snapshot_that_is_too_old_is_told_and_no_second_task_made(database_url: str, sql: Any) -> None:
    connection = await asyncpg.connect(database_url)
    with pytest.raises(asyncpg.SerializationError):
        async with connection.transaction(isolation="repeatable_read"):
            await connection.fetchval("select 1 from penstock.task")
            await penstock.enqueue(sql, "a", unique_key="k")
            await penstock.enqueue(connection, "a", unique_key="k")
    await connection.close()
    assert await count(sql) == 1


async def test_the_callers_settings_stay_as_they_were(sql: Any) -> None:
    await sql.execute("set plan_cache_mode = force_generic_plan")
    async with sql.transaction():
        await penstock.enqueue_many(sql, [{"action": "a"}] * 100)
        seen = [await sql.fetchval(f"show {name}") for name in ("plan_cache_mode", "enable_seqscan", "search_path")]
    assert seen == ["force_generic_plan", "on", '"$user", public']


async def test_wake_ups_can_be_left_out(sql: Any, heard: list[str]) -> None:
    await sql.execute("set penstock.notify = off")
    await penstock.enqueue(sql, "quiet")
    assert await settle_wake_ups(sql, heard) == 0
    await sql.execute("reset penstock.notify")
    await penstock.enqueue_many(sql, [{"action": "loud"}] * 5)
    assert await settle_wake_ups(sql, heard) == 1


async def test_defaults_of_the_database_can_be_set(sql: Any) -> None:
    await sql.execute("set penstock.max_attempts = 3")
    await sql.execute("set penstock.payload_limit_bytes = 50")
    await sql.execute("select penstock_enqueue('a')")
    assert await sql.fetchval("select max_attempts from penstock.task") == 3
    with pytest.raises(asyncpg.ProgramLimitExceededError):
        await sql.execute("select penstock_enqueue('a', jsonb_build_object('x', repeat('x', 60)))")


@pytest.mark.parametrize(("given", "kept"), [(30_000, 1000), (1000, 1000), (0, 1)])
async def test_attempts_that_a_session_sets_keep_to_the_limit(given: int, kept: int, sql: Any) -> None:
    await sql.execute(f"set penstock.max_attempts = {given}")
    await sql.execute("select penstock_enqueue('a')")
    await sql.execute('select count(*) from penstock_enqueue_many(\'[{"action": "a"}]\')')
    assert [row[0] for row in await sql.fetch("select max_attempts from penstock.task")] == [kept, kept]


async def test_a_task_of_a_function_settles_as_any_other(store: Store, sql: Any) -> None:
    await sql.execute("select penstock_enqueue('a', ordering_key => 'o'), penstock_enqueue('a', ordering_key => 'o')")
    for task_id in (1, 2):
        async with store.transaction() as session:
            batch = await claim.claim(session, 10)
            assert batch is not None
            assert [task.id for task in batch.tasks] == [task_id]
            assert await settle.finish(session, {(task_id, batch.id): "1"}) == 1
    assert await sql.fetchval("select count(*) from penstock.task_history") == 2
    assert "penstock.task_history" in SQL["finish_tasks"]
