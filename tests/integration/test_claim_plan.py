"""Plans of the hot statements: the tests fail when the planner would leave the index that a statement relies on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import asyncpg
import pytest

from penstock.local.postgres import EmbeddedPostgres
from penstock.migrate import upgrade
from penstock.sql import SQL
from tests.conftest import reachable_folder

FINISHED, READY, FUTURE, ACQUIRED = 50_000, 20_000, 20_000, 2_000

_SEED = f"""
insert into penstock.task_history (id, state, action, payload, priority, run_at, attempts, max_attempts, claim,
    claimed_at, created_at, updated_at, finished_at, result)
select nextval('penstock.task_id_seq'), 'SUCCESS', 'a', '{{}}', 0, now(), 1, 10, nextval('penstock.claim_seq'),
    now(), now(), now(), now(), '{{}}'
from generate_series(1, {FINISHED});
insert into penstock.task (state, action, payload, priority, run_at, attempts, max_attempts, created_at, updated_at)
select case when n % 10 = 0 then 'ERROR' else 'SCHEDULED' end::penstock.task_state, 'a', '{{}}', n % 3,
    now() - make_interval(secs => n), case when n % 10 = 0 then 1 else 0 end, 10, now(), now()
from generate_series(1, {READY}) n;
insert into penstock.task (state, action, payload, priority, run_at, max_attempts, created_at, updated_at)
select 'SCHEDULED', 'a', '{{}}', n % 3, now() + make_interval(days => 1, secs => n), 10, now(), now()
from generate_series(1, {FUTURE}) n;
insert into penstock.task (state, action, payload, priority, run_at, attempts, max_attempts, claim, claimed_at,
    created_at, updated_at)
select 'ACQUIRED', 'a', '{{}}', 0, now(), 1, 10, nextval('penstock.claim_seq'),
    now() - make_interval(secs => n), now(), now()
