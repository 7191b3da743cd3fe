from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest

from penstock.db.notify import Notifier
from penstock.db.pool import Store
from penstock.protocol.errors import Refused, Unavailable
from penstock.protocol.task import BEGINNING, Failure, NewTask, Position, State, Stretch
from penstock.tasks import claim as claims
from penstock.tasks import enqueue as enqueuing
from penstock.tasks import reschedule, settle
from penstock.tasks.claim import ClaimBatch
from penstock.tasks.ordering import Promotions

ERROR = json.dumps({"code": -32000, "message": "boom"})
TaskOf = Callable[[int], Any]


async def enqueue(store: Store, *tasks: NewTask) -> list[int]:
    async with store.transaction() as session:
        return [answer.id for answer in await enqueuing.enqueue(session, tasks)]


async def claim(store: Store, limit: int = 100, *, now: datetime | None = None) -> ClaimBatch:
    async with store.session() as session:
        batch = await claims.claim(session, limit, now=now)
    assert batch is not None
    return batch


async def finish(store: Store, batch: ClaimBatch, result: str = '{"ok":true}') -> int:
    async with store.transaction() as session:
        return await settle.finish(session, {(task.id, task.claim): result for task in batch.tasks})


async def fail(store: Store, batch: ClaimBatch, delay: float | None) -> int:
    async with store.transaction() as session:
        return len(await settle.fail(session, [Failure(task.id, task.claim, ERROR, delay) for task in batch.tasks]))


async def test_answers_of_a_batch_stand_in_the_order_of_its_tasks(store: Store, task_of: TaskOf) -> None:
    ids = await enqueue(store, *(NewTask("count", json.dumps({"n": n})) for n in range(200)))
    assert ids == sorted(ids)
    for n in (0, 57, 199):
        assert json.loads((await task_of(ids[n]))["payload"]) == {"n": n}


async def test_answers_of_a_batch_with_keys_stand_in_the_order_of_its_tasks(store: Store, task_of: TaskOf) -> None:
    tasks = [NewTask("a", json.dumps({"n": n}), unique_key=f"k{n % 7}" if n % 2 else None) for n in range(30)]
    async with store.transaction() as session:
        answers = await enqueuing.enqueue(session, tasks)
    first: dict[str, int] = {}
    for n, (task, answer) in enumerate(zip(tasks, answers, strict=True)):
        if task.unique_key is None:
            assert not answer.duplicate
            assert json.loads((await task_of(answer.id))["payload"]) == {"n": n}
        else:
            assert answer.duplicate == (task.unique_key in first)
            assert first.setdefault(task.unique_key, answer.id) == answer.id


async def test_a_duplicate_gets_the_first_tasks_id_and_state_while_it_is_kept(store: Store) -> None:
    task = NewTask("export", unique_key="23")
    (first,) = await enqueue(store, task)
    await finish(store, await claim(store))
    async with store.transaction() as session:
        (again,) = await enqueuing.enqueue(session, [task])
        (other,) = await enqueuing.enqueue(session, [NewTask("import", unique_key="23")])
    assert (again.id, again.state, again.duplicate) == (first, State.SUCCESS, True)
    assert not other.duplicate


async def test_concurrent_enqueues_of_one_unique_key_make_one_task(store: Store) -> None:
    tasks = [NewTask("export", unique_key=str(n)) for n in range(20)]
    answers = await asyncio.gather(*(enqueue(store, *(tasks if n % 2 else tasks[::-1])) for n in range(8)))
    assert {frozenset(ids) for ids in answers} == {frozenset(answers[0])}
    async with store.session() as session:
        rows = await session.fetch("count_live")
    assert [(row["action"], row["state"], row["count"]) for row in rows] == [("export", "SCHEDULED", 20)]


async def test_claim_takes_by_priority_then_run_at_then_id(store: Store) -> None:
    early, late = datetime(2020, 1, 1, tzinfo=UTC), datetime(2021, 1, 1, tzinfo=UTC)
    ids = await enqueue(
        store,
        NewTask("a", run_at=late),
        NewTask("a", run_at=early),
        NewTask("a", run_at=early),
        NewTask("a", run_at=late, priority=5),
        NewTask("a", run_at=early, priority=-5),
    )
    batch = await claim(store)
    assert [task.id for task in batch.tasks] == [ids[3], ids[1], ids[2], ids[0], ids[4]]


