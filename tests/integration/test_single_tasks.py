"""What a task that travels alone costs: which statements it takes, and who is woken."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

import asyncpg
import pytest

from penstock.api.dispatch import Enqueuer
from penstock.brokers.sqs import SqsQueue
from penstock.db import notify
from penstock.db.notify import CHANNEL, DUE, WORKFLOWS, Listener, Notifier
from penstock.db.pool import Store
from penstock.db.session import Session
from penstock.protocol.answers import Accepted
from penstock.protocol.reports import encode_result
from penstock.protocol.task import NewTask
from penstock.resulter import Resulter
from penstock.scheduler.process import Scheduler
from penstock.settings.model import Settings
from penstock.tasks import claim, enqueue
from tests.claims import claim_id
from tests.integration.doors import put
from tests.integration.lives import Lives

Heard = list[tuple[str, str]]
SOMETIMES = {"count_in_flight", "read_throughput", "read_rules", "read_claim_keys"}  # by the clock, not for each task


@pytest.fixture
def scheduler(store: Store, outbound: SqsQueue, settings: Settings) -> Scheduler:
    return Scheduler(open_queue=lambda *_: outbound, store=store, outbound=outbound, settings=settings)


@pytest.fixture
def resulter(store: Store, results: SqsQueue, settings: Settings) -> Resulter:
    return Resulter(store=store, results=results, settings=settings)


@pytest.fixture
async def heard(sql: Any) -> Heard:
    """The wake-ups of others, as (channel, payload)."""
    found: Heard = []
    for channel in (CHANNEL, WORKFLOWS):
        await sql.add_listener(channel, lambda _connection, _pid, name, payload: found.append((name, payload)))
    return found


@contextmanager
def statements(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """The statements that run in the block, by name."""
    counted = Counter[str]()
    fetch = Session.fetch

    async def counting(self: Session, name: str, *args: Any, **kwargs: Any) -> Any:
        counted[name] += 1
        return await fetch(self, name, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(Session, "fetch", counting)
        yield counted


@contextmanager
def beside(*runs: Callable[[], Any]) -> Iterator[None]:
    """Side tasks, for the duration of the block."""
    tasks = [asyncio.ensure_future(run()) for run in runs]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


async def until_free(sql: Any) -> None:
    """No connection holds the lock of those that wait for results any more."""
    async with asyncio.timeout(30):
        held = "select count(*) from pg_locks where objid::int = hashtext('penstock results') and locktype = 'advisory'"
        while await sql.fetchval(held):
            await asyncio.sleep(0.005)


async def add(store: Store, *tasks: NewTask) -> list[int]:
    async with store.transaction() as session:
        return [one.id for one in await enqueue.enqueue(session, tasks)]


async def claimed(store: Store, *tasks: NewTask) -> list[str]:
    """New tasks, claimed; their claim ids by the order of the tasks."""
    await add(store, *tasks)
    async with store.session() as session:
        batch = await claim.claim(session, 100)
        assert batch is not None
        await claim.confirm(session, batch.id)
    return [claim_id(task.id, task.claim) for task in sorted(batch.tasks, key=lambda task: task.id)]


# The api


@pytest.fixture
def notifier(store: Store) -> Notifier:
    return Notifier(store)


@pytest.fixture
def enqueuer(store: Store, notifier: Notifier, settings: Settings) -> Enqueuer:
    return Enqueuer(store, store.session, notifier, settings)


@pytest.mark.parametrize(("task", "payload"), [(NewTask("a"), DUE), (NewTask("a", delay_seconds=9), "")])
async def test_an_enqueue_alone_wakes_schedulers_by_its_own_commit(
    enqueuer: Enqueuer, heard: Heard, sql: Any, monkeypatch: pytest.MonkeyPatch, task: NewTask, payload: str
) -> None:
    with statements(monkeypatch) as run:
        (accepted,) = await enqueuer.enqueue([task])
    assert isinstance(accepted, Accepted)
    assert run == {"enqueue_task_and_notify": 1}
    await until(lambda: bool(heard))
    assert heard == [(CHANNEL, payload)]
    row = await sql.fetchrow("select id, action, state, run_at > now() + interval '5 s' as later from penstock.task")
    assert dict(row) == {"id": accepted.id, "action": "a", "state": "SCHEDULED", "later": payload == ""}
    assert await sql.fetchval("select sum(count) from penstock.tally where event = 'ENQUEUED'") == 1


@pytest.mark.parametrize(
    "tasks", [[NewTask("a"), NewTask("b")], [NewTask("a", unique_key="u")], [NewTask("a", ordering_key="o")]]
)
async def test_other_enqueues_leave_the_wake_up_to_the_notifier(
    enqueuer: Enqueuer, notifier: Notifier, heard: Heard, monkeypatch: pytest.MonkeyPatch, tasks: list[NewTask]
) -> None:
    with statements(monkeypatch) as run:
        assert len(await enqueuer.enqueue(tasks)) == len(tasks)
    assert "enqueue_task_and_notify" not in run
    assert heard == []
    with beside(notifier.run):
        await until(lambda: bool(heard))
    assert heard == [(CHANNEL, DUE)]


async def test_an_insert_carries_a_wake_up_rarely_and_never_beside_another(
    store: Store, notifier: Notifier, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(notify, "monotonic", lambda: now)
    assert notifier.may_carry()
    notifier.carried(0.001)
    now += 0.009
    assert not notifier.may_carry()  # others share the next one
    now += 0.002
    assert notifier.may_carry()
    notifier.carried(0.4)  # a slow disk, or many processes whose commits notify: the mean is 0.1 s
    now += 0.9
    assert not notifier.may_carry()
    now += 0.2
    assert notifier.may_carry()
    notifier.carried(0.1)
    now += 0.5
    notifier.wake()
    assert not notifier.may_carry()
    with beside(notifier.run):
        await until(lambda: bool(heard))
    now += 0.009
    assert not notifier.may_carry()
    now += 0.6  # a wake-up of the notifier's own keeps inserts from carrying one for the moment alone
    assert notifier.may_carry()


async def test_a_task_comes_in_while_the_queue_of_notifications_is_full(
    enqueuer: Enqueuer, sql: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await sql.execute("alter function pg_catalog.pg_notify(text, text) rename to notify_really")
    await sql.execute(
        """create function public.pg_notify(text, text) returns void language plpgsql as $$ begin
        raise 'too many notifications in the NOTIFY queue' using errcode = 'program_limit_exceeded'; end $$"""
    )
    with statements(monkeypatch) as run:
        (accepted,) = await enqueuer.enqueue([NewTask("a")])
    assert isinstance(accepted, Accepted)
    assert list(run) == ["enqueue_task_and_notify", "enqueue_plain_tasks"]
    assert [row["id"] for row in await sql.fetch("select id from penstock.task")] == [accepted.id]


# The scheduler


async def test_a_task_alone_takes_a_scheduler_one_statement(
    scheduler: Scheduler, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    await scheduler.run_once()
    await scheduler._read_seconds_to_next()
    for _ in range(3):
        await add(store, NewTask("a"))
        scheduler._listener.event.set()
        scheduler._looked_at = monotonic()
        scheduler._bounds.look_back()  # on a busy machine a sweep may take long, and is followed by a rest
        with statements(monkeypatch) as run:
            await scheduler.wait_for_work()
            assert await scheduler.run_once() == 1
        assert scheduler.has_found_all
        assert set(run) - SOMETIMES == {"claim_ready_tasks"}
        assert run["claim_ready_tasks"] == 1
    assert await scheduler.run_once() == 0
    assert not scheduler.has_found_all


async def test_a_wake_up_during_the_claim_of_the_other_pass_leads_to_another_look(
    scheduler: Scheduler, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await scheduler.run_once() == 0  # a window of its smallest size, which one claim sets aside as a whole
    monkeypatch.setattr(type(scheduler._bounds), "sweep_is_due", lambda *_: False)  # it would find the task too
    has_claimed, goes_on = asyncio.Event(), asyncio.Event()
    claim_ready = claim.claim_ready

    async def slow(*given: Any, **named: Any) -> Any:
        batch = await claim_ready(*given, **named)
        has_claimed.set()
        await goes_on.wait()
        return batch

    monkeypatch.setattr(claim, "claim_ready", slow)
    first = asyncio.create_task(scheduler.run_once())
    await has_claimed.wait()
    await add(store, NewTask("a"))
    scheduler._listener.event.set()
    await scheduler.wait_for_work()
    assert await scheduler.run_once() == 0
    assert not scheduler._listener.event.is_set()
    goes_on.set()
    assert await first == 0
    assert scheduler._listener.event.is_set()  # else both would wait for the poll
    assert await scheduler.run_once() == 1
    assert not scheduler._listener.event.is_set()


async def test_a_wake_up_for_tasks_that_are_due_has_no_look_for_later_ones(
    scheduler: Scheduler, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    await add(store, NewTask("a", delay_seconds=30))
    with statements(monkeypatch) as run:
        assert 0 < await scheduler._read_seconds_to_next() <= 30
        scheduler._looked_at = monotonic()
        await scheduler._read_seconds_to_next()
        assert run["read_seconds_to_next"] == 1
        scheduler._listener._hear(scheduler._listener.event, None, 1, CHANNEL, DUE)
        await scheduler._read_seconds_to_next()
        assert run["read_seconds_to_next"] == 1
        await add(store, NewTask("a", delay_seconds=10))
        scheduler._listener._hear(scheduler._listener.event, None, 1, CHANNEL, "")
        assert 0 < await scheduler._read_seconds_to_next() <= 10


@pytest.mark.parametrize(("wakes", "payload"), [([True], DUE), ([True, False], ""), ([False, True], "")])
async def test_a_wake_up_says_when_all_that_has_come_is_due(
    store: Store, heard: Heard, wakes: list[bool], payload: str
) -> None:
    notifier = Notifier(store)
    for due in wakes:
        notifier.wake(due=due)
    with beside(notifier.run):
        await until(lambda: bool(heard))
    assert heard == [(CHANNEL, payload)]


# The resulter


async def test_a_result_alone_takes_one_statement_and_wakes_no_process(
    resulter: Resulter, results: SqsQueue, store: Store, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    (name,) = await claimed(store, NewTask("a"))
    await put(results, encode_result(name, "1"))
    await store.read_fence()
    with beside(resulter._notifier.run), statements(monkeypatch) as run:
        assert await resulter.run_once() == 1
        await asyncio.sleep(0.1)
    assert run == {"finish_few_tasks": 1}
    assert heard == []


async def test_a_result_with_an_ordering_key_wakes_the_schedulers(
    resulter: Resulter, results: SqsQueue, store: Store, heard: Heard
) -> None:
    (name,) = await claimed(store, NewTask("a", ordering_key="k"))
    (successor,) = await add(store, NewTask("b", ordering_key="k"))
    await put(results, encode_result(name, "1"))
    with beside(resulter._notifier.run):
        assert await resulter.run_once() == 1
        await until(lambda: bool(heard))
    assert heard == [(CHANNEL, "")]
    async with store.session() as session:
        batch = await claim.claim(session, 10)
    assert batch is not None
    assert [task.id for task in batch.tasks] == [successor]


async def test_plain_results_and_others_of_one_batch_are_all_recorded(
    resulter: Resulter, results: SqsQueue, store: Store, sql: Any
) -> None:
    names = await claimed(store, NewTask("plain"), NewTask("keyed", ordering_key="k"))
    await put(results, "[" + ",".join(encode_result(name, "1") for name in names) + "]")
    assert await resulter.run_once() == 1
    rows = await sql.fetch("select action from penstock.task_history where state = 'SUCCESS' order by action")
    assert [row["action"] for row in rows] == ["keyed", "plain"]


async def test_an_api_whose_callers_wait_is_woken_by_each_result(
    resulter: Resulter, results: SqsQueue, store: Store, sql: Any
) -> None:
    first, second = await claimed(store, NewTask("a"), NewTask("a"))
    listener = Listener(store, hold="hold_results_lock")
    with beside(resulter._notifier.run):
        with beside(listener.run):
            await asyncio.wait_for(listener.event.wait(), 30)
            listener.event.clear()
            await put(results, encode_result(first, "1"))
            assert await resulter.run_once() == 1
            await asyncio.wait_for(listener.event.wait(), 30)
        await until_free(sql)
        await put(results, encode_result(second, "2"))
        assert await resulter.run_once() == 1
        assert not resulter._notifier._woken.is_set()


# Chains


async def test_the_process_that_settles_a_step_starts_the_next(
    resulter: Resulter, results: SqsQueue, store: Store, settings: Settings, heard: Heard
) -> None:
    lives = Lives(store, settings)
    workflow = await lives.create(chain=[{"action": "a"}, {"action": "b"}, {"action": "c", "delay": 60}])
    with beside(resulter._notifier.run, resulter._successors.run):
        for action, payload in (("a", DUE), ("b", "")):  # the last step starts later
            (task,) = await lives.claim()
            assert task.action == action
            heard.clear()
            await put(results, encode_result(claim_id(task.id, task.claim), "1"))
            assert await resulter.run_once() == 1
            await until(lambda: bool(heard))
            assert heard == [(CHANNEL, payload)]
    assert await lives.advance() == 0
    assert [step.state for step in (await lives.steps(workflow)).values()] == ["SUCCESS", "SUCCESS", "SCHEDULED"]


async def test_a_step_of_a_workflow_that_another_process_has_is_left_to_the_supervisor(
    resulter: Resulter, results: SqsQueue, store: Store, settings: Settings, heard: Heard
) -> None:
    lives = Lives(store, settings)
    workflow = await lives.create(chain=[{"action": "a"}, {"action": "b"}])
    (task,) = await lives.claim()
    with beside(resulter._notifier.run, resulter._successors.run):
        async with store.transaction() as session:
            await session.fetch("hold_workflow", workflow, None, None)
            await put(results, encode_result(claim_id(task.id, task.claim), "1"))
            assert await resulter.run_once() == 1
            await until(lambda: (WORKFLOWS, "") in heard)
    assert await lives.advance() == 1
    assert [step.state for step in (await lives.steps(workflow)).values()] == ["SUCCESS", "SCHEDULED"]


# The connection


async def test_sessions_one_after_another_share_a_connection_and_replace_a_lost_one(database_url: str) -> None:
    store = Store(database_url, pool_size=1)
    pids = []
    for _ in range(3):
        async with store.session() as session:
            pids.append(await session._connection.fetchval("select pg_backend_pid()"))
    assert len(set(pids)) == 1
    other = await asyncpg.connect(database_url)
    await other.fetchval("select pg_terminate_backend($1, 10000)", pids[0])
    await other.close()
    await asyncio.sleep(0.1)  # the client hears of it
    await store.ping()
    with pytest.raises(ZeroDivisionError):
        async with store.session():
            raise ZeroDivisionError
    await asyncio.gather(*(store.ping() for _ in range(20)))
    await store.close()
