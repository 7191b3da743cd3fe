from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from penstock.brokers.base import Depth, Message
from penstock.brokers.sqs import SqsQueue, SqsTransport
from penstock.db.notify import Notifier
from penstock.db.pool import Store
from penstock.local.postgres import EmbeddedPostgres
from penstock.protocol.errors import Unavailable
from penstock.protocol.message_attributes import TIMEOUT_ATTRIBUTE
from penstock.protocol.requests import parse_claim_id
from penstock.protocol.task import Claimed, Failure, NewTask
from penstock.runtime.loop import Loop
from penstock.scheduler import scan_bounds, window
from penstock.scheduler.process import Scheduler
from penstock.settings.model import Settings
from penstock.tasks import claim, settle
from penstock.tasks import enqueue as enqueuing
from tests.claims import claim_id
from tests.integration.doors import no_routes, postgres_away, sample, take
from tests.packs import pack_messages

TaskOf = Callable[[int], Any]


@pytest.fixture
def scheduler(store: Store, outbound: SqsQueue, settings: Settings) -> Scheduler:
    return Scheduler(open_queue=no_routes, store=store, outbound=outbound, settings=settings)


def with_settings(settings: Settings, **changes: Any) -> Settings:
    return settings.model_copy(update=changes)


async def enqueue(store: Store, *tasks: NewTask) -> list[int]:
    async with store.transaction() as session:
        return [answer.id for answer in await enqueuing.enqueue(session, tasks)]


def calls(messages: list[Message]) -> list[dict[str, Any]]:
    """The requests in these messages, single or in batches, in order."""
    found: list[dict[str, Any]] = []
    for message in messages:
        body = json.loads(message.body)
        found += body if isinstance(body, list) else [body]
    return found


def task_ids(messages: list[Message]) -> list[int]:
    ids = [parse_claim_id(call["id"]) for call in calls(messages)]
    return [claim_id.task_id for claim_id in ids if claim_id is not None]


async def unconfirmed(store: Store) -> int:
    async with store.session() as session:
        return int(await session._connection.fetchval("select count(*) from penstock.dispatch"))


# Sending


async def test_a_due_task_is_sent_as_a_request_that_names_its_claim(
    scheduler: Scheduler, store: Store, outbound: SqsQueue, task_of: TaskOf
) -> None:
    (task_id,) = await enqueue(store, NewTask("export", '{"n": 123456789012345678901234567890}'))
    assert await scheduler.run_once() == 1
    (message,) = await take(outbound)
    row = await task_of(task_id)
    assert (row["state"], row["attempts"]) == ("ACQUIRED", 1)
    assert json.loads(message.body) == {
        "jsonrpc": "2.0",
        "method": "export",
        "params": {"n": 123456789012345678901234567890},
        "id": claim_id(task_id, row["claim"]),
    }
    assert message.attributes == {}
    assert await unconfirmed(store) == 1
    assert await scheduler.run_once() == 0
    assert await unconfirmed(store) == 0  # by the next claim


async def test_tasks_that_are_not_due_stay(scheduler: Scheduler, store: Store, outbound: SqsQueue) -> None:
    await enqueue(store, NewTask("a", delay_seconds=60), NewTask("a", run_at=datetime.now(UTC) + timedelta(days=1)))
    assert await scheduler.run_once() == 0
    assert await outbound.depth() == Depth(0, 0, 0)


async def test_a_task_in_retry_is_sent_again_once_its_delay_has_passed(
    scheduler: Scheduler, store: Store, outbound: SqsQueue, task_of: TaskOf
) -> None:
    (task_id,) = await enqueue(store, NewTask("a"))
    await scheduler.run_once()
    first = await task_of(task_id)
    async with store.transaction() as session:
        await settle.fail(session, [Failure(task_id, first["claim"], '{"code":1,"message":"x"}', 0.05)])
    async with asyncio.timeout(30):
        while not await scheduler.run_once():
            await asyncio.sleep(0.01)
    again = await task_of(task_id)
    assert again["attempts"] == 2
    assert again["claim"] > first["claim"]
    assert task_ids(await take(outbound)) == [task_id, task_id]


