"""A program's transaction holds a key, or a table is locked: all else goes on, and nothing is lost."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import httpx
import pytest

from penstock.api.rejected import retry_rejected
from penstock.brokers.base import MAX_RECEIVES, Depth
from penstock.brokers.sqs import SqsQueue, SqsTransport
from penstock.compat import delayed_records
from penstock.compat.delayed_records import DelayedRecord
from penstock.db.context import within
from penstock.db.notify import Notifier
from penstock.db.pool import Store
from penstock.methods.table import METHODS, read_command
from penstock.protocol import answers
from penstock.protocol.errors import Locked, TooSlow, Unavailable
from penstock.protocol.reports import Waiting, WaitPolicy, encode_result
from penstock.protocol.task import Claimed, NewTask
from penstock.resulter import Resulter
from penstock.results.apply import apply_reports
from penstock.schedules.firing import ScheduleFiring
from penstock.settings.broker_urls import DEAD_LETTER_SUFFIX
from penstock.settings.model import Settings
from penstock.submitter import Submitter
from penstock.supervisor.bulk_jobs import BulkJobs
from penstock.supervisor.duties import expire, time_out_waits
from penstock.supervisor.limits import LimitUpkeep
from penstock.supervisor.repair import Repair
from penstock.tasks import bulk, claim, ordering
from penstock.tasks import enqueue as enqueuing
from penstock.tasks import settle as settling
from penstock.tasks.ordering import Promotions
from penstock.workflows.advancer import WorkflowAdvancer
from tests.claims import claim_id
from tests.integration.apis import running
from tests.integration.doors import no_routes, put, rejected, request
from tests.integration.faulty_postgres import Refusals
from tests.integration.lives import carry_out
from tests.integration.rules import set_limits, set_tenant
from tests.integration.schedule_changes import change_schedule

EMPTY = Depth(0, 0, 0)


@pytest.fixture
async def short(database_url: str) -> AsyncIterator[Store]:
    """A store whose statements may take a second, where a lock would otherwise be waited for for thirty."""
    store = Store(database_url, statement_timeout_seconds=1, application_name="penstock-short")
    yield store
    await store.close()


@asynccontextmanager
async def program(database_url: str, *statements: str) -> AsyncIterator[Any]:
    """A program's transaction that has run these and stays open; it is rolled back unless the test commits it."""
    connection = await asyncpg.connect(database_url)
    transaction = connection.transaction()
    await transaction.start()
    for statement in statements:
        await connection.execute(statement)
    try:
        yield connection
    finally:
        await connection.close()


async def enqueue(store: Store, *tasks: NewTask) -> list[int]:
    async with store.transaction() as session:
        return [answer.id for answer in await enqueuing.enqueue(session, tasks)]


async def claimed(store: Store, *tasks: NewTask) -> list[Claimed]:
    await enqueue(store, *tasks)
    async with store.session() as session:
        batch = await claim.claim(session, 1000)
        assert batch is not None
        await claim.confirm(session, batch.id)
    return sorted(batch.tasks, key=lambda task: task.id)


async def states(sql: Any, where: str = "true") -> dict[str, int]:
    """Tasks by state, live and settled."""
    rows = await sql.fetch(
        f"select state::text, count(*) from (select id, action, state, ordering_key from penstock.task union all "
        f"select id, action, state, ordering_key from penstock.task_history) t where {where} group by 1"
    )
    return dict(rows)


async def passes(service: Submitter | Resulter, times: int) -> None:
    for _ in range(times):
        try:
            await service.run_once()
        except Unavailable:
            continue


async def dead(transport: SqsTransport, name: str) -> Depth:
    return await transport.queue(name + DEAD_LETTER_SUFFIX, label="dead").depth()


HOLDS_K = "select penstock_enqueue('program', '{}', ordering_key => 'K')"
HOLDS_X = "select penstock_enqueue('a', '{}', unique_key => 'x')"


# Settling


