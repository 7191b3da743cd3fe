"""Until when a task keeps its unique key, what a duplicate does, and that many enqueuers at once agree on it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import httpx
import pytest

from penstock.brokers.sqs import SqsQueue
from penstock.db.context import within
from penstock.db.pool import Store
from penstock.db.session import Session
from penstock.methods.inbound import accept_inbound, read_inbound
from penstock.protocol.answers import Accepted
from penstock.protocol.errors import StateConflict
from penstock.protocol.task import Failure, NewTask, State
from penstock.settings.model import Settings
from penstock.submitter import Submitter
from penstock.supervisor.retention import Retention
from penstock.tasks import claim, reschedule, settle
from penstock.tasks import enqueue as enqueuing
from penstock.tasks.methods import retry
from penstock.tasks.params import RetryParams
from tests.integration.apis import JSON, running
from tests.integration.doors import put, rejected, request

TaskOf = Callable[[int], Any]


async def enqueue(store: Store, *tasks: NewTask) -> list[Accepted]:
    async with store.transaction() as session:
        return await enqueuing.enqueue(session, tasks)


async def cancel(store: Store, task_id: int) -> None:
    async with store.transaction() as session:
        assert await settle.cancel(session, [task_id]) == {task_id}


def live(**more: Any) -> NewTask:
    return NewTask("a", unique_key="k", unique="live", **more)


async def test_a_live_key_is_free_when_its_task_has_settled_and_not_before(store: Store) -> None:
    (first,) = await enqueue(store, live())
    (second,) = await enqueue(store, live())
    assert (second.id, second.duplicate) == (first.id, True)
    await cancel(store, first.id)
    (kept,) = await enqueue(store, NewTask("a", unique_key="k"))
    assert (kept.id, kept.duplicate) == (first.id, True), "the new task says how long it respects the key"
    (third,) = await enqueue(store, live())
    assert not third.duplicate


async def test_a_window_is_counted_from_when_the_key_was_taken(store: Store, sql: Any) -> None:
    (first,) = await enqueue(store, NewTask("a", unique_key="k", unique=60.0))
    assert (await enqueue(store, NewTask("a", unique_key="k", unique=60.0)))[0].id == first.id
    await sql.execute("update penstock.unique_key set taken_at = taken_at - interval '61 seconds'")
    assert (await enqueue(store, NewTask("a", unique_key="k", unique=100.0)))[0].id == first.id
    (second,) = await enqueue(store, NewTask("a", unique_key="k", unique=60.0))
    assert not second.duplicate
    (third,) = await enqueue(store, NewTask("a", unique_key="k", unique=60.0))
    assert (third.id, third.duplicate) == (second.id, True), "the window began again"


async def test_entries_of_one_batch_meet_each_other_in_their_order(store: Store) -> None:
    (old,) = await enqueue(store, live())
    await cancel(store, old.id)
    answers = await enqueue(
        store,
        NewTask("a", unique_key="k"),
        live(payload='{"n":1}'),
        NewTask("a"),
        live(payload='{"n":2}', on_duplicate="replace"),
        live(payload='{"n":3}', on_duplicate="replace"),
    )
    assert [(answer.id == old.id, answer.duplicate, answer.replaced) for answer in answers] == [
        (True, True, None), (False, False, None), (False, False, None), (False, True, True), (False, True, True),
    ]  # fmt: skip
    assert answers[1].id == answers[3].id == answers[4].id != answers[2].id
    async with store.session() as session:
        (row,) = await session.fetch("read_tasks", [answers[1].id])
    assert row["payload"] == '{"n":3}'


async def test_replacement_changes_what_was_given_and_leaves_the_rest(store: Store, task_of: TaskOf) -> None:
    later = datetime.now(UTC) + timedelta(hours=1)
    (first,) = await enqueue(store, live(payload="[1]", run_at=later, priority=7))
    before = await task_of(first.id)
    assert (await enqueue(store, live(payload="[2]", on_duplicate="replace")))[0].replaced
    after = await task_of(first.id)
    assert (after["payload"], after["run_at"], after["priority"]) == ("[2]", before["run_at"], 7)
    moved = live(payload="[3]", delay_seconds=0, priority=0, replaces_priority=True, on_duplicate="replace")
    assert (await enqueue(store, moved))[0].replaced
    after = await task_of(first.id)
    assert (after["payload"], after["priority"]) == ("[3]", 0)
    assert after["run_at"] < later - timedelta(minutes=59)


@pytest.mark.parametrize("by", ["process", "function"])
async def test_a_replaced_task_has_the_new_expiry_and_none_that_has_passed(
    store: Store, task_of: TaskOf, sql: Any, by: str
) -> None:
    async def replaced(expires_in: float | None) -> Any:
        if by == "function":
            call = "select * from penstock_enqueue('a', unique_key => 'k', on_duplicate => 'replace', expires_in => $1)"
            answer = await sql.fetchrow(call, expires_in)
        else:
            (told,) = await enqueue(store, live(on_duplicate="replace", expires_in_seconds=expires_in))
            answer = dict(told)
        assert answer["replaced"]
        return (await task_of(answer["id"]))["expires_at"]

    (first,) = await enqueue(store, live(expires_in_seconds=3600))
    given = (await task_of(first.id))["expires_at"]
    assert await replaced(None) == given
    assert await replaced(60) < given
    await sql.execute("update penstock.task set expires_at = now(), route = 'r', gate = 'g'")
    assert await replaced(None) is None
    async with store.session() as session:
        batch = await claim.claim(session, 1)  # it stands in line again, by whatever rules there are now
    assert batch is not None
    assert [task.id for task in batch.tasks] == [first.id]


async def test_a_task_that_runs_is_not_replaced(store: Store, task_of: TaskOf) -> None:
    (first,) = await enqueue(store, live(payload="[1]"))
    async with store.session() as session:
        assert await claim.claim(session, 1)
    (answer,) = await enqueue(store, live(payload="[2]", on_duplicate="replace"))
    assert (answer.id, answer.state, answer.duplicate, answer.replaced) == (first.id, State.ACQUIRED, True, False)
    assert (await task_of(first.id))["payload"] == "[1]"


@pytest.mark.parametrize("settled", [False, True])
async def test_many_enqueuers_at_once_make_one_task_and_the_last_replacement_stands(
    store: Store, sql: Any, settled: bool
) -> None:
    """With a plain `not among the live` each of them would think the key free: none sees the others' tasks."""
    if settled:
        (old,) = await enqueue(store, live())
        await cancel(store, old.id)
    for round_ in range(5):
        tasks = [live(payload=f"[{round_}, {n}]", on_duplicate="replace") for n in range(24)]
        answers = [answer for (answer,) in await asyncio.gather(*(enqueue(store, task) for task in tasks))]
        (task_id,) = {answer.id for answer in answers}
        assert [answer.duplicate for answer in answers].count(False) == 1
        assert all(answer.replaced for answer in answers if answer.duplicate)
        rows = await sql.fetch("select id, payload::text from penstock.task where unique_key = 'k'")
        assert [row["id"] for row in rows] == [task_id]
        assert rows[0]["payload"] in {task.payload for task in tasks}
        await cancel(store, task_id)


