"""The export example against a real database and the real api and queue: what it writes, and how often."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import asyncpg
import pytest

import penstock
from examples.export import database as export_database
from examples.export import demo, export
from examples.export.actions import ERROR_RATE, RandomError, error_rate
from examples.export.database import DATABASE_URL, SAMPLES, BadObject, ExportDatabase, current_database
from examples.export.feed import add_objects, feed
from examples.export.objects import made_up
from examples.export.place import Place, PlaceError
from examples.export.summary import lines_of, summarize
from penstock import Context, Fail, SettingsError
from penstock.brokers.sqs import SqsQueue
from penstock.db.pool import Store
from penstock.local.state import DataDir
from penstock.protocol.errors import PenstockError
from penstock.protocol.task import NewTask
from penstock.runtime.loop import Loop
from penstock.settings.model import Settings
from penstock.submitter import Submitter
from penstock.tasks import claim, enqueue
from penstock.tasks import settle as settling
from penstock.testing.inline import Inline
from penstock.worker.handlers.actions import REGISTRY
from penstock.worker.process import Worker
from tests.integration.apis import running
from tests.integration.doors import put

CONTEXT = Context(1, 1, "export", False, lambda percent, note: None)


@pytest.fixture
async def database(database_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ExportDatabase]:
    """The database that the handler uses in this test; it has no tables of the example yet."""
    monkeypatch.setenv(DATABASE_URL, database_url)
    monkeypatch.delenv(ERROR_RATE, raising=False)
    database = current_database()
    yield database
    await database.close()


@pytest.fixture
async def connection(database_url: str) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(database_url)
    yield connection
    await connection.close()


async def ledger_of(connection: Any) -> Counter[tuple[int, str]]:
    rows = await connection.fetch("select object_id, operation from t_export_ledger")
    return Counter((row["object_id"], row["operation"]) for row in rows)


async def insert(connection: Any, object_id: int, data: Any) -> None:
    await connection.execute("insert into t_object (id, data) values ($1, $2)", object_id, json.dumps(data))


async def test_an_export_is_the_object_transformed(database: ExportDatabase, connection: Any) -> None:
    ids = await database.add_objects(20, seed=7)
    answers = [await export(CONTEXT, object_id) for object_id in ids]
    rows = await connection.fetch(
        "select e.*, o.data::text as data from t_exported_object e join t_object o on o.id = e.object_id order by o.id"
    )
    for object_id, row, answer in zip(ids, rows, answers, strict=True):
        source = made_up(object_id, 7)
        total = sum(item["quantity"] * item["price_cents"] for item in source["items"])
        assert (row["object_id"], row["name"]) == (object_id, source["name"].upper())
        assert (row["country"], row["item_count"], row["total_cents"]) == (
            source["country"], len(source["items"]), total,
        )  # fmt: skip
        assert row["checksum"] == hashlib.sha256(row["data"].encode()).hexdigest()
        assert answer == {"objectID": object_id, "total_cents": total, "checksum": row["checksum"], "written": True}


async def test_a_second_export_finds_the_row_and_writes_nothing(database: ExportDatabase, connection: Any) -> None:
    (object_id,) = await database.add_objects(1)
    first, second = await export(CONTEXT, object_id), await export(CONTEXT, str(object_id))
    assert (first.pop("written"), second.pop("written")) == (True, False)
    assert first == second
    assert await ledger_of(connection) == {(object_id, "INSERT"): 1}


async def test_a_worker_that_dies_after_the_write_and_errors_before_it_leave_one_row(
    database: ExportDatabase, connection: Any, penstock_inline: Inline
) -> None:
    ids = await database.add_objects(3)
    for object_id in ids:
        await penstock.enqueue(None, "export", {"objectID": object_id})
    penstock_inline.fail("export", error=RandomError("before the write"))
    penstock_inline.crash("export", times=2)
    tasks = await penstock_inline.drain()
    assert {(task.state, task.attempts) for task in tasks} == {("SUCCESS", 1), ("SUCCESS", 2)}
    assert sorted(task.result["written"] for task in tasks) == [False, True, True]  # one lost its answer, twice
    assert await ledger_of(connection) == {(object_id, "INSERT"): 1 for object_id in ids}


async def test_the_same_object_at_the_same_time_is_written_once(
    database: ExportDatabase, database_url: str, connection: Any
) -> None:
    ids = await database.add_objects(50)
    others = [ExportDatabase(database_url) for _ in range(3)]
    try:
        answers = await asyncio.gather(*(each.export(n) for each in [database, *others] for n in [*ids, *ids]))
    finally:
        for other in others:
            await other.close()
    assert len(answers) == 400
    assert await ledger_of(connection) == {(object_id, "INSERT"): 1 for object_id in ids}


async def test_calls_at_the_same_time_share_statements(database: ExportDatabase, connection: Any) -> None:
    ids = await database.add_objects(400)
    await asyncio.gather(*(export(CONTEXT, object_id) for object_id in ids))
    rows = await connection.fetch("select xmin::text as transaction, count(*) from t_exported_object group by 1")
    assert sum(row["count"] for row in rows) == 400
    assert len(rows) <= 2


async def test_a_missing_object_fails_for_good_and_its_neighbours_are_exported(database: ExportDatabase) -> None:
    ids = await database.add_objects(3)
    answers = await asyncio.gather(*(export(CONTEXT, n) for n in [*ids, 999]), return_exceptions=True)
    assert [isinstance(answer, dict) for answer in answers] == [True, True, True, False]
    assert isinstance(answers[3], Fail)
    assert "no object 999" in str(answers[3])


@pytest.mark.parametrize(
    "data",
    [
        {"items": []},
        {"name": "x", "items": {"quantity": 1}},
        {"name": "x", "items": [{"quantity": "two", "price_cents": 5}]},
        {"name": "x", "items": [{"quantity": 2**62, "price_cents": 2**62}]},
        ["x"],
        None,
    ],
)
async def test_a_malformed_object_fails_for_good_and_its_neighbours_are_exported(
    database: ExportDatabase, connection: Any, data: Any
) -> None:
    ids = await database.add_objects(20)
    await insert(connection, 1000, data)
    answers = await asyncio.gather(*(export(CONTEXT, n) for n in [*ids, 1000]), return_exceptions=True)
    assert isinstance(answers[-1], Fail)
    assert "object 1000 cannot be exported" in str(answers[-1])
    assert await ledger_of(connection) == {(object_id, "INSERT"): 1 for object_id in ids}


@pytest.mark.parametrize("given", ["", "x", "-1", " 1", "+1", "1_0", "1.0", "٣", str(2**63), 2**63, -1, "9" * 5000])
async def test_an_id_that_no_row_can_have_fails_for_good(database: ExportDatabase, given: int | str) -> None:
    with pytest.raises(Fail, match=r"objectID is '.{0,40}': send the id"):
        await export(CONTEXT, given)


async def test_the_highest_id_is_exported(database: ExportDatabase, connection: Any) -> None:
    await database.prepare()
    await insert(connection, 2**63 - 1, {"name": "last"})
    assert (await export(CONTEXT, 2**63 - 1))["total_cents"] == 0


async def test_every_call_fails_at_rate_one_and_still_each_object_is_written_once(
    database: ExportDatabase, connection: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = await database.add_objects(5)
    monkeypatch.setenv(ERROR_RATE, "1")
    calls = [export(CONTEXT, object_id) for object_id in list(ids) * 40]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(answer) for answer in answers} == {RandomError}
    assert {str(answer).split(":")[0] for answer in answers} == {
        "a random error before the write", "a random error after the write",
    }  # fmt: skip
    assert await ledger_of(connection) == {(object_id, "INSERT"): 1 for object_id in ids}


@pytest.mark.parametrize("text", ["x", "-0.1", "1.1", "nan", "5%"])
def test_a_wrong_error_rate_is_refused_by_name_and_value(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(ERROR_RATE, text)
    with pytest.raises(SettingsError, match=f"{ERROR_RATE} is '{text}'"):
        error_rate()


async def test_without_a_database_url_the_error_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DATABASE_URL, raising=False)
    with pytest.raises(SettingsError, match=f"{DATABASE_URL} is not set"):
        await export(CONTEXT, 1)


async def test_the_first_task_on_a_new_database_finds_sample_objects(database: ExportDatabase, connection: Any) -> None:
    assert (await export(CONTEXT, 23))["written"] is True
    assert await connection.fetchval("select count(*) from t_object") == SAMPLES


async def test_a_table_of_objects_that_was_there_gets_no_samples(database: ExportDatabase, connection: Any) -> None:
    await connection.execute("create table t_object (id bigint primary key, data jsonb not null)")
    with pytest.raises(BadObject):
        await database.export(23)
    assert await connection.fetchval("select count(*) from t_object") == 0


async def test_feeders_at_the_same_time_make_the_tables_once_and_share_no_id(
    database: ExportDatabase, database_url: str, connection: Any
) -> None:
    others = [ExportDatabase(database_url) for _ in range(4)]
    try:
        ranges = await asyncio.gather(*(each.add_objects(10) for each in [database, *others]))
    finally:
        for other in others:
            await other.close()
    assert sorted(itertools.chain(*ranges)) == list(range(1, 51))
    assert await connection.fetchval("select count(*) from t_object") == 50


async def test_a_worker_answers_a_message_of_many_exports(
    database: ExportDatabase, settings: Settings, outbound: SqsQueue, results: SqsQueue
) -> None:
    ids = await database.add_objects(30)
    requests = [
        {"jsonrpc": "2.0", "method": "export", "params": {"objectID": object_id}, "id": f"{object_id}:{object_id}"}
        for object_id in [*ids, 777]
    ]
    await put(outbound, json.dumps(requests))
    worker = Worker(outbound=outbound, results=results, settings=settings, registry=REGISTRY)
    loop = Loop(worker, passes=1, grace_seconds=settings.grace_seconds)
    working = asyncio.create_task(loop.run(), name="worker")
    answers: dict[str, Any] = {}
    try:
        async with asyncio.timeout(30):
            while len(answers) < 31:
                for message in await results.receive(wait_seconds=1, visibility_seconds=30):
                    body = json.loads(message.body)
                    answers |= {
                        entry["id"]: entry for entry in (body if isinstance(body, list) else [body]) if "id" in entry
                    }
    finally:
        loop.stop()
        assert await working == 0
    assert all(answers[f"{object_id}:{object_id}"]["result"]["written"] for object_id in ids)
    missing = answers["777:777"]["error"]
    assert "no object 777" in missing["message"]
    assert missing["data"]["final"] is True


async def enqueued(connection: Any) -> dict[str, str]:
    """Keys of the tasks that are there, and their payloads."""
    rows = await connection.fetch("select unique_key, payload::text from penstock.task where action = 'export'")
    return {row["unique_key"]: row["payload"] for row in rows}


async def test_a_feed_comes_in_through_both_doors_and_sending_it_again_adds_nothing(
    database_url: str, connection: Any, store: Store, settings: Settings, inbound: SqsQueue,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    submitter = Submitter(store=store, inbound=inbound, settings=settings)
    fed: list[int] = []
    async with running(store, settings) as api:
        state = {
            "api": api.url,
            "env": {DATABASE_URL: database_url},
            "sqs_endpoint_url": settings.sqs_endpoint_url,
            "sqs_access_key": None,
            "queues": {"inbound": settings.inbound_queue},
        }
        result = await feed(state, 1200, http_share=0.25, on_progress=fed.append)
        assert (result.over_http, result.through_queue, result.duplicates) == (300, 900, 0)
        assert sum(fed) == 1200
        assert len(await enqueued(connection)) == 300
        await take_all(submitter, lambda: enqueued(connection), 1200)

        # The same objects again: each meets its task by the other way, or by its own.
        async def same_ids(self: ExportDatabase, count: int, *, seed: int = 0) -> range:
            return result.ids

        monkeypatch.setattr(ExportDatabase, "add_objects", same_ids)
        again = await feed(state, 1200, http_share=1)
        assert again.duplicates == 1200
    tasks = await enqueued(connection)
    assert tasks.keys() == {str(object_id) for object_id in result.ids}
    kinds = Counter(type(json.loads(payload)["objectID"]) for payload in tasks.values())
    assert kinds == {int: 300, str: 900}


async def take_all(submitter: Submitter, read: Callable[[], Any], count: int) -> None:
    async with asyncio.timeout(30):
        while len(await read()) < count:
            await submitter.run_once()


async def test_a_feed_outlasts_a_database_that_is_away_for_a_moment(
    database_url: str, connection: Any, store: Store, settings: Settings
) -> None:
    async def back_soon() -> None:
        await asyncio.sleep(0.6)
        await connection.execute("alter table penstock.task_away rename to task")

    await connection.execute("alter table penstock.task rename to task_away")
    async with running(store, settings) as api:
        state = {
            "api": api.url,
            "env": {DATABASE_URL: database_url},
            "sqs_endpoint_url": settings.sqs_endpoint_url,
            "sqs_access_key": None,
            "queues": {"inbound": settings.inbound_queue},
        }
        result, _ = await asyncio.gather(feed(state, 20, http_share=1), back_soon())
    assert (await enqueued(connection)).keys() == {str(object_id) for object_id in result.ids}


async def test_objects_are_inserted_although_the_database_ends_the_connection_meanwhile(
    database: ExportDatabase, connection: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, tries = export_database._copy_objects, itertools.count(1)

    async def cut_off_once(of: Any, ids: range, seed: int) -> None:
        if next(tries) == 1:
            await connection.execute("select pg_terminate_backend($1)", of.get_server_pid())
        await copy(of, ids, seed)

    await database.prepare()
    monkeypatch.setattr(export_database, "_copy_objects", cut_off_once)
    assert await add_objects(database, 3, seed=0) == range(1, 4)
    assert await connection.fetchval("select count(*) from t_object") == 3


async def test_a_feed_into_an_api_that_is_away_says_so(database_url: str, settings: Settings) -> None:
    state = {
        "api": "http://127.0.0.1:9",
        "env": {DATABASE_URL: database_url},
        "sqs_endpoint_url": settings.sqs_endpoint_url,
        "sqs_access_key": None,
        "queues": {"inbound": settings.inbound_queue},
    }
    with pytest.raises(PenstockError, match="cannot be reached"):
        await feed(state, 1, http_share=1)


async def settle(store: Store, count: int) -> None:
    """Enqueue, claim and finish so many tasks."""
    async with store.session() as session:
        await enqueue.enqueue(session, [NewTask("export", json.dumps({"objectID": n})) for n in range(1, count + 1)])
        batch = await claim.claim(session, count)
        assert batch is not None
        await claim.confirm(session, batch.id)
        await settling.finish(session, {(task.id, task.claim): '{"written":true}' for task in batch.tasks})


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (None, None),
        ("update t_exported_object set name = name where object_id = 3", "1 records were written more than once"),
        ("delete from t_exported_object where object_id = 3", "1 records were not exported"),
        ("insert into t_object values (11, '{}')", "1 records were not exported"),
        (
            "insert into t_exported_object (object_id, name, item_count, total_cents, checksum) "
            "values (99, '', 0, 0, '')",
            "11 rows are in t_exported_object where 10 belong",
        ),
        ("insert into penstock.rejected (source, body, reason) values ('inbound', 'x', 'y')", "messages were rejected"),
        ("delete from penstock.task_history where payload ->> 'objectID' = '3'", "9 of 10 tasks are SUCCESS"),
    ],
)
async def test_the_summary_finds_what_is_wrong(
    database: ExportDatabase, connection: Any, store: Store, spoil: str | None, problem: str | None
) -> None:
    ids = await database.add_objects(10)
    await asyncio.gather(*(database.export(object_id) for object_id in ids))
    await settle(store, 10)
    if spoil is not None:
        await connection.execute(spoil)
    summary = await summarize(connection, connection, 10, None)
    text = "\n".join(lines_of(summary))
    if problem is None:
        assert summary.problems == []
        assert "10 of 10 records exactly once" in text
    else:
        assert problem in summary.problems
        assert problem in text


async def test_the_demo_watches_on_when_the_driver_finds_its_connection_broken_while_its_stack_is_there(
    store: Store, database_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fetch, broken = asyncpg.Connection.fetch, [asyncpg.InternalClientError("cannot switch to state 12"), TimeoutError()]

    async def breaking(connection: Any, *arguments: Any) -> Any:
        if broken:
            raise broken.pop()
        return await fetch(connection, *arguments)

    monkeypatch.setattr(asyncpg.Connection, "fetch", breaking)
    watching = demo._watch(Place(tmp_path), database_url)
    async with asyncio.timeout(30), aclosing(watching) as snapshots:
        with DataDir(tmp_path).held():
            assert (await anext(snapshots)).settled == 0
            assert broken == []
        broken.append(TimeoutError())
        with pytest.raises(PlaceError, match=f"its stack in {tmp_path} has ended"):
            await anext(snapshots)