async def test_tasks_settle_while_a_program_holds_their_ordering_key(
    short: Store, results: SqsQueue, settings: Settings, transport: SqsTransport, database_url: str, sql: Any
) -> None:
    tasks = await claimed(short, NewTask("a", ordering_key="K"), *(NewTask("other") for _ in range(19)))
    bodies = [encode_result(claim_id(task.id, task.claim), "1") for task in tasks]
    await put(results, f"[{','.join(bodies[:10])}]", *bodies[10:])
    resulter = Resulter(store=short, results=results, settings=settings)
    turns = Promotions(store=short, notifier=Notifier(short))
    async with program(database_url, HOLDS_K) as connection:
        while await resulter.run_once():
            pass
        assert await states(sql) == {"SUCCESS": 20}
        assert (await results.depth(), await dead(transport, settings.results_queue)) == (EMPTY, EMPTY)
        assert await turns.run_once() > 0  # it is not committed yet
        await connection.execute("commit")
    assert await states(sql, "action = 'program'") == {"WAITING": 1}
    assert await turns.run_once() == 0
    assert await states(sql, "action = 'program'") == {"SCHEDULED": 1}
    assert await sql.fetchval("select count(*) from penstock.turn") == 0


async def test_a_key_that_a_program_held_and_gave_back_is_forgotten(short: Store, database_url: str, sql: Any) -> None:
    (task,) = await claimed(short, NewTask("a", ordering_key="K"))
    turns = Promotions(store=short, notifier=Notifier(short))
    async with program(database_url, HOLDS_K):
        async with short.transaction() as session:
            assert await settling.finish(session, {(task.id, task.claim): "1"}) == 1
        await turns.run_once()
    assert await sql.fetchval("select count(*) from penstock.ordering_head") == 1
    await turns.run_once()
    assert await sql.fetchval("select count(*) from penstock.ordering_head") == 0
    assert await sql.fetchval("select count(*) from penstock.turn") == 0


async def test_many_keys_that_a_program_holds_are_looked_at_again_after_a_pause(
    short: Store, database_url: str, sql: Any
) -> None:
    tasks = await claimed(short, *(NewTask("a", ordering_key=f"k{n}") for n in range(30)))
    for task in tasks:
        await sql.fetchval("select penstock_settle($1, '1')", f"{task.id}:{task.claim}")
    turns = Promotions(store=short, notifier=Notifier(short))
    holds_all = "select penstock_enqueue('program', '{}', ordering_key => 'k' || n) from generate_series(0, 29) n"
    async with program(database_url, holds_all) as connection:
        async with asyncio.timeout(20):
            while not await turns.run_once():
                pass
            await turns.end_all()
        await connection.execute("commit")
    while not await turns.run_once():
        pass
    assert await states(sql, "action = 'program'") == {"SCHEDULED": 30}
    assert await sql.fetchval("select count(*) from penstock.turn") == 0


async def test_the_next_of_a_key_waits_for_the_program_that_replaces_it_and_nothing_else_does(
    short: Store, database_url: str, sql: Any
) -> None:
    """Replaced by a program that stays open, it is not promoted; nor is the one behind it, which would be too soon."""
    tasks = await claimed(short, NewTask("a", ordering_key="K"), NewTask("a", ordering_key="L"))
    await enqueue(short, NewTask("a", ordering_key="K", unique_key="k", unique="live"), NewTask("b", ordering_key="K"),
                  NewTask("b", ordering_key="L"))  # fmt: skip
    replaces = """select penstock_enqueue('a', '{"n": 2}', unique_key => 'k', ordering_key => 'K', "unique" => 'live',
                                          on_duplicate => 'replace')"""
    turns = Promotions(store=short, notifier=Notifier(short))
    async with program(database_url, replaces) as connection:
        async with short.transaction() as session:
            assert await settling.finish(session, {(task.id, task.claim): "1" for task in tasks}) == 2
        await turns.run_once()
        assert await states(sql, "ordering_key = 'L'") == {"SUCCESS": 1, "SCHEDULED": 1}
        assert await states(sql, "ordering_key = 'K'") == {"SUCCESS": 1, "WAITING": 2}
        await connection.execute("commit")
    await turns.run_once()
    assert await states(sql, "ordering_key = 'K' and action = 'a'") == {"SUCCESS": 1, "SCHEDULED": 1}
    assert await states(sql, "ordering_key = 'K' and action = 'b'") == {"WAITING": 1}


