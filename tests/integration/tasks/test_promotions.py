"""Promotions: many tasks whose ordering key has become theirs, recorded in one row instead of one for each."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import asyncpg
import pytest

from penstock.brokers.sqs import SqsQueue
from penstock.db.pool import Store
from penstock.protocol.task import BEGINNING, PRIORITY_MIN, Claimed, NewTask, Stretch
from penstock.resulter import Resulter
from penstock.scheduler.process import Scheduler
from penstock.settings.model import Settings
from penstock.supervisor.duties import expire
from penstock.supervisor.process import Supervisor
from penstock.tasks import claim as claims
from penstock.tasks import enqueue, ordering, reschedule
from penstock.tasks import settle as settling
from penstock.tasks.claim import ClaimBatch
from tests.integration.doors import no_routes

TaskOf = Callable[[int], Any]
DONE = '{"ok":true}'
MANY = 20  # keys: more than make a turn


async def add(store: Store, *tasks: NewTask) -> list[int]:
    async with store.transaction() as session:
        return [answer.id for answer in await enqueue.enqueue(session, tasks)]


async def claim(store: Store, limit: int = 1000, **options: Any) -> ClaimBatch | None:
    async with store.session() as session:
        return await claims.claim(session, limit, **options)


async def claimed(store: Store, limit: int = 1000) -> list[int]:
    batch = await claim(store, limit)
    return [] if batch is None else [task.id for task in batch.tasks]


async def finish(store: Store, batch: ClaimBatch | None) -> None:
    assert batch is not None
    async with store.transaction() as session:
        assert await settling.finish(session, {(task.id, task.claim): DONE for task in batch.tasks}) == len(batch.tasks)


async def promote_overdue(store: Store) -> int:
    async with store.transaction() as session:
        return (await ordering.promote_overdue(session, 10)).promoted


async def states(store: Store, ids: Iterable[int]) -> set[str]:
    async with store.session() as session:
        return {row["state"] for row in await session.fetch("read_states", list(ids))}


async def turned(store: Store, *, keys: int = MANY, each: int = 2, **options: Any) -> list[list[int]]:
    """Tasks by key, ``each`` of every key, the first of each settled together, the second's turn."""
    tasks = [NewTask("a", ordering_key=f"k{n}", **options) for _ in range(each) for n in range(keys)]
    ids = await add(store, *tasks)
    await finish(store, await claim(store))
    return [ids[n::keys] for n in range(keys)]


def seconds_of(keys: list[list[int]]) -> list[int]:
    return [tasks[1] for tasks in keys]


async def turns(sql: Any) -> list[Any]:
    return list(await sql.fetch("select * from penstock.turn order by id"))


async def test_what_a_batch_lets_go_is_told_in_one_row_and_claimed_as_it_is(store: Store, sql: Any) -> None:
    keys = await turned(store)
    (turn,) = await turns(sql)
    named = list(zip(turn["keys"], turn["task_ids"], strict=True))
    assert sorted(named) == sorted((f"k{n}", tasks[1]) for n, tasks in enumerate(keys))
    assert (turn["size"], turn["run_at"], turn["task_id"]) == (MANY, min(turn["run_ats"]), min(turn["task_ids"]))
    assert await states(store, seconds_of(keys)) == {"WAITING"}
    batch = await claim(store)
    assert batch is not None
    assert [task.id for task in batch.tasks] == seconds_of(keys)
    assert await states(store, seconds_of(keys)) == {"ACQUIRED"}
    assert await turns(sql) == []
    await finish(store, batch)
    assert await sql.fetchval("select count(*) from penstock.ordering_head") == 0


async def test_a_few_that_are_let_go_are_promoted_one_by_one(store: Store, sql: Any) -> None:
    keys = await turned(store, keys=15)
    assert await turns(sql) == []
    assert await states(store, seconds_of(keys)) == {"SCHEDULED"}