async def test_a_record_that_is_being_dropped_keeps_its_key_from_a_retained_task_alone(store: Store, sql: Any) -> None:
    """Its partition is detached, so the history does not show it; its unique keys are deleted after that."""
    (first,) = await enqueue(store, live())
    await cancel(store, first.id)
    partition = await sql.fetchval("select tableoid::regclass::text from penstock.task_history")
    await sql.execute(f"alter table penstock.task_cancelled detach partition {partition}")
    (kept,) = await enqueue(store, NewTask("a", unique_key="k"))
    assert (kept.id, kept.duplicate) == (first.id, True)
    (second,) = await enqueue(store, live())
    assert not second.duplicate
    assert (await enqueue(store, live()))[0].id == second.id


@asynccontextmanager
async def open_transaction(database_url: str) -> AsyncIterator[tuple[Any, Session]]:
    connection = await asyncpg.connect(database_url)
    transaction = connection.transaction()
    await transaction.start()
    try:
        yield transaction, Session(connection)
    finally:
        await connection.close()


async def blocked(sql: Any, count: int = 1) -> None:
    """Until so many sessions of this database wait for a lock."""
    async with asyncio.timeout(30):
        while True:
            waiting = await sql.fetchval(
                "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
            )
            if waiting >= count:
                return
            await asyncio.sleep(0.01)


async def test_a_task_committed_behind_an_enqueuers_back_is_not_taken_for_settled(
    store: Store, database_url: str, sql: Any
) -> None:
    async with open_transaction(database_url) as (transaction, session):
        (first,) = await enqueuing.enqueue(session, [live()])
        second = asyncio.create_task(enqueue(store, live(on_duplicate="replace", payload="[2]")))
        await blocked(sql)
        await transaction.commit()
        (answer,) = await second
    assert (answer.id, answer.duplicate, answer.replaced) == (first.id, True, True)


async def test_a_task_that_is_retried_behind_an_enqueuers_back_keeps_its_key(
    store: Store, database_url: str, sql: Any
) -> None:
    (first,) = await enqueue(store, live())
    await cancel(store, first.id)
    async with open_transaction(database_url) as (transaction, session):
        assert first.id in await reschedule.restart(session, [first.id])
        second = asyncio.create_task(enqueue(store, live()))
        await blocked(sql)
        await transaction.commit()
        (answer,) = await second
    assert (answer.id, answer.duplicate) == (first.id, True), "the record that it saw was gone by then"


async def test_a_retry_that_comes_behind_an_enqueuer_is_refused(
    store: Store, settings: Settings, database_url: str, sql: Any
) -> None:
    (first,) = await enqueue(store, live())
    await cancel(store, first.id)
    async with open_transaction(database_url) as (transaction, session):
        (second,) = await enqueuing.enqueue(session, [live()])

        async def retry_first() -> None:
            async with store.transaction() as retrying:
                await retry.carry_out(within(retrying, settings), RetryParams(first.id))

        refused = asyncio.create_task(retry_first())
        await blocked(sql)
        await transaction.commit()
        with pytest.raises(StateConflict) as caught:
            await refused
    assert caught.value.data == {"id": first.id, "state": "CANCELLED", "holder": second.id}
    assert str(second.id) in str(caught.value)