async def test_one_result_behind_a_lock_is_kept_and_its_neighbours_are_stored(
    short: Store, results: SqsQueue, settings: Settings, transport: SqsTransport, database_url: str, sql: Any
) -> None:
    """The task that comes with a result has an ordering key that a program holds."""
    tasks = await claimed(short, *(NewTask("parent") for _ in range(5)))
    bodies = [encode_result(claim_id(task.id, task.claim), "1") for task in tasks]
    spawning = json.loads(bodies[1]) | {"spawn": [{"action": "a", "ordering_key": "K"}]}
    await put(results, f"[{bodies[0]},{json.dumps(spawning)},{bodies[2]}]", *bodies[3:])
    resulter = Resulter(store=short, results=results, settings=settings)
    async with program(database_url, HOLDS_K):
        await passes(resulter, 2 * MAX_RECEIVES)
        assert await states(sql, "action = 'parent'") == {"SUCCESS": 4, "ACQUIRED": 1}
        assert await results.depth() == Depth(visible=0, in_flight=1, delayed=0)
        with pytest.raises(Locked):
            await resulter.run_once()
    assert await resulter.run_once() == 1
    assert await states(sql) == {"SUCCESS": 5, "SCHEDULED": 1}
    assert (await results.depth(), await dead(transport, settings.results_queue)) == (EMPTY, EMPTY)
    assert await rejected(short) == []


async def test_no_result_is_used_up_while_the_table_is_locked(
    short: Store, results: SqsQueue, settings: Settings, transport: SqsTransport, database_url: str, sql: Any
) -> None:
    tasks = await claimed(short, *(NewTask("a") for _ in range(20)))
    await put(results, *(encode_result(claim_id(task.id, task.claim), "1") for task in tasks))
    resulter = Resulter(store=short, results=results, settings=settings)
    async with program(database_url, "lock table penstock.task in share mode"):  # as `create index` does
        await passes(resulter, 2 * MAX_RECEIVES)
    while (await results.depth()).total:
        await resulter.run_once()
    assert await states(sql) == {"SUCCESS": 20}
    assert await dead(transport, settings.results_queue) == EMPTY


# Coming in


async def test_messages_that_travel_with_a_locked_unique_key_are_stored(
    short: Store, inbound: SqsQueue, settings: Settings, transport: SqsTransport, database_url: str, sql: Any
) -> None:
    await put(inbound, request("enqueue", {"action": "a", "unique_key": "x"}))
    await put(inbound, *(request("submit:other", {"n": n}) for n in range(9)))
    submitter = Submitter(store=short, inbound=inbound, settings=settings)
    async with program(database_url, HOLDS_X):
        await passes(submitter, 2 * MAX_RECEIVES)
        assert await states(sql) == {"SCHEDULED": 9}
        assert await inbound.depth() == Depth(visible=0, in_flight=1, delayed=0)
        await put(inbound, request("submit:other", {"n": 10}))
        await passes(submitter, 2)
        assert await states(sql) == {"SCHEDULED": 10}
    assert await submitter.run_once() == 1
    assert await states(sql, "action = 'a'") == {"SCHEDULED": 1}
    assert (await inbound.depth(), await dead(transport, settings.inbound_queue)) == (EMPTY, EMPTY)


async def test_what_is_kept_for_a_lock_is_given_back_at_the_stop(
    short: Store, inbound: SqsQueue, settings: Settings, database_url: str
) -> None:
    await put(inbound, request("enqueue", {"action": "a", "unique_key": "x"}))
    submitter = Submitter(store=short, inbound=inbound, settings=settings)
    async with program(database_url, HOLDS_X):
        with pytest.raises(Locked):
            await submitter.run_once()
        assert await inbound.depth() == Depth(visible=0, in_flight=1, delayed=0)
        await submitter.drain(5)
    assert await inbound.depth() == Depth(visible=1, in_flight=0, delayed=0)


async def test_a_receive_is_counted_for_a_message_that_is_too_slow_alone_and_for_no_other(
    store: Store, inbound: SqsQueue, settings: Settings, transport: SqsTransport, sql: Any
) -> None:
    await put(inbound, request("submit:guilty", {"n": 0}), *(request("submit:other", {"n": n}) for n in range(9)))
    submitter = Submitter(store=store, inbound=inbound, settings=settings)
    refusals = Refusals(sql)
    await refusals.install()
    async with refusals.during("57014", "statement", action="guilty"):
        assert await submitter.run_once() == 10
        assert await states(sql) == {"SCHEDULED": 9}
        assert await inbound.depth() == Depth(visible=0, in_flight=1, delayed=0)
        for _ in range(MAX_RECEIVES):
            with pytest.raises(TooSlow):
                await submitter.run_once()
        assert await submitter.run_once() == 0
    assert (await dead(transport, settings.inbound_queue)).visible == 1


