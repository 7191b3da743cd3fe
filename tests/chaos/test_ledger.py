"""A ledger that never complains proves nothing: each kind of wrong must show."""

from __future__ import annotations

from pathlib import Path

import asyncpg
import pytest

from penstock.db.pool import Store
from penstock.protocol.task import NewTask
from penstock.tasks import claim as claims
from penstock.tasks import enqueue, settle
from tests.chaos.ledger import Accepted, Fault, Ledger, Row, recovery_seconds


async def _settled(store: Store, *, told: int | None = None) -> tuple[int, int]:
    """One task that was enqueued, claimed and finished; ``told``: the claim that its result speaks of."""
    async with store.transaction() as session:
        (entry,) = await enqueue.enqueue(session, [NewTask(action="work", payload="{}", unique_key="k")])
        batch = await claims.claim(session, 1)
        assert batch is not None
        claim = batch.tasks[0].claim
        await settle.finish(session, {(entry.id, claim): f'{{"claim": {told or claim}}}'})
    return entry.id, claim


@pytest.fixture
async def store(database_url: str) -> Store:
    return Store(database_url, pool_size=2)


async def _row(ledger: Ledger, database_url: str, *, may_repeat: bool = False) -> Row:
    row = Row("test")
    connection = await asyncpg.connect(database_url)
    try:
        await ledger.check(connection, row, may_repeat=may_repeat)
    finally:
        await connection.close()
    return row


def _note(ledger: Ledger, *runs: tuple[int, int]) -> None:
    lines = "".join(f"{task_id} {claim} 1 {1000 + n}\n" for n, (task_id, claim) in enumerate(runs))
    (ledger.folder / "runs-1").write_text(lines)


async def test_a_task_that_ran_and_settled_once_is_good(store: Store, database_url: str, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    task_id, claim = await _settled(store)
    await store.close()
    ledger.accepted += [Accepted(task_id, "k", 0, 0), Accepted(None, "k", 0, 0)]
    _note(ledger, (task_id, claim))
    row = await _row(ledger, database_url)
    assert (row.accepted, row.settled, row.problems) == (2, 2, [])


async def test_what_was_accepted_and_is_nowhere_is_lost(store: Store, database_url: str, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    async with store.session() as session:
        (live,) = await enqueue.enqueue(session, [NewTask(action="work", payload="{}")])
    await store.close()
    ledger.accepted += [Accepted(live.id + 7, None, 0, 0), Accepted(None, "no such key", 0, 0)]
    ledger.accepted.append(Accepted(live.id, None, 0, 0))
    row = await _row(ledger, database_url)
    assert (row.lost, row.settled) == (3, 0)
    assert "lost: 3" in row.problems


async def test_a_task_in_two_places_is_recorded_twice(store: Store, database_url: str, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    task_id, claim = await _settled(store)
    await store.close()
    ledger.accepted.append(Accepted(task_id, "k", 0, 0))
    _note(ledger, (task_id, claim))
    connection = await asyncpg.connect(database_url)
    await connection.execute(
        "insert into penstock.task (id, state, action, payload, priority, run_at, attempts, max_attempts, claim, "
        "created_at, updated_at, unique_key) select id + more, 'SCHEDULED', action, payload, priority, run_at, 0, "
        "max_attempts, claim, created_at, updated_at, unique_key "
        "from penstock.task_history, unnest(array[0, 1]) more"
    )
    await connection.close()
    row = await _row(ledger, database_url)
    assert row.twice == 2  # live and settled; two tasks for one key
    assert not row.is_good


async def test_a_result_of_another_claim_or_of_no_run_is_wrong(store: Store, database_url: str, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    task_id, claim = await _settled(store, told=4711)
    await store.close()
    ledger.accepted.append(Accepted(task_id, "k", 0, 0))
    _note(ledger, (task_id, claim))
    assert (await _row(ledger, database_url)).wrong == 1
    _note(ledger)
    assert (await _row(ledger, database_url)).wrong == 1


async def test_a_second_run_is_a_problem_only_where_none_may_be(
    store: Store, database_url: str, tmp_path: Path
) -> None:
    ledger = Ledger(tmp_path)
    task_id, claim = await _settled(store)
    await store.close()
    ledger.accepted.append(Accepted(task_id, "k", 0, 0))
    _note(ledger, (task_id, claim), (task_id, claim))
    assert (await _row(ledger, database_url, may_repeat=True)).problems == []
    row = await _row(ledger, database_url)
    assert (row.repeated, row.is_good) == (1, False)


async def test_a_run_before_the_delay_is_over_is_early(store: Store, database_url: str, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    task_id, claim = await _settled(store)
    await store.close()
    ledger.accepted.append(Accepted(task_id, "k", 999.5, 1.0))
    _note(ledger, (task_id, claim))  # at 1000
    assert (await _row(ledger, database_url)).early == 1


def test_recovery_is_when_the_old_rate_has_come_back_for_seconds() -> None:
    steady = [n / 100 for n in range(1000, 3000)]  # 100 a second, from 10 s to 30 s
    assert recovery_seconds(steady, 12, 100, now=20) == 0
    gap = [at for at in steady if not 12 <= at < 16]
    found = recovery_seconds(gap, 12, 100, now=25)
    assert found is not None
    assert 3.5 < found <= 4
    assert recovery_seconds(gap, 12, 100, now=17) is None


def test_a_killed_process_that_is_not_made_good_within_the_bar_is_a_problem() -> None:
    assert Fault("kill", 0, 0, 10.0, 10.5).is_too_slow
    assert Fault("kill", 0, 0, 10.0, None).is_too_slow
    assert not Fault("kill", 0, 0, 10.0, 3.0).is_too_slow
    assert not Fault("outage", 0, 0, None, None).is_too_slow