from generate_series(1, {ACQUIRED}) n;
"""

Node = dict[str, Any]


def nodes(plan: Node) -> Iterator[Node]:
    yield plan
    for child in plan.get("Plans", []):
        yield from nodes(child)


def scans_of(plan: Node, table: str) -> set[tuple[str, str | None]]:
    """(kind of scan, index or null) of every scan of a table; the scan of an index alone names no table."""
    scans = set()
    for node in nodes(plan):
        if node.get("Relation Name") == table and node["Node Type"] not in ("ModifyTable", "Bitmap Heap Scan"):
            scans.add((node["Node Type"], node.get("Index Name")))
        if node["Node Type"] == "Bitmap Index Scan":
            scans.add((node["Node Type"], node["Index Name"]))
    return scans


def expect_scans(plan: Node, table: str, index: str) -> None:
    scans = scans_of(plan, table)
    assert scans, "the plan reads the table by no scan that is known here"
    assert {name for _, name in scans} == {index}, scans


async def explain(connection: Any, statement: str, *args: Any, analyze: bool = False) -> Node:
    """The plan of a statement for these arguments. ``analyze`` runs it, and takes back what it did."""
    options = "analyze, buffers, timing off, format json" if analyze else "format json"
    transaction = connection.transaction()
    await transaction.start()
    try:
        text = await connection.fetchval(f"explain ({options}) {statement}", *args)
    finally:
        await transaction.rollback()
    plan: Node = json.loads(text)[0]["Plan"]
    return plan


async def explain_generic(connection: Any, name: str) -> Node:
    """The plan that a connection settles for once it has run the statement a few times, whatever the arguments."""
    await connection.execute("set plan_cache_mode = force_generic_plan")
    try:
        await connection.execute(f"prepare generic as {SQL[name]}")
        count = await connection.fetchval(
            "select cardinality(parameter_types) from pg_prepared_statements where name = 'generic'"
        )
        text = await connection.fetchval(f"explain (format json) execute generic ({', '.join(['null'] * count)})")
    finally:
        await connection.execute("deallocate all")
        await connection.execute("reset plan_cache_mode")
    plan: Node = json.loads(text)[0]["Plan"]
    return plan


@pytest.fixture(scope="module")
def seeded_url(postgres: EmbeddedPostgres, template_database: str) -> Iterator[str]:
    """A database with finished, due, future and claimed tasks, analyzed; tests take back what they change."""
    postgres.create_database("plans", template=template_database)
    url = postgres.dsn("plans")

    async def seed() -> None:
        connection = await asyncpg.connect(url, timeout=60)
        try:
            await connection.execute(_SEED)
            await connection.execute("vacuum analyze")
        finally:
            await connection.close()

    asyncio.run(seed())
    yield url
    postgres.drop_database("plans")


@pytest.fixture
async def seeded(seeded_url: str) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(seeded_url, server_settings={"jit": "off"})
    yield connection
    await connection.close()


# The claim


def candidates_of(claim: str) -> str:
    """The inner select of the claim: what the CTE named due holds."""
    text = claim.split("materialized (", 1)[1]
    return text.split("), claimed as", 1)[0]


def expect_claim_plan(plan: Node, *, due: Node) -> None:
    expect_scans(due, "task", "task_ready")
    kinds = [node["Node Type"] for node in nodes(due)]
    assert "Seq Scan" not in kinds
    assert "Sort" not in kinds
    assert "Incremental Sort" not in kinds
    scans = {name for _, name in scans_of(plan, "task")}
    assert scans == {"task_ready", "task_pkey"}, scans
    assert not any(
        node["Node Type"] == "Seq Scan" and node.get("Relation Name", "").startswith("task") for node in nodes(plan)
    )


async def test_the_claim_reads_its_candidates_in_the_order_of_its_index(seeded: Any) -> None:
    due = await explain(seeded, candidates_of(SQL["claim_tasks"]), 1000, None)
    whole = await explain(seeded, SQL["claim_tasks"], 1000, None)
    expect_claim_plan(whole, due=due)


async def test_the_claim_keeps_its_plan_once_it_is_generic(seeded: Any) -> None:
    whole = await explain_generic(seeded, "claim_tasks")
    (due,) = [node for node in nodes(whole) if node.get("Subplan Name") == "CTE due"]
    expect_claim_plan(whole, due=due)


async def test_the_claim_never_takes_more_than_its_limit_and_touches_no_more(seeded: Any) -> None:
    plan = await explain(seeded, SQL["claim_tasks"], 100, None, analyze=True)
    (scan,) = [node for node in nodes(plan) if node.get("Index Name") == "task_ready"]
    assert scan["Actual Rows"] * scan["Actual Loops"] == 100


async def test_the_claim_reads_no_history(seeded: Any) -> None:
    plan = await explain(seeded, SQL["claim_tasks"], 1000, None)
    assert not any("task_success" in node.get("Relation Name", "") for node in nodes(plan))


async def test_a_claim_that_finds_nothing_due_does_not_read_the_future(seeded: Any) -> None:
    # On PostgreSQL 18 the scan skips from priority to priority; before, it reads the index of all future tasks.
    before_all = await seeded.fetchval("select min(run_at) - interval '1 hour' from penstock.task")
    plan = await explain(seeded, candidates_of(SQL["claim_tasks"]), 1000, before_all, analyze=True)
    assert plan["Actual Rows"] == 0
    assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] < 40


async def test_the_window_is_counted_in_the_index_of_claimed_tasks(seeded: Any) -> None:
    plan = await explain(seeded, SQL["count_in_flight"], 5000)
    expect_scans(plan, "task", "task_acquired")


async def test_stale_tasks_are_found_in_the_index_of_claimed_tasks(seeded: Any) -> None:
    plan = await explain(seeded, SQL["find_stale"], 600.0, 500, None, None, None)
    expect_scans(plan, "task", "task_acquired")


# Claim tokens


async def test_claim_tokens_grow_whichever_connection_claims(database_url: str) -> None:
    connections = [await asyncpg.connect(database_url) for _ in range(3)]
    try:
        await connections[0].fetch(SQL["enqueue_plain_tasks"], ["a"], ["{}"], [None], [None], [0], [10], [None])
        tokens = []
        for turn in range(12):
            connection = connections[-turn % 3]
            ((task_id, token, *_),) = await connection.fetch(SQL["claim_tasks"], 1, None)
            tokens.append(token)
            await connection.fetch(SQL["release_tasks"], [task_id], [token])
        assert tokens == sorted(set(tokens))
    finally:
        for connection in connections:
            await connection.close()


# Settling, by id and claim, under the statistics of a table that swings between empty and full

_SETTLING: dict[str, Callable[[list[int], list[int]], tuple[Any, ...]]] = {
    "finish_tasks": lambda ids, claims: (ids, claims, ["{}"] * len(ids)),
    "bury_tasks": lambda ids, claims: (ids, claims, ["{}"] * len(ids)),
    "delay_tasks": lambda ids, claims: (ids, claims, ["{}"] * len(ids), [1.0] * len(ids)),
    "note_heartbeats": lambda ids, claims: (ids, claims, [None] * len(ids)),
    "release_tasks": lambda ids, claims: (ids, claims),
    "read_attempts": lambda ids, claims: (ids, claims),
    "cancel_tasks": lambda ids, claims: (ids,),
}


@pytest.fixture(scope="module", params=["full", "emptied", "empty"])
def swinging_url(request: pytest.FixtureRequest, postgres: EmbeddedPostgres, template_database: str) -> Iterator[str]:
    """A full table whose statistics are its own, or those of the same table while it was empty.

    empty: analyzed when it had never held a row; emptied: vacuumed and analyzed after its rows had gone.
    """
    statistics: str = request.param
    name = f"swinging_{statistics}"
    postgres.create_database(name, template=template_database)
    url = postgres.dsn(name)

    async def seed() -> None:
        connection = await asyncpg.connect(url, timeout=60)
        try:
            await connection.execute("alter table penstock.task set (autovacuum_enabled = off)")
            if statistics == "emptied":
                await connection.execute(_SEED)
                await connection.execute("delete from penstock.task")
            if statistics != "full":
                await connection.execute("vacuum analyze penstock.task")
            await connection.execute(_SEED)
            if statistics == "full":
                await connection.execute("vacuum analyze penstock.task")
        finally:
            await connection.close()

    asyncio.run(seed())
    yield url
    postgres.drop_database(name)


@pytest.fixture
async def swinging(swinging_url: str) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(swinging_url, server_settings={"jit": "off"})
    yield connection
    await connection.close()


@pytest.mark.parametrize(
    ("name", "count"),
    # Nobody cancels more than one task at a time.
    [(name, count) for name in _SETTLING for count in ((1,) if name == "cancel_tasks" else (1, 100, 1000))],
)
async def test_a_settling_statement_goes_by_the_primary_key(swinging: Any, name: str, count: int) -> None:
    rows = await swinging.fetch("select id, claim from penstock.task where state = 'ACQUIRED' limit $1", count)
    args = _SETTLING[name]([row["id"] for row in rows], [row["claim"] for row in rows])
    expect_scans(await explain(swinging, SQL[name], *args), "task", "task_pkey")


@pytest.mark.parametrize("name", _SETTLING)
async def test_a_settling_statement_keeps_the_primary_key_once_its_plan_is_generic(swinging: Any, name: str) -> None:
    expect_scans(await explain_generic(swinging, name), "task", "task_pkey")


async def test_the_claim_keeps_its_index_under_any_statistics(swinging: Any) -> None:
    due = await explain(swinging, candidates_of(SQL["claim_tasks"]), 1000, None)
    expect_scans(due, "task", "task_ready")
    assert "Sort" not in [node["Node Type"] for node in nodes(due)]


# Every statement, every server


@pytest.fixture(scope="module")
def url_16() -> Iterator[str]:
    with reachable_folder() as path:
        server = EmbeddedPostgres(path, version=16, options={"fsync": "off"})
        server.start()
        server.create_database("plans")
        upgrade(server.dsn("plans"))
        yield server.dsn("plans")
        server.stop()


@pytest.fixture
async def older(url_16: str) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(url_16, server_settings={"jit": "off"})
    yield connection
    await connection.close()


async def prepare_all(connection: Any) -> None:
    for name, statement in SQL.items():
        try:
            text = statement.replace("{partition}", "task_success_default").replace("{parent}", "task_success")
            await connection.prepare(text)
        except asyncpg.PostgresError as error:
            raise AssertionError(f"{name}: {error}") from error


async def test_every_statement_is_understood(seeded: Any) -> None:
    await prepare_all(seeded)


async def test_every_statement_is_understood_by_postgres_16(older: Any) -> None:
    await prepare_all(older)


async def test_the_claim_keeps_its_plan_on_postgres_16(older: Any) -> None:
    transaction = older.transaction()
    await transaction.start()
    try:
        await older.execute(_SEED)
        await older.execute("analyze penstock.task")
        due = await explain(older, candidates_of(SQL["claim_tasks"]), 1000, None)
        whole = await explain(older, SQL["claim_tasks"], 1000, None)
        expect_claim_plan(whole, due=due)
    finally:
        await transaction.rollback()