async def test_a_rejected_message_whose_key_is_held_keeps_no_other_from_its_retry(
    store: Store, settings: Settings, database_url: str, sql: Any
) -> None:
    same, other = {"action": "a", "unique_key": "x"}, {"action": "other"}
    bodies = [(request("enqueue", one), "not allowed") for one in (other, same, same, other)]
    async with store.transaction() as session:
        await enqueuing.insert_rejected(session, "inbound", bodies)
    ids = [row["id"] for row in await sql.fetch("select id from penstock.rejected order by id")]
    async with program(database_url, HOLDS_X):
        replayed = await retry_rejected(store, ids, settings)
    assert (replayed.retried, [one.id for one in replayed.still_rejected]) == (2, ids[1:3])
    assert "holds a lock" in replayed.still_rejected[0].reason
    assert [reason for _, _, reason in await rejected(store)] == ["not allowed"] * 2
    assert (await retry_rejected(store, ids, settings)).retried == 2


async def test_over_http_a_locked_key_is_unavailable_for_those_alone_who_name_it(
    store: Store, settings: Settings, database_url: str
) -> None:
    def call(**params: Any) -> dict[str, Any]:
        return {"jsonrpc": "2.0", "id": 1, "method": "enqueue", "params": params}

    same, other = call(action="a", unique_key="x"), call(action="other")
    async with running(store, settings) as api, httpx.AsyncClient(base_url=api.url, timeout=60) as http:
        async with program(database_url, HOLDS_X):
            given = [same, other, same, other, same, other, other]
            replies = await asyncio.gather(*(http.post("/rpc", json=one) for one in given))
            assert [reply.status_code for reply in replies] == [503, 200, 503, 200, 503, 200, 200]
            (one, two, three) = (await http.post("/rpc", json=[other, same, other])).json()
            assert ("result" in one, "result" in two, "result" in three) == (True, False, True)
            assert two["error"]["message"] == "Temporarily unavailable, try again"
        assert (await http.post("/rpc", json=same)).status_code == 200


# What the supervisor does


async def test_one_schedule_whose_key_is_held_does_not_keep_the_others(
    short: Store, settings: Settings, database_url: str, sql: Any
) -> None:
    async with short.transaction() as session:
        for n in range(20):
            given = {"name": f"s{n}", "expression": "@every 1h", "action": "a"} | (
                {"ordering_key": "K"} if n == 7 else {}
            )
            await change_schedule(session, "schedule.create", json.dumps(given).encode(), settings)
    await sql.execute("update penstock.schedule_clock set next_at = now(), due_at = now()")
    firing = ScheduleFiring(store=short, notifier=Notifier(short), settings=settings)
    async with program(database_url, HOLDS_K):
        assert (await firing.run_once()).tasks == 19
        assert (await firing.run_once()).schedules == 0
    await sql.execute("update penstock.schedule_clock set due_at = now() where last_task_id is null")
    assert (await firing.run_once()).tasks == 1
    assert await states(sql, "action = 'a'") == {"SCHEDULED": 20}


async def test_one_workflow_whose_key_is_held_does_not_keep_the_others(
    short: Store, settings: Settings, database_url: str, sql: Any
) -> None:
    for n in range(10):
        second = {"name": "two", "action": "b", "after": ["one"]} | ({"ordering_key": "K"} if n == 4 else {})
        steps = [{"name": "one", "action": "a"}, second]
        async with short.transaction() as session:
            await carry_out(session, settings, "workflow.create", steps=steps)
    tasks = await claimed(short)
    async with short.transaction() as session:
        await settling.finish(session, {(task.id, task.claim): "1" for task in tasks})
    advancing = WorkflowAdvancer(store=short, notifier=Notifier(short), settings=settings)
    async with program(database_url, HOLDS_K):
        assert await advancing.run_once() == 9
        assert await advancing.run_once() is None  # it is left alone for a while
    advancing = WorkflowAdvancer(store=short, notifier=Notifier(short), settings=settings)
    assert await advancing.run_once() == 1


