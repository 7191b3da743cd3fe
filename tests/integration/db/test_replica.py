"""Reads from a real streaming replica: lists and counts of its age, no result missed, the way back."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import Any

import asyncpg
import httpx
import pytest
from pydantic import SecretStr

from penstock.api.http import AGE_HEADER
from penstock.api.process import Api
from penstock.cli.doctor.database import examine_database
from penstock.cli.doctor.findings import Finding, Report
from penstock.db.migrate import upgrade
from penstock.db.pool import Store
from penstock.db.session import Session
from penstock.db.statements import SQL
from penstock.protocol.task import NewTask
from penstock.runtime import metrics
from penstock.settings.model import Settings, load_settings
from penstock.tasks import enqueue, reschedule
from tests import postgres_versions
from tests.claims import use_known_key
from tests.failover import Pair
from tests.integration.apis import running
from tests.integration.test_results import claim, fail, finish

pytestmark = pytest.mark.skipif(postgres_versions.VERSION != 18, reason="the pair is of version 18")

MAX_AGE_SECONDS = 3.0
INSERTED = "select (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint"
KNOWN = "select count(*) from pg_proc where proname = 'pg_last_wal_replay_lsn'"


@pytest.fixture(scope="module")
def pair(module_data_path: Path) -> Iterator[Pair]:
    pair = Pair(module_data_path, synchronous=False, shared_buffers="32MB")
    pair.start()
    pair.primary.create_database("penstock")
    upgrade(pair.primary.dsn("penstock"))
    use_known_key(pair.primary, "penstock")
    yield pair
    pair.stop()


@pytest.fixture
def application_url(pair: Pair) -> str:
    pair.primary.execute("truncate penstock.task, penstock.task_history", "penstock")
    return pair.primary.dsn("penstock")


@pytest.fixture
def settings(application_url: str, pair: Pair) -> Settings:
    return load_settings(
        database_url=application_url, database_read_url=pair.standby.dsn("penstock"), http_port=0, metrics_port=0,
        grace_seconds=5, database_read_max_age_seconds=MAX_AGE_SECONDS, aws_region="us-east-1",
    )  # fmt: skip


@contextmanager
def paused(pair: Pair) -> Iterator[None]:
    """The replica receives the log, and shows nothing of it."""
    pair.standby.execute("select pg_wal_replay_pause()")
    try:
        yield
    finally:
        pair.standby.execute("select pg_wal_replay_resume()")


@asynccontextmanager
async def serving(store: Store, settings: Settings) -> AsyncIterator[tuple[Api, httpx.AsyncClient]]:
    async with running(store, settings) as api, httpx.AsyncClient(base_url=api.url, timeout=60) as http:
        if settings.database_read_url is not None:
            await until_age_is_shown(http, shown=True)
        yield api, http


async def call(http: httpx.AsyncClient, method: str, **params: Any) -> tuple[Any, float | None]:
    """The result, and the age of the answer, None for one by the primary."""
    answer = await http.post("/rpc", json={"jsonrpc": "2.0", "method": method, "params": params, "id": 1})
    age = answer.headers.get(AGE_HEADER)
    return answer.json()["result"], None if age is None else float(age)


async def until_age_is_shown(http: httpx.AsyncClient, *, shown: bool) -> None:
    async with asyncio.timeout(60):
        while ((await call(http, "list"))[1] is not None) != shown:
            await asyncio.sleep(0.05)


def age_exported() -> float:
    age = metrics.REGISTRY.get_sample_value("penstock_replica_age_seconds")
    assert age is not None
    return age


async def add(store: Store) -> int:
    async with store.session() as session:
        (task,) = await enqueue.enqueue(session, [NewTask("a")])
    return task.id


async def until_listed(http: httpx.AsyncClient, task_id: int) -> None:
    async with asyncio.timeout(60):
        while task_id not in [task["id"] for task in (await call(http, "list"))[0]["tasks"]]:
            await asyncio.sleep(0.05)


async def test_lists_and_counts_are_as_old_as_the_replica_and_a_status_is_not(
    store: Store, settings: Settings, pair: Pair
) -> None:
    async with serving(store, settings) as (_api, http):
        first = await add(store)
        await until_listed(http, first)
        with paused(pair):
            second = await add(store)
            tasks, age = await call(http, "list")
            assert [task["id"] for task in tasks["tasks"]] == [first]
            assert age is not None
            assert age <= MAX_AGE_SECONDS
            counted, age = await call(http, "stats")
            assert counted["states"]["SCHEDULED"] == 1
            assert age is not None
            shown, age = await call(http, "status", id=second)
            assert (shown["id"], age) == (second, None)
            page = await http.get("/tasks", headers={"Accept": "text/html"})
            assert "From a replica, at most " in page.text
            assert 0 < age_exported() <= MAX_AGE_SECONDS
            await until_age_is_shown(http, shown=False)  # now it is too old
            assert age_exported() == math.inf
            assert len((await call(http, "list"))[0]["tasks"]) == 2
            assert "From a replica" not in (await http.get("/tasks", headers={"Accept": "text/html"})).text
        await until_age_is_shown(http, shown=True)
        await until_listed(http, second)


async def test_counts_that_are_kept_for_other_callers_have_their_age_too(store: Store, settings: Settings) -> None:
    async with serving(store, settings) as (_, http):
        ages = [(await call(http, "stats"))[1] for _ in range(5)]
        assert None not in ages


async def test_a_position_behind_the_header_of_a_page_is_one_before_it(application_url: str) -> None:
    connection = await asyncpg.connect(application_url)
    noted: dict[int, int] = {}
    async with asyncio.timeout(60):
        while not any(position % 8192 in (24, 40) for position in noted):
            await connection.execute("select pg_switch_wal()")
            before, position, after = [
                await connection.fetchval(query) for query in (INSERTED, SQL["read_log_position"], INSERTED)
            ]
            if before == after:  # no other has written meanwhile
                noted[before] = position
    await connection.close()
    assert {before - position for before, position in noted.items()} <= {0, 24, 40}
    assert all(position % 8192 == 0 for before, position in noted.items() if before % 8192 in (24, 40))


async def test_a_replica_does_not_age_while_nothing_is_written(store: Store, settings: Settings) -> None:
    async with serving(store, settings) as (_, http):
        ended = monotonic() + MAX_AGE_SECONDS + 1
        while monotonic() < ended:
            assert (await call(http, "list"))[1] is not None
            await asyncio.sleep(0.2)


async def test_no_result_is_missed_and_none_of_an_earlier_run_is_answered(
    store: Store, settings: Settings, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[str | None] = []
    original = Session.fetch

    async def fetch(session: Session, name: str, *args: Any, **options: Any) -> Any:
        if name == "read_settled":
            looks.append(session._connection.get_settings().in_hot_standby)
        return await original(session, name, *args, **options)

    monkeypatch.setattr(Session, "fetch", fetch)
    async with serving(store, settings) as (_, http):
        task_id = await add(store)
        claimed, _ = await claim(store)
        await fail(store, claimed, task_id)
        await until_replayed(pair)
        with paused(pair):
            async with store.transaction() as session:
                await reschedule.restart(session, [task_id])
            # On the replica, it still is a failed one.
            waiting = asyncio.create_task(call(http, "result", id=task_id, timeout=1.5))
            answer, _ = await waiting
            assert answer["state"] == "SCHEDULED"
            claimed, _ = await claim(store)
            waiting = asyncio.create_task(call(http, "result", id=task_id, timeout=2))
            await asyncio.sleep(0.5)
            await finish(store, claimed, [task_id])
            answer, _ = await waiting
            assert (answer["state"], answer["result"]) == ("SUCCESS", {"of": task_id})
        await until_age_is_shown(http, shown=True)
        other = await add(store)
        claimed, _ = await claim(store)
        waiting = asyncio.create_task(call(http, "result", id=other, timeout=60))
        looks.clear()
        async with asyncio.timeout(60):
            while "on" not in looks:  # the watch has gone over to the replica
                await asyncio.sleep(0.05)
        looks.clear()
        began = monotonic()
        await finish(store, claimed, [other])
        answer, _ = await waiting
        assert answer["state"] == "SUCCESS"
        assert monotonic() - began < 30
        assert set(looks) <= {"on"}  # none where a look that was under way has found it


async def until_replayed(pair: Pair) -> None:
    position = pair.primary.fetch_value("select pg_current_wal_flush_lsn()::text")
    async with asyncio.timeout(60):
        while not pair.standby.fetch_value("select pg_last_wal_replay_lsn() >= $1::text::pg_lsn", position):
            await asyncio.sleep(0.05)


async def found_about_the_replica(settings: Settings) -> Finding:
    report = Report()
    await examine_database(settings, report)
    (found,) = [finding for finding in report.findings if finding.what == "read replica"]
    return found


async def test_doctor_tells_a_replica_that_lags_and_a_server_that_is_none(
    settings: Settings, pair: Pair, application_url: str
) -> None:
    short = settings.model_copy(update={"database_read_max_age_seconds": 2.0})
    found = await found_about_the_replica(short)
    assert found.level == "ok"
    assert "follows the primary" in found.seen
    with paused(pair):
        pair.primary.execute("create table if not exists something (id int)")
        found = await found_about_the_replica(short)
        assert found.level == "warning"
        assert "lags by more than 2 s" in found.seen
        assert "READ_MAX_AGE" in found.fix
    primary = SecretStr(application_url)
    found = await found_about_the_replica(settings.model_copy(update={"database_read_url": primary}))
    assert found.level == "warning"
    assert "is no replica" in found.seen
    assert "streaming replica" in found.fix


async def test_a_replica_that_does_not_report_its_position_is_not_read(
    store: Store, settings: Settings, pair: Pair
) -> None:
    """As Aurora's, which refuses the function: here it has another name for a while."""
    rename = "alter function pg_catalog.{}() rename to {}"
    pair.primary.execute(rename.format("pg_last_wal_replay_lsn", "no_replay_lsn"), "penstock")
    try:
        async with asyncio.timeout(60):
            while pair.standby.fetch_value(KNOWN, database="penstock"):
                await asyncio.sleep(0.05)
        async with running(store, settings) as api, httpx.AsyncClient(base_url=api.url, timeout=60) as http:
            await asyncio.sleep(0.2)  # the first check has failed
            assert (await call(http, "list"))[1] is None
            found = await found_about_the_replica(settings)
            assert (found.level, "does not report its position" in found.seen) == ("warning", True)
            pair.primary.execute(rename.format("no_replay_lsn", "pg_last_wal_replay_lsn"), "penstock")
            await until_age_is_shown(http, shown=True)
    finally:
        with suppress(asyncpg.UndefinedFunctionError):
            pair.primary.execute(rename.format("no_replay_lsn", "pg_last_wal_replay_lsn"), "penstock")


async def test_without_the_replica_everything_is_read_from_the_primary(
    store: Store, settings: Settings, pair: Pair
) -> None:
    """The last one: the replica is gone afterwards."""
    async with serving(store, settings) as (_, http):
        task_id = await add(store)
        pair.standby.stop()
        answer, age = await call(http, "list")
        assert ([task["id"] for task in answer["tasks"]], age) == ([task_id], None)
        found = await found_about_the_replica(settings)
        assert found.level == "warning"
        assert "a streaming replica that runs" in found.fix
