"""Plans of the hot statements: the tests fail when the planner would leave the index that a statement relies on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from datetime import datetime
from typing import Any

import asyncpg
import pytest

from penstock.db.pool import PLANNING
from penstock.db.statements import SQL
from penstock.local.postgres import EmbeddedPostgres
from penstock.protocol.task import BEGINNING, EVERYTHING, Position, Stretch
from penstock.runtime.sweeps import RECENT_SECONDS
from penstock.scheduler.scan_bounds import ScanBounds
from tests.conftest import PARTITIONS
from tests.postgres_versions import VERSION

pytestmark = pytest.mark.skipif(PARTITIONS > 1, reason="of a divided table: test_divided_plan.py")

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
        if node["Node Type"] == "Bitmap Index Scan" and node["Index Name"].startswith(f"{table}_"):
            scans.add((node["Node Type"], node["Index Name"]))
    return scans


def expect_scans(plan: Node, table: str, index: str) -> None:
    scans = scans_of(plan, table)
    assert scans, "the plan reads the table by no scan that is known here"
    assert {name for _, name in scans} == {index}, scans


def expect_scans_among(plan: Node, table: str, indexes: set[str]) -> None:
    names = {name for _, name in scans_of(plan, table)}
    assert names, "the plan reads the table by no scan that is known here"
    assert names <= indexes, names


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
    connection = await asyncpg.connect(seeded_url, server_settings=PLANNING)
    yield connection
    await connection.close()


# The claim


def claim_of(limit: int, now: datetime | None = None, stretches: Sequence[Stretch] = EVERYTHING) -> tuple[Any, ...]:
    """The arguments of a claim."""
    after = [stretch.after for stretch in stretches]
    return (
        limit, now, [stretch.low for stretch in stretches], [stretch.high for stretch in stretches],
        [position.run_at for position in after], [position.id for position in after], 0.0,
    )  # fmt: skip


def stretches_of(positions: dict[int, Position]) -> list[Stretch]:
    """As a scheduler looks that knows the priorities 2, 1 and 0."""
    levels = [Stretch(level, level, positions.get(level, BEGINNING)) for level in (2, 1, 0)]
    return [Stretch(3, 32767, BEGINNING), *levels, Stretch(-32768, -1, BEGINNING)]


FROM_FRONT = {"all priorities at once": EVERYTHING, "each priority alone": tuple(stretches_of({}))}


def candidates_in(plan: Node) -> Node:
    """Where a claim chooses what to take."""
    named = {node.get("Subplan Name"): node for node in nodes(plan)}
    return named.get("CTE looked") or named["CTE behind"]


def expect_no_sort(due: Node) -> None:
    """Candidates come in the order of the index; a sort would read all due tasks for each claim."""
    expect_scans(due, "task", "task_ready")
    kinds = {node["Node Type"] for node in nodes(due)}
    assert not kinds & {"Seq Scan", "Sort", "Incremental Sort", "Bitmap Heap Scan"}, kinds


def expect_bound_in_index(due: Node) -> None:
    """The position behind which a stretch begins is where the scan begins, not what it filters by."""
    conditions = [node["Index Cond"] for node in nodes(due) if node.get("Index Name") == "task_ready"]
    assert len(conditions) == 2
    assert sum("ROW(run_at, id) > ROW(" in condition for condition in conditions) == 1
    assert all("priority" in condition and "run_at <= (COALESCE" in condition for condition in conditions)


def expect_claim_plan(plan: Node) -> None:
    expect_no_sort(candidates_in(plan))
    expect_bound_in_index(candidates_in(plan))
    scans = {name for _, name in scans_of(plan, "task")}
    assert scans == {"task_ready", "task_pkey"}, scans
    assert not any(
        node["Node Type"] == "Seq Scan" and node.get("Relation Name", "").startswith("task") for node in nodes(plan)
    )


def read_in(plan: Node, index: str) -> float:
    """Rows that the scans of an index brought."""
    scans = [node for node in nodes(plan) if node.get("Index Name") == index]
    return float(sum(scan["Actual Rows"] * scan["Actual Loops"] for scan in scans))


def pages_of(plan: Node) -> int:
    return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])


@pytest.mark.parametrize("stretches", FROM_FRONT.values(), ids=list(FROM_FRONT))
@pytest.mark.parametrize("limit", [1, 100, 5000])
async def test_the_claim_reads_its_candidates_in_the_order_of_its_index(
    seeded: Any, limit: int, stretches: Sequence[Stretch]
) -> None:
    expect_claim_plan(await explain(seeded, SQL["claim_tasks"], *claim_of(limit, None, stretches)))


async def test_a_claim_behind_bounds_begins_there(seeded: Any) -> None:
    rows = await seeded.fetch(
        "select distinct on (priority) priority, run_at, id from penstock.task"
        " where state in ('SCHEDULED', 'ERROR') and run_at < now() - interval '1 hour' order by 1, 2 desc, 3 desc"
    )
    bounds = stretches_of({row["priority"]: Position(row["run_at"], row["id"]) for row in rows})
    plan = await explain(seeded, SQL["claim_tasks"], *claim_of(100, None, bounds), analyze=True)
    expect_claim_plan(plan)
    assert read_in(plan, "task_ready") == 100
    assert pages_of(candidates_in(plan)) < 350  # a few of each index descent, and the row and its lock of each found


async def test_the_claim_keeps_its_plan_once_it_is_generic(seeded: Any) -> None:
    expect_claim_plan(await explain_generic(seeded, "claim_tasks"))


@pytest.mark.parametrize("stretches", FROM_FRONT.values(), ids=list(FROM_FRONT))
async def test_the_claim_never_takes_more_than_its_limit_and_touches_no_more(
    seeded: Any, stretches: Sequence[Stretch]
) -> None:
    plan = await explain(seeded, SQL["claim_tasks"], *claim_of(100, None, stretches), analyze=True)
    assert read_in(plan, "task_ready") == 100
    assert plan["Actual Rows"] == 100


async def test_the_claim_reads_no_history(seeded: Any) -> None:
    plan = await explain(seeded, SQL["claim_tasks"], *claim_of(1000))
    assert not any("task_success" in node.get("Relation Name", "") for node in nodes(plan))


@pytest.mark.parametrize("stretches", FROM_FRONT.values(), ids=list(FROM_FRONT))
async def test_a_claim_that_finds_nothing_due_does_not_read_the_future(
    seeded: Any, stretches: Sequence[Stretch]
) -> None:
    if VERSION < 18 and stretches == EVERYTHING:
        pytest.skip(
            "PostgreSQL 18 is the first to skip from priority to priority in one scan; schedulers read them apart"
        )
    before_all = await seeded.fetchval("select min(run_at) - interval '1 hour' from penstock.task")
    plan = await explain(seeded, SQL["claim_tasks"], *claim_of(1000, before_all, stretches), analyze=True)
    assert plan["Actual Rows"] == 0
    assert pages_of(candidates_in(plan)) < 40


async def test_the_priorities_in_use_are_read_by_one_look_each(seeded: Any) -> None:
    plan = await explain(seeded, SQL["read_priorities"], 16, analyze=True)
    expect_scans(plan, "task", "task_ready")
    assert plan["Actual Rows"] == 3
    assert 3 <= read_in(plan, "task_ready") <= 4  # counted by rounded averages
    assert pages_of(plan) < 40


async def test_what_comes_next_is_read_without_passing_what_was_claimed(seeded: Any) -> None:
    levels = stretches_of({})
    transaction = seeded.transaction()
    await transaction.start()
    try:
        # Their entries stand in front of what is due later, for as long as an open transaction can see them.
        await seeded.execute(
            "update penstock.task set state = 'ACQUIRED', claimed_at = now(), claim = 1, attempts = 1"
            " where state in ('SCHEDULED', 'ERROR') and run_at <= now()"
        )
        args = [level.low for level in levels], [level.high for level in levels], 16
        plan = await explain(seeded, SQL["read_seconds_to_next"], *args, analyze=True)
    finally:
        await transaction.rollback()
    expect_scans(plan, "task", "task_ready")
    assert pages_of(plan) < 60


@pytest.mark.parametrize("since", [BEGINNING.run_at, datetime(2100, 1, 1).astimezone()])
async def test_the_window_is_counted_in_the_index_of_claimed_tasks(seeded: Any, since: datetime) -> None:
    plan = await explain(seeded, SQL["count_in_flight"], 5000, since, analyze=True)
    expect_scans(plan, "task", "task_acquired")
    assert read_in(plan, "task_acquired") == (ACQUIRED if since < datetime.now().astimezone() else 0)


def expect_lanes_plan(plan: Node) -> None:
    used = {"task_ready", "task_ready_by_route", "task_acquired", "task_acquired_by_route"}
    expect_scans_among(plan, "task", used)


async def test_lanes_are_counted_in_the_indexes_of_what_is_due_and_claimed(seeded: Any) -> None:
    plan = await explain(seeded, SQL["read_lanes"], 5000, 100, 60.0, 10.0, analyze=True)
    expect_lanes_plan(plan)
    expect_lanes_plan(await explain_generic(seeded, "read_lanes"))
    read = [node for node in nodes(plan) if node.get("Index Name") == "task_ready" and node.get("Actual Rows")]
    # Of 20,000 due no more than where counting stops, and of as many that are due tomorrow none.
    assert sum(node["Actual Rows"] * node["Actual Loops"] for node in read) <= 5000 + 2 * 3 + 2


async def test_unsent_claims_are_found_in_the_index_of_claimed_tasks(seeded: Any) -> None:
    plan = await explain(seeded, SQL["release_unsent"], 60.0, 100, None)
    assert scans_of(plan, "task") == {("Index Scan", "task_acquired"), ("Index Scan", "task_pkey")}


async def test_stale_tasks_are_found_in_the_index_of_claimed_tasks(seeded: Any) -> None:
    plan = await explain(seeded, SQL["find_stale"], 600.0, 500, None, None, None)
    expect_scans(plan, "task", "task_acquired")


async def test_gates_worth_a_look_are_found_by_a_few_steps_an_action(seeded: Any) -> None:
    async with seeded.transaction():
        await seeded.execute(
            "insert into penstock.gate (name, action, next_at) select 'g' || n, 'a' || n % 4,"
            " case n % 4 when 0 then now() - interval '1 second' when 1 then now() + make_interval(secs => n)"
            " when 2 then 'infinity' else now() + make_interval(secs => 5 * (n - 10)) end"
            " from generate_series(1, 20000) n"
        )
        (found,) = await seeded.fetch(SQL["find_open_gates"])
        assert (found["actions"], found["seconds"]) == (["a0", "a3"], 1.0)
        plan = await explain(seeded, SQL["find_open_gates"], analyze=True)
        assert rows_walked(plan) < 100
        await seeded.execute("delete from penstock.gate")


async def test_tasks_in_flight_are_looked_at_a_page_at_a_time(seeded: Any) -> None:
    plan = await explain(seeded, SQL["adopt_next_in_flight"], None, None, 10, analyze=True)
    assert read_in(plan, "task_acquired") <= 20
    expect_scans_among(plan, "task", {"task_acquired", "task_pkey"})


# Claim tokens


async def test_claim_tokens_grow_whichever_connection_claims(database_url: str) -> None:
    connections = [await asyncpg.connect(database_url) for _ in range(3)]
    try:
        await connections[0].fetch(SQL["enqueue_plain_tasks"], ["a"], ["{}"], [None], [None], [0], [10], [None])
        tokens = []
        for turn in range(12):
            connection = connections[-turn % 3]
            ((task_id, token, *_),) = await connection.fetch(SQL["claim_tasks"], *claim_of(1))
            tokens.append(token)
            await connection.fetch(SQL["release_tasks"], [task_id], [token], None)
        assert tokens == sorted(set(tokens))
    finally:
        for connection in connections:
            await connection.close()


# Settling, by id and claim, under the statistics of a table that swings between empty and full

_SETTLING: dict[str, Callable[[list[int], list[int]], tuple[Any, ...]]] = {
    "finish_tasks": lambda ids, claims: (ids, claims, ["{}"] * len(ids), ["w:1"] * len(ids), 16),
    "fail_tasks_permanently": lambda ids, claims: (ids, claims, ["{}"] * len(ids), ["w:1"] * len(ids)),
    "delay_tasks": lambda ids, claims: (
        ids,
        claims,
        ["{}"] * len(ids),
        [1.0] * len(ids),
        [False] * len(ids),
        ["w:1"] * len(ids),
    ),
    "note_heartbeats": lambda ids, claims: (ids, claims, [None] * len(ids), ["w:1"] * len(ids)),
    "release_tasks": lambda ids, claims: (ids, claims, None),
    "refund_attempts": lambda ids, claims: (ids, claims, ["{}"] * len(ids)),
    "postpone_tasks": lambda ids, claims: (ids, claims, [30.0] * len(ids), ["{}"] * len(ids), ["snooze"] * len(ids)),
    "read_attempts": lambda ids, claims: (ids, claims),
    "cancel_tasks": lambda ids, claims: (ids, "expired"),
}
_ALSO_BY = {"finish_tasks": {"task_ordering"}}  # the next of each ordering key


@pytest.fixture(scope="module", params=["full", "emptied", "emptied, pages kept", "empty"])
def swinging_url(request: pytest.FixtureRequest, postgres: EmbeddedPostgres, template_database: str) -> Iterator[str]:
    """A full table whose statistics are its own, or those of the same table while it was empty.

    empty: analyzed when it had never held a row; emptied: vacuumed and analyzed after its rows had gone. If a
    transaction looks at the table meanwhile, vacuum keeps its empty pages, and the planner takes every page for empty.
    """
    statistics: str = request.param
    name = "swinging"
    postgres.create_database(name, template=template_database)
    url = postgres.dsn(name)

    async def seed() -> None:
        connection = await asyncpg.connect(url, timeout=60)
        try:
            await connection.execute("alter table penstock.task set (autovacuum_enabled = off)")
            if statistics.startswith("emptied"):
                await connection.execute(_SEED)
                await connection.execute("delete from penstock.task")
            if statistics != "full":
                options = "analyze, truncate false" if statistics.endswith("pages kept") else "analyze"
                await connection.execute(f"vacuum ({options}) penstock.task")
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
    connection = await asyncpg.connect(swinging_url, server_settings=PLANNING)
    yield connection
    await connection.close()


async def join_by_hash(connection: Any, statement: str) -> list[Any]:
    """Rows of a statement that prepares a test; the planner, wrong about the table, would take half a minute for it."""
    await connection.execute("set local enable_nestloop = off")
    rows: list[Any] = await connection.fetch(statement)
    await connection.execute("set local enable_nestloop = on")
    return rows


def expect_settling_plan(name: str, plan: Node) -> None:
    """Each task is looked up by the primary key: a scan of the whole index would be walked once for each pair."""
    assert {index for _, index in scans_of(plan, "task")} == {"task_pkey", *_ALSO_BY.get(name, ())}
    of_tasks = [node for node in nodes(plan) if node.get("Index Name") == "task_pkey"]
    assert all(" = ANY (ARRAY[" in node["Index Cond"] for node in of_tasks), of_tasks


@pytest.mark.parametrize(
    ("name", "count"),
    [(name, count) for name in _SETTLING for count in (1, 100, 1000)],
)
async def test_a_settling_statement_goes_by_the_primary_key(swinging: Any, name: str, count: int) -> None:
    rows = await swinging.fetch("select id, claim from penstock.task where state = 'ACQUIRED' limit $1", count)
    args = _SETTLING[name]([row["id"] for row in rows], [row["claim"] for row in rows])
    expect_settling_plan(name, await explain(swinging, SQL[name], *args))


@pytest.mark.parametrize("name", _SETTLING)
async def test_a_settling_statement_keeps_the_primary_key_once_its_plan_is_generic(swinging: Any, name: str) -> None:
    expect_settling_plan(name, await explain_generic(swinging, name))


@pytest.mark.parametrize("stretches", FROM_FRONT.values(), ids=list(FROM_FRONT))
async def test_the_claim_keeps_its_index_under_any_statistics(swinging: Any, stretches: Sequence[Stretch]) -> None:
    expect_no_sort(candidates_in(await explain(swinging, SQL["claim_tasks"], *claim_of(1000, None, stretches))))
    expect_no_sort(candidates_in(await explain_generic(swinging, "claim_tasks")))


# What it takes to look up the rules of a thousand tasks


def rows_walked(plan: Node) -> int:
    """Rows that the steps of a plan that was run have given on or thrown away."""
    return sum(
        int(node["Actual Loops"] * (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)))
        for node in nodes(plan)
    )


_RULES = {
    "another action": "insert into penstock.action (name, max_in_flight) values ('another', 3)",
    "their action": "insert into penstock.action (name, max_in_flight) select distinct action, 3 from penstock.task",
    "a route": "insert into penstock.route (name, queue, actions, position) values ('r', 'q', '{%}', 1)",
}


@pytest.mark.parametrize("rules", _RULES)
@pytest.mark.parametrize("name", ["claim_tasks_by_rules", "put_tasks_aside"])
async def test_rules_are_looked_up_in_a_few_steps_a_task(swinging: Any, name: str, rules: str) -> None:
    is_claim = name == "claim_tasks_by_rules"
    async with swinging.transaction():
        await swinging.execute(_RULES[rules])
        actions = [row[0] for row in await swinging.fetch("select name from penstock.action")]
        for admitted in ([], actions):
            rooms = admitted, [500] * len(admitted)
            args = (*claim_of(1000), *rooms) if is_claim else (1000, 0, BEGINNING.run_at, BEGINNING.id, admitted)
            plan = await explain(swinging, SQL[name], *args, analyze=True)
            assert rows_walked(plan) < 60_000, "it walks what it has found once for each task"
        await swinging.execute("delete from penstock.action")
        await swinging.execute("delete from penstock.route")


@pytest.mark.parametrize("rules", ["another action", "their action"])
async def test_limits_of_what_a_route_sends_are_looked_up_in_a_few_steps_a_task(swinging: Any, rules: str) -> None:
    async with swinging.transaction():
        await join_by_hash(
            swinging,
            "update penstock.task set route = 'r' where id in"
            " (select id from penstock.task where state = 'SCHEDULED' and run_at <= now() limit 1500)",
        )
        await swinging.execute(_RULES[rules])
        plan = await explain(swinging, SQL["claim_tasks_by_route"], 1000, "r", analyze=True)
        assert rows_walked(plan) < 60_000, "it walks what it has found once for each task"
        assert {index for _, index in scans_of(plan, "task")} == {"task_pkey", "task_ready_by_route"}
        await swinging.execute("delete from penstock.action")
        await swinging.execute("update penstock.task set route = null, gate = null where route is not null")


async def test_tasks_that_no_rule_concerns_are_not_looked_at_one_by_one(swinging: Any) -> None:
    async with swinging.transaction():
        await swinging.execute(_RULES["another action"])
        plan = await explain(swinging, SQL["claim_tasks_by_rules"], *claim_of(1000), [], [], analyze=True)
        (by_task,) = (node for node in nodes(plan) if node.get("Subplan Name") == "CTE sorted")
        assert rows_walked(by_task) < 10
        await swinging.execute("delete from penstock.action")


# Promotions in ordering keys

_WAITING = (
    "insert into penstock.task (state, action, payload, priority, run_at, max_attempts, ordering_key, created_at,"
    " updated_at) select 'WAITING', 'a', '{}', 3, now() - interval '2 days', 10, 'k' || n, now(), now()"
    " from generate_series(1, 1000) n"
)
_TURN = (
    "insert into penstock.turn (priority, run_at, task_id, size, task_ids, run_ats, keys, ends_at)"
    " select 3, min(run_at), min(id), count(*), array_agg(id), array_agg(run_at), array_agg(ordering_key),"
    " now() + interval '1 h' from penstock.task where state = 'WAITING'"
)


@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
@pytest.mark.parametrize("limit", [1000, 700])
async def test_turns_are_claimed_in_a_few_steps_a_task(swinging: Any, limit: int, mode: str) -> None:
    whole = "'{-32768}', '{32767}', '{-infinity}', '{0}'"
    async with swinging.transaction():
        await swinging.execute("analyze penstock.turn")
        await swinging.execute(f"set local plan_cache_mode = {mode}")
        await swinging.execute(f"prepare claiming as {SQL['claim_tasks']}")
        await swinging.execute(_WAITING)
        await swinging.execute(_TURN)
        text = await swinging.fetchval(
            f"explain (analyze, timing off, format json) execute claiming ({limit}, null, {whole}, 0)"
        )
        await swinging.execute("deallocate claiming")
        plan = json.loads(text)[0]["Plan"]
        assert plan["Actual Rows"] == limit
        assert rows_walked(plan) < 60_000, "it walks what it has found once for each task"
        for table in ("task where state in ('WAITING', 'ACQUIRED') and ordering_key is not null", "turn", "dispatch"):
            await swinging.execute(f"delete from penstock.{table}")


@pytest.mark.parametrize("name", ["finish_tasks", "promote_successors"])
@pytest.mark.parametrize("turns_from", [16, 10_000])
async def test_those_who_are_next_are_let_go_in_a_few_steps_a_task(swinging: Any, name: str, turns_from: int) -> None:
    async with swinging.transaction():
        await swinging.execute(_WAITING)
        rows = await join_by_hash(
            swinging,
            "update penstock.task t set ordering_key = 'k' || n.n from (select id, row_number() over () as n"
            " from penstock.task where state = 'ACQUIRED' limit 1000) n where t.id = n.id returning t.id, t.claim",
        )
        assert len(rows) == 1000
        ids, claims = [row["id"] for row in rows], [row["claim"] for row in rows]
        args = (*_SETTLING["finish_tasks"](ids, claims)[:-1], turns_from)
        if name == "promote_successors":
            args = ([f"k{n}" for n in range(1, 1001)],)
        plan = await explain(swinging, SQL[name], *args, analyze=True)
        assert rows_walked(plan) < 60_000, "it walks what it has found once for each task"
        await swinging.execute("delete from penstock.task where state = 'WAITING'")


# Plans that are kept from a moment at which the table was empty

_BY_INDEX = {
    "claim_tasks": {"task_ready", "task_pkey"},
    "claim_tasks_by_rules": {"task_ready", "task_pkey"},
    "put_tasks_aside": {"task_ready", "task_pkey"},
    "claim_tasks_by_route": {"task_ready_by_route", "task_pkey"},
    "claim_tasks_at_gates": {"task_ready_by_gate", "task_pkey"},
    "read_seconds_to_next": {"task_ready"},
    "leave_gates": {"task_ready_by_gate", "task_pkey"},
    "rest_gates": {"task_ready_by_gate"},
    "lock_gates": {"task_acquired_by_gate"},
    "count_gated": {"task_acquired_by_gate"},
    "count_gated_of_tenants": {"task_acquired_by_tenant"},
    "count_in_flight_by_route": {"task_acquired_by_route"},
    "count_in_flight": {"task_acquired"},
    "find_stale": {"task_acquired"},
    "adopt_next_in_flight": {"task_acquired", "task_pkey"},
    "release_unsent": {"task_acquired", "task_pkey"},
    "read_states": {"task_pkey"},
    "find_by_key": {"task_ordering", "task_pkey"},
    "promote_successors": {"task_ordering", "task_pkey"},
    "forget_ordering_keys": {"task_ordering"},
    "look_at_objects": {"task_pkey"},
    **{name: {"task_pkey", *_ALSO_BY.get(name, ())} for name in _SETTLING},
}


@pytest.mark.parametrize("name", _BY_INDEX)
async def test_a_plan_kept_from_an_empty_table_goes_by_the_index(emptied_url: str, name: str) -> None:
    connection = await asyncpg.connect(emptied_url, server_settings=PLANNING)
    try:
        plan = await explain_generic(connection, name)
    finally:
        await connection.close()
    assert {index for _, index in scans_of(plan, "task")} == _BY_INDEX[name]
    if name in ("claim_tasks", "claim_tasks_by_rules"):
        expect_no_sort(candidates_in(plan))


@pytest.fixture(scope="module")
def emptied_url(postgres: EmbeddedPostgres, template_database: str) -> Iterator[str]:
    """A table that was full, is empty, and was vacuumed since, so that the planner knows."""
    postgres.create_database("emptied", template=template_database)
    url = postgres.dsn("emptied")

    async def seed() -> None:
        connection = await asyncpg.connect(url, timeout=60)
        try:
            await connection.execute(_SEED)
            await connection.execute("delete from penstock.task")
            await connection.execute("vacuum analyze")
        finally:
            await connection.close()

    asyncio.run(seed())
    yield url
    postgres.drop_database("emptied")


# Every statement


async def test_every_statement_is_understood(seeded: Any) -> None:
    for name, statement in SQL.items():
        try:
            text = statement.replace("{partition}", "task_success_default").replace("{parent}", "task_success")
            await seeded.prepare(text)
        except asyncpg.PostgresError as error:
            raise AssertionError(f"{name}: {error}") from error


async def test_a_claim_of_twenty_priorities_does_not_read_the_future(database_url: str) -> None:
    """Before PostgreSQL 18, a scan across several priorities reads all that is due later; so each is read alone."""
    bounds = ScanBounds()
    connection = await asyncpg.connect(database_url, server_settings=PLANNING)
    try:
        await connection.execute(
            "insert into penstock.task (state, action, payload, priority, run_at, attempts, max_attempts, created_at,"
            " updated_at) select 'SCHEDULED', 'a', '{}', 2 * (n % 20), now() + interval '1 day', 0, 10, now(), now()"
            " from generate_series(1, 100000) n"
        )
        await connection.execute("analyze penstock.task")
        bounds.set_levels([row["priority"] for row in await connection.fetch(SQL["read_priorities"], 100)], 0.0)
        for stretches in (bounds.from_front(), bounds.from_bounds()):
            plan = await explain(connection, SQL["claim_tasks"], *claim_of(1000, None, stretches), analyze=True)
            assert plan["Actual Rows"] == 0
            assert pages_of(candidates_in(plan)) < 300  # one descent a priority and one for what is between two
    finally:
        await connection.close()


# Dead entries, which cannot be removed while an old transaction is open


async def test_a_claim_behind_its_bound_passes_no_dead_entries(database_url: str) -> None:
    """100,000 tasks were claimed, half of them settled, while a transaction is held open; 500 more are due."""
    connection = await asyncpg.connect(database_url, server_settings=PLANNING)
    holder = await asyncpg.connect(database_url)
    try:
        await connection.execute("alter table penstock.task set (autovacuum_enabled = off)")
        await connection.execute(_due(100_000, "2 days"))
        holding = holder.transaction(isolation="repeatable_read")
        await holding.start()
        await holder.fetchval("select count(*) from penstock.tally")
        last = await connection.fetchrow("select run_at, id from penstock.task order by run_at desc, id desc limit 1")
        await connection.execute(
            "update penstock.task set state = 'ACQUIRED', attempts = 1, claim = nextval('penstock.claim_seq'),"
            " claimed_at = now()"
        )
        await connection.execute("delete from penstock.task where id % 2 = 0")
        await connection.execute(_due(500, "1 hour"))
        await connection.execute("vacuum analyze penstock.task")
        bound = stretches_of({0: Position(last["run_at"], last["id"])})
        behind = await explain(connection, SQL["claim_tasks"], *claim_of(100, None, bound), analyze=True)
        front = await explain(connection, SQL["claim_tasks"], *claim_of(100, None, stretches_of({})), analyze=True)
        assert behind["Actual Rows"] == front["Actual Rows"] == 100
        expect_claim_plan(behind)
        assert pages_of(candidates_in(behind)) < 350
        # So that the test would notice if there were nothing to pass.
        assert pages_of(candidates_in(front)) > 10_000
        await holding.rollback()
    finally:
        await holder.close()
        await connection.close()


async def test_a_look_for_stale_claims_passes_no_dead_entries_before_the_oldest_that_holds(database_url: str) -> None:
    connection = await asyncpg.connect(database_url, server_settings=PLANNING)
    holder = await asyncpg.connect(database_url)
    try:
        await connection.execute("alter table penstock.task set (autovacuum_enabled = off)")
        await connection.execute(_due(20_000, "2 days"))
        holding = holder.transaction(isolation="repeatable_read")
        await holding.start()
        await holder.fetchval("select count(*) from penstock.tally")
        await connection.execute(
            "update penstock.task set state = 'ACQUIRED', attempts = 1, claim = 1,"
            " claimed_at = now() - interval '1 hour' + (id % 1000) * interval '1 second'"
        )
        await connection.execute("delete from penstock.task where id % 1000 < 990")
        await connection.execute("vacuum analyze penstock.task")
        oldest = await connection.fetchval("select min(claimed_at) from penstock.task")
        assert await connection.fetchval(SQL["find_oldest_claim"], 60.0, None) == oldest
        behind, front = [
            await explain(connection, SQL["find_stale"], 60.0, 100, None, since, 0, analyze=True)
            for since in (oldest, None)
        ]
        assert behind["Actual Rows"] == front["Actual Rows"] == 100
        assert pages_of(behind) < 1000 < 5000 < pages_of(front)
        again = await explain(connection, SQL["find_oldest_claim"], 60.0, oldest, analyze=True)
        assert pages_of(again) < 20
        await holding.rollback()
    finally:
        await holder.close()
        await connection.close()


async def test_a_claim_passes_no_dead_turns(database_url: str) -> None:
    """20,000 turns were taken while a transaction is held open; three are left."""
    connection = await asyncpg.connect(database_url, server_settings=PLANNING)
    holder = await asyncpg.connect(database_url)
    give = (
        "insert into penstock.turn (priority, run_at, task_id, size, task_ids, run_ats, keys, ends_at)"
        " select 0, now(), n, 1, array[n], array[now()], array['k' || n], now() + interval '{}'"
        " from generate_series(1, {}) n"
    )
    try:
        holding = holder.transaction(isolation="repeatable_read")
        await holding.start()
        await holder.fetchval("select count(*) from penstock.tally")
        await connection.execute(give.format("-1 s", 20_000))
        await connection.execute("delete from penstock.turn")
        await connection.execute(give.format("1 h", 3))
        await connection.execute("vacuum analyze penstock.turn")
        plan = await explain(connection, SQL["claim_tasks"], *claim_of(100), analyze=True)
        assert not any(
            node["Node Type"] == "Seq Scan" and node.get("Relation Name") == "turn" for node in nodes(plan)
        )  # fmt: skip
        (turns,) = (node for node in nodes(plan) if node.get("Subplan Name") == "CTE turns")
        assert turns["Actual Rows"] == 3
        assert pages_of(plan) < 150
        await holding.rollback()
    finally:
        await holder.close()
        await connection.close()


@pytest.mark.parametrize(
    ("table", "keep", "looks"),
    [
        (
            "turn",
            "insert into penstock.turn (priority, run_at, task_id, size, task_ids, run_ats, keys, ends_at)"
            " select 0, now(), n, 1, array[n], array[now()], array['k' || n], now() - {} from generate_series(1, {}) n",
            {"take_overdue_promotions": (10, False)},
        ),
        (
            "schedule_clock",
            "insert into penstock.schedule_clock (schedule_id, next_at, due_at)"
            " select n, now() - interval '1 day', now() - {} from generate_series(1, {}) n",
            {"claim_due_schedules": (10,), "read_wait": ()},
        ),
    ],
)
async def test_a_look_between_two_sweeps_passes_no_old_dead_entries(
    database_url: str, table: str, keep: str, looks: dict[str, tuple[Any, ...]]
) -> None:
    """20,000 came due over a minute and have left while a transaction is held open; three are due."""
    connection = await asyncpg.connect(database_url, server_settings=PLANNING)
    holder = await asyncpg.connect(database_url)
    try:
        await connection.execute("set session_replication_role = replica")  # clocks without their schedules
        holding = holder.transaction(isolation="repeatable_read")
        await holding.start()
        await holder.fetchval("select count(*) from penstock.tally")
        await connection.execute(keep.format("interval '1 minute' - n * interval '1 ms'", 20_000))
        await connection.execute(f"delete from penstock.{table}")
        await connection.execute(keep.format("interval '1 s'", 3))
        await connection.execute(f"vacuum analyze penstock.{table}")
        for name, args in looks.items():
            bounded, swept = [
                await explain(connection, SQL[name], *args, since, analyze=True) for since in (RECENT_SECONDS, None)
            ]
            assert bounded["Actual Rows"] == swept["Actual Rows"] >= 1
            assert pages_of(bounded) < 100, name
            # So that the test would notice if there were nothing to pass.
            assert pages_of(swept) > 200, name
        await holding.rollback()
    finally:
        await holder.close()
        await connection.close()


def _due(count: int, ago: str) -> str:
    return (
        "insert into penstock.task (state, action, payload, priority, run_at, max_attempts, created_at, updated_at)"
        # Not in the order in which they stand in the table, so that each is a page to look at.
        f" select 'SCHEDULED', 'a', '{{}}', 0, now() - interval '{ago}' + make_interval(secs => n * 7919 % {count}),"
        f" 10, now(), now() from generate_series(1, {count}) n"
    )


# Unique keys and expiry


def keyed(count: int) -> tuple[Any, ...]:
    """The arguments of so many enqueues that each take a key from a task, once it has settled."""
    none = [None] * count
    keys = [f"k{n}" for n in range(count)]
    return (
        ["a"] * count, ["{}"] * count, none, none, [0] * count, [10] * count, none, keys, none, none, none, none, none,
        [True] * count, none, none,
    )  # fmt: skip


async def test_a_taken_key_is_looked_up_among_the_live_by_id_and_the_history_is_not_asked(seeded: Any) -> None:
    """Hashed, as an EXISTS may be, the question whether its task has settled reads every live task for one enqueue."""
    await seeded.execute("set plan_cache_mode = force_custom_plan")
    plan = await explain(seeded, SQL["enqueue_keyed_tasks"], *keyed(1000))
    looks = [node for node in nodes(plan) if node.get("Relation Name") == "task" and node["Node Type"] != "ModifyTable"]
    assert len(looks) == 2  # where the key is taken, and where keys that the body repeats are taken first
    for look in looks:
        assert look["Node Type"] in ("Index Scan", "Index Only Scan")
        assert "task_id" in look["Index Cond"]
    assert not [node for node in nodes(plan) if node.get("Relation Name", "").startswith("task_success")]


async def test_expired_tasks_are_found_by_their_index(seeded: Any) -> None:
    plan = await explain(seeded, SQL["find_expired"], 500, None)
    expect_scans(plan, "task", "task_expiring")
