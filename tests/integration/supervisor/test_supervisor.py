from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import structlog
from prometheus_client import CollectorRegistry

from penstock.brokers.sqs import SqsQueue, SqsTransport
from penstock.db.notify import Listener
from penstock.db.pool import Store
from penstock.db.statements import SQL
from penstock.protocol.errors import Unavailable
from penstock.protocol.task import Failure, NewTask, State
from penstock.runtime import metrics
from penstock.runtime.loop import Loop
from penstock.settings.model import Settings
from penstock.settings.values import DAY
from penstock.supervisor import gauges as gauges_of
from penstock.supervisor import repair as repair_of
from penstock.supervisor import retention
from penstock.supervisor.gauges import Gauges
from penstock.supervisor.process import Supervisor
from penstock.supervisor.repair import Repair
from penstock.supervisor.retention import Retention
from penstock.tasks import claim as claims
from penstock.tasks import enqueue, settle
from penstock.tasks.claim import ClaimBatch
from tests.integration.doors import no_routes, put, sample, take

TaskOf = Callable[[int], Any]
ERROR = '{"code":-32000,"message":"boom"}'


@pytest.fixture
def queues(inbound: SqsQueue, outbound: SqsQueue, results: SqsQueue) -> dict[str, SqsQueue]:
    return {"inbound": inbound, "outbound": outbound, "results": results}


@pytest.fixture
def supervisor(store: Store, queues: dict[str, SqsQueue], settings: Settings) -> Supervisor:
    return Supervisor(open_queue=no_routes, store=store, queues=queues, settings=settings)


