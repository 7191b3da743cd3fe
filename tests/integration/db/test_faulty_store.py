"""The faulty store: what is refused leaves nothing, what loses its reply stays."""

from __future__ import annotations

import pytest

from penstock.db.pool import Store
from penstock.protocol.errors import Unavailable
from penstock.protocol.task import NewTask
from penstock.runtime.chaos import Edge, Faults
from penstock.tasks import claim, enqueue

TASK = NewTask(action="work", payload="{}")


async def _count(database_url: str) -> int:
    store = Store(database_url)
    async with store.session() as session:
        found = await claim.claim(session, 100)
    await store.close()
    return len(found.tasks) if found else 0


def _store(database_url: str, edge: Edge) -> Store:
    return Store(database_url, faults=Faults("api", {edge: 1}))


@pytest.mark.parametrize(("edge", "stored"), [("postgres", 0), ("commit", 1)])
async def test_a_transaction_is_refused_whole_or_loses_its_reply_after_the_commit(
    database_url: str, edge: Edge, stored: int
) -> None:
    store = _store(database_url, edge)
    with pytest.raises(Unavailable, match=f"PENSTOCK_CHAOS_{edge.upper()}"):
        async with store.transaction() as session:
            await enqueue.enqueue(session, [TASK])
    await store.close()
    assert await _count(database_url) == stored


@pytest.mark.parametrize(("edge", "stored"), [("postgres", 0), ("commit", 1)])
async def test_so_does_a_statement_that_commits_by_itself(database_url: str, edge: Edge, stored: int) -> None:
    store = _store(database_url, edge)
    with pytest.raises(Unavailable, match=f"PENSTOCK_CHAOS_{edge.upper()}"):
        async with store.session() as session:
            await enqueue.enqueue(session, [TASK])
    await store.close()
    assert await _count(database_url) == stored
