"""Tasks that expire, are moved, carry labels; ordering keys that a failed task holds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest

from penstock.brokers.sqs import SqsQueue
from penstock.db.context import within
from penstock.db.pool import Store
from penstock.methods.inbound import accept_inbound, read_inbound
from penstock.protocol import answers
from penstock.protocol.errors import StateConflict
from penstock.protocol.reports import decode_reports, encode_error, encode_result
from penstock.protocol.task import Failure, NewTask, State
from penstock.results.apply import apply_reports
from penstock.scheduler.process import Scheduler
from penstock.settings.model import Settings
from penstock.supervisor.duties import expire
from penstock.supervisor.payloads import PayloadRetention
from penstock.supervisor.retention import Retention
from penstock.tasks import claim as claiming
from penstock.tasks import enqueue, methods, ordering, reschedule, settle
from penstock.tasks.params import RescheduleParams
from tests.integration.apis import JSON, running
from tests.integration.doors import no_routes, request, take

TaskOf = Callable[[int], Any]
BOOM = '{"code":1,"message":"boom"}'


async def add(store: Store, *tasks: NewTask) -> list[int]:
    async with store.transaction() as session:
        return [answer.id for answer in await enqueue.enqueue(session, tasks)]


async def claim(store: Store, limit: int = 100) -> dict[int, int]:
    """Claims by task id."""
    async with store.session() as session:
        batch = await claiming.claim(session, limit)
    return {} if batch is None else {task.id: task.claim for task in batch.tasks}


async def fail(store: Store, task_id: int, claim_: int, *, hold: bool = True) -> None:
    async with store.transaction() as session:
        assert await settle.fail(session, [Failure(task_id, claim_, BOOM, None)], hold_keys=hold)


async def states(store: Store, ids: list[int]) -> list[str]:
    async with store.session() as session:
        found = {row["id"]: row["state"] for row in await session.fetch("read_states", ids)}
    return [found.get(task_id, "gone") for task_id in ids]


# Labels, limit keys


async def test_labels_expiry_and_limit_key_stay_with_a_task_all_its_life(store: Store, task_of: TaskOf) -> None:
    task = NewTask("a", labels='{"tenant":"acme"}', limit_key="l", expires_in_seconds=3600.0)
    given = ("labels", "expires_at", "limit_key")
    ends: dict[str, Any] = {}
    for end in ("finish", "bury", "cancel"):
        (task_id,) = await add(store, task)
        first = {name: (await task_of(task_id))[name] for name in given}
        assert json.loads(first["labels"]) == {"tenant": "acme"}
        assert first["limit_key"] == "l"
        claim_ = (await claim(store))[task_id]
        async with store.transaction() as session:
            if end == "finish":
                await settle.finish(session, {(task_id, claim_): "1"})
            elif end == "bury":
                await settle.fail(session, [Failure(task_id, claim_, BOOM, None)])
            else:
                await settle.cancel(session, [task_id], "no longer wanted")
        ends[end] = await task_of(task_id)
        assert {name: ends[end][name] for name in given} == first
        if end != "finish":
            async with store.transaction() as session:
                await reschedule.restart(session, [task_id])
            back = await task_of(task_id)
            assert {name: back[name] for name in given} == first
            assert back["reason"] is None
            assert await claim(store) != {}
    assert [ends[end]["reason"] for end in ends] == [None, None, "no longer wanted"]


# Expiry


async def test_an_expired_task_is_never_claimed_and_is_cancelled_with_its_reason(store: Store, task_of: TaskOf) -> None:
    past = datetime.now(UTC) - timedelta(seconds=1)
    expired, fresh = await add(store, NewTask("a", expires_at=past), NewTask("a", expires_in_seconds=60.0))
    assert list(await claim(store)) == [fresh]
    assert await expire(store) == 1
    row = await task_of(expired)
    assert (row["state"], row["reason"]) == ("CANCELLED", "expired")
    assert await expire(store) == 0


async def test_expiry_takes_what_waits_and_leaves_what_runs_until_it_stops(store: Store, sql: Any) -> None:
    soon = 3600.0
    running_, failed, head, waiting, last = await add(
        store,
        NewTask("a", expires_in_seconds=soon, priority=2),
        NewTask("a", expires_in_seconds=soon, priority=1),
        NewTask("a", ordering_key="o", run_at=datetime.now(UTC) + timedelta(days=1), expires_in_seconds=soon),
        NewTask("a", ordering_key="o", expires_in_seconds=soon),
        NewTask("a", ordering_key="o"),
    )
    claims = await claim(store, 2)
    async with store.transaction() as session:
        await settle.fail(session, [Failure(failed, claims[failed], BOOM, 1000.0)])
    await sql.execute("update penstock.task set expires_at = now() where expires_at is not null")
    assert await expire(store) == 3
    ids = [running_, failed, head, waiting, last]
    assert await states(store, ids) == ["ACQUIRED", "CANCELLED", "CANCELLED", "CANCELLED", "SCHEDULED"]
    async with store.session() as session:
        await claiming.release(session, [(running_, claims[running_])])
    assert await claim(store) == {last: (await claims_of(store, last))}
    assert await expire(store) == 1
    assert await states(store, [running_]) == ["CANCELLED"]


async def claims_of(store: Store, task_id: int) -> int:
    async with store.session() as session:
        (row,) = await session.fetch("read_tasks", [task_id])
    claim_: int = row["claim"]
    return claim_


async def test_expiry_goes_through_many_in_bounded_batches(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.supervisor.duties._BATCH", 3)
    await add(store, *[NewTask("a", expires_in_seconds=0.000001)] * 7)
    assert await expire(store) == 7


async def test_a_retry_forgets_an_expiry_that_has_passed(store: Store, task_of: TaskOf) -> None:
    (task_id,) = await add(store, NewTask("a", expires_in_seconds=0.000001))
    await expire(store)
    async with store.transaction() as session:
        await reschedule.restart(session, [task_id])
    assert (await task_of(task_id))["expires_at"] is None
    assert list(await claim(store)) == [task_id]


# Reschedule


async def test_a_task_rescheduled_to_now_is_run_by_a_scheduler_whose_bounds_have_passed_it(
    store: Store, outbound: SqsQueue, settings: Settings
) -> None:
    scheduler = Scheduler(open_queue=no_routes, store=store, outbound=outbound, settings=settings)
    later, due = await add(store, NewTask("a", delay_seconds=3600.0), NewTask("a"))
    await scheduler.run_once()
    assert await states(store, [later, due]) == ["SCHEDULED", "ACQUIRED"]
    async with store.session() as session:
        past = datetime.now(UTC) - timedelta(hours=1)
        (moved,) = await session.fetch("reschedule_tasks", [later], past, None, None)
    assert moved["state"] == "SCHEDULED"
    async with asyncio.timeout(30):
        while (await states(store, [later])) != ["ACQUIRED"]:
            await scheduler.run_once()
            await asyncio.sleep(0.05)
    assert len(await take(outbound)) == 2


async def test_reschedule_moves_what_waits_and_refuses_the_rest(store: Store, settings: Settings, sql: Any) -> None:
    failed, head, waiting, claimed = await add(
        store, NewTask("a", priority=9), NewTask("a", ordering_key="o", delay_seconds=60.0),
        NewTask("a", ordering_key="o"), NewTask("a", priority=8),
    )  # fmt: skip
    claims = await claim(store, 2)
    async with store.transaction() as session:
        await settle.fail(session, [Failure(failed, claims[failed], BOOM, 1000.0)])
    async with running(store, settings) as api, httpx.AsyncClient(base_url=api.url, headers=JSON) as http:

        async def ask(task_id: int, **params: Any) -> Any:
            params = {"id": task_id} | params
            body = {"jsonrpc": "2.0", "method": "reschedule", "params": params, "id": 1}
            return (await http.post("/rpc", json=body)).json()

        at = "2040-01-31T08:00:00Z"
        for task_id, state in ((failed, "ERROR"), (head, "SCHEDULED"), (waiting, "WAITING")):
            assert (await ask(task_id, run_at=at, priority=5))["result"] == {"id": task_id, "state": state}
        assert (await ask(claimed, run_at=at))["error"]["data"] == {"id": claimed, "state": "ACQUIRED"}
        assert (await ask(4711, delay=0))["error"]["code"] == -32004
    rows = await sql.fetch("select id, run_at, priority from penstock.task order by id")
    moved = {(row["run_at"].year, row["priority"]) for row in rows if row["id"] != claimed}
    assert moved == {(2040, 5)}
    inbound = read_inbound(request("reschedule", {"id": failed, "priority": -1}), settings)
    async with store.transaction() as session:
        await accept_inbound(session, inbound, settings, source="inbound")
    assert await sql.fetchval("select priority from penstock.task where id = $1", failed) == -1


# Ordering keys on failure


@pytest.mark.parametrize("setting", ["release", "hold"])
async def test_what_a_critical_error_does_to_its_ordering_key_is_a_setting(
    store: Store, settings: Settings, setting: str
) -> None:
    chosen = settings.model_copy(update={"ordering_on_critical_error": setting})
    first, second = await add(store, *[NewTask("a", ordering_key="o")] * 2)
    claims = await claim(store)
    report = encode_error(f"{first}:{claims[first]}", 1, "boom", {"final": True})
    async with store.transaction() as session:
        await apply_reports(session, decode_reports(report, batch_limit=10), chosen)
    expected = {"release": "SCHEDULED", "hold": "WAITING"}[setting]
    assert await states(store, [first, second]) == ["CRITICAL_ERROR", expected]


async def test_a_held_key_goes_on_when_the_failed_task_is_retried_and_succeeds(store: Store) -> None:
    first, second = await add(store, *[NewTask("a", ordering_key="o")] * 2)
    await fail(store, first, (await claim(store))[first])
    (third,) = await add(store, NewTask("a", ordering_key="o"))
    async with store.transaction() as session:
        await settle.cancel(session, [third])
    assert await states(store, [first, second]) == ["CRITICAL_ERROR", "WAITING"], "a cancel must not let it go"
    async with store.transaction() as session:
        assert await reschedule.restart(session, [first]) == {first: State.SCHEDULED}
        assert await ordering.list_held_keys(session, 10) == []
    claims = await claim(store)
    assert list(claims) == [first]
    result = encode_result(f"{first}:{claims[first]}", "1")
    async with store.transaction() as session:
        await settle.finish(session, {(first, claims[first]): result})
    assert await states(store, [first, second]) == ["SUCCESS", "SCHEDULED"]


async def test_held_keys_are_listed_by_pages_and_let_go_by_an_operator(store: Store, settings: Settings) -> None:
    ids = await add(store, *[NewTask("a", ordering_key=key) for key in ("b", "a", "a", "a", "c")])
    claims = await claim(store)
    for task_id in (ids[0], ids[1]):
        await fail(store, task_id, claims[task_id])
    async with running(store, settings) as api, httpx.AsyncClient(base_url=api.url, headers=JSON) as http:

        async def ask(method: str, **params: Any) -> Any:
            body = {"jsonrpc": "2.0", "method": method, "params": params, "id": 1}
            return (await http.post("/rpc", json=body)).json()["result"]

        page = await ask("ordering.list", limit=1)
        (first,) = page["keys"]
        assert (first["key"], first["task_id"], first["action"], first["waiting"]) == ("a", ids[1], "a", 2)
        assert first["since"].endswith("Z")
        rest = await ask("ordering.list", limit=5, cursor=page["cursor"])
        assert [key["key"] for key in rest["keys"]] == ["b"]
        assert rest["cursor"] is None
        assert await ask("ordering.release", key="a") == {"key": "a", "released": True, "next": ids[2]}
        assert await ask("ordering.release", key="a") == {"key": "a", "released": False, "next": None}
        assert await ask("ordering.release", key="b") == {"key": "b", "released": True, "next": None}
        assert (await ask("ordering.list"))["keys"] == []
    assert await states(store, [ids[2], ids[3]]) == ["SCHEDULED", "WAITING"]


async def test_a_task_retried_after_its_key_was_let_go_waits_behind_the_next(store: Store) -> None:
    first, second = await add(store, *[NewTask("a", ordering_key="o")] * 2)
    await fail(store, first, (await claim(store))[first])
    async with store.transaction() as session:
        assert await ordering.release_keys(session, ["o"]) == {"o": second}
        assert await reschedule.restart(session, [first]) == {first: State.WAITING}


async def test_the_first_task_of_a_key_retried_while_another_runs_waits_behind_it(store: Store) -> None:
    first, second = await add(store, *[NewTask("a", ordering_key="o")] * 2)
    await fail(store, first, (await claim(store))[first], hold=False)
    assert await states(store, [second]) == ["SCHEDULED"]
    async with store.transaction() as session:
        assert await reschedule.restart(session, [first]) == {first: State.WAITING}
    claims = await claim(store)
    assert list(claims) == [second]
    async with store.transaction() as session:
        await settle.finish(session, {(second, claims[second]): "1"})
    assert await states(store, [first]) == ["SCHEDULED"]


async def waiting_for_a_lock(sql: Any) -> None:
    async with asyncio.timeout(60):
        while not await sql.fetchval("select count(*) from pg_locks where not granted"):
            await asyncio.sleep(0.01)


async def test_a_successor_that_is_cancelled_while_it_is_let_go_gives_its_place_to_the_next(
    store: Store, sql: Any
) -> None:
    first, second, third = await add(store, *[NewTask("a", ordering_key="o")] * 3)
    claims = await claim(store)
    async with store.transaction() as canceller:
        assert await settle.cancel(canceller, [second]) == {second}
        async with store.transaction() as session:  # it does not wait for the other
            assert await settle.finish(session, {(first, claims[first]): "1"}) == 1
    assert await states(store, [first, second, third]) == ["SUCCESS", "CANCELLED", "WAITING"]
    async with store.transaction() as session:
        assert (await ordering.promote_overdue(session, 10)).promoted == 1
    assert await states(store, [third]) == ["SCHEDULED"]
    assert await sql.fetchval("select count(*) from penstock.turn") == 0


async def test_a_task_that_is_let_go_while_somebody_cancels_it_lets_the_next_go(store: Store, sql: Any) -> None:
    first, second, third = await add(store, *[NewTask("a", ordering_key="o")] * 3)
    claims = await claim(store)

    async def cancel() -> None:
        async with store.transaction() as session:
            assert await settle.cancel(session, [second]) == {second}

    async with store.transaction() as session:
        await settle.finish(session, {(first, claims[first]): "1"})
        cancelling = asyncio.create_task(cancel())
        await waiting_for_a_lock(sql)
    await cancelling
    assert await states(store, [second, third]) == ["CANCELLED", "SCHEDULED"]


async def test_an_open_transaction_that_adds_to_a_key_holds_up_no_task_of_it(store: Store, sql: Any) -> None:
    first, second = await add(store, *[NewTask("a", ordering_key="o")] * 2)

    async def finish(task_id: int, claim_: int) -> None:
        async with store.transaction() as session:
            assert await settle.finish(session, {(task_id, claim_): "1"}) == 1

    async with store.transaction() as session:
        (third,) = [answer.id for answer in await enqueue.enqueue(session, [NewTask("a", ordering_key="o")])]
        await finish(first, (await claim(store))[first])
        assert await states(store, [second]) == ["SCHEDULED"]
        await finish(second, (await claim(store))[second])
    assert await states(store, [second, third]) == ["SUCCESS", "WAITING"]
    async with store.transaction() as session:
        assert (await ordering.promote_overdue(session, 10)).promoted == 1
    assert await states(store, [third]) == ["SCHEDULED"]
    claims = await claim(store)
    await finish(third, claims[third])
    assert await sql.fetchval("select count(*) from penstock.ordering_head") == 0


async def test_a_body_of_thousands_keeps_the_order_of_its_keys_beside_others(
    store: Store, settings: Settings, sql: Any
) -> None:
    def body(key: str, count: int) -> list[dict[str, Any]]:
        return [
            {
                "jsonrpc": "2.0",
                "method": "enqueue",
                "params": {"action": "a", "payload": [n], "ordering_key": key},
                "id": n,
            }
            for n in range(count)
        ]

    async with running(store, settings) as api, httpx.AsyncClient(base_url=api.url, headers=JSON, timeout=120) as http:
        bodies = [body("large", 2500), *(body(f"k{n}", 700) for n in range(4))]
        replies = await asyncio.gather(*(http.post("/rpc", json=one) for one in bodies))
    assert [len(reply.json()) for reply in replies] == [2500, 700, 700, 700, 700]
    rows = await sql.fetch(
        "select ordering_key, array_agg((payload ->> 0)::int order by id) as placed from penstock.task group by 1"
    )
    assert {row["ordering_key"]: row["placed"] for row in rows} == {
        key: list(range(count)) for key, count in [("large", 2500), *((f"k{n}", 700) for n in range(4))]
    }


async def test_the_last_of_a_body_that_replaces_a_task_counts_wherever_the_body_is_cut(
    store: Store, settings: Settings, sql: Any
) -> None:
    def entry(number: int, key: str, **params: Any) -> dict[str, Any]:
        given = {"action": "a", "unique_key": key, "unique": "live", "on_duplicate": "replace"} | params
        return {"jsonrpc": "2.0", "method": "enqueue", "params": given, "id": number}

    async with running(store, settings) as api, httpx.AsyncClient(base_url=api.url, headers=JSON, timeout=120) as http:
        for turn in range(3):
            body = [entry(n, f"{turn}-{n}") for n in range(999)]
            body += [entry(999, f"x{turn}", payload=[1]), entry(1000, f"x{turn}", payload=[2])]
            assert (await http.post("/rpc", json=body)).status_code == 200
    payloads = await sql.fetch("select payload::text from penstock.task where unique_key like 'x%'")
    assert [text for (text,) in payloads] == ["[2]"] * 3


async def test_cleaning_the_failed_task_lets_its_key_go(store: Store, settings: Settings, sql: Any) -> None:
    first, second = await add(store, *[NewTask("a", ordering_key="o")] * 2)
    await fail(store, first, (await claim(store))[first])
    retention = Retention(store=store, settings=settings.model_copy(update={"retention_critical_error_seconds": 60.0}))
    await retention.run_once()
    async with store.session() as session:
        (held,) = await ordering.list_held_keys(session, 10)
        assert held == answers.HeldKey(key="o", task_id=first, action="a", since=held.since, waiting=1, tenant=None)
    await sql.execute("update penstock.task_history set finished_at = now() - interval '61 seconds'")
    await retention.run_once()
    assert await states(store, [first, second]) == ["gone", "SCHEDULED"]


async def test_emptying_the_failed_tasks_payload_lets_its_key_go(store: Store, settings: Settings, sql: Any) -> None:
    first, second = await add(store, NewTask("a", "[1]", ordering_key="o"), NewTask("a", ordering_key="o"))
    await fail(store, first, (await claim(store))[first])
    await sql.execute("update penstock.task_history set finished_at = now() - interval '3 days'")
    emptying = PayloadRetention(store=store, settings=settings.model_copy(update={"payload_retention_seconds": 60.0}))
    assert await emptying.run_once() == 1
    await Retention(store=store, settings=settings).run_once()
    assert await states(store, [first, second]) == ["CRITICAL_ERROR", "SCHEDULED"]


# The protocol: status, cancel's reason, claims.check


async def test_status_shows_reason_labels_expiry_and_limit_key(store: Store, settings: Settings) -> None:
    async with running(store, settings) as api, httpx.AsyncClient(base_url=api.url, headers=JSON) as http:

        async def ask(method: str, **params: Any) -> Any:
            body = {"jsonrpc": "2.0", "method": method, "params": params, "id": 1}
            return (await http.post("/rpc", json=body)).json()["result"]

        given = {"labels": {"tenant": "acme"}, "expires_at": "2040-01-31T08:00:00Z", "limit_key": "l"}
        task_id = (await ask("enqueue", action="a", **given))["id"]
        assert "reason" not in await ask("status", id=task_id)
        await ask("cancel", id=task_id, reason="no longer wanted")
        assert (await ask("status", id=task_id))["reason"] == "no longer wanted"
        detail = await ask("status", id=task_id, detail=True)
        shown = {name: detail[name] for name in given}
        assert shown == given | {"expires_at": "2040-01-31T08:00:00.000000Z"}


async def test_claims_that_hold_no_more_are_told_apart(store: Store, settings: Settings) -> None:
    ids = await add(store, *[NewTask("a")] * 4)
    claims = await claim(store)
    async with store.transaction() as session:
        await settle.cancel(session, [ids[0]])
        await settle.finish(session, {(ids[1], claims[ids[1]]): "1"})
        await claiming.release(session, [(ids[2], claims[ids[2]])])
    again = await claim(store)
    asked = [f"{task_id}:{claims[task_id]}" for task_id in ids] + [f"{ids[2]}:{again[ids[2]]}", "4711:1"]
    async with running(store, settings) as api, httpx.AsyncClient(base_url=api.url, headers=JSON) as http:
        body = {"jsonrpc": "2.0", "method": "claims.check", "params": {"claims": asked}, "id": 1}
        answer = (await http.post("/rpc", json=body)).json()
    assert answer["result"] == {"lost": [*asked[:3], "4711:1"]}


async def test_what_is_settled_cannot_be_rescheduled(store: Store, settings: Settings) -> None:
    (task_id,) = await add(store, NewTask("a"))
    async with store.transaction() as session:
        await settle.cancel(session, [task_id])
    with pytest.raises(StateConflict, match="is CANCELLED; it cannot be rescheduled"):
        async with store.transaction() as session:
            await methods.reschedule.carry_out(within(session, settings), RescheduleParams(task_id, None, 0.0, None))