async def test_higher_priority_goes_first_then_earlier_then_older(
    store: Store, outbound: SqsQueue, settings: Settings
) -> None:
    past = datetime.now(UTC) - timedelta(hours=1)
    late, low, high, early, older = await enqueue(
        store,
        NewTask("late", run_at=past + timedelta(minutes=2)),
        NewTask("low", priority=-1, run_at=past - timedelta(hours=9)),
        NewTask("high", priority=9),
        NewTask("early", run_at=past),
        NewTask("older", run_at=past + timedelta(minutes=2)),
    )
    one_by_one = with_settings(settings, claim_batch_size=1)
    scheduler = Scheduler(open_queue=no_routes, store=store, outbound=outbound, settings=one_by_one)
    order = []
    while await scheduler.run_once():
        order += task_ids(await outbound.receive(wait_seconds=0, visibility_seconds=30))
    assert order == [high, early, late, older, low]


async def test_a_small_claim_travels_one_task_a_message(scheduler: Scheduler, store: Store, outbound: SqsQueue) -> None:
    ids = await enqueue(store, *(NewTask("a") for _ in range(9)))
    assert await scheduler.run_once() == 9
    messages = await take(outbound)
    assert len(messages) == 9
    assert sorted(task_ids(messages)) == ids


async def test_a_large_claim_travels_in_packs(scheduler: Scheduler, store: Store, outbound: SqsQueue) -> None:
    ids = await enqueue(store, *(NewTask("a") for _ in range(1000)))
    async with store.session() as session:
        await settle.note_run_times(session, {"a": (1000, 1.0)})
    assert await scheduler.run_once() == 1000
    messages = await take(outbound)
    assert len(messages) == 10
    assert sorted(task_ids(messages)) == ids
    assert {len(json.loads(message.body)) for message in messages} == {100}


async def test_a_time_limit_travels_as_an_attribute_and_tasks_of_different_limits_apart(
    scheduler: Scheduler, store: Store, outbound: SqsQueue
) -> None:
    limits = [None, 1.5, 30.0] * 20
    await enqueue(store, *(NewTask("a", json.dumps([limit]), timeout_seconds=limit) for limit in limits))
    assert await scheduler.run_once() == 60
    seen = 0
    for message in await take(outbound):
        packed = {call["params"][0] for call in calls([message])}
        limit = message.attributes.get(TIMEOUT_ATTRIBUTE)
        assert packed == {None if limit is None else float(limit)}
        seen += len(calls([message]))
    assert seen == 60


def claimed(number: int, payload: str = "{}", timeout: float | None = None) -> Claimed:
    return Claimed(number, number + 1000, "a", payload, timeout, 0.0, suspect=False)


@pytest.mark.parametrize(
    ("tasks", "max_tasks", "expected"), [(1, 100, 1), (10, 100, 10), (19, 100, 10), (20, 100, 10), (999, 7, 143)]
)
def test_packs_grow_with_the_claim_and_keep_their_order(tasks: int, max_tasks: int, expected: int) -> None:
    tasks_ = [claimed(n) for n in range(tasks)]
    messages = pack_messages(tasks_, {}, max_tasks=max_tasks, max_bytes=1_000_000, max_seconds=math.inf)
    assert len(messages) == expected
    assert [task.id for packed in messages for task in packed.tasks] == list(range(tasks))
    for packed in messages:
        body = json.loads(packed.message.body)
        assert [f"{t.id}:{t.claim}" for t in packed.tasks] == [
            call["id"] for call in (body if isinstance(body, list) else [body])
        ]


async def test_large_tasks_are_packed_by_bytes_as_sqs_counts_them(
    scheduler: Scheduler, store: Store, outbound: SqsQueue
) -> None:
    """U+FFFF travels as an escape of 6 bytes: four such payloads of 260,000 bytes do not fit one message."""
    payload = json.dumps(["\uffff" * 86_000], ensure_ascii=False)
    ids = await enqueue(store, *(NewTask("a", payload) for _ in range(40)))
    assert await scheduler.run_once() == 40
    messages = await take(outbound)
    assert len(messages) == 20
    assert sorted(task_ids(messages)) == ids
    assert max(len(message.body.encode()) for message in messages) <= outbound.limits.max_message_bytes
    assert calls(messages)[0]["params"] == json.loads(payload)


# The window