async def test_a_turn_is_of_one_priority_and_of_what_is_due(store: Store, sql: Any) -> None:
    heads = await add(store, *(NewTask("a", ordering_key=f"k{n}") for n in range(60)))
    low = await add(store, *(NewTask("a", ordering_key=f"k{n}", priority=-1) for n in range(20)))
    high = await add(store, *(NewTask("a", ordering_key=f"k{n}", priority=1) for n in range(20, 36)))
    few = await add(store, *(NewTask("a", ordering_key=f"k{n}", priority=2) for n in range(36, 41)))
    later = await add(store, *(NewTask("a", ordering_key=f"k{n}", delay_seconds=60) for n in range(41, 60)))
    await finish(store, await claim(store, len(heads)))
    assert {turn["priority"]: sorted(turn["task_ids"]) for turn in await turns(sql)} == {-1: low, 1: high}
    assert await states(store, few + later) == {"SCHEDULED"}
    assert await claimed(store, 10) == few + high[:5]
    assert await claimed(store, 20) == high[5:] + low[:9]
    assert await claimed(store) == low[9:]
    assert await turns(sql) == []


async def test_a_turn_of_the_lowest_priority_holds_up_no_claim(store: Store) -> None:
    keys = await turned(store, priority=PRIORITY_MIN)
    plain = await add(store, *(NewTask("b") for _ in range(5)))
    lowest = await add(store, *(NewTask("b", priority=PRIORITY_MIN) for _ in range(5)))
    assert [await claimed(store, 5), await claimed(store)] == [plain, sorted(seconds_of(keys) + lowest)]


async def test_turns_and_other_tasks_are_claimed_in_one_order(store: Store, sql: Any) -> None:
    ids = await add(store, *(NewTask("a", ordering_key=f"k{n % MANY}") for n in range(2 * MANY)))
    for n, task_id in enumerate(ids[MANY:]):  # one every other second, in no order of their ids
        at = f"now() - interval '1 hour' + interval '{n * 7 % MANY * 2} seconds'"
        await sql.execute(f"update penstock.task set run_at = {at} where id = $1", task_id)
    await finish(store, await claim(store, MANY))
    plain = await add(store, *(NewTask("b") for _ in range(MANY)))
    for n, task_id in enumerate(plain):
        at = f"now() - interval '1 hour' + interval '{n * 2 + 1} seconds'"
        await sql.execute(f"update penstock.task set run_at = {at} where id = $1", task_id)
    rows = await sql.fetch("select id from penstock.task order by priority desc, run_at, id")
    expected = [row["id"] for row in rows]
    assert len(await turns(sql)) == 1
    assert len(expected) == 2 * MANY
    for first in range(0, len(expected), 7):
        assert await claimed(store, 7) == expected[first : first + 7]
    assert await turns(sql) == []


async def test_several_turns_are_claimed_in_one_order(store: Store, sql: Any) -> None:
    ids = await add(store, *(NewTask("a", ordering_key=f"k{n % 60}") for n in range(120)))
    heads = await claim(store, 60)
    assert heads is not None
    for part in (heads.tasks[40:], heads.tasks[20:40], heads.tasks[:20]):
        await finish(store, ClaimBatch(heads.id, part, {}))
    assert len(await turns(sql)) == 3
    assert [await claimed(store, 25) for _ in range(3)] == [ids[60:85], ids[85:110], ids[110:]]


async def test_a_turn_of_one_that_is_cancelled_goes_to_the_next_of_its_key(store: Store, sql: Any) -> None:
    keys = await turned(store, each=3)
    async with store.transaction() as session:
        await settling.cancel(session, [keys[3][1]])
    assert await claimed(store) == [task for task in seconds_of(keys) if task != keys[3][1]]
    assert await states(store, [keys[3][2]]) == {"WAITING"}
    assert await promote_overdue(store) == 1
    assert await claimed(store) == [keys[3][2]]
    assert await turns(sql) == []


async def test_a_key_whose_last_task_is_cancelled_in_its_turn_is_forgotten(store: Store, sql: Any) -> None:
    keys = await turned(store)
    async with store.transaction() as session:
        await settling.cancel(session, [keys[0][1]])
    await finish(store, await claim(store))
    assert await sql.fetchval("select count(*) from penstock.ordering_head") == 1
    assert await promote_overdue(store) == 0
    assert await sql.fetchval("select count(*) from penstock.ordering_head") == 0
    (new,) = await add(store, NewTask("a", ordering_key="k0"))
    assert await claimed(store) == [new]


