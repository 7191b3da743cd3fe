"""What docs/postgres.md says of a restore."""

from __future__ import annotations

from collections.abc import Iterator

import asyncpg
import pytest

from penstock.db.pool import Store
from penstock.local.postgres import EmbeddedPostgres
from penstock.protocol.reports import Succeeded
from penstock.protocol.task import NewTask
from penstock.settings.model import Settings
from penstock.tasks import enqueue
from tests.docs_blocks import ROOT, blocks_in
from tests.integration.lives import Lives
from tests.postgres_versions import COPY_FILES

_PAGE = "docs/postgres.md"
(ADVANCE,) = (
    block.text for block in blocks_in(_PAGE, (ROOT / _PAGE).read_text("utf-8")) if block.info == "sql restore"
)


@pytest.fixture
def restored_url(postgres: EmbeddedPostgres) -> Iterator[str]:
    yield postgres.dsn("restored")
    postgres.drop_database("restored")


async def add(store: Store, count: int) -> list[int]:
    async with store.transaction() as session:
        return [answer.id for answer in await enqueue.enqueue(session, [NewTask("a")] * count)]


@pytest.mark.parametrize("is_advanced", [True, False])
async def test_after_a_restore_results_of_later_claims_are_ignored_once_the_sequences_are_advanced(
    database_url: str, restored_url: str, postgres: EmbeddedPostgres, settings: Settings, is_advanced: bool
) -> None:
    earlier, later = Store(database_url), Store(restored_url)
    before, after = Lives(earlier, settings), Lives(later, settings)
    try:
        claimed_before, unclaimed = await add(earlier, 2)
        (kept,) = await before.claim(1)
        assert kept.id == claimed_before
        await earlier.close()
        name = database_url.rpartition("/")[2]
        postgres.execute(f"create database restored template {name} {COPY_FILES}")  # the backup

        await add(earlier, 1)
        lost = await before.claim()
        results = [Succeeded(task.id, task.claim, None, '"sent before the restore"') for task in (kept, *lost)]
        assert [task.id for task in lost] == [unclaimed, unclaimed + 1]

        if is_advanced:
            connection = await asyncpg.connect(restored_url)
            await connection.execute(ADVANCE)
            await connection.close()
        await add(later, 1)
        again = {(task.id, task.claim) for task in await after.claim()}
        await after.report(*results)
        async with later.session() as session:
            ids = [kept.id, *(id_ for id_, _ in again)]
            states = {row["id"]: row["state"] for row in await session.fetch("read_tasks", ids)}
        assert states.pop(kept.id) == "SUCCESS"
        assert len(states) == 2
        # Without it, the same claims were given to the same ids, of which one is another task.
        assert set(states.values()) == ({"ACQUIRED"} if is_advanced else {"SUCCESS"})
    finally:
        await earlier.close()
        await later.close()