async def test_a_task_is_not_claimed_before_its_time(store: Store) -> None:
    await enqueue(store, NewTask("a", delay_seconds=3600))
    async with store.session() as session:
        assert await claims.claim(session, 10) is None
    assert len((await claim(store, now=datetime.now(UTC) + timedelta(seconds=3700))).tasks) == 1


async def claim_in(store: Store, limit: int, stretches: Sequence[Stretch]) -> ClaimBatch | None:
    async with store.session() as session:
        return await claims.claim(session, limit, stretches=stretches)


async def test_a_claim_tells_how_far_it_came_in_each_priority(store: Store) -> None:
    past = [datetime(2020, 1, day, tzinfo=UTC) for day in (1, 2, 3)]
    ids = await enqueue(store, *(NewTask("a", run_at=at, priority=level) for level in (0, 7) for at in past))
    first = await claim(store, 4)
    assert first.reached == {7: Position(past[2], ids[5]), 0: Position(past[0], ids[0])}
    assert {task.claim for task in first.tasks} == {first.id}
    second = await claim(store, 4)
    assert second.id > first.id
    assert second.reached == {0: Position(past[2], ids[2])}


async def test_a_claim_of_a_stretch_takes_only_what_stands_behind_its_position(store: Store) -> None:
    at = datetime(2020, 1, 1, tzinfo=UTC)
    ids = await enqueue(store, *(NewTask("a", run_at=at + timedelta(seconds=n // 2)) for n in range(6)))
    other = await enqueue(store, NewTask("a", priority=1, run_at=at), NewTask("a", priority=-1, run_at=at))
    behind_third = Stretch(0, 0, Position(at + timedelta(seconds=1), ids[2]))
    batch = await claim_in(store, 10, [behind_third])
    assert batch is not None
    assert [task.id for task in batch.tasks] == ids[3:]
    assert await claim_in(store, 10, [behind_third]) is None
    rest = await claim_in(store, 3, [Stretch(1, 9, BEGINNING), Stretch(0, 0, BEGINNING), Stretch(-9, -1, BEGINNING)])
    assert rest is not None
    assert [task.id for task in rest.tasks] == [other[0], *ids[:2]]
    assert [task.id for task in (await claim(store)).tasks] == [ids[2], other[1]]


async def test_a_limit_holds_over_all_stretches_together(store: Store) -> None:
    await enqueue(store, *(NewTask("a", priority=level) for level in range(4) for _ in range(3)))
    batch = await claim_in(store, 4, [Stretch(level, level, BEGINNING) for level in (3, 2, 1, 0)])
    assert batch is not None
    assert len(batch.tasks) == 4
    async with store.session() as session:
        assert (await claims.count_in_flight(session, 100)).tasks == 4


async def test_a_claim_never_gives_a_task_a_smaller_token_than_it_had(store: Store, sql: Any, task_of: TaskOf) -> None:
    """Between a claim's token and its lock on the task, another one may have taken it and given it back."""
    overtaken, other = await enqueue(store, NewTask("a"), NewTask("a"))
    await sql.execute("update penstock.task set claim = nextval('penstock.claim_seq') + 1 where id = $1", overtaken)
    first = await claim(store)
    assert [task.id for task in first.tasks] == [other]
    assert (await task_of(overtaken))["state"] == "SCHEDULED"
    second = await claim(store)
    assert [task.id for task in second.tasks] == [overtaken]


async def test_priorities_in_use_are_those_of_tasks_that_run_now_or_later(store: Store) -> None:
    await enqueue(store, NewTask("a", priority=5), NewTask("a", priority=5), NewTask("a", priority=-32768))
    await enqueue(store, NewTask("a", priority=32767, delay_seconds=3600), NewTask("a", priority=0, ordering_key="k"))
    await enqueue(store, NewTask("a", priority=3, ordering_key="k"))  # it waits
    async with store.session() as session:
        assert await claims.read_priorities(session, 16) == [32767, 5, 0, -32768]
        assert await claims.read_priorities(session, 2) == [32767, 5]
        await claims.claim(session, 100)
        assert await claims.read_priorities(session, 16) == [32767]


async def test_concurrent_claims_never_share_a_task(store: Store) -> None:
    ids = await enqueue(store, *(NewTask("a") for _ in range(500)))
    batches = await asyncio.gather(*(claim(store, 50) for _ in range(10)))
    claimed = [task.id for batch in batches for task in batch.tasks]
    assert sorted(claimed) == ids


async def test_finish_moves_the_task_with_its_result_to_the_history(store: Store, task_of: TaskOf) -> None:
    (task_id,) = await enqueue(store, NewTask("a", '{"n": 123456789012345678901234567890}'))
    assert await finish(store, await claim(store), '{"n":1e400}') == 1
    row = await task_of(task_id)
    assert (row["state"], row["result"], row["attempts"]) == ("SUCCESS", '{"n":1e400}', 1)
    assert row["payload"] == '{"n": 123456789012345678901234567890}'


async def test_a_result_of_an_older_claim_is_ignored(store: Store, task_of: TaskOf) -> None:
    (task_id,) = await enqueue(store, NewTask("a"))
    old = await claim(store)
    async with store.session() as session:
        assert await claims.release(session, [(task.id, task.claim) for task in old.tasks]) == 1
    new = await claim(store)
    assert new.tasks[0].claim > old.tasks[0].claim
    assert await finish(store, old) == 0
    assert (await task_of(task_id))["state"] == "ACQUIRED"
    assert await finish(store, new) == 1


async def test_a_stale_claim_beside_a_valid_one_settles_only_the_valid_ones_task(store: Store, task_of: TaskOf) -> None:
    first, second = await enqueue(store, NewTask("a"), NewTask("a"))
    old = await claim(store)
    async with store.session() as session:
        await claims.release(session, [(task.id, task.claim) for task in old.tasks])
    new = {task.id: task.claim for task in (await claim(store)).tasks}
    stale = {task.id: task.claim for task in old.tasks}
    async with store.transaction() as session:
        done = await settle.finish(session, {(first, new[first]): "1", (second, stale[second]): "2"})
    assert done == 1
    assert (await task_of(first))["state"] == "SUCCESS"
    assert (await task_of(second))["state"] == "ACQUIRED"


async def test_release_gives_the_attempt_back_and_the_state_it_came_from(store: Store, task_of: TaskOf) -> None:
    (task_id,) = await enqueue(store, NewTask("a"))
    first = await claim(store)
    async with store.session() as session:
        await claims.release(session, [(task.id, task.claim) for task in first.tasks])
    row = await task_of(task_id)
    assert (row["state"], row["attempts"]) == ("SCHEDULED", 0)
    await fail(store, await claim(store), 0.0)
    second = await claim(store)
    async with store.session() as session:
        await claims.release(session, [(task.id, task.claim) for task in second.tasks])
    row = await task_of(task_id)
    assert (row["state"], row["attempts"]) == ("ERROR", 1)


@pytest.mark.parametrize("how", ["sparing", "failure"])
async def test_a_suspect_is_claimed_as_one_until_it_begins_a_new_life(store: Store, how: str) -> None:
    suspect, other = await enqueue(store, NewTask("a"), NewTask("a"))
    first = await claim(store)
    assert [task.suspect for task in first.tasks] == [False, False]
    async with store.transaction() as session:
        for task in first.tasks:
            if how == "sparing" and task.id == suspect:
                await settle.refund(session, [Failure(task.id, task.claim, ERROR, None)])
            else:
                await settle.fail(session, [Failure(task.id, task.claim, ERROR, 0.0, suspect=task.id == suspect)])
    for _ in range(2):  # a release of another cause does not clear it
        again = await claim(store)
        assert {task.id: task.suspect for task in again.tasks} == {suspect: True, other: False}
        async with store.session() as session:
            await claims.release(session, ((task.id, task.claim) for task in again.tasks))
    async with store.transaction() as session:
        await settle.cancel(session, [suspect])
        await reschedule.restart(session, [suspect])
    assert not any(task.suspect for task in (await claim(store)).tasks)


async def test_failures_are_kept_one_by_one_and_the_last_is_the_error(store: Store, task_of: TaskOf) -> None:
    (task_id,) = await enqueue(store, NewTask("a", max_attempts=2))
    assert await fail(store, await claim(store), 0.0) == 1
    row = await task_of(task_id)
    assert (row["state"], json.loads(row["error"])["message"]) == ("ERROR", "boom")
    assert await fail(store, await claim(store), None) == 1
    row = await task_of(task_id)
    assert (row["state"], row["attempts"]) == ("CRITICAL_ERROR", 2)
    assert [entry["attempt"] for entry in json.loads(row["failures"])] == [1, 2]


async def test_restart_begins_a_new_life_that_late_results_cannot_reach(store: Store, task_of: TaskOf) -> None:
    (task_id,) = await enqueue(store, NewTask("a", max_attempts=1))
    old = await claim(store)
    await fail(store, old, None)
    async with store.transaction() as session:
        assert await reschedule.restart(session, [task_id]) == {task_id: State.SCHEDULED}
        assert await reschedule.restart(session, [task_id]) == {}
    row = await task_of(task_id)
    assert (row["state"], row["attempts"]) == ("SCHEDULED", 0)
    new = await claim(store)
    assert new.tasks[0].claim > old.tasks[0].claim
    assert await finish(store, old) == 0
    assert await finish(store, new) == 1


@pytest.mark.parametrize("state", ["SCHEDULED", "ACQUIRED", "ERROR"])
async def test_cancel_takes_a_task_from_any_live_state(store: Store, task_of: TaskOf, state: str) -> None:
    (task_id,) = await enqueue(store, NewTask("a"))
    batch = await claim(store) if state != "SCHEDULED" else None
    if state == "ERROR" and batch:
        await fail(store, batch, 60.0)
    async with store.transaction() as session:
        assert await settle.cancel(session, [task_id]) == {task_id}
        assert await settle.cancel(session, [task_id]) == set()
    assert (await task_of(task_id))["state"] == "CANCELLED"
    if batch:
        assert await finish(store, batch) == 0


async def test_an_ordering_key_lets_one_task_go_at_a_time_in_order(store: Store, task_of: TaskOf) -> None:
    ids = await enqueue(store, *(NewTask("a", ordering_key="k", priority=n) for n in range(3)), NewTask("free"))
    for n, expected in enumerate(ids[:3]):
        batch = await claim(store)
        assert expected in [task.id for task in batch.tasks]
        assert not {task.id for task in batch.tasks} & set(ids[:3]) - {expected}
        mine = ClaimBatch(batch.id, [task for task in batch.tasks if task.id == expected], {})
        if n == 1:
            await fail(store, mine, 0.0)  # a task in retry holds its successors back
            assert (await task_of(ids[2]))["state"] == "WAITING"
            mine = await claim(store)
            assert [task.id for task in mine.tasks] == [expected]
        await finish(store, mine)
    async with store.session() as session:
        assert await claims.claim(session, 10) is None


async def test_cancelling_the_head_of_a_key_lets_its_successor_go(store: Store, task_of: TaskOf) -> None:
    first, second, third = await enqueue(store, *(NewTask("a", ordering_key="k") for _ in range(3)))
    async with store.transaction() as session:
        await settle.cancel(session, [second])
    assert (await task_of(third))["state"] == "WAITING"
    async with store.transaction() as session:
        await settle.cancel(session, [first])
    assert (await task_of(third))["state"] == "SCHEDULED"
    async with store.transaction() as session:
        assert await reschedule.restart(session, [first]) == {first: State.WAITING}


async def test_enqueueing_while_the_last_of_a_key_settles_never_strands_the_newcomer(store: Store) -> None:
    for round_number in range(15):
        key = f"k{round_number}"
        await enqueue(store, NewTask("a", ordering_key=key))
        batch = await claim(store)
        await asyncio.gather(finish(store, batch), *(enqueue(store, NewTask("a", ordering_key=key)) for _ in range(3)))
        # A key that an enqueue held when its task settled is noted, and looked at by the resulter's side task.
        await Promotions(store=store, notifier=Notifier(store)).end_all()
        for _ in range(3):
            assert await finish(store, await claim(store)) == 1


async def test_an_unconfirmed_dispatch_is_given_back_and_a_confirmed_one_is_not(store: Store, task_of: TaskOf) -> None:
    lost, sent = await enqueue(store, NewTask("a"), NewTask("a"))
    await claim(store, 1)
    second = await claim(store, 1)
    async with store.session() as session:
        await claims.confirm(session, second.id)
        assert await session.fetch("release_unsent", 60, 10, None) == []
        later = datetime.now(UTC) + timedelta(seconds=120)
        assert len(await session.fetch("release_unsent", 60, 10, later)) == 1
    row = await task_of(lost)
    assert (row["state"], row["attempts"]) == ("SCHEDULED", 0)
    assert (await task_of(sent))["state"] == "ACQUIRED"


async def test_a_stale_task_tells_whether_a_worker_ever_took_it(store: Store) -> None:
    quiet, alive = await enqueue(store, NewTask("a"), NewTask("a"))
    batch = await claim(store)
    async with store.transaction() as session:
        beats = {(t.id, t.claim): '{"percent":40.0,"note":null}' for t in batch.tasks if t.id == alive}
        assert await settle.note_heartbeats(session, beats) == 1
        later = datetime.now(UTC) + timedelta(seconds=61)
        stale = await session.fetch("find_stale", 60, 10, later, None, None)
    assert {row["id"]: row["taken"] for row in stale} == {quiet: False, alive: True}


async def test_a_heartbeat_keeps_a_task_from_being_stale(store: Store) -> None:
    await enqueue(store, NewTask("a"))
    batch = await claim(store)
    await asyncio.sleep(0.3)
    async with store.session() as session:
        assert len(await session.fetch("find_stale", 0.2, 10, None, None, None)) == 1
        await settle.note_heartbeats(session, {(task.id, task.claim): None for task in batch.tasks})
        assert await session.fetch("find_stale", 0.2, 10, None, None, None) == []


async def test_a_heartbeat_that_comes_after_a_task_was_chosen_keeps_it_from_being_released(
    store: Store, sql: Any
) -> None:
    await enqueue(store, NewTask("a"))
    batch = await claim(store)
    pairs = [(task.id, task.claim) for task in batch.tasks]
    async with store.session() as session:
        await settle.note_heartbeats(session, dict.fromkeys(pairs))
        assert await claims.release(session, pairs) == 0
        assert await claims.release(session, pairs, silent_seconds=60) == 0
        await sql.execute("update penstock.task set heartbeat_at = now() - interval '61 seconds'")
        assert await claims.release(session, pairs, silent_seconds=60) == 1


async def test_tasks_in_flight_are_counted_by_age_and_up_to_a_limit(store: Store, sql: Any) -> None:
    await enqueue(store, *(NewTask("a") for _ in range(9)))
    batch = await claim(store, 6)
    old = [task.id for task in batch.tasks[:2]]
    await sql.execute("update penstock.task set claimed_at = now() - interval '1 hour' where id = any($1)", old)
    async with store.session() as session:
        everything = await claims.count_in_flight(session, 100)
        assert (everything.tasks, everything.aged) == (6, 2)
        assert (await claims.count_in_flight(session, 3)).tasks == 3
        young = await claims.count_in_flight(session, 100, since=everything.aged_before)
        assert (young.tasks, young.aged) == (4, 0)
        assert everything.aged_before <= young.aged_before


async def test_the_pace_of_an_action_is_what_ended_and_how_long_it_ran(store: Store) -> None:
    await enqueue(store, *(NewTask("a") for _ in range(3)))
    batch = await claim(store)
    mine = [[task] for task in batch.tasks if task.action == "a"]
    await finish(store, ClaimBatch(0, mine[0], {}))
    await fail(store, ClaimBatch(0, mine[1], {}), 60)
    await fail(store, ClaimBatch(0, mine[2], {}), None)
    async with store.transaction() as session:
        await settle.note_run_times(session, {"a": (2, 0.5), "b": (1, 9.0)})
        await settle.note_run_times(session, {"a": (2, 0.5)})
        await settle.note_run_times(session, {})
    async with store.session() as session:
        found = await session.fetch("read_throughput", 60)
        assert {(row["action"], row["ended"], row["timed"], row["seconds"]) for row in found} == {
            ("a", 3, 4, 1.0), ("b", 0, 1, 9.0),
        }  # fmt: skip
        (rates,) = await session.fetch("read_rates")  # run times are no change of state
        assert (rates["succeeded_per_second"], rates["failed_per_second"]) == (0.017, 0.033)
        await session.fetch("compact_tally", 0.0, 0.0, 1000, 500, "other")
        everything = await session.fetch("read_throughput", 1e10)  # sums stand at the epoch
        assert sum(row["seconds"] for row in everything) == 10.0
        await asyncio.sleep(0.05)
        assert await session.fetch("read_throughput", 0.01) == []


async def test_a_unique_key_is_found_under_every_action_though_the_tally_knows_none(store: Store, sql: Any) -> None:
    ids = await enqueue(
        store, *(NewTask(action, unique_key=key) for action in ("c", "a", "b") for key in ("u", "v")), NewTask("d")
    )
    await sql.execute("truncate penstock.tally")
    async with store.session() as session:
        assert {row["id"] for row in await session.fetch("find_by_key", "v", 10)} == {ids[1], ids[3], ids[5]}
        assert await session.fetch("find_by_key", "w", 10) == []


async def test_counts_follow_every_change_of_state(store: Store) -> None:
    ids = await enqueue(store, *(NewTask("a") for _ in range(4)))
    batch = await claim(store, 3)
    one, two, three = ([task] for task in batch.tasks)
    await finish(store, ClaimBatch(0, one, {}))
    await fail(store, ClaimBatch(0, two, {}), None)
    await fail(store, ClaimBatch(0, three, {}), 60)
    async with store.transaction() as session:
        await settle.cancel(session, [ids[3]])

    async def settled() -> dict[str, int]:
        async with store.session() as session:
            return {row["state"]: row["count"] for row in await session.fetch("count_settled", "other")}

    assert await settled() == {"SUCCESS": 1, "CRITICAL_ERROR": 1, "CANCELLED": 1}
    async with store.transaction() as session:
        await reschedule.restart(session, [ids[3], two[0].id])
        await session.fetch("compact_tally", 0.0, 0.0, 1000, 500, "other")
    assert await settled() == {"SUCCESS": 1}


async def test_the_older_conventions_attempt_finds_the_current_claim(store: Store) -> None:
    (task_id,) = await enqueue(store, NewTask("a"))
    batch = await claim(store)
    async with store.session() as session:
        assert await settle.find_claims(session, [(task_id, 1)]) == {(task_id, 1): batch.tasks[0].claim}
        assert await settle.find_claims(session, [(task_id, 2), (99, 2**40)]) == {}


async def test_a_value_that_postgres_refuses_is_told_from_a_database_that_is_away(store: Store) -> None:
    with pytest.raises(Refused):
        await enqueue(store, NewTask("a", payload="{"))
    with pytest.raises(Refused):
        await enqueue(store, NewTask("a\0b"))
    away = Store("postgresql://nobody:secret@127.0.0.1:1/none")
    with pytest.raises(Unavailable) as caught:
        await away.open()
    assert "secret" not in str(caught.value)


async def test_a_database_without_the_schema_names_the_next_step(empty_database_url: str) -> None:
    store = Store(empty_database_url)
    try:
        with pytest.raises(Unavailable, match="penstock migrate"):
            await enqueue(store, NewTask("a"))
    finally:
        await store.close()


@pytest.mark.parametrize("within", ["a statement", "a savepoint", "the end"])
async def test_of_a_connection_that_was_closed_operators_read_just_that(
    store: Store, sql: asyncpg.Connection, within: str
) -> None:
    kill = "select pg_terminate_backend(pid, 10000) from pg_stat_activity where application_name = 'penstock-test'"
    with pytest.raises(Unavailable) as caught:
        async with store.transaction() as session:
            await session.fetch("read_clock")
            await sql.execute(kill)
            async with asyncio.timeout(30):
                while not session._connection.is_closed():
                    await asyncio.sleep(0.01)
            if within == "a statement":
                await session.fetch("read_clock")
            elif within == "a savepoint":
                async with session.savepoint():
                    await session.fetch("read_clock")
    assert str(caught.value) == "Postgres is unavailable or rejected the request: the connection was closed"


async def test_a_killed_connection_is_unavailable_and_the_next_call_works(store: Store, database_url: str) -> None:
    await enqueue(store, NewTask("a"))
    killer = await asyncpg.connect(database_url)
    try:
        with pytest.raises(Unavailable):
            async with store.transaction() as session:
                await killer.execute(
                    "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'penstock-test'"
                )
                await enqueuing.enqueue(session, [NewTask("a")])
    finally:
        await killer.close()
    await enqueue(store, NewTask("a"))
