"""Results recorded in the handler's own transaction: `penstock.settle` and the function `penstock_settle`."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest

import penstock
from penstock import Context, Fail
from penstock.brokers.opening import open_transport
from penstock.db.notify import Notifier
from penstock.db.pool import Store
from penstock.protocol.errors import TooLarge
from penstock.protocol.json_text import replace_unstorable
from penstock.resulter import Resulter
from penstock.scheduler.process import Scheduler
from penstock.settings.model import Settings
from penstock.tasks import claim as claims
from penstock.tasks.ordering import Promotions
from penstock.testing.inline import Inline
from penstock.testing.pipeline import Pipeline
from penstock.worker.handlers.actions import REGISTRY, Registry, action
from tests.forking import forked_commands
from tests.integration.tasks.test_transactional import KINDS, Caller

APP = """
import os, signal
from pathlib import Path
import asyncpg
import penstock

def die_at(point, at):
    mark = Path(os.environ["MARKS"]) / at
    if point == at and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)

@penstock.action
async def effect(ctx: penstock.Context, at: str):
    connection = await asyncpg.connect(os.environ["DATABASE_URL"])
    async with connection.transaction():
        await connection.execute("insert into effect values ($1)", at)
        die_at("begun", at)
        if not await penstock.settle(connection, ctx, {"at": at}):
            raise penstock.Fail("the transaction is rolled back")
        die_at("settled", at)
    die_at("committed", at)
    await connection.close()