async def test_a_task_cancelled_in_its_turn_and_retried_keeps_its_place(store: Store, sql: Any) -> None:
    keys = await turned(store, each=3)
    async with store.transaction() as session:
        await settling.cancel(session, [keys[0][1]])
        await reschedule.restart(session, [keys[0][1]])
    batch = await claim(store)
    assert batch is not None
    took = {task.id for task in batch.tasks}
    assert took == set(seconds_of(keys)) - {keys[0][1]}  # its run_at is another one
    await promote_overdue(store)
    assert await claimed(store) == [keys[0][1]]


async def test_a_duplicate_of_a_task_in_its_turn_is_told_waiting_until_the_turn_is_over(store: Store, sql: Any) -> None:
    tasks = [NewTask("a", ordering_key=f"k{n % MANY}", unique_key=f"u{n}") for n in range(2 * MANY)]
    ids = await add(store, *tasks)
    await finish(store, await claim(store))

    async def told() -> set[tuple[str, bool]]:
        async with store.transaction() as session:
            answers = await enqueue.enqueue(session, tasks[MANY:])
        assert [answer.id for answer in answers] == ids[MANY:]
        return {(answer.state, answer.duplicate) for answer in answers}

    assert await told() == {("WAITING", True)}
    assert await claimed(store, 5) == ids[MANY : MANY + 5]
    assert await told() == {("ACQUIRED", True), ("WAITING", True)}
    await sql.execute("update penstock.turn set ends_at = now() - interval '1 ms'")
    assert await promote_overdue(store) == MANY - 5
    assert await told() == {("ACQUIRED", True), ("SCHEDULED", True)}
    assert await claimed(store) == ids[MANY + 5 :]


@pytest.mark.parametrize("change", [{"delay": 3600.0}, {"priority": -3}])
async def test_a_task_moved_in_its_turn_is_claimed_when_it_should_be(
    store: Store, sql: Any, task_of: TaskOf, change: dict[str, Any]
) -> None:
    keys = await turned(store)
    moved = keys[5][1]
    async with store.session() as session:
        await session.fetch("reschedule_tasks", [moved], None, change.get("delay"), change.get("priority"))
    assert await claimed(store) == [task for task in seconds_of(keys) if task != moved]
    assert await promote_overdue(store) == 1
    assert (await task_of(moved))["state"] == "SCHEDULED"
    assert await claimed(store) == ([moved] if "priority" in change else [])


async def test_a_task_that_somebody_holds_is_left_in_its_turn_and_loses_no_place(
    store: Store, sql: Any, database_url: str
) -> None:
    keys = await turned(store)
    held = keys[2][1]
    other = await asyncpg.connect(database_url)
    transaction = other.transaction()
    await transaction.start()
    await other.execute("select from penstock.task where id = $1 for update", held)
    assert await claimed(store) == [task for task in seconds_of(keys) if task != held]
    await transaction.rollback()
    assert await promote_overdue(store) == 1
    await other.close()
    assert await claimed(store) == [held]


async def test_a_task_that_expires_in_its_turn_is_cancelled_and_the_next_goes(store: Store, sql: Any) -> None:
    keys = await turned(store, each=3)
    late = keys[7][1]
    await sql.execute("update penstock.task set expires_at = now() - interval '1 s' where id = $1", late)
    assert late not in await claimed(store)
    assert await expire(store) == 1
    assert await states(store, [late]) == {"CANCELLED"}
    await promote_overdue(store)
    assert await claimed(store) == [keys[7][2]]


async def test_a_turn_lasts_for_some_seconds_and_is_then_a_state(store: Store, sql: Any) -> None:
    keys = await turned(store)
    assert await promote_overdue(store) == 0
    (turn,) = await turns(sql)
    assert 4 < (turn["ends_at"] - await sql.fetchval("select now()")).total_seconds() <= 5
    await sql.execute("update penstock.turn set ends_at = now() - interval '1 ms'")
    assert await claim(store) is None  # the one that promotes them has them
    assert await promote_overdue(store) == MANY
    assert await states(store, seconds_of(keys)) == {"SCHEDULED"}
    assert await turns(sql) == []
    assert await claimed(store) == seconds_of(keys)