@pytest.mark.parametrize("holds_keys", [False, True])
async def test_one_stale_task_whose_key_is_held_does_not_keep_the_others(
    short: Store, settings: Settings, outbound: SqsQueue, results: SqsQueue, database_url: str, sql: Any,
    holds_keys: bool,
) -> None:  # fmt: skip
    tasks = [NewTask("a", ordering_key="K", max_attempts=1), *(NewTask("a", max_attempts=1) for _ in range(9))]
    lost = await claimed(short, *tasks)
    async with short.session() as session:
        await settling.note_heartbeats(session, {(task.id, task.claim): None for task in lost})
    past = "- '1 day'::interval"
    await sql.execute(
        f"update penstock.task set suspect = true, claimed_at = claimed_at {past}, heartbeat_at = heartbeat_at {past}"
    )
    given = settings.model_copy(update={"ordering_on_critical_error": "hold" if holds_keys else "continue"})
    assert given.holds_ordering_keys is holds_keys
    repair = Repair(store=short, queue_of=lambda _: outbound, results=results, settings=given)
    async with program(database_url, HOLDS_K):
        # With its key, which is to be held, the task itself is left.
        assert await repair.run_once() == 9 + (not holds_keys)
        if holds_keys:
            with pytest.raises(Locked):
                await repair.run_once()
    assert await repair.run_once() == holds_keys
    assert await states(sql, "action = 'a'") == {"CRITICAL_ERROR": 10}


async def test_an_unconfirmed_claim_that_its_handler_settles_does_not_keep_the_others(
    short: Store, settings: Settings, outbound: SqsQueue, results: SqsQueue, database_url: str, sql: Any
) -> None:
    await enqueue(short, NewTask("a"), NewTask("a"))
    async with short.session() as session:
        (settles,), _ = [batch.tasks for _ in range(2) if (batch := await claim.claim(session, 1))]
    await sql.execute("update penstock.task set claimed_at = claimed_at - '1 day'::interval")
    await sql.execute("update penstock.dispatch set claimed_at = claimed_at - '1 day'::interval")
    repair = Repair(store=short, queue_of=lambda _: outbound, results=results, settings=settings)
    async with program(database_url, f"select penstock_settle('{settles.id}:{settles.claim}', '1')"):
        assert await repair.run_once() == 1
    assert await states(sql) == {"ACQUIRED": 1, "SCHEDULED": 1}


async def test_one_expired_task_whose_key_is_held_does_not_keep_the_others(
    short: Store, database_url: str, sql: Any
) -> None:
    await enqueue(short, *(NewTask("a", ordering_key=key, expires_in_seconds=0) for key in ("K", "L", None)))
    async with program(database_url, HOLDS_K):
        assert await expire(short) == 3
    assert await states(sql, "action = 'a'") == {"CANCELLED": 3}


async def test_one_overdue_wait_whose_key_is_held_does_not_keep_the_others(
    short: Store, settings: Settings, database_url: str, sql: Any
) -> None:
    tasks = [NewTask("a", ordering_key="K", max_attempts=1), *(NewTask("a", max_attempts=1) for _ in range(9))]
    waits = [Waiting(task.id, task.claim, f"t{task.id}", 10, WaitPolicy()) for task in await claimed(short, *tasks)]
    given = settings.model_copy(update={"ordering_on_critical_error": "hold"})
    async with short.transaction() as session:
        assert (await apply_reports(session, waits, given)).waiting == 10
    await sql.execute("update penstock.wait set deadline = deadline - interval '11 seconds'")
    async with program(database_url, HOLDS_K):
        assert await time_out_waits(short, given) == 9
        assert await time_out_waits(short, given) == 0
        assert await states(sql, "action = 'a'") == {"CRITICAL_ERROR": 9, "WAITING": 1}
    assert await time_out_waits(short, given) == 1
    assert await states(sql, "action = 'a'") == {"CRITICAL_ERROR": 10}