"""
POINTS = ("begun", "settled", "committed", "never")


async def claimed(store: Store, *, action: str = "a", **options: Any) -> claims.Claimed:
    """A task that is enqueued and claimed."""
    connection = await asyncpg.connect(store.database_url)
    await penstock.enqueue(connection, action, **options)
    await connection.close()
    async with store.session() as session:
        batch = await claims.claim(session, 1)
    assert batch is not None
    return batch.tasks[0]


def context_of(task: claims.Claimed) -> Context:
    return Context(task.id, task.claim, task.action)


@pytest.fixture
async def open_store(database_url: str) -> AsyncIterator[Store]:
    store = Store(database_url)
    yield store
    await store.close()


async def settled(caller: Caller, ctx: Context, result: Any) -> bool:
    if caller._sync:
        return await asyncio.to_thread(penstock.settle_sync, caller.connection, ctx, result)
    return await penstock.settle(caller.connection, ctx, result)


@pytest.mark.parametrize("kind", KINDS)
async def test_rows_and_result_commit_together(kind: Any, database_url: str, open_store: Store, sql: Any) -> None:
    first, second = await claimed(open_store), await claimed(open_store)
    async with kind(database_url) as caller:
        ctx = context_of(first)
        assert await settled(caller, ctx, {"é": ["penstock+object:x", None]})
        assert ctx.cancellation.is_settled
        with pytest.raises(ZeroDivisionError):
            async with caller.savepoint():
                assert await settled(caller, context_of(second), 1)
                raise ZeroDivisionError
        late = context_of(first)
        assert not await settled(caller, late, 2)
        assert late.cancelled
        assert not await settled(caller, Context(second.id, second.claim + 1, "a"), 2)
    rows = await sql.fetch("select id, state::text, result::text, attempts from penstock.task_history")
    assert [tuple(row) for row in rows] == [(first.id, "SUCCESS", '{"\\u00e9":["penstock+object:x",null]}', 1)]
    assert await sql.fetchval("select state::text from penstock.task") == "ACQUIRED"


async def test_everything_that_follows_a_success_follows(open_store: Store, sql: Any) -> None:
    task = await claimed(open_store, ordering_key="k")
    await sql.execute("select penstock_enqueue('a', '{}', ordering_key => 'k')")
    assert await sql.fetchval("select penstock_settle($1, $2)", f"{task.id}:{task.claim}:token", '"penstock+object:x"')
    await Promotions(store=open_store, notifier=Notifier(open_store)).run_once()
    assert await sql.fetchval("select state::text from penstock.task where ordering_key = 'k'") == "SCHEDULED"
    assert await sql.fetchval("select sum(count) from penstock.tally where event = 'SUCCESS'") == 1
    # A text that looks like one of ours is not one.
    assert await sql.fetchval("select result::text from penstock.task_history") == '"penstock+plain:penstock+object:x"'


@pytest.mark.parametrize("at_the_stop", [False, True])
async def test_keys_in_which_no_task_waits_do_not_keep_the_others(
    open_store: Store, sql: Any, at_the_stop: bool
) -> None:
    await sql.execute("select penstock_enqueue('a', '{}', ordering_key => 'k' || n) from generate_series(1, 300) n")
    async with open_store.session() as session:
        batch = await claims.claim(session, 1000)
    assert batch is not None
    for task in batch.tasks:
        assert await sql.fetchval("select penstock_settle($1, '1')", f"{task.id}:{task.claim}")
    await sql.execute("select penstock_enqueue('b', '{}', ordering_key => 'k300')")
    turns = Promotions(store=open_store, notifier=Notifier(open_store))
    if at_the_stop:
        await turns.end_all()
    while not await turns.run_once():  # as long as it does not ask for a pause
        assert not at_the_stop
    assert await sql.fetchval("select count(*) from penstock.turn") == 0
    assert await sql.fetchval("select state::text from penstock.task") == "SCHEDULED"


async def test_what_is_wrong_changes_nothing_and_is_said(open_store: Store, sql: Any) -> None:
    ctx = context_of(await claimed(open_store))
    with pytest.raises(TypeError, match=r"give a asyncpg Connection.*penstock\.settle_sync"):
        await penstock.settle(object(), ctx)
    with pytest.raises(TooLarge):
        await penstock.settle(sql, ctx, "x" * 300_000)
    with pytest.raises(ValueError, match=r"NaN|JSON"):
        await penstock.settle(sql, ctx, float("nan"))
    for name in (None, "", "1", "1:x", "1:2:3:4", "'; drop"):
        with pytest.raises(asyncpg.InvalidParameterValueError, match="claim_id"):
            await sql.fetchval("select penstock_settle($1, 'null')", name)
    with pytest.raises(asyncpg.ProgramLimitExceededError, match="limit is 262144"):
        await sql.fetchval("select penstock_settle('1:1', $1)", f'"{"x" * 262_143}"')
    ctx.spawn("other")
    with pytest.raises(ValueError, match="spawn"):
        await penstock.settle(sql, ctx)
    assert not ctx.cancelled
    assert await sql.fetchval("select state::text from penstock.task") == "ACQUIRED"


async def test_a_grant_of_the_function_alone_is_enough(open_store: Store, database_url: str, sql: Any) -> None:
    task = await claimed(open_store)
    await sql.execute("create role settler login password 'x'")
    try:
        role = await asyncpg.connect(database_url, user="settler", password="x")
        try:
            with pytest.raises(asyncpg.InsufficientPrivilegeError) as refused:
                await penstock.settle(role, context_of(task), 1)
            assert refused.value.__notes__ == ["grant it: grant execute on function penstock_settle to <role>"]
            await sql.execute("grant execute on function penstock_settle to settler")
            assert await penstock.settle(role, context_of(task), 1)
        finally:
            await role.close()
    finally:
        await sql.execute("drop owned by settler")
        await sql.execute("drop role settler")


async def test_encrypted_results_are_those_of_the_api(settings: Settings, open_store: Store, sql: Any) -> None:
    key = "A" * 43 + "="
    task = await claimed(open_store)
    keyed = settings.model_copy(update={"payload_keys": penstock.load_settings(payload_keys=[key]).payload_keys})
    assert await penstock.settle(sql, context_of(task), {"card": "4711"}, settings=keyed)
    assert (await sql.fetchval("select result::text from penstock.task_history")).startswith('"penstock+sealed:')


async def test_what_postgres_cannot_store_is_replaced(open_store: Store, sql: Any) -> None:
    task = await claimed(open_store)
    assert await penstock.settle(sql, context_of(task), {"name": "caf\udce9\0"})
    assert await sql.fetchval("select result::jsonb from penstock.task_history") == '{"name": "caf\ufffd\ufffd"}'


async def test_what_another_program_settles_with_is_replaced_too(open_store: Store, sql: Any) -> None:
    given = r"""{"a\u0000": "\\\\u0000 \\\\\uD800\ud800\uDC00 \udc00x \u00e9\"\n"}"""
    task = await claimed(open_store)
    assert await sql.fetchval("select penstock_settle($1, $2)", f"{task.id}:{task.claim}", given)
    stored = await sql.fetchval("select result::text from penstock.task_history")
    assert stored == replace_unstorable(given)
    assert await sql.fetchval("select result::jsonb from penstock.task_history") is not None


async def test_a_result_within_the_limit_is_taken_when_it_is_encrypted_and_when_the_limit_is_raised(
    settings: Settings, open_store: Store, sql: Any
) -> None:
    keys = penstock.load_settings(payload_keys=["A" * 43 + "="]).payload_keys
    highest = {"result_limit_bytes": 900_000}
    for changes, size in (
        ({"payload_keys": keys}, 250_000), ({"result_limit_bytes": 500_000}, 300_000),
        ({"payload_keys": keys} | highest, 899_998),
    ):  # fmt: skip
        task = await claimed(open_store)
        given = settings.model_copy(update=changes)
        assert await penstock.settle(sql, context_of(task), "x" * size, settings=given)


def _handlers(runs: list[Any]) -> Registry:
    registry = Registry()

    @action("settles", registry=registry)
    async def settles(ctx: Context, url: str | None = None, fails: bool = False) -> str:
        connection = await asyncpg.connect(url) if url else None
        try:
            runs.append(held := await penstock.settle(connection, ctx, "of the transaction"))
            if fails:
                raise Fail(f"after {held}")
            return "of the worker"
        finally:
            if connection is not None:
                await connection.close()

    return registry


async def test_the_worker_sends_no_result_and_its_death_changes_nothing(penstock_pipeline: Pipeline) -> None:
    runs: list[Any] = []
    penstock_pipeline._registry = _handlers(runs)
    connection = await asyncpg.connect(penstock_pipeline.database_url)
    await penstock.enqueue(connection, "settles", {"url": penstock_pipeline.database_url})
    await penstock.enqueue(connection, "settles", {"url": penstock_pipeline.database_url, "fails": True})
    await connection.close()
    await penstock_pipeline.drain()
    assert [(task.state, task.result) for task in penstock_pipeline.enqueued()] == [
        ("SUCCESS", "of the transaction"), ("SUCCESS", "of the transaction"),
    ]  # fmt: skip
    assert runs == [True, True]


async def test_the_handler_of_the_transactions_page_ships_once(
    penstock_pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[3] / "docs" / "transactions.md").read_text("utf-8")
    (text,) = re.findall(r"^```python handler\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    registry = penstock_pipeline._registry = Registry()
    monkeypatch.setenv("DATABASE_URL", penstock_pipeline.database_url)
    exec(compile(text, "docs/transactions.md", "exec"), {})
    registry["ship"] = REGISTRY.pop("ship")
    connection = await asyncpg.connect(penstock_pipeline.database_url)
    await connection.execute("create table orders (id int primary key, status text)")
    await connection.execute("insert into orders values (1, 'paid')")
    await penstock.enqueue(connection, "ship", {"order": 1})
    penstock_pipeline.crash("ship")
    await penstock_pipeline.drain()
    assert await connection.fetchval("select status from orders") == "shipped"
    await connection.close()
    (task,) = penstock_pipeline.enqueued()
    assert (task.state, task.result, task.attempts) == ("SUCCESS", {"shipped": 1}, 1)


async def test_a_test_without_database_settles_too(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Any] = []
    inline = Inline(_handlers(runs))
    monkeypatch.setattr("penstock.protocol.in_process.substitute", inline)
    await penstock.enqueue(None, "settles")
    await inline.drain()
    assert (inline.tasks[0].state, inline.tasks[0].result, runs) == ("SUCCESS", "of the transaction", [True])


async def test_a_worker_that_is_killed_at_any_point_has_one_effect(
    settings: Settings, open_store: Store, sql: Any, tmp_path: Path
) -> None:
    (tmp_path / "killed.py").write_text(APP, "utf-8")
    await sql.execute("create table effect (at text)")
    for point in POINTS:
        await penstock.enqueue(sql, "effect", {"at": point})
    environment = {
        **os.environ, "MARKS": str(tmp_path), "DATABASE_URL": open_store.database_url, "PYTHONPATH": f"{tmp_path}",
        "PENSTOCK_SQS_ENDPOINT_URL": str(settings.sqs_endpoint_url), "PENSTOCK_AWS_REGION": "us-east-1",
        "PENSTOCK_OUTBOUND_QUEUE": settings.outbound_queue, "PENSTOCK_RESULTS_QUEUE": settings.results_queue,
        "PENSTOCK_VISIBILITY_TIMEOUT_SECONDS": "3", "PENSTOCK_WORKER_CONCURRENCY": "1", "PENSTOCK_METRICS_PORT": "0",
    }  # fmt: skip
    transport = open_transport(settings)
    outbound = transport.queue(settings.outbound_queue, label="outbound")
    results = transport.queue(settings.results_queue, label="results")
    scheduler = Scheduler(
        store=open_store, outbound=outbound, settings=settings,
        open_queue=lambda name, label: transport.queue(name, label=label),
    )  # fmt: skip
    resulter = Resulter(store=open_store, results=results, settings=settings)
    command = (sys.executable, "-m", "penstock", "worker", "--app", "killed")
    kills = 0
    try:
        while await scheduler.run_once():
            pass
        while (await outbound.depth()).total:  # a worker deletes what it has answered, or found settled
            with forked_commands():
                worker = await asyncio.create_subprocess_exec(*command, env=environment, cwd=tmp_path)
            try:
                while worker.returncode is None and (await outbound.depth()).total:
                    await resulter.run_once()
                    await asyncio.sleep(0.1)
            finally:
                if worker.returncode is None:
                    worker.terminate()
                kills += await worker.wait() == -9
        while await resulter.run_once():
            pass
    finally:
        await transport.close()
    assert kills == 3
    assert sorted(row["at"] for row in await sql.fetch("select at from effect")) == sorted(POINTS)
    rows = await sql.fetch("select state::text, result ->> 'at' as at, attempts from penstock.task_history")
    assert sorted(tuple(row) for row in rows) == [("SUCCESS", point, 1) for point in sorted(POINTS)]