async def test_a_claim_for_tasks_that_have_waited_long_takes_no_turns(store: Store, sql: Any) -> None:
    keys = await turned(store)
    await asyncio.sleep(0.02)
    assert await claim(store, stretches=[Stretch(0, 0, BEGINNING)], due_seconds=0.001) is None
    assert await claimed(store) == seconds_of(keys)


async def test_where_there_are_rules_no_turn_is_given(store: Store, sql: Any) -> None:
    async with store.session() as session:
        await session._connection.execute("insert into penstock.route (name, queue, actions) values ('r', 'q', '{b}')")
    tasks = [NewTask("a", ordering_key=f"k{n % MANY}") for n in range(2 * MANY)]
    ids = await add(store, *tasks)
    async with store.session() as session:
        batch, _ = await claims.claim_by_rules(session, 1000)
    await finish(store, batch)
    assert await turns(sql) == []
    assert await states(store, ids[MANY:]) == {"SCHEDULED"}


@pytest.fixture
def scheduler(store: Store, outbound: SqsQueue, settings: Settings) -> Scheduler:
    return Scheduler(store=store, outbound=outbound, settings=settings, open_queue=no_routes)


async def test_a_scheduler_sends_turns_and_a_resulter_ends_those_that_are_over(
    store: Store, sql: Any, scheduler: Scheduler, results: SqsQueue, settings: Settings
) -> None:
    keys = await turned(store, each=3)
    async with store.transaction() as session:
        await settling.cancel(session, [keys[3][1]])
    assert await scheduler.run_once() == MANY - 1
    resulter = Resulter(store=store, results=results, settings=settings)
    ending = asyncio.create_task(resulter.side_tasks()["turns"]())  # type: ignore[arg-type]
    while await turns(sql):
        await asyncio.sleep(0.02)
    ending.cancel()
    assert await states(store, [keys[3][2]]) == {"SCHEDULED"}
    assert await scheduler.run_once() == 1


async def test_turns_given_before_there_were_rules_obey_them(store: Store, sql: Any, scheduler: Scheduler) -> None:
    keys = await turned(store)
    async with store.session() as session:
        await session._connection.execute("insert into penstock.action (name, paused) values ('a', true)")
    assert await scheduler.run_once() == 0
    assert await promote_overdue(store) == MANY
    assert await scheduler.run_once() == MANY  # put aside, for their action is paused
    assert await turns(sql) == []
    assert await states(store, seconds_of(keys)) == {"SCHEDULED"}