@pytest.mark.parametrize("method", ["bulk.retry", "bulk.delete"])
async def test_a_bulk_job_passes_over_a_task_whose_key_a_program_holds(
    short: Store, settings: Settings, database_url: str, sql: Any, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(bulk, "HELD_TRIES", 4)
    monkeypatch.setattr(bulk, "HELD_REST_SECONDS", 0.001)
    tasks = [NewTask("a") for _ in range(20)]
    tasks[7] = NewTask("a", ordering_key="K") if method == "bulk.retry" else NewTask("a", unique_key="x")
    ids = await enqueue(short, *tasks)
    async with short.transaction() as session:
        await settling.cancel(session, ids)
        command = read_command(method, b'{"action":"a"}', settings)
        job = (await METHODS[method].carry_out(within(session, settings), command)).job
    jobs = BulkJobs(store=short, changed=lambda: None)
    async with program(database_url, HOLDS_K if method == "bulk.retry" else HOLDS_X):
        for _ in range(3):
            await jobs.run_once()
        assert await sql.fetchval("select changed from penstock.job") == 7
        while await sql.fetchval("select state = 'RUNNING' from penstock.job"):
            await jobs.run_once()
    async with short.session() as session:
        ended = await bulk.read_job(session, job)
    assert (ended.state, ended.changed, ended.refused) == ("DONE", 19, 1)
    assert ended.errors == [
        answers.JobError(id=ids[7], reason="another transaction held it, or a key of it, for too long")
    ]
    assert await states(sql, "action = 'a'") == {"CANCELLED": 1} | ({"SCHEDULED": 19} if method == "bulk.retry" else {})


async def test_armed_schedules_behind_a_held_key_wait_in_their_order(short: Store, database_url: str, sql: Any) -> None:
    wanted = [
        DelayedRecord(
            "s",
            bytes([n]),
            delayed_records.instant_of(1000 + n),
            "K" if n % 3 == 1 else f"free-{n}",
            json.dumps({"n": n}),
        )
        for n in range(12)
    ]
    async with short.transaction() as session:
        await delayed_records.put(session, wanted, replaces=False)
    async with program(database_url, HOLDS_K), short.transaction() as session:
        assert await delayed_records.publish_due(session) == 8
    async with short.transaction() as session:
        assert await delayed_records.publish_due(session) == 4
    payloads = await sql.fetch("select payload::text from penstock.task where ordering_key = 'K' order by id")
    assert [record["n"] for (text,) in payloads for record in json.loads(text)["records"]] == [1, 4, 7, 10]


# One order of locks


async def waiting(sql: Any, sessions: int) -> None:
    """Wait until so many sessions of this database wait for a lock."""
    query = "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
    async with asyncio.timeout(30):
        while await sql.fetchval(query) != sessions:
            await asyncio.sleep(0.01)


@pytest.fixture
async def enduring(database_url: str, sql: Any) -> AsyncIterator[Store]:
    """A store that does not give up behind a lock; for it Postgres looks for a deadlock at once."""
    store = Store(database_url, application_name="penstock-enduring")
    store.asked |= {"lock_timeout": "30000", "deadlock_timeout": "20"}
    yield store
    await store.close()


async def test_a_program_that_replaces_tasks_meets_no_deadlock_with_their_cancellation(
    enduring: Store, database_url: str, sql: Any
) -> None:
    """One call that names a key again, whose first naming replaces nothing, beside the cancellation of both tasks."""
    a, between, b = await enqueue(enduring, *(NewTask("a", unique_key=key) for key in ("a", "between", "b")))
    named = [("b", "replace"), ("a", "return"), ("a", "replace")]
    tasks = [{"action": "a", "unique_key": key, "on_duplicate": policy} for key, policy in named]

    async def cancel() -> set[int]:
        async with enduring.transaction() as session:
            return await settling.cancel(session, [b, between, a])

    async def replace() -> None:
        async with program(database_url) as connection:
            await connection.fetch("select * from penstock_enqueue_many($1::text)", json.dumps(tasks))

    held = f"select from penstock.task where id = {between} for update"
    async with asyncio.TaskGroup() as group, program(database_url, held):
        cancelling = group.create_task(cancel())
        await waiting(sql, 1)  # it holds a
        group.create_task(replace())
        await waiting(sql, 2)  # for a, and must not hold b
    assert cancelling.result() == {a, between, b}


async def test_records_that_expire_meet_no_deadlock_with_programs_that_enqueue_their_keys(
    enduring: Store, database_url: str, sql: Any
) -> None:
    for key in ("b", "a"):  # settled in another order than that of the keys
        tasks = await claimed(enduring, NewTask("a", unique_key=key))
        async with enduring.transaction() as session:
            await settling.finish(session, {(task.id, task.claim): "1" for task in tasks})
    partition = await sql.fetchval(
        "select c.relname from penstock.task_history h join pg_class c on c.oid = h.tableoid limit 1"
    )
    later = datetime.now(UTC) + timedelta(hours=1)
    again = "select * from penstock_enqueue('a', unique_key => '{}')"
    async with program(database_url, again.format("a")) as connection:
        deleting = asyncio.create_task(
            enduring.value("delete_expired", "SUCCESS", 60.0, 100, later, partition=partition)
        )
        await waiting(sql, 1)  # for a, and must not hold b
        await connection.execute("set local lock_timeout = '300ms'")
        await connection.fetch(again.format("b"))
    assert await deleting == 2


@pytest.mark.parametrize("of", ["action", "tenant"])
async def test_a_limit_does_not_wait_for_a_running_task_that_its_handler_settles(
    short: Store, outbound: SqsQueue, database_url: str, sql: Any, of: str
) -> None:
    settles, runs = await claimed(short, NewTask("a", tenant="t"), NewTask("a", tenant="t"))
    counted = "select array_agg(id order by id) from penstock.task where gate is not null"
    upkeep = LimitUpkeep(store=short, outbound=outbound, open_queue=no_routes)
    async with program(database_url, f"select penstock_settle('{settles.id}:{settles.claim}', '1')"):
        async with short.transaction() as session:
            change = set_limits if of == "action" else set_tenant
            await change(session, "a" if of == "action" else "t", {"max_in_flight": 5})
        assert await sql.fetchval(counted) == [runs.id]
        await upkeep.run_once()
    await upkeep.run_once()  # after a rollback it counts too
    assert await sql.fetchval(counted) == [settles.id, runs.id]


async def test_programs_that_enqueue_many_meet_no_deadlock_while_tasks_of_their_keys_settle(
    store: Store, enduring: Store, database_url: str, sql: Any
) -> None:
    """Each call names few keys often and in any order; beside it tasks settle and are cancelled.

    What settles gives up behind a lock before Postgres looks for a deadlock. What cancels here does not give up, and
    looks early, so any deadlock is seen. What settles may have a part in one, since its rows come in no order; without
    it there is none.
    """
    pids: set[str] = set()  # of programs, and of what cancels
    deadlocks: list[str] = []
    keys = [f"k{n}" for n in range(8)]
    ended = asyncio.Event()
    met: Counter[str] = Counter()

    async def programs(seed: int) -> None:
        chosen = random.Random(seed)
        connection = await asyncpg.connect(database_url)
        pids.add(str(connection.get_server_pid()))
        for _ in range(60):
            tasks = [
                {"action": "a", "payload": [n], "unique_key": chosen.choice(keys), "unique": "live",
                 "ordering_key": chosen.choice(keys), "on_duplicate": chosen.choice(["replace", "replace", "return"])}
                for n in range(12)
            ]  # fmt: skip
            try:
                await connection.fetch("select * from penstock_enqueue_many($1::text)", json.dumps(tasks))
                met["stored"] += 1
            except asyncpg.DeadlockDetectedError as exc:
                deadlocks.append(str(exc.detail))
        await connection.close()

    async def settle() -> None:
        while not ended.is_set():
            async with store.session() as session:
                batch = await claim.claim(session, 6)
            if batch is None:
                await asyncio.sleep(0.002)
                continue
            try:
                async with store.transaction() as session:
                    met["settled"] += await settling.finish(
                        session, {(task.id, task.claim): "1" for task in batch.tasks}
                    )
            except Unavailable:
                met["settled later"] += 1

    async def promote_overdue() -> None:
        while not ended.is_set():
            async with store.transaction() as session:
                met["promoted"] += (await ordering.promote_overdue(session, 10)).promoted
            await asyncio.sleep(0.01)

    async def cancel() -> None:
        while not ended.is_set():
            ids = [row["id"] for row in await sql.fetch("select id from penstock.task order by random() limit 2")]
            try:
                async with enduring.transaction() as session:
                    pids.add(str(session._connection.get_server_pid()))
                    met["cancelled"] += len(await settling.cancel(session, ids))
            except Locked as exc:
                deadlocks.append(str(getattr(exc.__cause__, "detail", exc)))
            await asyncio.sleep(0.05)

    async with asyncio.TaskGroup() as group:
        for work in (settle, settle, promote_overdue, cancel):
            group.create_task(work())
        await asyncio.gather(*(programs(seed) for seed in range(8)))
        ended.set()
    assert all((met["stored"], met["settled"], met["cancelled"])), met
    for detail in deadlocks:
        involved = set(re.findall(r"rocess (\d+)", detail))
        assert involved - pids or not involved, detail
    async with store.transaction() as session:
        while (await ordering.promote_overdue(session, 10)).taken:
            pass
    # Of each key that has tasks one may run, and no more.
    running = await sql.fetch(
        "select ordering_key, count(*) filter (where state <> 'WAITING') from penstock.task group by 1"
    )
    assert {count for _, count in running} <= {1}, met