@pytest.fixture
def repair(
    store: Store, outbound: SqsQueue, results: SqsQueue, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> Repair:
    monkeypatch.setattr(repair_of, "_SWEEP_SECONDS", 0.0)  # ``age`` moves claims to before the oldest known
    return Repair(store=store, queue_of=lambda _: outbound, results=results, settings=settings, empty_seconds=0)


async def claimed(store: Store, *tasks: NewTask, confirm: bool = True) -> ClaimBatch:
    """New tasks, claimed and, by default, confirmed as sent."""
    async with store.transaction() as session:
        await enqueue.enqueue(session, tasks)
    return await claim(store, confirm=confirm)


async def claim(store: Store, *, confirm: bool = True, now: datetime | None = None) -> ClaimBatch:
    async with store.session() as session:
        batch = await claims.claim(session, 2000, now=now)
        assert batch is not None
        if confirm:
            await claims.confirm(session, batch.id)
    return batch


async def beat(store: Store, *batches: ClaimBatch) -> None:
    """A worker reports that it has taken these tasks."""
    async with store.session() as session:
        await settle.note_heartbeats(session, {(t.id, t.claim): None for batch in batches for t in batch.tasks})


async def age(sql: Any, seconds: float) -> None:
    """Let every claim be so much older."""
    past = timedelta(seconds=seconds)
    await sql.execute(
        "update penstock.task set claimed_at = claimed_at - $1::interval, heartbeat_at = heartbeat_at - $1::interval",
        past,
    )
    await sql.execute("update penstock.dispatch set claimed_at = claimed_at - $1::interval", past)


# Repair: claimed, and never sent


async def test_a_claim_that_was_never_sent_is_given_back_with_its_attempt(
    repair: Repair, store: Store, settings: Settings, task_of: TaskOf, sql: Any
) -> None:
    batch = await claimed(store, NewTask("a"), NewTask("a"), confirm=False)
    assert await repair.run_once() == 0
    await age(sql, settings.unsent_after_seconds + 1)
    before = sample("penstock_released_total", reason="unsent")
    assert await repair.run_once() == 2
    for task in batch.tasks:
        row = await task_of(task.id)
        assert (row["state"], row["attempts"]) == ("SCHEDULED", 0)
    assert sample("penstock_released_total", reason="unsent") == before + 2
    assert await repair.run_once() == 0


async def test_many_unsent_dispatches_are_given_back_in_one_round(
    repair: Repair, store: Store, settings: Settings, sql: Any
) -> None:
    for _ in range(45):
        await claimed(store, NewTask("a"), confirm=False)
    await age(sql, settings.unsent_after_seconds + 1)
    assert await repair.run_once() == 45
    assert await sql.fetchval("select count(*) from penstock.dispatch") == 0


# Repair: taken by a worker that stopped heartbeating


async def test_a_task_whose_worker_fell_silent_is_a_failed_attempt_counted_once(
    repair: Repair, store: Store, settings: Settings, task_of: TaskOf, sql: Any
) -> None:
    batch = await claimed(store, NewTask("a"))
    await beat(store, batch)
    assert await repair.run_once() == 0
    await age(sql, settings.stale_after_seconds + 1)
    before = sample("penstock_repaired_total")
    assert await repair.run_once() == 1
    row = await task_of(batch.tasks[0].id)
    assert (row["state"], row["attempts"]) == ("ERROR", 1)
    assert row["run_at"] > row["updated_at"]
    error = json.loads(row["error"])
    assert error["data"]["type"] == "StaleTask"
    assert "its worker stopped sending heartbeats" in error["message"]
    assert sample("penstock_repaired_total") == before + 1


async def test_a_silent_claim_older_than_any_known_is_found_by_a_sweep(
    repair: Repair, store: Store, settings: Settings, task_of: TaskOf, sql: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a claim whose transaction committed late."""
    monkeypatch.setattr(repair_of, "_SWEEP_SECONDS", 600.0)
    assert await repair.run_once() == 0
    batch = await claimed(store, NewTask("a"))
    await beat(store, batch)
    await age(sql, settings.stale_after_seconds + repair_of._LATE_SECONDS + 10)
    assert await repair.run_once() == 0
    monkeypatch.setattr(repair, "_sweep_at", 0.0)
    assert await repair.run_once() == 1
    assert (await task_of(batch.tasks[0].id))["state"] == "ERROR"


async def test_a_claim_that_holds_for_long_is_looked_at_in_every_round(
    repair: Repair, store: Store, settings: Settings, sql: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repair_of, "_SWEEP_SECONDS", 600.0)
    batch = await claimed(store, NewTask("a"))
    await age(sql, 10 * settings.stale_after_seconds)
    await beat(store, batch)
    for _ in range(2):
        assert await repair.run_once() == 0
    await sql.execute(
        "update penstock.task set heartbeat_at = now() - make_interval(secs => $1)", settings.stale_after_seconds + 1
    )
    assert await repair.run_once() == 1


async def test_a_late_result_after_repair_is_ignored(
    repair: Repair, store: Store, settings: Settings, task_of: TaskOf, sql: Any
) -> None:
    batch = await claimed(store, NewTask("a"))
    await beat(store, batch)
    await age(sql, settings.stale_after_seconds + 1)
    await repair.run_once()
    (task,) = batch.tasks
    async with store.transaction() as session:
        assert await settle.finish(session, {(task.id, task.claim): "1"}) == 0
    assert (await task_of(task.id))["state"] == "ERROR"


async def test_a_task_that_kills_every_worker_is_given_up_within_its_cap(
    repair: Repair, store: Store, settings: Settings, task_of: TaskOf, sql: Any
) -> None:
    batch = await claimed(store, NewTask("poison", max_attempts=4))
    for attempt in range(1, 5):
        await beat(store, batch)
        await age(sql, settings.stale_after_seconds + 1)
        assert await repair.run_once() == 1
        row = await task_of(batch.tasks[0].id)
        assert row["attempts"] == attempt
        if attempt < 4:
            assert row["state"] == "ERROR"
            batch = await claim(store, now=datetime.now(UTC) + timedelta(minutes=1))
    assert row["state"] == "CRITICAL_ERROR"
    assert len(json.loads(row["failures"])) == 4


async def test_an_attempt_lost_in_company_is_given_back_and_told_among_the_failures(
    repair: Repair, store: Store, settings: Settings, task_of: TaskOf, sql: Any
) -> None:
    batch = await claimed(store, NewTask("a", max_attempts=1), NewTask("a", max_attempts=1))
    (first, second) = batch.tasks
    async with store.session() as session:
        beats = {(task.id, task.claim): '{"percent":50}' for task in batch.tasks}
        await settle.note_heartbeats(session, beats, dict.fromkeys(beats, "worker-7"))
    await age(sql, settings.stale_after_seconds + 1)
    async with store.transaction() as session:
        await settle.finish(session, {(second.id, second.claim): "1"})
    before = sample("penstock_released_total", reason="suspect")
    assert await repair.run_once() == 1
    assert sample("penstock_released_total", reason="suspect") == before + 1
    row = await task_of(first.id)
    assert (row["state"], row["attempts"], row["progress"]) == ("SCHEDULED", 0, None)
    (lost,) = json.loads(row["failures"])
    assert (lost["attempt"], lost["claim"], lost["worker"]) == (1, first.claim, "worker-7")
    assert lost["error"]["data"]["type"] == "StaleTask"
    again = await claim(store)
    assert [task.suspect for task in again.tasks] == [True]
    await beat(store, again)
    await age(sql, settings.stale_after_seconds + 1)
    assert await repair.run_once() == 1
    row = await task_of(first.id)
    assert (row["state"], row["attempts"]) == ("CRITICAL_ERROR", 1)
    assert len(json.loads(row["failures"])) == 2


async def test_a_task_with_a_recent_heartbeat_is_left_alone_however_old_its_claim(
    repair: Repair, store: Store, settings: Settings, task_of: TaskOf, sql: Any
) -> None:
    batch = await claimed(store, NewTask("a"))
    await age(sql, 100 * settings.stale_after_seconds)
    await beat(store, batch)
    assert await repair.run_once() == 0
    assert (await task_of(batch.tasks[0].id))["state"] == "ACQUIRED"


# Repair: sent, and never reported


async def test_a_task_that_waits_in_its_queue_burns_no_attempt_and_is_sent_anew_when_overdue(
    repair: Repair, store: Store, outbound: SqsQueue, settings: Settings, task_of: TaskOf, sql: Any
) -> None:
    batch = await claimed(store, NewTask("a"))
    await put(outbound, '"the message"')
    await age(sql, settings.stale_after_seconds + 1)
    for _ in range(4):
        assert await repair.run_once() == 0
    assert (await task_of(batch.tasks[0].id))["state"] == "ACQUIRED"
    await age(sql, settings.untaken_after_seconds)
    before = sample("penstock_released_total", reason="untaken")
    assert await repair.run_once() == 1
    row = await task_of(batch.tasks[0].id)
    assert (row["state"], row["attempts"]) == ("SCHEDULED", 0)
    assert sample("penstock_released_total", reason="untaken") == before + 1


async def test_a_message_that_a_worker_holds_is_not_taken_for_gone(
    repair: Repair, store: Store, outbound: SqsQueue, settings: Settings, sql: Any
) -> None:
    await claimed(store, NewTask("a"))
    await put(outbound, '"the message"')
    assert len(await take(outbound)) == 1
    await age(sql, settings.stale_after_seconds + 1)
    for _ in range(4):
        assert await repair.run_once() == 0


async def test_a_message_gone_without_an_answer_is_a_failed_attempt_after_two_looks(
    repair: Repair, store: Store, settings: Settings, task_of: TaskOf, sql: Any
) -> None:
    batch = await claimed(store, NewTask("a"))
    await age(sql, settings.stale_after_seconds + 1)
    assert await repair.run_once() == 0
    assert await repair.run_once() == 1
    row = await task_of(batch.tasks[0].id)
    assert (row["state"], row["attempts"]) == ("ERROR", 1)
    assert "its message is gone" in json.loads(row["error"])["message"]


async def test_where_held_messages_are_not_counted_one_is_gone_when_nobody_can_hold_it_any_longer(
    repair: Repair, store: Store, outbound: SqsQueue, settings: Settings, sql: Any
) -> None:
    outbound.limits = replace(outbound.limits, counts_held=False, max_extend_seconds=1000)
    await claimed(store, NewTask("a"))
    await age(sql, settings.stale_after_seconds + 1)
    for _ in range(4):
        assert await repair.run_once() == 0
    await age(sql, 1000)
    assert await repair.run_once() == 1


async def test_a_message_seen_between_two_looks_begins_the_count_anew(
    repair: Repair, store: Store, outbound: SqsQueue, settings: Settings, sql: Any
) -> None:
    await claimed(store, NewTask("a"))
    await age(sql, settings.stale_after_seconds + 1)
    assert await repair.run_once() == 0
    await put(outbound, '"the message"')
    assert await repair.run_once() == 0
    await outbound.delete(await take(outbound))
    assert await repair.run_once() == 0
    assert await repair.run_once() == 1


async def test_no_attempt_fails_while_answers_wait_unread(
    repair: Repair, store: Store, results: SqsQueue, settings: Settings, task_of: TaskOf, sql: Any
) -> None:
    """The resulters are down, or were until now: the answers may be among what they have not read."""
    answered = await claimed(store, NewTask("a"))
    taken = await claimed(store, NewTask("a"))
    await beat(store, taken)
    await put(results, '"an answer"')
    await age(sql, settings.stale_after_seconds + 1)
    for _ in range(4):
        assert await repair.run_once() == 0
    for batch in (answered, taken):
        assert (await task_of(batch.tasks[0].id))["state"] == "ACQUIRED"
    await results.delete(await take(results))
    assert await repair.run_once() == 2


async def test_a_queue_that_is_missing_keeps_no_task_of_another_from_repair(
    store: Store, outbound: SqsQueue, results: SqsQueue, transport: SqsTransport, settings: Settings, task_of: TaskOf,
    sql: Any, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(repair_of, "_SWEEP_SECONDS", 0.0)
    missing = transport.queue("no-such-queue", label="outbound:video")
    repair = Repair(
        store=store, queue_of=lambda route: outbound if route is None else missing, results=results, settings=settings,
        empty_seconds=0,
    )  # fmt: skip
    taken, of_route = (await claimed(store, NewTask("a"), NewTask("b"))).tasks
    async with store.session() as session:
        await settle.note_heartbeats(session, {(taken.id, taken.claim): None})
    await sql.execute("update penstock.task set route = 'video' where id = $1", of_route.id)
    await age(sql, settings.stale_after_seconds + 1)
    assert await repair.run_once() == 1
    assert (await task_of(taken.id))["state"] == "ERROR"
    await age(sql, settings.untaken_after_seconds)
    assert await repair.run_once() == 1
    assert (await task_of(of_route.id))["state"] == "SCHEDULED"


async def test_no_attempt_fails_while_a_resulter_holds_the_answers(
    repair: Repair, store: Store, results: SqsQueue, settings: Settings, sql: Any
) -> None:
    """It has received the last messages after an outage, and not committed yet: none of them is ready any more."""
    await claimed(store, NewTask("a"))
    await beat(store, await claimed(store, NewTask("a")))
    await put(results, '"an answer"')
    held = await take(results)
    assert (await results.depth()).visible == 0
    await age(sql, settings.stale_after_seconds + 1)
    assert [await repair.run_once() for _ in range(3)] == [0, 0, 0]
    await results.delete(held)
    assert await repair.run_once() == 2


async def note(sql: Any, name: str, *, lag: float | None = 0, reads_for: float = 3600, ago: float = 0) -> None:
    """What a resulter has noted."""
    await sql.execute(
        "insert into penstock.resulter"
        " select $1, $2, now() - make_interval(secs => $3), now() - make_interval(secs => $4)"
        " on conflict (name) do update set lag = excluded.lag, since = excluded.since, noted_at = excluded.noted_at",
        name, lag, reads_for, ago,
    )  # fmt: skip


async def test_a_task_whose_worker_died_fails_though_results_never_cease(
    repair: Repair, store: Store, results: SqsQueue, settings: Settings, sql: Any
) -> None:
    await put(results, '"always another answer"')
    await note(sql, "resulter-1", lag=5)
    await beat(store, await claimed(store, NewTask("a")))
    # An answer may be behind by 5 s, and for so long with a resulter that has died.
    await age(sql, settings.stale_after_seconds + settings.visibility_timeout_seconds + 2)
    assert await repair.run_once() == 0
    await age(sql, 5)
    assert await repair.run_once() == 1
    assert await sql.fetchval("select state::text from penstock.task") == "ERROR"


async def test_silence_counts_only_once_a_resulter_has_read_for_a_while(
    repair: Repair, store: Store, settings: Settings, sql: Any
) -> None:
    """After an outage of Postgres or of the resulters: what the others held is not back in the queue at once."""
    await beat(store, await claimed(store, NewTask("a")))
    await age(sql, 3600)
    hold = settings.visibility_timeout_seconds
    await note(sql, "before the outage", reads_for=7200, ago=hold + 31)
    assert await repair.run_once() == 0
    await note(sql, "resulter-1", reads_for=hold - 5)
    assert await repair.run_once() == 0
    await note(sql, "resulter-1", reads_for=hold + 1)
    await note(sql, "one that lags", lag=4000, reads_for=0)
    assert await repair.run_once() == 0
    await note(sql, "one that lags", lag=10, reads_for=0)
    assert await repair.run_once() == 1


async def test_a_resulter_that_died_holds_no_verdict_up_for_long(
    repair: Repair, store: Store, settings: Settings, sql: Any
) -> None:
    await beat(store, await claimed(store, NewTask("a")))
    hold = settings.visibility_timeout_seconds
    await age(sql, settings.stale_after_seconds + hold + 20)
    await note(sql, "resulter-1")
    await note(sql, "dead", ago=hold + 25)  # it may hold the answer, and nothing newer is known of it
    assert await repair.run_once() == 0
    await note(sql, "dead", lag=4000, ago=hold + 31)
    assert await repair.run_once() == 1


async def test_where_results_tell_no_time_the_queue_has_to_be_empty(
    repair: Repair, store: Store, results: SqsQueue, settings: Settings, sql: Any
) -> None:
    await beat(store, await claimed(store, NewTask("a")))
    await age(sql, 3600)
    await note(sql, "resulter-1", lag=None)
    await put(results, '"an answer"')
    assert await repair.run_once() == 0
    await results.delete(await take(results))
    assert await repair.run_once() == 1


async def test_a_task_that_lives_is_not_sent_again_however_long_it_runs(
    repair: Repair, store: Store, results: SqsQueue, settings: Settings, sql: Any
) -> None:
    await beat(store, await claimed(store, NewTask("a")))
    await age(sql, settings.untaken_after_seconds)
    await sql.execute("update penstock.task set heartbeat_at = now() - interval '10 minutes'")
    await put(results, '"a heartbeat"')  # resulters were stopped for as long
    assert await repair.run_once() == 0
    assert await sql.fetchval("select state::text from penstock.task") == "ACQUIRED"
    await age(sql, settings.untaken_after_seconds)  # and no resulter reads results
    assert await repair.run_once() == 1
    assert await sql.fetchval("select state::text from penstock.task") == "SCHEDULED"


async def test_an_unconfirmed_claim_of_which_a_worker_has_told_is_left_to_it(
    repair: Repair, store: Store, settings: Settings, sql: Any
) -> None:
    """The messages went, and the confirmation did not."""
    batch = await claimed(store, NewTask("a"), NewTask("a"), confirm=False)
    async with store.session() as session:
        await settle.note_heartbeats(session, {(batch.tasks[0].id, batch.tasks[0].claim): None})
    await sql.execute("update penstock.task set claimed_at = claimed_at - interval '1 hour'")
    await sql.execute("update penstock.dispatch set claimed_at = claimed_at - interval '1 hour'")
    assert await repair.run_once() == 1
    states = await sql.fetch("select state::text from penstock.task order by id")
    assert [row[0] for row in states] == ["ACQUIRED", "SCHEDULED"]


async def test_a_queue_has_to_look_empty_for_a_minute(
    store: Store, outbound: SqsQueue, results: SqsQueue, settings: Settings, sql: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1000.0]
    monkeypatch.setattr("penstock.supervisor.repair.monotonic", lambda: clock[0])
    repair = Repair(store=store, queue_of=lambda _: outbound, results=results, settings=settings)
    await claimed(store, NewTask("a"))
    await age(sql, settings.stale_after_seconds + 1)
    for _ in range(12):
        assert await repair.run_once() == 0
        clock[0] += 5
    assert await repair.run_once() == 1


async def test_a_silent_task_behind_pages_of_waiting_ones_of_the_same_claim_is_found(
    repair: Repair, store: Store, outbound: SqsQueue, settings: Settings, task_of: TaskOf, sql: Any
) -> None:
    batch = await claimed(store, *(NewTask("a") for _ in range(1200)))
    silent = max(batch.tasks, key=lambda task: task.id)
    async with store.session() as session:
        await settle.note_heartbeats(session, {(silent.id, silent.claim): None})
    await put(outbound, '"the others"')
    await age(sql, settings.stale_after_seconds + 1)
    assert await repair.run_once() == 1
    assert (await task_of(silent.id))["state"] == "ERROR"
    assert await sql.fetchval("select count(*) from penstock.task where state = 'ACQUIRED'") == 1199


async def test_two_supervisors_at_once_fail_and_give_back_each_task_once(
    store: Store, outbound: SqsQueue, results: SqsQueue, settings: Settings, sql: Any
) -> None:
    await beat(store, await claimed(store, *(NewTask("a") for _ in range(300))))
    await claimed(store, *(NewTask("b") for _ in range(300)), confirm=False)
    await age(sql, settings.stale_after_seconds + 1)
    repairs = [
        Repair(store=store, queue_of=lambda _: outbound, results=results, settings=settings, empty_seconds=0)
        for _ in range(4)
    ]
    assert sum(await asyncio.gather(*(repair.run_once() for repair in repairs))) == 600
    rows = await sql.fetch(
        "select action, state::text, attempts, jsonb_array_length(coalesce(failures, '[]')) as failures, count(*)"
        " from penstock.task group by 1, 2, 3, 4 order by 1"
    )
    assert [tuple(row) for row in rows] == [("a", "ERROR", 1, 1, 300), ("b", "SCHEDULED", 0, 0, 300)]


@pytest.mark.parametrize("what", ["unsent claim", "ordering key"])
async def test_what_was_given_back_wakes_the_schedulers(
    supervisor: Supervisor, store: Store, settings: Settings, sql: Any, what: str
) -> None:
    if what == "unsent claim":
        await claimed(store, NewTask("a"), confirm=False)
    else:  # whose failed task is gone
        async with store.transaction() as session:
            await enqueue.enqueue(session, [NewTask("a", ordering_key="k")] * 2)
        await sql.execute("delete from penstock.task where state = 'SCHEDULED'")
        await sql.execute("update penstock.ordering_head set held = true")
    listener = Listener(store)
    listening = asyncio.create_task(listener.run())
    await asyncio.wait_for(listener.event.wait(), 30)
    listener.event.clear()
    loop = Loop(supervisor, passes=1, grace_seconds=5)
    running = asyncio.create_task(loop.run())
    await age(sql, settings.unsent_after_seconds + 1)
    await asyncio.wait_for(listener.event.wait(), 30)
    listening.cancel()
    loop.stop()
    assert await running == 0


# Retention


def keeping(settings: Settings, **seconds: float) -> Settings:
    return settings.model_copy(update={f"retention_{name}_seconds": value for name, value in seconds.items()})


async def settled(store: Store, state: State, **more: Any) -> int:
    """A task that has just reached that final state; its id."""
    batch = await claimed(store, NewTask("a", **more))
    (task,) = batch.tasks
    async with store.transaction() as session:
        if state is State.SUCCESS:
            await settle.finish(session, {(task.id, task.claim): "1"})
        elif state is State.CRITICAL_ERROR:
            await settle.fail(session, [Failure(task.id, task.claim, ERROR, None)])
        else:
            await settle.cancel(session, [task.id])
    return task.id


async def counts(store: Store) -> dict[str, int]:
    async with store.session() as session:
        return {row["state"]: row["count"] for row in await session.fetch("count_settled", "other")}


FINAL = [State.SUCCESS, State.CRITICAL_ERROR, State.CANCELLED]


@pytest.mark.parametrize("state", FINAL)
async def test_each_final_state_is_kept_for_its_own_time_and_its_unique_key_with_it(
    store: Store, settings: Settings, task_of: TaskOf, state: State
) -> None:
    ids = {each: await settled(store, each, unique_key=f"key-{each}") for each in FINAL}
    assert await counts(store) == dict.fromkeys(FINAL, 1)
    before = sample("penstock_cleaned_total", kind=state.value)
    duty = Retention(store=store, settings=keeping(settings, **{state.value.lower(): 0.0}))
    assert await duty.run_once() == 1
    assert {each: (await task_of(i)) is None for each, i in ids.items()} == {each: each is state for each in FINAL}
    assert await counts(store) == {each: 1 for each in FINAL if each is not state}
    async with store.transaction() as session:
        answers = await enqueue.enqueue(session, [NewTask("a", unique_key=f"key-{each}") for each in FINAL])
    assert {each: answer.duplicate for each, answer in zip(FINAL, answers, strict=True)} == {
        each: each is not state for each in FINAL
    }
    assert sample("penstock_cleaned_total", kind=state.value) == before + 1


async def test_a_live_task_is_never_cleaned(store: Store, settings: Settings, task_of: TaskOf) -> None:
    (task,) = (await claimed(store, NewTask("a"))).tasks
    duty = Retention(store=store, settings=keeping(settings, success=0, critical_error=0, cancelled=0))
    assert await duty.run_once() == 0
    assert (await task_of(task.id))["state"] == "ACQUIRED"


async def test_cleaning_goes_in_bounded_batches(
    store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "_BATCH", 3)
    monkeypatch.setattr(retention, "_BATCHES_PER_ROUND", 2)
    batch = await claimed(store, *(NewTask("a") for _ in range(10)))
    async with store.transaction() as session:
        await settle.finish(session, {(task.id, task.claim): "1" for task in batch.tasks})
    duty = Retention(store=store, settings=keeping(settings, success=0.0))
    assert [await duty.run_once() for _ in range(3)] == [6, 4, 0]
    assert await counts(store) == {}


async def past_partition(sql: Any, days_ago: int) -> str:
    """A partition of successes as it was made so many days ago."""
    day = datetime.now(UTC).date() - timedelta(days=days_ago)
    name = f"task_success_{day:%Y%m%d}"
    await sql.execute(
        f"create table penstock.{name} partition of penstock.task_success"
        f" for values from ('{day} 00:00+00') to ('{day + timedelta(days=1)} 00:00+00')"
    )
    return name


async def finished(sql: Any, task_id: int, days_ago: int) -> None:
    """Let a success have happened at noon so many days ago."""
    noon = datetime.now(UTC).replace(hour=12, minute=0) - timedelta(days=days_ago)
    await sql.execute("update penstock.task_history set finished_at = $2 where id = $1", task_id, noon)


async def partitions(sql: Any) -> set[str]:
    rows = await sql.fetch("select c.relname from pg_inherits i join pg_class c on c.oid = i.inhrelid")
    return {row["relname"] for row in rows}


async def test_a_partition_is_dropped_once_its_last_moment_has_outlived_the_retention(
    store: Store, settings: Settings, task_of: TaskOf, sql: Any
) -> None:
    expired, kept = await past_partition(sql, 10), await past_partition(sql, 7)
    old = await settled(store, State.SUCCESS, unique_key="old")
    younger = await settled(store, State.SUCCESS, unique_key="younger")
    await finished(sql, old, 10)
    await finished(sql, younger, 7)
    duty = Retention(store=store, settings=keeping(settings, success=7 * DAY))
    assert await duty.run_once() == 1
    assert await partitions(sql) >= {kept}
    assert expired not in await partitions(sql)
    assert await sql.fetchval("select to_regclass('penstock.' || $1)", expired) is None
    assert await task_of(old) is None
    assert (await task_of(younger))["state"] == "SUCCESS"
    assert await counts(store) == {"SUCCESS": 1}
    async with store.transaction() as session:
        answers = await enqueue.enqueue(session, [NewTask("a", unique_key="old"), NewTask("a", unique_key="younger")])
    assert [answer.duplicate for answer in answers] == [False, True]


async def test_a_partition_detached_by_a_supervisor_that_died_is_dropped_by_the_next(
    store: Store, settings: Settings, sql: Any
) -> None:
    left = await past_partition(sql, 10)
    await finished(sql, await settled(store, State.SUCCESS, unique_key="old"), 10)
    await sql.execute(f"alter table penstock.task_success detach partition penstock.{left}")
    assert await Retention(store=store, settings=settings).run_once() == 1
    assert await sql.fetchval("select to_regclass('penstock.' || $1)", left) is None
    assert await counts(store) == {}
    async with store.transaction() as session:
        (answer,) = await enqueue.enqueue(session, [NewTask("a", unique_key="old")])
    assert not answer.duplicate


async def test_what_fell_into_the_default_partition_is_cleaned_too(
    store: Store, settings: Settings, task_of: TaskOf, sql: Any
) -> None:
    """No supervisor ran for days, so the day had no partition of its own."""
    old = await settled(store, State.SUCCESS, unique_key="old")
    younger = await settled(store, State.SUCCESS)
    await finished(sql, old, 10)
    await finished(sql, younger, 3)
    assert await sql.fetchval("select count(*) from penstock.task_success_default") == 2
    duty = Retention(store=store, settings=keeping(settings, success=7 * DAY))
    assert await duty.run_once() == 1
    assert await task_of(old) is None
    assert await task_of(younger) is not None
    assert await counts(store) == {"SUCCESS": 1}


async def without_partition_of_today(sql: Any) -> str:
    """As if no supervisor had run for days: what settles falls into the default partition. Returns the name."""
    name = f"task_success_{datetime.now(UTC):%Y%m%d}"
    await sql.execute(f"drop table penstock.{name}")
    return name


async def in_default(sql: Any) -> int:
    count: int = await sql.fetchval("select count(*) from penstock.task_success_default")
    return count


async def history_ids(sql: Any) -> list[int]:
    return [row["id"] for row in await sql.fetch("select id from penstock.task_history order by id")]


def by_small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "_BLOCKS_COPIED_AT_ONCE", 2)
    monkeypatch.setattr(retention, "_CHANGES_AT_ONCE", 2)
    monkeypatch.setattr(retention, "_COPYING_SECONDS", 0.0)


async def many_settled(store: Store, count: int) -> list[int]:
    async with store.transaction() as session:
        added = await enqueue.enqueue(session, [NewTask("a", payload=json.dumps("x" * 500)) for _ in range(count)])
    batch = await claim(store)
    async with store.transaction() as session:
        await settle.finish(session, {(task.id, task.claim): "1" for task in batch.tasks})
    return [one.id for one in added]


async def test_days_with_records_in_the_default_partition_get_partitions_and_no_record_is_ever_missing(
    store: Store, settings: Settings, sql: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_small_steps(monkeypatch)
    today = await without_partition_of_today(sql)
    ids = await many_settled(store, 100)
    for place, task_id in enumerate(ids[:60]):
        await finished(sql, task_id, 2 + place % 2 * 2)  # the day between them has no records
    duty = Retention(store=store, settings=settings)
    rounds = 0
    while await in_default(sql):
        rounds += 1
        assert rounds < 200
        await duty.run_once()
        assert await history_ids(sql) == ids
        if rounds < 10:
            # What settles, is changed and leaves meanwhile, in blocks that were copied and in others.
            if await in_default(sql):
                ids.append(await settled(store, State.SUCCESS))
            await sql.execute(
                "update penstock.task_history set payload = '1' where id = any($1)", ids[: 60 + rounds : 9]
            )
            await sql.execute("delete from penstock.task_history where id = $1", ids.pop(rounds * 5))
    assert rounds > 10, "it was done in one step"
    now = datetime.now(UTC)
    days = {f"task_success_{now - timedelta(days=ago):%Y%m%d}" for ago in (2, 4, 0, -1, -2, -3)}
    assert today in days
    assert await partitions(sql) >= days | {"task_success_default"}
    rows = await sql.fetch("select id, payload::text, tableoid::regclass::text as part from penstock.task_success")
    assert len(rows) == len(ids)
    assert {row["part"].removeprefix("penstock.") for row in rows} == {
        f"task_success_{now - timedelta(days=ago):%Y%m%d}" for ago in (2, 4, 0)
    }
    assert sum(row["payload"] == "1" for row in rows) >= 7
    assert await sql.fetchval("select count(*) from pg_class where relname like '%aside'") == 0
    assert await sql.fetchval("select count(*) from penstock.default_move") == 0
    assert await sql.fetchval("select count(*) from penstock.default_change") == 0
    # They are as other partitions: replicated, indexed as their parent, and removed as a whole.
    assert await sql.fetchval("select bool_and(relreplident = 'f') from pg_class where relname = any($1)", list(days))
    assert await sql.fetchval(
        "select count(*) from pg_class c join pg_inherits i on i.inhrelid = c.oid where c.relkind = 'i'"
        " and c.oid in (select indexrelid from pg_index where indrelid = $1::text::regclass)", f"penstock.{today}",
    ) == await sql.fetchval(
        "select count(*) from pg_index where indrelid = 'penstock.task_success'::regclass"
    )  # fmt: skip
    assert not await sql.fetch("select from pg_constraint where conname = 'of_the_day'")
    old = sum(1 for row in rows if row["part"].endswith(f"{now - timedelta(days=4):%Y%m%d}"))
    assert await Retention(store=store, settings=keeping(settings, success=2.5 * DAY)).run_once() == old


async def test_tasks_settle_while_the_default_partition_is_emptied(
    store: Store, settings: Settings, sql: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_small_steps(monkeypatch)
    monkeypatch.setattr(retention, "_CHANGES_AT_ONCE", 50)
    monkeypatch.setattr(retention, "_LOCK_PAUSE_SECONDS", 0.0)
    today = await without_partition_of_today(sql)
    ids = await many_settled(store, 100)
    duty = Retention(store=store, settings=settings)

    async def upkeep() -> None:
        async with asyncio.timeout(60):
            while today not in await partitions(sql):
                with suppress(Unavailable):  # it met a settle: the next round
                    await duty.run_once()

    emptying = asyncio.create_task(upkeep())
    while not emptying.done():
        ids.append(await settled(store, State.SUCCESS))
    await emptying
    ids.append(await settled(store, State.SUCCESS))
    assert await history_ids(sql) == sorted(ids)
    assert await in_default(sql) == 0


async def test_a_reader_of_the_history_keeps_the_default_partition_from_being_replaced_and_nothing_else(
    store: Store, settings: Settings, sql: Any
) -> None:
    today = await without_partition_of_today(sql)
    ids = await many_settled(store, 5)
    await sql.execute("insert into penstock.inbound_receipt values ('old', now() - interval '99 days')")
    async with sql.transaction():
        assert await history_ids(sql) == ids
        with pytest.raises(Unavailable):
            await Retention(store=store, settings=settings).run_once()
        assert await sql.fetchval("select count(*) from penstock.inbound_receipt") == 0
        ids.append(await settled(store, State.SUCCESS))
        assert await history_ids(sql) == ids
    assert today not in await partitions(sql)
    await Retention(store=store, settings=settings).run_once()
    assert today in await partitions(sql)
    assert await history_ids(sql) == ids


async def test_a_default_partition_that_was_rewritten_is_copied_from_its_start(
    store: Store, settings: Settings, sql: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_small_steps(monkeypatch)
    await without_partition_of_today(sql)
    ids = await many_settled(store, 100)
    duty = Retention(store=store, settings=settings)
    while not await sql.fetchval("select next_block from penstock.default_move"):
        await duty.run_once()
    await sql.execute("delete from penstock.task_success_default where id = any($1)", ids[:50])
    await sql.execute("vacuum full penstock.task_success_default")
    while await in_default(sql):
        await duty.run_once()
        assert await history_ids(sql) == ids[50:]


async def test_a_default_partition_is_not_replaced_while_more_was_noted_than_is_copied_at_once(
    store: Store, sql: Any
) -> None:
    await without_partition_of_today(sql)
    ids = await many_settled(store, 3)
    await sql.execute("select penstock.begin_default_move('task_success')")
    while await sql.fetchval("select penstock.step_default_move('task_success', 128, 1000)") != "ready":
        pass
    await sql.execute("update penstock.task_history set payload = '1' where id = any($1)", ids)
    assert not await sql.fetchval("select penstock.end_default_move('task_success', 2)")
    assert await history_ids(sql) == ids
    while await sql.fetchval("select penstock.step_default_move('task_success', 128, 2)") != "ready":
        pass
    assert await sql.fetchval("select penstock.end_default_move('task_success', 2)")
    assert await sql.fetchval("select count(*) from penstock.task_success where payload::text = '1'") == len(ids)


async def test_tables_of_days_are_attached_without_being_read(store: Store, sql: Any) -> None:
    """The history is locked meanwhile."""
    await without_partition_of_today(sql)
    await finished(sql, (await many_settled(store, 2))[0], 3)
    await sql.execute("select penstock.begin_default_move('task_success')")
    while await sql.fetchval("select penstock.step_default_move('task_success', 128, 1000)") != "ready":
        pass
    notes: list[str] = []
    sql.add_log_listener(lambda _, message: notes.append(message.message))
    await sql.execute("set client_min_messages = debug1")
    assert await sql.fetchval("select penstock.end_default_move('task_success', 1000)")
    await sql.execute("reset client_min_messages")
    assert [note.rsplit('" is ')[-1] for note in notes if "partition constraint" in note] == [
        "implied by existing constraints"
    ] * 2


async def test_a_role_without_rights_of_its_own_on_the_notes_settles_while_a_default_partition_is_emptied(
    store: Store, settings: Settings, sql: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_small_steps(monkeypatch)
    await without_partition_of_today(sql)
    (task_id, other) = await many_settled(store, 2)
    await Retention(store=store, settings=settings).run_once()
    async with sql.transaction():
        await sql.execute("create role settler")
        await sql.execute("grant usage on schema penstock to settler; grant all on penstock.task_history to settler")
        await sql.execute("set local role settler")
        await sql.execute("delete from penstock.task_history where id = $1", task_id)
        await sql.execute("reset role")
        assert [row["id"] for row in await sql.fetch("select id from penstock.default_change")] == [task_id]
        await sql.execute("drop owned by settler; drop role settler")
    assert await history_ids(sql) == [other]


async def test_partitions_are_made_ahead(store: Store, settings: Settings, sql: Any) -> None:
    today = datetime.now(UTC).date()
    expected = {f"task_{state.lower()}_{today + timedelta(days=ahead):%Y%m%d}" for state in FINAL for ahead in range(4)}
    for name in expected & await partitions(sql):
        await sql.execute(f"drop table penstock.{name}")
    await Retention(store=store, settings=settings).run_once()
    assert await partitions(sql) >= expected


async def test_a_reader_of_an_old_partition_makes_the_drop_wait_and_the_lock_is_left_alone_meanwhile(
    store: Store, settings: Settings, sql: Any
) -> None:
    """Everybody's inserts would queue up behind each try."""
    expired = await past_partition(sql, 10)
    keeping_a_week = keeping(settings, success=7 * DAY)
    duty = Retention(store=store, settings=keeping_a_week)
    async with sql.transaction():
        await sql.fetch("select 1 from penstock.task_history")
        with pytest.raises(Unavailable):
            await duty.run_once()
        failed = sample("penstock_duties_failed_total", duty="expired partitions")
        assert failed >= 1
        await duty.run_once()
        assert sample("penstock_duties_failed_total", duty="expired partitions") == failed
        assert expired in await partitions(sql)
    await Retention(store=store, settings=keeping_a_week).run_once()
    assert expired not in await partitions(sql)


async def test_tasks_settle_while_a_new_partition_waits_for_a_reader_of_the_history(
    store: Store, settings: Settings, sql: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "_LOCK_WAIT_MS", 60_000)
    ahead = max(
        await partitions(sql) & {f"task_success_{datetime.now(UTC) + timedelta(days=n):%Y%m%d}" for n in (2, 3)}
    )
    await sql.execute(f"drop table penstock.{ahead}")
    (task,) = (await claimed(store, NewTask("a"))).tasks
    async with sql.transaction():
        await sql.fetch("select 1 from penstock.task_history")
        making = asyncio.create_task(Retention(store=store, settings=settings).run_once())
        async with asyncio.timeout(30):
            while not await sql.fetchval("select count(*) from pg_locks where not granted and locktype = 'relation'"):
                await asyncio.sleep(0.01)
        async with store.transaction() as session:
            await session.fetch("limit_lock_wait")
            assert await settle.finish(session, {(task.id, task.claim): "1"}) == 1
        assert not making.done()
    await making
    assert ahead in await partitions(sql)


async def expired_day(store: Store, sql: Any, records: int) -> str:
    """A partition of ten days ago with so many records over several blocks, each with a unique key."""
    name = await past_partition(sql, 10)
    async with store.transaction() as session:
        await enqueue.enqueue(
            session, [NewTask("a", payload=json.dumps("x" * 500), unique_key=f"k{n}") for n in range(records)]
        )
    batch = await claim(store)
    async with store.transaction() as session:
        await settle.finish(session, {(task.id, task.claim): "1" for task in batch.tasks})
    noon = datetime.now(UTC).replace(hour=12, minute=0) - timedelta(days=10)
    await sql.execute("update penstock.task_history set finished_at = $1", noon)
    return name


async def test_a_large_day_is_forgotten_in_steps_that_the_next_supervisor_goes_on_with(
    store: Store, settings: Settings, sql: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "_BLOCKS_AT_ONCE", 2)
    monkeypatch.setattr(retention, "_FORGETTING_SECONDS", 0.0)
    name = await expired_day(store, sql, 100)
    week = keeping(settings, success=7 * DAY)
    keys = []
    for _ in range(20):
        removed = await Retention(store=store, settings=week).run_once()
        keys.append(await sql.fetchval("select count(*) from penstock.unique_key"))
        if removed:
            break
        assert await sql.fetchval("select to_regclass('penstock.' || $1)", name) is not None
        assert await counts(store) == {"SUCCESS": 100}
    assert removed == 100
    assert len(keys) > 3, "it was done in one step"
    assert keys == sorted(keys, reverse=True)
    assert (keys[0] > 0, keys[-1]) == (True, 0)
    assert await sql.fetchval("select to_regclass('penstock.' || $1)", name) is None
    assert await sql.fetchval("select count(*) from penstock.forgetting") == 0
    assert await counts(store) == {}


async def test_a_partition_that_was_rewritten_half_way_is_read_from_its_start(
    store: Store, settings: Settings, sql: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its records stand in other blocks from then on."""
    monkeypatch.setattr(retention, "_BLOCKS_AT_ONCE", 2)
    monkeypatch.setattr(retention, "_FORGETTING_SECONDS", 0.0)
    name = await expired_day(store, sql, 100)
    duty = Retention(store=store, settings=keeping(settings, success=7 * DAY))
    await duty.run_once()
    await duty.run_once()
    index = await sql.fetchval(
        "select indexrelid::regclass::text from pg_index i join pg_class c on c.oid = i.indexrelid"
        " join pg_am a on a.oid = c.relam where indrelid = $1::regclass and amname = 'btree'", f"penstock.{name}",
    )  # fmt: skip
    await sql.execute(f"cluster penstock.{name} using {index.split('.')[-1]}")
    monkeypatch.setattr(retention, "_FORGETTING_SECONDS", 60.0)
    assert await duty.run_once() == 100
    assert await sql.fetchval("select count(*) from penstock.unique_key") == 0
    assert await counts(store) == {}


async def test_each_part_of_retention_survives_the_failure_of_another(
    store: Store, settings: Settings, sql: Any
) -> None:
    async with store.transaction() as session:
        await enqueue.insert_rejected(session, "inbound", [("old", "why")])
    await sql.execute("update penstock.rejected set at = now() - interval '9 days'")
    await sql.execute("alter table penstock.inbound_receipt rename to elsewhere")
    expired = await past_partition(sql, 10)
    before = sample("penstock_duties_failed_total", duty="records receipt")
    with pytest.raises(Unavailable):
        await Retention(store=store, settings=keeping(settings, success=7 * DAY, rejected=8 * DAY)).run_once()
    assert sample("penstock_duties_failed_total", duty="records receipt") == before + 1
    assert expired not in await partitions(sql)
    assert await sql.fetchval("select count(*) from penstock.rejected") == 0


async def test_one_supervisor_at_a_time_does_the_upkeep(store: Store, settings: Settings, sql: Any) -> None:
    expired = await past_partition(sql, 10)
    duty = Retention(store=store, settings=keeping(settings, success=7 * DAY))
    async with sql.transaction(), asyncio.timeout(30):
        await sql.execute("select pg_advisory_xact_lock(hashtext('penstock upkeep'))")
        assert await duty.run_once() == 0
        assert expired in await partitions(sql)
    await asyncio.gather(duty.run_once(), duty.run_once())
    assert expired not in await partitions(sql)


async def test_receipts_and_rejected_messages_leave_after_their_time(
    store: Store, settings: Settings, sql: Any
) -> None:
    async with store.transaction() as session:
        await enqueue.record_receipts(session, ["old", "new"])
        await enqueue.insert_rejected(session, "inbound", [("old", "why"), ("new", "why")])
    await sql.execute(
        "update penstock.inbound_receipt set received_at = now() - interval '9 days' where message_id = 'old'"
    )
    await sql.execute("update penstock.rejected set at = now() - interval '9 days' where body = 'old'")
    duty = Retention(store=store, settings=keeping(settings, receipts=8 * DAY, rejected=8 * DAY))
    assert await duty.run_once() == 2
    assert await sql.fetchval("select array_agg(message_id) from penstock.inbound_receipt") == ["new"]
    assert await sql.fetchval("select array_agg(convert_from(body, 'UTF8')) from penstock.rejected") == ["new"]


async def test_old_counts_are_folded_and_the_sums_stay(store: Store, settings: Settings, sql: Any) -> None:
    for _ in range(5):
        await settled(store, State.SUCCESS)
    await sql.execute("update penstock.tally set at = at - interval '1 hour'")
    assert await sql.fetchval("select count(*) from penstock.tally where event = 'SUCCESS'") == 5
    await Retention(store=store, settings=settings).run_once()
    assert await sql.fetchval("select count(*) from penstock.tally where event = 'SUCCESS'") == 1
    assert await counts(store) == {"SUCCESS": 5}


async def test_a_long_backlog_of_counts_is_folded_in_bounded_steps(
    store: Store, settings: Settings, sql: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "_TALLY_ROWS_AT_ONCE", 100)
    monkeypatch.setattr(retention, "_BATCHES_PER_ROUND", 2)
    await sql.execute(
        "insert into penstock.tally (at, action, event, count, seconds)"
        " select now() - interval '2 h' - n * interval '1 s', 'a', (array['SUCCESS', 'RAN'])[1 + n % 2], 1, 0.5"
        " from generate_series(1, 500) n"
    )
    before = await sql.fetchrow("select sum(count), sum(seconds) from penstock.tally")
    left = []
    for _ in range(4):
        await Retention(store=store, settings=settings).run_once()
        left.append(await sql.fetchval("select count(*) from penstock.tally"))
        assert await sql.fetchrow("select sum(count), sum(seconds) from penstock.tally") == before
    assert left == [302, 102, 2, 2]


async def test_old_receipts_are_found_by_their_index(store: Store, sql: Any) -> None:
    await sql.execute("insert into penstock.inbound_receipt select n::text, now() from generate_series(1, 5000) n")
    await sql.execute("analyze penstock.inbound_receipt")
    plan = json.loads(await sql.fetchval(f"explain (format json) {SQL['delete_old_receipts']}", 86400.0, 2000))
    assert "inbound_receipt_received_at" in json.dumps(plan)


async def test_what_is_kept_for_a_short_time_leaves_by_an_index_of_new_partitions(
    store: Store, settings: Settings, sql: Any
) -> None:
    short = Retention(store=store, settings=keeping(settings, success=3600.0))
    await short.run_once()
    indexed = await sql.fetch(
        "select tablename from pg_indexes where schemaname = 'penstock' and indexdef like '%btree (finished_at)'"
    )
    today = datetime.now(UTC).date()
    assert {row["tablename"] for row in indexed} == {
        f"task_success_{today + timedelta(days=n):%Y%m%d}" for n in range(4)
    }
    done = await settled(store, State.SUCCESS)
    assert await short.run_once() == 0
    await sql.execute(
        "update penstock.task_history set finished_at = date_trunc('day', now(), 'utc') where id = $1", done
    )
    statement = SQL["delete_expired"].replace("{partition}", f"task_success_{today:%Y%m%d}")
    await sql.execute("set enable_seqscan = off")
    plan = json.dumps(
        json.loads(await sql.fetchval(f"explain (format json) {statement}", "SUCCESS", 3600.0, 2000, None))
    )
    assert f"task_success_{today:%Y%m%d}_finished_at_idx1" in plan


async def test_held_keys_are_looked_at_some_in_each_round_and_then_those_behind(
    store: Store, settings: Settings, sql: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "_KEYS_LOOKED_AT", 2)
    await sql.execute(
        "insert into penstock.ordering_head (key, task_id, held) select 'k' || n, 900000 + n, true"
        " from generate_series(1, 5) n"
    )
    duty = Retention(store=store, settings=settings)
    left = []
    for _ in range(4):
        await duty.run_once()
        left.append(await sql.fetchval("select count(*) from penstock.ordering_head where held"))
    assert left == [3, 1, 0, 0]


async def test_names_that_callers_make_up_stay_no_rows_of_their_own(
    store: Store, settings: Settings, sql: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "MAX_ACTIONS_SHOWN", 2)
    duty = Retention(store=store, settings=settings)

    async def note(counted: dict[str, int], *, ago: timedelta) -> None:
        await sql.executemany(
            "insert into penstock.tally (at, action, event, count)"
            " values (date_trunc('minute', now() - $3::interval) + interval '1 second', $1, 'SUCCESS', $2)",
            [(action, count, ago) for action, count in counted.items()],
        )
        await duty.run_once()

    async def rows() -> set[tuple[str, int]]:
        return {tuple(row) for row in await sql.fetch("select action, count from penstock.tally")}

    async def settled_tasks() -> dict[str, int]:
        async with store.session() as session:
            return {row["action"]: row["count"] for row in await session.fetch("count_settled", "other")}

    made_up = {f"made-up-{n}": 1 for n in range(100)}
    await note(made_up | {"mail": 7, "sync": 5}, ago=timedelta(minutes=10))
    assert await rows() == {("mail", 7), ("sync", 5), ("other", 100)}
    await sql.execute("truncate penstock.tally")
    await note(made_up | {"mail": 7, "sync": 5}, ago=timedelta(hours=3))
    await note({"made-up-1": 3, "mail": 1, "late": 6}, ago=timedelta(hours=2))
    assert await rows() == {("mail", 8), ("late", 6), ("other", 108)}
    # Retention takes records back under the names that they have.
    await sql.execute(
        "insert into penstock.tally (action, event, count) select 'made-up-' || n, 'SUCCESS', -1"
        " from generate_series(0, 99) n"
    )
    assert await settled_tasks() == {"mail": 8, "late": 6, "other": 8}
    await sql.execute("update penstock.tally set at = now() - interval '2 hours' where count < 0")
    await duty.run_once()
    assert await rows() == {("mail", 8), ("late", 6), ("other", 8)}


async def test_counts_that_are_taken_back_before_they_are_folded_stay_with_their_action(
    store: Store, settings: Settings, sql: Any
) -> None:
    insert = "insert into penstock.tally (at, action, event, count) values (now() - $1::interval, 'a', 'SUCCESS', $2)"
    duty = Retention(store=store, settings=settings)
    for hours, count in ((3, -1), (2, 2)):  # the transaction that takes back began first
        await sql.execute(insert, timedelta(hours=hours), count)
        await duty.run_once()
    assert [tuple(row) for row in await sql.fetch("select action, count from penstock.tally")] == [("a", 1)]


# Gauges


def depths() -> Mapping[str, float]:
    return {
        f"{queue} {kind}": sample("penstock_queue_depth", queue=queue, kind=kind)
        for queue in ("inbound", "outbound", "results")
        for kind in ("visible", "in_flight")
    }


async def test_gauges_tell_what_waits_and_fall_again(
    store: Store, queues: dict[str, SqsQueue], sql: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gauges_of, "_CHEAP_SECONDS", 60)  # on a busy machine the second look would be left out
    batch = await claimed(store, *(NewTask("a") for _ in range(2)))
    async with store.transaction() as session:
        await enqueue.enqueue(
            session, [NewTask("a", ordering_key="k"), NewTask("a", ordering_key="k"), NewTask("a", delay_seconds=99)]
        )
        await enqueue.insert_rejected(session, "results", [("x", "why"), ("y", "why")])
    await sql.execute("update penstock.task set run_at = now() - interval '90 seconds' where ordering_key is not null")
    await put(queues["inbound"], "1", "2", "3")
    await put(queues["results"], "1")
    await take(queues["results"])
    gauges = Gauges(store=store, queues=queues, dead_letters={})
    await gauges.run_once()
    backlog = {
        state: sample("penstock_backlog", state=state) for state in ("WAITING", "SCHEDULED", "ACQUIRED", "ERROR")
    }
    assert backlog == {"WAITING": 1, "SCHEDULED": 2, "ACQUIRED": 2, "ERROR": 0}
    assert sample("penstock_due") == 1
    assert 90 <= sample("penstock_oldest_due_seconds") < 600
    assert sample("penstock_rejected_kept") == 2
    assert depths() == {
        "inbound visible": 3, "inbound in_flight": 0, "outbound visible": 0,
        "outbound in_flight": 0, "results visible": 0, "results in_flight": 1,
    }  # fmt: skip
    async with store.transaction() as session:
        await settle.finish(session, {(task.id, task.claim): "1" for task in batch.tasks})
        await settle.cancel(
            session, [row["id"] for row in await sql.fetch("select id from penstock.task where state <> 'ACQUIRED'")]
        )
    await gauges.run_once()
    assert [sample("penstock_backlog", state=state) for state in backlog] == [0, 0, 0, 0]
    assert (sample("penstock_due"), sample("penstock_oldest_due_seconds")) == (0, 0)


async def test_the_queue_of_a_deleted_route_has_no_gauge_any_more(
    store: Store, queues: dict[str, SqsQueue], transport: SqsTransport, settings: Settings
) -> None:
    routes: dict[str, SqsQueue] = {"outbound:video": transport.queue(settings.inbound_queue, label="outbound:video")}
    await put(routes["outbound:video"], "1")
    gauges = Gauges(store=store, queues=queues, dead_letters={}, by_route=lambda: routes)
    await gauges.run_once()
    depth, kinds = "penstock_queue_depth", ("visible", "in_flight", "delayed")
    assert [sample(depth, queue="outbound:video", kind=kind) for kind in kinds] == [1, 0, 0]
    routes.clear()
    await gauges.run_once()
    assert [metrics.REGISTRY.get_sample_value(depth, {"queue": "outbound:video", "kind": k}) for k in kinds] == [
        None
    ] * 3
    assert sample(depth, queue="inbound", kind="visible") == 1


async def test_counters_that_an_alert_watches_for_their_first_event_are_exported_before_it(
    store: Store, queues: dict[str, SqsQueue], settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = CollectorRegistry()
    for name, label in (("SCHEDULE_RUNS", "outcome"), ("RELEASED", "reason")):
        counter = metrics.Counter(name.lower(), "", [label], namespace="penstock", registry=registry)
        monkeypatch.setattr(metrics, name, counter)
    Supervisor(store=store, queues=queues, settings=settings, open_queue=no_routes)
    assert registry.get_sample_value("penstock_schedule_runs_total", {"outcome": "MISSED"}) == 0
    assert registry.get_sample_value("penstock_released_total", {"reason": "suspect"}) == 0


async def test_a_queue_that_is_missing_keeps_no_other_from_its_gauge(
    store: Store, queues: dict[str, SqsQueue], transport: SqsTransport
) -> None:
    await put(queues["results"], "1", "2")
    missing = transport.queue("no-such-queue", label="inbound")
    gauges = Gauges(store=store, queues=queues | {"inbound": missing}, dead_letters={"x-dlq": missing})
    with pytest.raises(Unavailable, match="no-such-queue"):
        await gauges.run_once()
    assert sample("penstock_queue_depth", queue="results", kind="visible") == 2


async def test_queues_have_their_gauges_while_postgres_is_unavailable(queues: dict[str, SqsQueue]) -> None:
    await put(queues["results"], "1", "2", "3")
    away = Store("postgresql://u:p@127.0.0.1:1/x")
    with pytest.raises(Unavailable):
        await Gauges(store=away, queues=queues, dead_letters={}).run_once()
    assert sample("penstock_queue_depth", queue="results", kind="visible") == 3


async def test_a_dead_letter_queue_that_may_not_be_read_is_left_out(
    store: Store, queues: dict[str, SqsQueue], transport: SqsTransport, settings: Settings
) -> None:
    dead = {
        "inbound-dlq": transport.queue(settings.inbound_queue + "-dlq", label="inbound-dlq"),
        "outbound-dlq": transport.queue("no-such-queue", label="outbound-dlq"),
    }
    await put(dead["inbound-dlq"], "1")
    await Gauges(store=store, queues=queues, dead_letters=dead).run_once()
    assert sample("penstock_queue_depth", queue="inbound-dlq", kind="visible") == 1


async def test_a_rise_of_dead_letters_is_logged_once_and_again_after_they_were_dealt_with(
    store: Store, transport: SqsTransport, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture = structlog.testing.LogCapture()
    monkeypatch.setattr("penstock.supervisor.gauges.log", structlog.wrap_logger(None, processors=[capture]))
    dead = transport.queue(settings.outbound_queue + "-dlq", label="outbound-dlq")
    gauges = Gauges(store=store, queues={}, dead_letters={"outbound-dlq": dead})

    async def rises() -> list[int]:
        capture.entries.clear()
        await gauges.run_once()
        assert {line["log_level"] for line in capture.entries} <= {"warning"}
        assert {line["queue"] for line in capture.entries} <= {"outbound-dlq"}
        return [line["messages"] for line in capture.entries if line["event"] == "dead_letters_rose"]

    assert await rises() == []
    await put(dead, "1", "2")
    assert await rises() == [2]
    assert await rises() == []
    await put(dead, "3")
    assert await rises() == [3]
    held = await take(dead)
    assert await rises() == [], "one who looks is no rise"
    await dead.delete(held)
    assert [await rises(), await rises()] == [[], []]
    await put(dead, "4")
    assert await rises() == [1]


def test_a_count_that_flickers_is_one_rise() -> None:
    rises = gauges_of._Rises()
    assert [rises.has_risen(count) for count in (5, 4, 5, 5, 4, 5, 6)] == [True] + [False] * 5 + [True]
    assert [rises.has_risen(count) for count in (2, 2, 3)] == [False, False, True]


# The process


async def test_a_duty_whose_queue_is_away_keeps_the_others_from_nothing(
    store: Store, queues: dict[str, SqsQueue], transport: SqsTransport, settings: Settings, task_of: TaskOf, sql: Any
) -> None:
    done = await settled(store, State.SUCCESS)
    await claimed(store, NewTask("a"))
    await age(sql, settings.stale_after_seconds + 1)  # so that repair asks the queue
    missing = transport.queue("no-such-queue", label="outbound")
    supervisor = Supervisor(
        open_queue=no_routes,
        store=store,
        queues=queues | {"outbound": missing},
        settings=keeping(settings, success=0.0),
    )
    with pytest.raises(Unavailable, match="no-such-queue"):
        await supervisor.run_once()
    assert await task_of(done) is None


async def test_a_duty_that_raises_anything_keeps_the_others_from_nothing(
    supervisor: Supervisor, store: Store, settings: Settings, task_of: TaskOf, sql: Any
) -> None:
    (task,) = (await claimed(store, NewTask("a"), confirm=False)).tasks
    await sql.execute("insert into penstock.route (name, queue, actions) values ('r', 'q', '{}')")  # see no_routes
    await age(sql, settings.unsent_after_seconds + 1)
    before = sample("penstock_duties_failed_total", duty="Rules")
    with pytest.raises(Unavailable, match=r"Rules \(AssertionError\)"):
        await supervisor.run_once()
    assert sample("penstock_duties_failed_total", duty="Rules") == before + 1
    assert (await task_of(task.id))["state"] == "SCHEDULED"


async def test_a_supervisor_repeats_its_round(
    supervisor: Supervisor, store: Store, settings: Settings, task_of: TaskOf, sql: Any
) -> None:
    loop = Loop(supervisor, passes=1, grace_seconds=5)
    running = asyncio.create_task(loop.run())
    try:
        for _ in range(2):
            (task,) = (await claimed(store, NewTask("a"), confirm=False)).tasks
            await age(sql, settings.unsent_after_seconds + 1)
            async with asyncio.timeout(30):
                while (await task_of(task.id))["state"] != "SCHEDULED":
                    await asyncio.sleep(0.02)
            async with store.transaction() as session:
                await settle.cancel(session, [task.id])
    finally:
        loop.stop()
        assert await running == 0