async def test_no_more_is_claimed_than_the_window_allows(store: Store, outbound: SqsQueue, settings: Settings) -> None:
    small = with_settings(settings, in_flight_limit=7, claim_batch_size=5)
    scheduler = Scheduler(open_queue=no_routes, store=store, outbound=outbound, settings=small)
    await enqueue(store, *(NewTask("a") for _ in range(20)))
    assert [await scheduler.run_once() for _ in range(3)] == [5, 2, 0]
    assert sample("penstock_in_flight") == 7
    messages = await take(outbound)
    async with store.transaction() as session:
        claims = [parse_claim_id(call["id"]) for call in calls(messages)[:3]]
        await settle.finish(session, {(c.task_id, c.claim): "1" for c in claims if c is not None})
    claimed = 0
    async with asyncio.timeout(60):
        while not claimed:  # on a slow machine these tasks are old by now, and not all are counted each time
            await scheduler.wait_for_work()  # as long as the window knows itself to be full
            claimed = await scheduler.run_once()
    assert [claimed, await scheduler.run_once()] == [3, 0]


async def test_the_window_follows_what_ended_lately_and_how_long_it_ran(
    store: Store, outbound: SqsQueue, settings: Settings, sql: Any
) -> None:
    scheduler = Scheduler(open_queue=no_routes, store=store, outbound=outbound, settings=settings)
    await enqueue(store, *(NewTask("a") for _ in range(3)))
    await scheduler.run_once()
    assert sample("penstock_window") == settings.in_flight_floor
    await sql.execute("insert into penstock.tally (action, event, count) values ('a', 'SUCCESS', 30000)")
    async with store.session() as session:
        await settle.note_run_times(session, {"a": (100, 50.0)})
    another = Scheduler(open_queue=no_routes, store=store, outbound=outbound, settings=settings)
    await another.run_once()
    assert sample("penstock_window") == 3000 * (settings.in_flight_seconds + 2 * 0.5)
    assert sample("penstock_in_flight") == 3


async def test_passes_at_once_share_one_window(store: Store, outbound: SqsQueue, settings: Settings) -> None:
    small = with_settings(settings, in_flight_limit=10, claim_batch_size=8)
    scheduler = Scheduler(open_queue=no_routes, store=store, outbound=outbound, settings=small)
    await enqueue(store, *(NewTask("a") for _ in range(50)))
    assert sum(await asyncio.gather(*(scheduler.run_once() for _ in range(6)))) == 10


async def test_schedulers_at_once_send_every_task_once(store: Store, outbound: SqsQueue, settings: Settings) -> None:
    small = with_settings(settings, claim_batch_size=7)
    ids = await enqueue(store, *(NewTask("a") for _ in range(100)))
    schedulers = [Scheduler(open_queue=no_routes, store=store, outbound=outbound, settings=small) for _ in range(4)]

    async def drain(scheduler: Scheduler) -> None:
        while await scheduler.run_once():
            pass

    await asyncio.gather(*(drain(scheduler) for scheduler in schedulers))
    assert sorted(task_ids(await take(outbound))) == ids


# Run times


async def test_a_slow_action_travels_alone_and_a_fast_one_by_the_hundred(
    scheduler: Scheduler, store: Store, outbound: SqsQueue
) -> None:
    async with store.session() as session:
        await settle.note_run_times(session, {"fast": (1000, 1.0), "slow": (3, 12.0)})
    await enqueue(store, *(NewTask("slow") for _ in range(5)), *(NewTask("fast") for _ in range(995)))
    assert await scheduler.run_once() == 1000
    by_action: dict[str, list[int]] = {"slow": [], "fast": []}
    for message in await take(outbound):
        actions = [call["method"] for call in calls([message])]
        assert len(set(actions)) == 1
        by_action[actions[0]].append(len(actions))
    assert by_action["slow"] == [1] * 5
    assert max(by_action["fast"]) == 100