@pytest.mark.parametrize("turns_from", [1, 5])
async def test_whatever_happens_at_once_no_key_is_broken_and_nothing_is_left(
    database_url: str, sql: Any, monkeypatch: pytest.MonkeyPatch, turns_from: int
) -> None:
    """Claims, results, releases, cancels, moves and ends of turns by several at once; each key keeps its order."""
    monkeypatch.setattr(settling, "PROMOTIONS_FROM", turns_from)
    store = Store(database_url, application_name="penstock-test", pool_size=12)
    chance = random.Random(turns_from)
    count = 1500
    ids = [
        task_id
        for _ in range(count // 100)
        for task_id in await add(
            store,
            *(
                NewTask("a", ordering_key=f"k{chance.randrange(40)}", priority=chance.choice([0, 0, 0, 1]))
                for _ in range(100)
            ),
        )
    ]
    key_of = {row["id"]: row["ordering_key"] for row in await sql.fetch("select id, ordering_key from penstock.task")}
    running: dict[str, int] = {}
    ran: dict[str, list[int]] = defaultdict(list)
    met: Counter[str] = Counter()
    stop = asyncio.Event()

    async def tried(work: Any, *args: Any) -> Any:
        while True:  # as a service tries again what Postgres took back
            try:
                return await work(*args)
            except Exception as exc:
                if "deadlock" not in str(exc):
                    raise
                met["deadlock"] += 1

    async def claimer() -> None:
        while not stop.is_set():
            batch = await claim(store, chance.choice([1, 7, 30]))
            if batch is None:
                await asyncio.sleep(0.002)
                continue
            for task in batch.tasks:
                key = key_of[task.id]
                assert key not in running, f"{task.id} of {key} beside {running[key]}"
                running[key] = task.id
            await asyncio.sleep(chance.random() * 0.004)
            again = [task for task in batch.tasks if chance.random() < 0.05]
            done = [task for task in batch.tasks if task not in again]
            for task in batch.tasks:  # before the commit: from then on the next may run
                del running[key_of[task.id]]
            for task in done:
                ran[key_of[task.id]].append(task.id)

            await tried(settle, batch, done, again)
            met["released"] += len(again)

    async def settle(batch: ClaimBatch, done: list[Claimed], again: list[Claimed]) -> None:
        async with store.transaction() as session:
            await claims.release(session, ((task.id, task.claim) for task in again))
            await settling.finish(session, {(task.id, task.claim): DONE for task in done})
            await claims.confirm(session, batch.id)

    async def changer() -> None:
        while not stop.is_set():
            await tried(chance.choice([cancel, move]), chance.sample(ids, 5))
            await asyncio.sleep(0.003)

    async def cancel(chosen: list[int]) -> None:
        async with store.transaction() as session:
            # Cancelled while it runs, a task would let the next one go beside it, as it should.
            waiting = await session._connection.fetch(
                "select id from penstock.task where id = any($1::bigint[]) and state = 'WAITING'"
                " order by id limit 1 for update", chosen,
            )  # fmt: skip
            met["cancelled"] += len(await settling.cancel(session, [row["id"] for row in waiting]))

    async def move(chosen: list[int]) -> None:
        async with store.transaction() as session:
            priority = chance.choice([-1, 0, 1])
            met["moved"] += len(await session.fetch("reschedule_tasks", chosen[:2], None, None, priority))

    async def ender() -> None:
        while not stop.is_set():
            if chance.random() < 0.3:
                await sql.execute("update penstock.turn set ends_at = now() where random() < 0.5")
            met["ended"] += await tried(promote_overdue, store)
            met["turns"] += await sql.fetchval("select count(*) from penstock.turn")
            await asyncio.sleep(0.01)

    async def watch() -> None:
        while await sql_count() > 0:
            await asyncio.sleep(0.05)
        stop.set()

    watching = await asyncpg.connect(database_url)

    async def sql_count() -> int:
        return int(await watching.fetchval("select count(*) from penstock.task"))

    try:
        async with asyncio.timeout(120), asyncio.TaskGroup() as group:
            for work in (claimer, claimer, claimer, changer, ender, watch):
                group.create_task(work())
        await promote_overdue(store)
        assert await turns(sql) == []
        assert await sql.fetchval("select count(*) from penstock.ordering_head") == 0
        assert len(ids) == await sql.fetchval("select count(*) from penstock.task_history")
        for key, order in ran.items():
            assert order == sorted(order), key
        assert {what for what in met if met[what]} >= {"released", "cancelled", "moved", "turns", "ended"}
    finally:
        await watching.close()
        await store.close()


async def test_a_resulter_that_stops_leaves_no_turns(
    store: Store, results: SqsQueue, settings: Settings, sql: Any
) -> None:
    """The version before, to which one may go back, knows of none."""
    keys = await turned(store)
    assert len(await turns(sql)) == 1
    await Resulter(store=store, results=results, settings=settings).drain(1)
    assert await turns(sql) == []
    assert await states(store, seconds_of(keys)) == {"SCHEDULED"}


async def test_supervisors_end_turns_that_are_over_too(
    store: Store, inbound: SqsQueue, outbound: SqsQueue, results: SqsQueue, settings: Settings, sql: Any
) -> None:
    keys = await turned(store)
    queues = {"inbound": inbound, "outbound": outbound, "results": results}
    supervisor = Supervisor(store=store, queues=queues, settings=settings, open_queue=no_routes)
    await sql.execute("update penstock.turn set ends_at = now()")
    side = asyncio.create_task(supervisor.side_tasks()["turns"]())  # type: ignore[arg-type]
    try:
        async with asyncio.timeout(60):
            while await states(store, seconds_of(keys)) != {"SCHEDULED"}:
                await asyncio.sleep(0.05)
    finally:
        side.cancel()
