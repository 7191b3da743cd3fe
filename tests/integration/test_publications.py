"""Beside a publication for all tables, as a logical replica or a blue/green upgrade makes one, everything goes on."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import asyncpg

from penstock.cli.doctor.checks import examine
from penstock.cli.doctor.findings import Report
from penstock.db import migrate
from penstock.db.pool import Store
from penstock.protocol.task import Failure, NewTask, State
from penstock.settings.model import Settings
from penstock.supervisor.retention import Retention
from penstock.tasks import claim, enqueue, reschedule, settle
from tests import postgres_versions
from tests.docs_blocks import all_blocks

BLOCKS = {block.info: block.text for block in all_blocks() if block.page == "docs/postgres.md"}

_WITHOUT_IDENTITY = """
select c.relname from pg_class c
where c.relnamespace = 'penstock'::regnamespace and c.relkind = 'r' and c.relreplident <> 'f'
  and not exists (select from pg_index i where i.indrelid = c.oid and i.indisprimary)
"""


async def test_records_are_changed_removed_and_counted_beside_a_publication_for_all_tables(
    store: Store, settings: Settings, sql: Any
) -> None:
    ahead = f"task_success_{datetime.now(UTC) + timedelta(days=3):%Y%m%d}"
    await sql.execute(f"drop table if exists penstock.{ahead}")
    async with store.transaction() as session:
        await enqueue.enqueue(session, [NewTask("a"), NewTask("b"), NewTask("c")])
        batch = await claim.claim(session, 3)
        assert batch is not None
        a, b, c = batch.tasks
        await settle.fail(session, [Failure(a.id, a.claim, '{"code":1,"message":"x"}', None)])
        await settle.finish(session, {(b.id, b.claim): "1", (c.id, c.claim): "1"})
    await sql.execute("update penstock.tally set at = at - interval '2 hours'")
    await sql.execute("create publication everything for all tables")
    async with store.transaction() as session:
        assert await reschedule.restart(session, [a.id]) == {a.id: State.SCHEDULED}
        assert len(await session.fetch("delete_settled_tasks", [b.id])) == 1
    await sql.execute("update penstock.task_history set finished_at = now() - interval '2 days' where id = $1", c.id)
    kept = settings.model_copy(update={"retention_success_seconds": 86400.0})
    assert await Retention(store=store, settings=kept).run_once() == 1
    assert await sql.fetchval("select to_regclass('penstock.' || $1)", ahead) is not None
    assert await sql.fetch(_WITHOUT_IDENTITY) == []


async def test_a_published_table_whose_changes_would_be_refused_is_found(settings: Settings, sql: Any) -> None:
    async def complaints() -> list[tuple[str, str]]:
        report = Report()
        await examine(settings, report)
        return [(f.level, f.seen) for f in report.findings if f.what == "publications"]

    await sql.execute("alter table penstock.tally replica identity default")
    assert await complaints() == []
    await sql.execute("create publication counts for table penstock.tally")
    ((level, seen),) = await complaints()
    assert level == "error"
    assert "tally" in seen
    await sql.execute("alter table penstock.tally replica identity full")
    assert await complaints() == []


async def test_a_server_that_follows_by_logical_replication_takes_over(data_path: Path) -> None:
    server = postgres_versions.server(data_path, options={"wal_level": "logical", "fsync": "off"})
    await asyncio.to_thread(server.start)
    try:
        old_url, new_url = server.dsn("old"), server.dsn("new")
        for url in (old_url, new_url):
            server.create_database(url.rpartition("/")[2])
            await asyncio.to_thread(migrate.upgrade, url)
        old, new = await asyncpg.connect(old_url), await asyncpg.connect(new_url)
        await old.execute(BLOCKS["sql publisher"])
        await new.execute(BLOCKS["sql subscriber"])
        # The partition of a day that the old server has made since.
        await new.execute(f"drop table penstock.task_success_{datetime.now(UTC):%Y%m%d}")
        # Both are databases of one server here, where the subscription cannot make its slot.
        await old.execute("select pg_create_logical_replication_slot('move', 'pgoutput')")
        await new.execute(
            f"create subscription move connection '{old_url}' publication penstock_move "
            "with (create_slot = false, slot_name = 'move')"
        )
        async with Store(old_url) as store, store.transaction() as session:
            await enqueue.enqueue(session, [NewTask("a"), NewTask("b"), NewTask("c")])
            batch = await claim.claim(session, 2)
            assert batch is not None
            a, b = batch.tasks
            await settle.finish(session, {(b.id, b.claim): "1"})
            await settle.fail(session, [Failure(a.id, a.claim, '{"code":1,"message":"x"}', None)])
        async with Store(old_url) as store, store.transaction() as session:
            await reschedule.restart(session, [a.id])  # deletes a record of the history
        await asyncio.wait_for(_caught_up(old, new), 60)
        await new.execute("alter subscription move disable; alter subscription move set (slot_name = none)")
        await new.execute("drop subscription move")
        for (statement,) in await old.fetch(BLOCKS["sql sequences"]):
            await new.execute(statement)
        await new.execute("alter table penstock.task_history drop constraint task_history_pkey")
        async with Store(new_url) as store, store.transaction() as session:
            (added,) = await enqueue.enqueue(session, [NewTask("d")])
            batch = await claim.claim(session, 10)
            assert batch is not None
            assert {task.id for task in batch.tasks} == {a.id, b.id + 1, added.id}
            assert min(task.claim for task in batch.tasks) > b.claim
        assert await new.fetch("select id, state::text from penstock.task_history") == [(b.id, "SUCCESS")]
        await old.close()
        await new.close()
    finally:
        await asyncio.to_thread(server.stop)


async def _caught_up(old: Any, new: Any) -> None:
    while await new.fetchval("select exists (select from pg_subscription_rel where srsubstate <> 'r')"):
        await asyncio.sleep(0.2)
    upto = await old.fetchval("select pg_current_wal_lsn()")
    while not await old.fetchval(
        "select confirmed_flush_lsn >= $1 from pg_replication_slots where slot_name = 'move'", upto
    ):
        await asyncio.sleep(0.2)
