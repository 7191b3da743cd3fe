"""Beside a publication for all tables, as a logical replica or a blue/green upgrade makes one, everything goes on."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from penstock.cli.doctor.checks import examine
from penstock.cli.doctor.findings import Report
from penstock.db.pool import Store
from penstock.protocol.task import Failure, NewTask, State
from penstock.settings.model import Settings
from penstock.supervisor.retention import Retention
from penstock.tasks import claim, enqueue, reschedule, settle

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
