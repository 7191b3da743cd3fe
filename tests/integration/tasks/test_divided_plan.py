"""Plans over a divided table: each task is looked up in its own partition alone, by a plan that is kept."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import asyncpg
import pytest

from penstock.db.pool import PLANNING
from penstock.db.statements import SQL
from penstock.local.postgres import EmbeddedPostgres
from tests.conftest import PARTITIONS
from tests.integration.tasks.test_claim_plan import _SEED, _SETTLING, Node, nodes
from tests.partitions import divide

COUNT = 100
_READING: dict[str, tuple[Any, ...]] = {
    "read_tasks": (),
    "read_states": (),
    "read_settled": (1000,),
    "hold_live_tasks": (["ACQUIRED"],),
}


@pytest.fixture(scope="module", params=["full", "empty"])
def divided_url(request: pytest.FixtureRequest, postgres: EmbeddedPostgres, template_database: str) -> Iterator[str]:
    """A full table of four partitions, with its own statistics or those of an empty one."""
    postgres.create_database("divided", template=template_database)
    if PARTITIONS == 1:
        divide(postgres, "divided", 4)
    if request.param == "empty":
        postgres.execute("analyze penstock.task", "divided")
    postgres.execute(_SEED, "divided")
    if request.param == "full":
        postgres.execute("analyze penstock.task", "divided")
    yield postgres.dsn("divided")
    postgres.drop_database("divided")


@pytest.fixture
async def divided(divided_url: str) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(divided_url, server_settings=PLANNING)
    yield connection
    await connection.close()


def literal(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        quoted = (
            json.dumps(item) if isinstance(item, str) else str(item) if item is not None else "null" for item in value
        )
        return f"'{{{','.join(quoted)}}}'"
    return "null" if value is None else f"'{value}'"


async def explain_kept(connection: Any, name: str, args: Sequence[Any]) -> Node:
    """The plan that a connection keeps, run for these arguments, and what it did taken back."""
    transaction = connection.transaction()
    await transaction.start()
    try:
        await connection.execute("set local plan_cache_mode = force_generic_plan")
        await connection.execute(f"prepare kept as {SQL[name]}")
        given = ", ".join(map(literal, args))
        text = await connection.fetchval(f"explain (analyze, timing off, format json) execute kept ({given})")
    finally:
        await transaction.rollback()
        await connection.execute("deallocate all")
    plan: Node = json.loads(text)[0]["Plan"]
    return plan


def expect_one_partition_each(plan: Node, count: int) -> None:
    """Every look by the primary key is at one partition, and so many tasks were looked up."""
    looks = [
        (node["Actual Loops"], sum(child["Actual Loops"] for child in node["Plans"]))
        for node in nodes(plan)
        if node["Node Type"] == "Append"
        and all(child.get("Index Name", "").endswith("_pkey") for child in node["Plans"])
    ]
    assert max(loops for loops, _ in looks) == count, looks
    assert all(loops == partitions for loops, partitions in looks), looks


@pytest.mark.parametrize("name", [*_SETTLING, *_READING])
async def test_a_task_is_looked_up_in_its_own_partition(divided: Any, name: str) -> None:
    rows = await divided.fetch(
        "select id, claim from penstock.task where state = 'ACQUIRED' order by id limit $1", COUNT
    )
    ids, claims = [row["id"] for row in rows], [row["claim"] for row in rows]
    args = _SETTLING[name](ids, claims) if name in _SETTLING else (ids, *_READING[name])
    expect_one_partition_each(await explain_kept(divided, name, args), COUNT)


@pytest.mark.parametrize("name", ["claim_tasks", "claim_tasks_by_rules"])
async def test_a_claim_merges_the_partitions_and_updates_each_task_in_its_own(divided: Any, name: str) -> None:
    (low, high, run_at, task_id) = "{-32768}", "{32767}", "{-infinity}", "{0}"
    rooms = ("{}", "{}") if name == "claim_tasks_by_rules" else ()
    plan = await explain_kept(divided, name, (COUNT, None, low, high, run_at, task_id, 0, *rooms))
    assert plan["Actual Rows"] == COUNT
    expect_one_partition_each(plan, COUNT)
    merged = [node for node in nodes(plan) if node["Node Type"] == "Merge Append" and node["Actual Loops"]]
    read = [child["Actual Rows"] * child["Actual Loops"] for node in merged for child in node["Plans"]]
    assert COUNT <= sum(read) <= COUNT + 8, read