async def test_run_times_are_means_of_what_is_known_and_stay_for_actions_that_rest(
    store: Store, sql: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(window, "_READ_EVERY_SECONDS", 0.0)
    throughput = window.Throughput(store)
    async with store.session() as session:
        await settle.note_run_times(session, {"a": (20, 5.0), "b": (80, 5.0)})
    await sql.execute("insert into penstock.tally (action, event, count) values ('untimed', 'SUCCESS', 9)")
    await throughput.refresh()
    assert throughput.run_seconds == {"a": 0.25, "b": 0.0625}
    await sql.execute("truncate penstock.tally")
    await throughput.refresh()
    assert throughput.run_seconds == {"a": 0.25, "b": 0.0625}


async def test_a_suspect_is_sent_in_a_message_of_its_own(
    scheduler: Scheduler, store: Store, outbound: SqsQueue
) -> None:
    async with store.session() as session:
        await settle.note_run_times(session, {"a": (1000, 1.0)})
    (suspect,) = await enqueue(store, NewTask("a"))
    async with store.session() as session:
        batch = await claim.claim(session, 1)
        assert batch is not None
        await settle.refund(session, [Failure(suspect, batch.id, '{"code":-32000,"message":"silent"}', None)])
        await claim.confirm(session, batch.id)
    await enqueue(store, *(NewTask("a") for _ in range(99)))
    assert await scheduler.run_once() == 100
    messages = await take(outbound)
    assert sorted(map(len, map(task_ids, ([message] for message in messages)))) == [1, 9, *[10] * 9]
    assert [suspect] in [task_ids([message]) for message in messages]


# The bounds


@pytest.fixture
def sweeps_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as each claim finds as much as it has room for, there is no sweep but the first."""
    monkeypatch.setattr(scan_bounds, "_SWEEP_SECONDS", 3600.0)


@pytest.fixture
def by_two(store: Store, outbound: SqsQueue, settings: Settings, sweeps_seldom: None) -> Scheduler:
    return Scheduler(
        open_queue=no_routes, store=store, outbound=outbound, settings=with_settings(settings, claim_batch_size=2)
    )


async def next_two(scheduler: Scheduler, outbound: SqsQueue) -> list[int]:
    assert await scheduler.run_once() == 2
    return sorted(task_ids(await take(outbound)))


async def test_a_task_that_comes_to_stand_before_the_bound_is_found_by_the_next_sweep(
    by_two: Scheduler, store: Store, outbound: SqsQueue
) -> None:
    past = datetime.now(UTC) - timedelta(hours=1)
    ids = await enqueue(store, *(NewTask("a", run_at=past + timedelta(seconds=n)) for n in range(7)))
    assert await next_two(by_two, outbound) == ids[:2]
    assert await next_two(by_two, outbound) == ids[2:4]
    early = await enqueue(store, NewTask("a", run_at=past - timedelta(hours=1)))
    assert await next_two(by_two, outbound) == ids[4:6], "what stands before the bound was read again"
    assert await by_two.run_once() == 1  # less than it has room for, so the next claim begins at the front
    assert task_ids(await take(outbound)) == ids[6:]
    assert await by_two.run_once() == 1
    assert task_ids(await take(outbound)) == early


async def test_a_pass_that_finds_nothing_behind_its_bounds_sweeps_at_once(
    by_two: Scheduler, store: Store, outbound: SqsQueue
) -> None:
    past = datetime.now(UTC) - timedelta(hours=1)
    ids = await enqueue(store, NewTask("a", run_at=past), NewTask("a", run_at=past))
    assert await next_two(by_two, outbound) == ids
    early = await enqueue(store, NewTask("a", run_at=past - timedelta(hours=1)))
    assert await by_two.run_once() == 1
    assert task_ids(await take(outbound)) == early


async def test_an_urgent_task_of_a_new_priority_is_found_at_once_behind_the_bounds(
    by_two: Scheduler, store: Store, outbound: SqsQueue
) -> None:
    past = datetime.now(UTC) - timedelta(hours=1)
    backlog = await enqueue(store, *(NewTask("a", run_at=past) for _ in range(9)), NewTask("a", priority=5))
    assert await next_two(by_two, outbound) == [backlog[0], backlog[9]]
    assert await next_two(by_two, outbound) == backlog[1:3]
    for priority in (9, 3, -1):
        urgent = await enqueue(store, *(NewTask("a", priority=priority) for _ in range(2)))
        expected = urgent if priority > 0 else backlog[3:5]
        assert await next_two(by_two, outbound) == expected


@pytest.mark.parametrize("known", [(), (0,), (5, 0), (7, 0, -3), tuple(range(scan_bounds.LEVELS))])
async def test_the_next_task_is_known_whether_its_priority_is_or_not(store: Store, known: Sequence[int]) -> None:
    here = scan_bounds.ScanBounds()
    here.set_levels(known, 0.0)
    delays = {0: 90.0, 5: 60.0, 7: 0.0, -3: 70.0}
    await enqueue(store, *(NewTask("a", priority=level, delay_seconds=delay) for level, delay in delays.items()))
    async with store.session() as session:
        seconds = await claim.read_seconds_to_next(session, here.from_bounds(), scan_bounds.LEVELS)
        assert seconds is not None
        assert 30 < seconds <= 60
        await settle.cancel(session, list(range(1, 100)))
        assert await claim.read_seconds_to_next(session, here.from_bounds(), scan_bounds.LEVELS) is None


async def test_more_priorities_than_have_bounds_are_claimed_in_their_order(
    by_two: Scheduler, store: Store, outbound: SqsQueue
) -> None:
    count = 2 * scan_bounds.LEVELS
    ids = await enqueue(store, *(NewTask("a", priority=level) for level in range(count)))
    for number in range(count, 0, -2):
        assert await next_two(by_two, outbound) == ids[number - 2 : number]
    assert await by_two.run_once() == 0


async def test_what_could_not_be_sent_is_claimed_again_though_it_stands_before_the_bounds(
    by_two: Scheduler, store: Store, outbound: SqsQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    past = datetime.now(UTC) - timedelta(hours=1)
    ids = await enqueue(store, *(NewTask("a", run_at=past + timedelta(seconds=n)) for n in range(6)))
    assert await next_two(by_two, outbound) == ids[:2]
    with monkeypatch.context() as away:
        away.setattr(
            by_two._routes, "outbound", outbound.__class__(outbound._transport, "no-such-queue", label="outbound")
        )
        with pytest.raises(Unavailable):
            await by_two.run_once()
    assert await next_two(by_two, outbound) == ids[2:4]


# What cannot be sent


async def test_what_could_not_be_sent_is_given_back_with_its_attempt(
    store: Store, transport: SqsTransport, settings: Settings, task_of: TaskOf
) -> None:
    missing = transport.queue("no-such-queue", label="outbound")
    scheduler = Scheduler(open_queue=no_routes, store=store, outbound=missing, settings=settings)
    (task_id,) = await enqueue(store, NewTask("a"))
    before = sample("penstock_released_total", reason="send_failed")
    for _ in range(12):  # more often than the task has attempts
        with pytest.raises(Unavailable, match=r"nothing could be sent: .*no-such-queue"):
            await scheduler.run_once()
    row = await task_of(task_id)
    assert (row["state"], row["attempts"]) == ("SCHEDULED", 0)
    assert await unconfirmed(store) == 0
    assert sample("penstock_released_total", reason="send_failed") == before + 12


async def test_a_scheduler_without_its_queue_does_not_open(
    store: Store, transport: SqsTransport, settings: Settings
) -> None:
    missing = transport.queue("no-such-queue", label="outbound")
    with pytest.raises(Unavailable, match="no-such-queue"):
        await Scheduler(open_queue=no_routes, store=store, outbound=missing, settings=settings).open()


async def test_a_task_that_the_queue_never_takes_is_given_up_and_holds_nobody_back(
    scheduler: Scheduler, store: Store, transport: SqsTransport, outbound: SqsQueue, task_of: TaskOf
) -> None:
    """The queue has a smaller limit of its own, as AWS queues of an older terraform have: packs do not fit either."""
    client = await transport.client()
    await client.set_queue_attributes(QueueUrl=await outbound.url(), Attributes={"MaximumMessageSize": "1024"})
    ids = await enqueue(
        store,
        NewTask("huge", json.dumps(["x" * 2000]), priority=9, ordering_key="k"),
        NewTask("next", ordering_key="k"),
        *(NewTask("a", json.dumps(["y" * 50])) for _ in range(200)),
    )
    assert await scheduler.run_once() == 201
    assert await scheduler.run_once() == 1
    assert await scheduler.run_once() == 0
    assert sorted(task_ids(await take(outbound))) == ids[1:]
    row = await task_of(ids[0])
    assert (row["state"], row["attempts"]) == ("CRITICAL_ERROR", 1)
    error = json.loads(row["error"])
    assert error["message"] == "the outbound queue refuses the task's message"
    assert "1024" in error["data"]["message"]
    assert await unconfirmed(store) == 0


async def test_a_claim_that_postgres_could_not_confirm_is_given_back_later(
    store: Store, outbound: SqsQueue, settings: Settings, task_of: TaskOf
) -> None:
    """The scheduler dies between its claim and its send."""
    (task_id,) = await enqueue(store, NewTask("a"))
    scheduler = Scheduler(open_queue=no_routes, store=store, outbound=outbound, settings=settings)
    batch, _ = await scheduler._claim()
    assert batch is not None
    assert await unconfirmed(store) == 1
    later = datetime.now(UTC) + timedelta(seconds=settings.unsent_after_seconds + 1)
    async with store.session() as session:
        assert len(await session.fetch("release_unsent", settings.unsent_after_seconds, 10, later)) == 1
    row = await task_of(task_id)
    assert (row["state"], row["attempts"]) == ("SCHEDULED", 0)
    async with asyncio.timeout(20):  # it stands before the bounds now: the next sweep finds it
        while not await scheduler.run_once():
            await asyncio.sleep(0.01)
    assert task_ids(await take(outbound)) == [task_id]


async def test_a_scheduler_comes_back_after_an_outage_of_postgres(
    scheduler: Scheduler, store: Store, outbound: SqsQueue, postgres: EmbeddedPostgres, database_url: str
) -> None:
    (task_id,) = await enqueue(store, NewTask("a"))
    async with postgres_away(postgres, database_url):
        with pytest.raises(Unavailable):
            await scheduler.run_once()
    assert await scheduler.run_once() == 1
    assert task_ids(await take(outbound)) == [task_id]


# Waking up


async def test_a_wake_up_wakes_the_scheduler_long_before_its_next_poll(
    store: Store, outbound: SqsQueue, settings: Settings
) -> None:
    patient = with_settings(settings, poll_seconds=3600)
    scheduler = Scheduler(open_queue=no_routes, store=store, outbound=outbound, settings=patient)
    notifier = Notifier(store)
    notifying = asyncio.create_task(notifier.run())
    loop = Loop(scheduler, passes=2, grace_seconds=5)
    running = asyncio.create_task(loop.run())
    try:
        for _ in range(3):
            (task_id,) = await enqueue(store, NewTask("a"))
            notifier.wake()
            received = await outbound.receive(wait_seconds=20, visibility_seconds=30)
            assert task_ids(received) == [task_id]
    finally:
        notifying.cancel()
        loop.stop()
        assert await running == 0


async def test_a_wake_up_is_good_for_one_look(store: Store, outbound: SqsQueue, settings: Settings) -> None:
    scheduler = Scheduler(
        open_queue=no_routes, store=store, outbound=outbound, settings=with_settings(settings, poll_seconds=3600)
    )
    scheduler._listener.event.set()
    await asyncio.wait_for(scheduler.wait_for_work(), 30)
    assert await scheduler.run_once() == 0
    waiting = asyncio.create_task(scheduler.wait_for_work())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not waiting.done()
    scheduler._listener.event.set()
    await asyncio.wait_for(waiting, 30)


async def test_a_full_window_is_looked_at_again_while_another_pass_waits_for_a_wake_up(
    store: Store, outbound: SqsQueue, settings: Settings
) -> None:
    changed = with_settings(settings, poll_seconds=3600, in_flight_floor=1, in_flight_limit=1)
    scheduler = Scheduler(open_queue=no_routes, store=store, outbound=outbound, settings=changed)
    assert await scheduler.run_once() == 0
    waiting = asyncio.create_task(scheduler.wait_for_work())
    await asyncio.sleep(0.1)
    await enqueue(store, NewTask("a"))
    assert await scheduler.run_once() == 1
    await asyncio.wait_for(scheduler.wait_for_work(), 30)
    assert not waiting.done()
    waiting.cancel()


async def test_without_a_wake_up_the_poll_finds_the_task(
    scheduler: Scheduler, store: Store, outbound: SqsQueue
) -> None:
    loop = Loop(scheduler, passes=1, grace_seconds=5)
    running = asyncio.create_task(loop.run())
    try:
        for _ in range(2):  # the listener's own first wake-up may have found the first
            (task_id,) = await enqueue(store, NewTask("a"))
            assert task_ids(await outbound.receive(wait_seconds=20, visibility_seconds=30)) == [task_id]
    finally:
        loop.stop()
        assert await running == 0