async def test_a_retry_takes_back_a_key_that_nobody_has(store: Store, settings: Settings, sql: Any) -> None:
    """The task that took it was cleaned, and its key with it."""
    (first,) = await enqueue(store, live())
    await cancel(store, first.id)
    (second,) = await enqueue(store, live())
    async with store.transaction() as session:
        batch = await claim.claim(session, 1)
        assert batch
        await settle.fail(session, [Failure(second.id, batch.id, '{"code":1,"message":"x"}', None)])
        assert await reschedule.restart(session, [first.id]) == {}
    await sql.execute("update penstock.task_history set finished_at = now() - interval '2 s' where id = $1", second.id)
    short = settings.model_copy(update={"retention_critical_error_seconds": 1.0})
    assert await Retention(store=store, settings=short).run_once() == 1
    async with store.transaction() as session:
        assert await reschedule.restart(session, [first.id]) == {first.id: State.SCHEDULED}
    assert (await enqueue(store, live()))[0].id == first.id


async def test_batches_that_name_keys_of_several_scopes_in_other_orders_all_come_through(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has taken one key when it wants the other: Postgres ends one of them, which begins again.

    Only where a key is named with several scopes, which are answered one after the other.
    """
    one_key_each = asyncio.Barrier(2)
    parts: list[int] = []
    enqueue_part = enqueuing._enqueue_keyed

    async def enqueue_and_wait(session: Session, tasks: Sequence[NewTask]) -> list[Accepted]:
        answers = await enqueue_part(session, tasks)
        parts.append(len(tasks))
        if len(parts) <= 2:
            await one_key_each.wait()
        return answers

    monkeypatch.setattr(enqueuing, "_enqueue_keyed", enqueue_and_wait)

    async def alone(*keys: str) -> list[Accepted]:
        async with store.session() as session:
            return await enqueuing.enqueue(
                session, [NewTask("a", unique_key=key, unique="live" if n else 60.0) for n, key in enumerate(keys)]
            )

    first, second = await asyncio.gather(alone("x", "x", "y"), alone("y", "y", "x"))
    assert parts[:2] == [1, 1]
    assert len(parts) > 4, "there was no deadlock"
    assert {answer.id for answer in first} == {answer.id for answer in second}
    assert [answer.duplicate for answer in first + second].count(False) == 2


# on_duplicate = error


async def test_an_entry_that_errors_harms_no_other_of_its_http_batch(store: Store, settings: Settings) -> None:
    def entry(number: int, **params: Any) -> dict[str, Any]:
        return {"jsonrpc": "2.0", "method": "enqueue", "params": {"action": "a"} | params, "id": number}

    async with running(store, settings) as api, httpx.AsyncClient(base_url=api.url, headers=JSON) as http:
        body = [
            entry(1, unique_key="k"),
            entry(2, unique_key="k", on_duplicate="error"),
            entry(3),
            entry(4, unique_key="k", unique="live", on_duplicate="replace", payload=[4]),
        ]
        answers = {answer["id"]: answer for answer in (await http.post("/rpc", json=body)).json()}
    first = answers[1]["result"]
    assert first == {"id": first["id"], "state": "SCHEDULED", "duplicate": False}
    assert answers[2]["error"] == {
        "code": -32012,
        "message": f"Task {first['id']} has this unique key already",
        "data": {"id": first["id"], "state": "SCHEDULED"},
    }
    assert not answers[3]["result"]["duplicate"]
    assert answers[4]["result"] == {"id": first["id"], "state": "SCHEDULED", "duplicate": True, "replaced": True}


async def test_an_entry_that_errors_is_rejected_from_the_inbound_queue_alone(
    store: Store, settings: Settings, inbound: SqsQueue, sql: Any
) -> None:
    guilty = request("enqueue", {"action": "a", "unique_key": "k", "on_duplicate": "error"})
    other = request("enqueue", {"action": "b"})
    await put(inbound, request("enqueue", {"action": "a", "unique_key": "k"}), f"[{guilty},{other}]")
    submitter = Submitter(store=store, inbound=inbound, settings=settings)
    for _ in range(20):
        await submitter.run_once()
    ((source, body, reason),) = await rejected(store)
    assert (source, json.loads(body)) == ("inbound", json.loads(guilty))
    assert reason.endswith("has this unique key already")
    assert await sql.fetchval("select count(*) from penstock.task") == 2


async def test_a_message_of_which_all_is_accepted_rejects_nothing(store: Store, settings: Settings) -> None:
    body = request("enqueue", {"action": "a", "unique_key": "k", "on_duplicate": "error"})
    inbound = read_inbound(body, settings)
    async with store.transaction() as session:
        assert len(await accept_inbound(session, inbound, settings, source="inbound")) == 1
    assert inbound.refused == []
