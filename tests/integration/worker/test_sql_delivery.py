"""sql.execute against a real Postgres, in a database that is not Penstock's."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from penstock.db.pool import Store
from penstock.local.postgres import EmbeddedPostgres
from penstock.protocol.errors import InvalidParams, SettingsError
from penstock.settings.model import Settings, load_settings
from penstock.worker.deliveries.errors import NotDelivered, Undeliverable
from penstock.worker.deliveries.registry import Deliveries
from penstock.worker.handlers.actions import Registry
from penstock.worker.handlers.context import Context
from tests.integration.lines import running

Execute = Callable[..., Awaitable[Any]]
TABLE = """
create table item (
  id bigint primary key, name text, price numeric, made timestamptz, tags text[], more jsonb, key uuid, raw bytea,
  days date[]
)
"""


@pytest.fixture(scope="module")
def other_url(postgres: EmbeddedPostgres) -> Iterator[str]:
    name = f"other_{secrets.token_hex(4)}"
    postgres.create_database(name)
    yield postgres.dsn(name)
    postgres.drop_database(name)


@pytest.fixture
async def other(other_url: str) -> AsyncIterator[asyncpg.Connection[Any]]:
    connection = await asyncpg.connect(other_url)
    await connection.execute(TABLE)
    yield connection
    await connection.execute("drop table item")
    await connection.close()


@pytest.fixture
def delivery_url(other_url: str) -> str:
    """That database as deliveries reach it."""
    return other_url


@pytest.fixture
async def make(delivery_url: str) -> AsyncIterator[Callable[..., Execute]]:
    """Makes what runs one task of sql.execute, with statements by name, or the members of one."""
    opened: list[Deliveries] = []

    def make(result_limit_bytes: int = 262144, **statements: Any) -> Execute:
        registry = Registry()
        named = {
            name: {"dsn": delivery_url, **({"statement": given} if isinstance(given, str) else given)}
            for name, given in statements.items()
        }
        settings = load_settings(deliveries="sql.execute", sql_statements=named, result_limit_bytes=result_limit_bytes)
        opened.append(Deliveries(settings, registry))
        handler = registry["sql.execute"]
        assert handler.bad_params_attempts == 1

        async def execute(statement: str, *parameters: Any, task_id: int = 1, tenant: str | None = None) -> Any:
            payload = {"statement": statement, "parameters": parameters}
            args, kwargs = handler.fit(json.dumps(payload).encode())
            return await handler.function(Context(task_id, 1, "sql.execute", tenant=tenant), *args, **kwargs)

        return execute

    yield make
    for deliveries in opened:
        await deliveries.close()


async def test_a_named_statement_runs_with_the_payloads_parameters(
    make: Callable[..., Execute], other: asyncpg.Connection[Any]
) -> None:
    execute = make(add="insert into item (id, name) values ($1, $2)", all="select id, name from item order by id")
    assert await execute("add", 1, "it's; drop table item --") == {"status": "INSERT 0 1"}
    assert await execute("all") == {"rows": [{"id": 1, "name": "it's; drop table item --"}], "truncated": False}


async def test_no_prepared_statement_is_left_behind(make: Callable[..., Execute]) -> None:
    execute = make(left="select count(*)::int as count from pg_prepared_statements")
    for _ in range(2):
        assert (await execute("left"))["rows"] == [{"count": 0}]


async def test_values_that_json_has_no_type_for_go_and_come_as_text(
    make: Callable[..., Execute], other: asyncpg.Connection[Any]
) -> None:
    execute = make(
        put="insert into item values ($1, $2, $3, $4, $5, $6, $7, $8, $9) returning *",
        kinds="select 1.5::float8 as f, 'NaN'::float8 as nan, null as nothing, true as yes, (1, 'a') as pair, "
        "'1 day'::interval as span, '10.0.0.1'::inet as host",
    )
    result = await execute(
        "put", 1, None, 12.5, "2026-01-02T03:04:05Z", ["a", None], {"a": [1, "x"]},
        "12345678-1234-5678-1234-567812345678", "\\x00ff", ["2026-01-02"],
    )  # fmt: skip
    assert result == {
        "rows": [
            {
                "id": 1, "name": None, "price": "12.5", "made": result["rows"][0]["made"], "tags": ["a", None],
                "more": {"a": [1, "x"]}, "key": "12345678-1234-5678-1234-567812345678", "raw": "\\x00ff",
                "days": ["2026-01-02"],
            }
        ],
        "truncated": False,
    }  # fmt: skip
    assert result["rows"][0]["made"].startswith("2026-01-0")
    (row,) = (await execute("kinds"))["rows"]
    assert (row["f"], row["nan"], row["nothing"], row["yes"], row["span"], row["host"]) == (
        1.5, "nan", None, True, "1 day", "10.0.0.1",
    )  # fmt: skip
    json.dumps(row, allow_nan=False)


async def test_rows_beyond_the_limits_are_left_out_and_the_statement_stays_done(
    make: Callable[..., Execute], other: asyncpg.Connection[Any]
) -> None:
    fill = "insert into item (id, name) select n, repeat('x', 1000) from generate_series(1, 50) n returning id, name"
    execute = make(
        result_limit_bytes=11_000, few={"statement": "select n from generate_series(1, 10) n", "max_rows": 3}, fill=fill
    )
    assert await execute("few") == {"rows": [{"n": 1}, {"n": 2}, {"n": 3}], "truncated": True}
    result = await execute("fill")
    assert result["truncated"]
    assert 5 <= len(result["rows"]) <= 10
    assert len(json.dumps(result)) <= 11_000
    assert await other.fetchval("select count(*) from item") == 50


async def test_a_statement_that_fails_leaves_nothing_behind(
    make: Callable[..., Execute], other: asyncpg.Connection[Any]
) -> None:
    execute = make(both="with a as (insert into item (id) values ($1) returning id) select 1 / (id - 5) from a")
    with pytest.raises(Undeliverable, match=r"both: division by zero \(SQLSTATE 22012\)"):
        await execute("both", 5)
    assert await other.fetchval("select count(*) from item") == 0


async def test_the_tasks_id_makes_a_statement_that_may_run_twice_run_once(
    make: Callable[..., Execute], other: asyncpg.Connection[Any]
) -> None:
    once = "insert into item (id, name) values ($1, $2) on conflict do nothing"
    execute = make(once={"statement": once, "with_task_id": True})
    assert [await execute("once", "a", task_id=7) for _ in range(2)] == [
        {"status": "INSERT 0 1"}, {"status": "INSERT 0 0"},
    ]  # fmt: skip
    with pytest.raises(Undeliverable, match="once takes 1 parameters, and was given 2"):
        await execute("once", "a", "b")


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ((1,), "takes 2 parameters, and was given 1"),
        (("one", "a"), "add: "),
        ((1, {"a": 1}), "add: "),
        ((2**70, "a"), "add: "),
        ((1, "nul \x00"), "add: "),
    ],
    ids=["few", "text-for-number", "object-for-text", "too-large", "nul"],
)
async def test_parameters_that_do_not_fit_are_refused_for_good(
    make: Callable[..., Execute], other: asyncpg.Connection[Any], parameters: tuple[Any, ...], message: str
) -> None:
    execute = make(add="insert into item (id, name) values ($1, $2)")
    with pytest.raises(Undeliverable, match=message):
        await execute("add", *parameters)


async def test_only_a_name_of_the_settings_is_run(make: Callable[..., Execute]) -> None:
    execute = make(one="select 1")
    with pytest.raises(Undeliverable, match=r"no statement 'select 2' in PENSTOCK_SQL_STATEMENTS; there is one"):
        await execute("select 2")
    with pytest.raises(InvalidParams):
        await execute(None)  # type: ignore[arg-type]


async def test_a_key_that_is_taken_is_final_and_a_lock_or_a_slow_statement_is_not(
    make: Callable[..., Execute], other: asyncpg.Connection[Any]
) -> None:
    execute = make(
        add="insert into item (id) values ($1)",
        slow={"statement": "select pg_sleep(60)", "timeout_seconds": 0.2},
        waits={"statement": "update item set name = 'x'", "timeout_seconds": 0.2},
        wrong="select * from no_such_table",
    )
    await execute("add", 1)
    with pytest.raises(Undeliverable, match="SQLSTATE 23505"):
        await execute("add", 1)
    with pytest.raises(NotDelivered, match="SQLSTATE 57014"):
        await execute("slow")
    async with other.transaction():
        await other.execute("lock table item")
        with pytest.raises(NotDelivered, match="SQLSTATE 57014"):
            await execute("waits")
    with pytest.raises(NotDelivered, match="no_such_table"):
        await execute("wrong")  # the operator may yet make it


async def test_a_database_that_is_away_is_tried_again_and_no_password_is_told(make: Callable[..., Execute]) -> None:
    execute = make(
        away={"dsn": "postgresql://me:hidden@127.0.0.1:1/none", "statement": "select 1"},
    )
    with pytest.raises(NotDelivered) as caught:
        await execute("away")
    assert "hidden" not in str(caught.value)
    assert "away: the database cannot be reached" in str(caught.value)


async def test_a_missing_file_of_authorities_is_tried_again(
    make: Callable[..., Execute], delivery_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    dsn = f"{delivery_url}{'&' if '?' in delivery_url else '?'}sslmode=verify-full"
    with pytest.raises(NotDelivered, match=r"root.crt"):  # the operator may yet put it there
        await make(one={"dsn": dsn, "statement": "select 1"})("one")


async def test_more_tasks_than_connections_all_run(
    make: Callable[..., Execute], other: asyncpg.Connection[Any]
) -> None:
    execute = make(add="insert into item (id) values ($1)")
    await asyncio.gather(*(execute("add", n) for n in range(60)))
    assert await other.fetchval("select count(*) from item") == 60


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"a": {"statement": "select 1"}}, "PENSTOCK_SQL_STATEMENTS: a.dsn: Field required"),
        ({"a": {"dsn": "mysql://x:geheim@y/z", "statement": "select 1"}}, "a.dsn: must begin with postgresql://"),
        (
            {"a": {"dsn": "postgresql://x:gehe/im@y:geheim/z", "statement": "select 1"}},
            "a.dsn: must be postgresql://user",
        ),
        ({"a": {"dsn": "postgresql://x", "statement": ""}}, "a.statement"),
        ({"a": {"dsn": "postgresql://x", "statement": "select 1", "max_row": 1}}, "a.max_row"),
    ],
    ids=["no-dsn", "scheme", "torn", "empty", "misspelt"],
)
def test_a_statement_that_cannot_be_is_refused_at_the_start(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(sql_statements=given)
    assert message in str(caught.value)
    assert "geheim" not in str(caught.value)


def test_statements_come_from_the_environment_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "PENSTOCK_SQL_STATEMENTS", '{"a": {"dsn": "postgresql://u:geheim@h/d", "statement": "select 1"}}'
    )
    settings = load_settings()
    assert settings.sql_statements["a"].statement == "select 1"
    assert "geheim" not in repr(settings)
    monkeypatch.setenv("PENSTOCK_SQL_STATEMENTS", "{geheim")
    with pytest.raises(SettingsError, match="PENSTOCK_SQL_STATEMENTS: must be JSON") as caught:
        load_settings()
    assert "geheim" not in str(caught.value)


async def test_it_runs_as_a_task(
    store: Store, settings: Settings, other_url: str, other: asyncpg.Connection[Any]
) -> None:
    statements = {
        "add": {"dsn": other_url, "statement": "insert into item (id, name) values ($1, $2)", "with_task_id": True}
    }
    async with running(store, settings, deliveries=("sql.execute",), sql_statements=statements) as line:
        (task_id,) = await line.enqueue("sql.execute", {"statement": "add", "parameters": ["a"]})
        row = await line.until(task_id, "SUCCESS")
    assert row["result"] == {"status": "INSERT 0 1"}
    assert await other.fetchval("select name from item where id = $1", task_id) == "a"


async def test_a_statement_is_bound_to_the_tenant_of_its_task_and_not_to_what_the_payload_says(make: Any) -> None:
    both = {"statement": "select $1::bigint as id, $2::text as tenant, $3::text as given", "with_task_id": True}
    execute = make(
        both=both | {"with_tenant": True}, one={"statement": "select $1::text as tenant", "with_tenant": True}
    )
    answer = await execute("both", "globex", task_id=7, tenant="acme")
    assert answer["rows"] == [{"id": 7, "tenant": "acme", "given": "globex"}]
    assert (await execute("one"))["rows"] == [{"tenant": None}]
    with pytest.raises(Undeliverable, match="one takes 0 parameters, and was given 1"):
        await execute("one", "globex", tenant="acme")
