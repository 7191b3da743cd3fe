"""Dividing the table of live tasks, and back: what stays, what is refused, and what a run that was ended leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import psycopg
import pytest

from penstock.cli.doctor.checks import examine
from penstock.cli.doctor.findings import Report
from penstock.db import partitions as dividing
from penstock.db.migrate import grants, upgrade
from penstock.db.partitions import partition_tasks
from penstock.db.pool import Store
from penstock.local.postgres import EmbeddedPostgres
from penstock.protocol.errors import Refused, Unavailable
from penstock.protocol.task import NewTask, State
from penstock.settings.model import Settings
from penstock.tasks import claim, enqueue, reschedule, settle
from tests.conftest import PARTITIONS
from tests.migration.test_migration import inventory
from tests.pgbouncer import WHY_NOT, through

pytestmark = pytest.mark.skipif(PARTITIONS > 1, reason="begins with one table")


async def divide(url: str, partitions: int, **options: Any) -> list[str]:
    said: list[str] = []
    await partition_tasks(url, partitions, report=said.append, **options)
    return said


async def add(store: Store, count: int) -> list[int]:
    async with store.session() as session:
        return [stored.id for stored in await enqueue.enqueue(session, [NewTask("a")] * count)]


async def settle_all(store: Store) -> list[int]:
    async with store.transaction() as session:
        batch = await claim.claim(session, 1000)
        assert batch is not None
        await claim.confirm(session, batch.id)
        claimed = {(task.id, task.claim): "1" for task in batch.tasks}
        assert await settle.finish(session, claimed) == len(claimed)
        return [task.id for task in batch.tasks]


async def tables(sql: Any) -> set[str]:
    rows = await sql.fetch("select distinct tableoid::regclass::text as name from penstock.task")
    return {row["name"].removeprefix("penstock.") for row in rows}


@pytest.fixture
async def reader(sql: Any) -> AsyncIterator[str]:
    """A role with rights of its own on the table of tasks."""
    await sql.execute("create role partition_reader")
    await sql.execute("grant select on penstock.task to partition_reader with grant option")
    await sql.execute("grant update (priority) on penstock.task to partition_reader")
    yield "partition_reader"
    await sql.execute("drop owned by partition_reader")
    await sql.execute("drop role partition_reader")


@pytest.mark.usefixtures("reader")
async def test_a_divided_table_is_the_same_again_once_it_is_one(database_url: str, store: Store, sql: Any) -> None:
    before = await asyncio.to_thread(inventory, database_url)
    rights = """select relacl::text,
                       (select string_agg(attname || attacl::text, '') from pg_attribute where attrelid = c.oid)
                from pg_class c where oid = 'penstock.task'::regclass"""
    granted = await sql.fetchrow(rights)
    first = await add(store, 10)
    assert (await divide(database_url, 4))[-1].startswith("new tasks go to 4 tables; older ones are in task_from_0,")
    assert await sql.fetchrow(rights) == granted
    second = await add(store, 100)
    assert max(first) < 2_000_000_000 <= min(second)
    assert await tables(sql) == {"task_from_0", *(f"task_from_2000000000_{n}" for n in range(4))}
    options = "select distinct reloptions from pg_class where relname ~ '^task_from_' and relkind = 'r'"
    assert len(await sql.fetch(options)) == 1
    assert (await divide(database_url, 3))[-1].startswith(
        "new tasks go to 3 tables; older ones are in task_from_0, task_from_2"
    )
    third = await add(store, 100)
    assert min(third) == 4_000_000_000
    assert (await divide(database_url, 1))[-1].startswith("new tasks go to 1 tables")
    last = await add(store, 5)
    assert await settle_all(store) == [*first, *second, *third, *last]  # in their order, over all tables
    assert (await divide(database_url, 1))[-1] == "tasks are in one table"
    assert await sql.fetchrow(rights) == granted
    assert await asyncio.to_thread(inventory, database_url) == before
    await add(store, 5)
    assert len(await settle_all(store)) == 5


async def test_a_task_of_a_range_that_was_dropped_starts_again(database_url: str, store: Store, sql: Any) -> None:
    (old,) = await add(store, 1)
    await divide(database_url, 2)
    async with store.transaction() as session:
        assert await settle.cancel(session, [old]) == {old}
    assert (await divide(database_url, 2))[-1] == "tasks are in 2 partitions"
    async with store.transaction() as session:
        assert await reschedule.restart(session, [old]) == {old: State.SCHEDULED}
    await add(store, 10)
    assert await tables(sql) == {"task_from_2000000000_0", "task_from_2000000000_1"}
    assert len(await settle_all(store)) == 11


class Ended(Exception):
    """The process that divides the table ends here."""


@pytest.mark.parametrize("step", range(1, 5))
async def test_a_run_that_was_ended_is_begun_anew_or_taken_back(
    database_url: str, store: Store, sql: Any, settings: Settings, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    before = await asyncio.to_thread(inventory, database_url)
    begun: list[str] = []
    run = dividing._Division._step

    async def ended(self: Any, text: str, *plans: Any, **options: Any) -> bool:
        done = await run(self, text, *plans, **options)
        begun.append(text)
        if len(begun) == step:
            raise Ended
        return done

    async def complaints() -> list[str]:
        report = Report()
        await examine(settings, report)
        return [f.level for f in report.findings if f.what == "partitions"]

    await add(store, 5)
    with monkeypatch.context() as patched:
        patched.setattr(dividing._Division, "_step", ended)
        with pytest.raises(Ended):
            await divide(database_url, 4)
    assert await complaints() == (["ok"] if step == 4 else ["warning"])
    await add(store, 5)
    if step < 4:
        await divide(database_url, 1)
        assert await asyncio.to_thread(inventory, database_url) == before
    await divide(database_url, 4)
    await add(store, 50)
    assert len(await tables(sql)) == 5
    assert len(await settle_all(store)) == 60
    assert await complaints() == ["ok"]


async def test_what_does_not_fit_is_refused_and_nothing_is_changed(
    database_url: str, postgres: EmbeddedPostgres, sql: Any
) -> None:
    before = await asyncio.to_thread(inventory, database_url)
    with pytest.raises(
        Refused, match="max_locks_per_transaction is 64, and a statement over 16 partitions may take 192 locks"
    ):
        await divide(database_url, 16)
    await sql.execute("create view public.report as select id from penstock.task")
    await sql.execute("create publication changes for table penstock.task")
    with pytest.raises(
        Refused, match=r"these depend on the table that is replaced: publication of table .*; rule _RETURN on view"
    ):
        await divide(database_url, 4)
    await sql.execute("drop view public.report")
    await sql.execute("drop publication changes")
    await sql.execute("create role partition_clerk login password 'x'")
    try:
        await sql.execute("grant usage on schema penstock to partition_clerk")
        await sql.execute("grant select on all sequences in schema penstock to partition_clerk")
        parts = urlsplit(database_url)
        url = parts._replace(netloc=f"partition_clerk:x@{parts.netloc.rpartition('@')[2]}").geturl()
        with pytest.raises(
            Refused, match="the role partition_clerk has not the rights of penstock, which owns the table"
        ):
            await divide(url, 4)
    finally:
        await sql.execute("drop owned by partition_clerk")
        await sql.execute("drop role partition_clerk")
    assert await asyncio.to_thread(inventory, database_url) == before


async def test_it_gives_way_to_a_transaction_that_holds_the_table(
    database_url: str, store: Store, sql: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dividing, "_PAUSE_SECONDS", 0.05)
    async with sql.transaction():
        await sql.fetch("select from penstock.task")
        with pytest.raises(Unavailable, match="other transactions kept the table locked over 2 tries"):
            await divide(database_url, 4, tries=2)
        assert len(await add(store, 3)) == 3
    await divide(database_url, 4)
    assert len(await settle_all(store)) == 3


@pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")
async def test_it_works_through_a_pooler_in_transaction_mode(database_url: str, pgbouncer: int, store: Store) -> None:
    await add(store, 3)
    said = await divide(through(database_url, pgbouncer), 4)
    assert said[-1].startswith("new tasks go to 4 tables")
    assert len(await settle_all(store)) == 3


@pytest.mark.parametrize("schema", ["orders", "penstock_staging"])
async def test_another_schema_is_divided(empty_database_url: str, schema: str) -> None:
    await asyncio.to_thread(upgrade, empty_database_url, schema=schema)
    owner = await asyncpg.connect(empty_database_url)
    store = Store(empty_database_url, schema=schema)
    await owner.execute(f"create role penstock_reader; grant select on {schema}.task to penstock_reader")
    try:
        assert (await divide(empty_database_url, 4, schema=schema))[-1] == "tasks are in 4 partitions"
        await add(store, 20)
        assert len(await settle_all(store)) == 20
        assert await owner.fetchval(f"select has_table_privilege('penstock_reader', '{schema}.task', 'select')")
    finally:
        await store.close()
        await owner.execute("drop owned by penstock_reader; drop role penstock_reader")
        await owner.close()


async def test_the_roles_of_processes_need_no_rights_on_partitions(database_url: str, store: Store, sql: Any) -> None:
    await divide(database_url, 4)
    await add(store, 20)
    await sql.execute("create role partition_scheduler")
    try:
        for statement in grants("partition_scheduler", ["scheduler", "resulter"]):
            await sql.execute(statement)
        async with sql.transaction():
            await sql.execute("set local role partition_scheduler")
            rows = await sql.fetch("select id from penstock.task for update")
            assert len(rows) == 20
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                async with sql.transaction():
                    await sql.fetch("select from penstock.task_from_2000000000_0")
    finally:
        await sql.execute("drop owned by partition_scheduler")
        await sql.execute("drop role partition_scheduler")


def test_later_migrations_change_a_divided_table(empty_database_url: str) -> None:
    upgrade(empty_database_url, "initial")
    asyncio.run(divide(empty_database_url, 4))
    upgrade(empty_database_url)
    with psycopg.connect(empty_database_url) as connection:
        found = connection.execute(
            "select count(*) from pg_attribute where attname = 'journal' and attrelid in"
            " (select relid from pg_partition_tree('penstock.task'))"
        ).fetchone()
    assert found == (6,)
