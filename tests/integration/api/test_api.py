"""The api as a caller meets it: real HTTP in front of a real Postgres."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry
from pydantic import SecretStr

from penstock import __version__
from penstock.api.process import Api
from penstock.db.pool import Store
from penstock.local.postgres import EmbeddedPostgres
from penstock.protocol.errors import SettingsError
from penstock.protocol.task import Failure, NewTask, State
from penstock.runtime import metrics
from penstock.settings.model import Settings
from penstock.tasks import claim, enqueue
from penstock.tasks import settle as settling
from tests.claims import claim_id
from tests.integration.apis import JSON, captured_log, running

INSTANT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")
GOOD = {"jsonrpc": "2.0", "method": "enqueue", "params": {"action": "good"}, "id": "good"}


class Rpc:
    """Calls methods of one api and counts on an answer."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http

    async def post(self, body: str | bytes | Any, **headers: str) -> httpx.Response:
        content = body if isinstance(body, str | bytes) else json.dumps(body)
        return await self.http.post(
            "/rpc", content=content, headers=JSON | {k.replace("_", "-"): v for k, v in headers.items()}
        )

    async def answer(self, method: str, params: Any = None) -> dict[str, Any]:
        request = {"jsonrpc": "2.0", "method": method, "id": 1} | ({} if params is None else {"params": params})
        answer: dict[str, Any] = (await self.post(request)).json()
        return answer

    async def result(self, method: str, params: Any = None) -> Any:
        answer = await self.answer(method, params)
        assert "result" in answer, answer
        return answer["result"]

    async def error(self, method: str, params: Any = None) -> dict[str, Any]:
        error: dict[str, Any] = (await self.answer(method, params))["error"]
        return error


@pytest.fixture
async def api(store: Store, settings: Settings) -> AsyncIterator[Api]:
    async with running(store, settings) as api:
        yield api


@pytest.fixture
async def rpc(api: Api) -> AsyncIterator[Rpc]:
    async with httpx.AsyncClient(base_url=api.url) as http:
        yield Rpc(http)


async def settle(store: Store, result: str = '{"ok":true}', *, fail: bool = False) -> list[int]:
    """Claim what is due and let it end, as a worker would."""
    async with store.transaction() as session:
        dispatch = await claim.claim(session, 1000)
        assert dispatch is not None
        pairs = {(task.id, task.claim): result for task in dispatch.tasks}
        if fail:
            await settling.fail(session, [Failure(*pair, result, None) for pair in pairs])
        else:
            await settling.finish(session, pairs)
    return [task_id for task_id, _ in pairs]


def counted(registry: CollectorRegistry, name: str, **labels: str) -> float:
    return registry.get_sample_value(name, labels) or 0.0


# enqueue and submit


async def test_enqueue_is_in_the_database_when_it_is_answered(rpc: Rpc, task_of: Callable[[int], Any]) -> None:
    run_at = datetime(2031, 1, 2, 3, 4, 5, 600000, UTC)
    params = {
        "action": "mail", "payload": {"to": "a@b"}, "run_at": "2031-01-02T04:04:05.6+01:00", "priority": 7,
        "unique_key": "u", "ordering_key": "o", "max_attempts": 3, "timeout": 1.5,
    }  # fmt: skip
    result = await rpc.result("enqueue", params)
    assert result == {"id": result["id"], "state": "SCHEDULED", "duplicate": False}
    row = await task_of(result["id"])
    assert (row["action"], json.loads(row["payload"]), row["run_at"]) == ("mail", {"to": "a@b"}, run_at)
    assert (row["priority"], row["unique_key"], row["ordering_key"]) == (7, "u", "o")
    assert (row["max_attempts"], row["timeout_seconds"]) == (3, 1.5)


async def test_delay_counts_from_now_and_epoch_milliseconds_are_an_instant(
    rpc: Rpc, task_of: Callable[[int], Any]
) -> None:
    later = await rpc.result("enqueue", {"action": "a", "delay": 3600})
    row = await task_of(later["id"])
    assert row["run_at"] - row["created_at"] == timedelta(hours=1)
    fixed = await rpc.result("enqueue", {"action": "a", "run_at": 1_893_456_000_000})
    assert (await task_of(fixed["id"]))["run_at"] == datetime(2030, 1, 1, tzinfo=UTC)


async def test_second_enqueue_of_a_unique_key_gets_the_first_ones_id(rpc: Rpc) -> None:
    first = await rpc.result("enqueue", {"action": "a", "unique_key": "k"})
    second = await rpc.result("enqueue", {"action": "a", "unique_key": "k", "payload": {"other": True}})
    other = await rpc.result("enqueue", {"action": "b", "unique_key": "k"})
    assert second == {"id": first["id"], "state": "SCHEDULED", "duplicate": True}
    assert other["id"] != first["id"]
    assert not other["duplicate"]


async def test_submit_takes_its_params_as_payload_and_object_id_as_unique_key(
    rpc: Rpc, task_of: Callable[[int], Any]
) -> None:
    first = await rpc.result("submit:export", {"objectID": 23, "deep": [1, {"x": None}]})
    second = await rpc.result("submit:export", {"objectID": "23"})
    assert (second["id"], second["duplicate"]) == (first["id"], True)
    row = await task_of(first["id"])
    assert (row["action"], json.loads(row["payload"])) == ("export", {"objectID": 23, "deep": [1, {"x": None}]})
    by_position = await rpc.result("submit:sum", [1, 2])
    assert (await task_of(by_position["id"]))["payload"] == "[1, 2]"


async def test_numbers_of_a_payload_are_stored_and_shown_as_they_were_written(rpc: Rpc) -> None:
    payload = '{"big":123456789012345678901234567890,"exact":0.1000,"tiny":1e-400}'
    answer = await rpc.post(
        '{"jsonrpc":"2.0","method":"enqueue","params":{"action":"a","payload":' + payload + '},"id":1}'
    )
    task_id = answer.json()["result"]["id"]
    shown = await rpc.post({"jsonrpc": "2.0", "method": "status", "params": {"id": task_id, "detail": True}, "id": 1})
    assert '"payload":' + payload in shown.text


async def test_a_batch_of_thousands_is_stored_whole_and_answered_in_order(rpc: Rpc, store: Store) -> None:
    requests = [
        {"jsonrpc": "2.0", "method": "enqueue", "params": {"action": "n", "payload": {"n": n}}, "id": n}
        for n in range(3000)
    ]
    answers = (await rpc.post(requests)).json()
    assert [answer["id"] for answer in answers] == list(range(3000))
    ids = [answer["result"]["id"] for answer in answers]
    async with store.session() as session:
        rows = {row["id"]: json.loads(row["payload"])["n"] for row in await session.fetch("read_tasks", ids)}
    assert [rows[task_id] for task_id in ids] == list(range(3000))


async def test_enqueues_at_the_same_time_share_inserts(rpc: Rpc) -> None:
    name = "penstock_statement_seconds_count"
    before = counted(metrics.REGISTRY, name, statement="enqueue_plain_tasks")
    answers = await asyncio.gather(*(rpc.result("enqueue", {"action": "a"}) for _ in range(100)))
    assert len({answer["id"] for answer in answers}) == 100
    assert counted(metrics.REGISTRY, name, statement="enqueue_plain_tasks") - before < 75
    batch = [GOOD | {"id": n} for n in range(500)]
    before = counted(metrics.REGISTRY, name, statement="enqueue_plain_tasks")
    await rpc.post(batch)
    assert counted(metrics.REGISTRY, name, statement="enqueue_plain_tasks") - before == 1


async def test_values_that_only_postgres_refuses_spoil_no_neighbour(
    store: Store, api: Api, rpc: Rpc, task_of: Callable[[int], Any]
) -> None:
    """A constraint that intake knows nothing of stands in for whatever a database may refuse."""
    async with store.session() as session:
        await session._connection.execute(
            "alter table penstock.task add constraint no_thirteen check (payload->>'n' is distinct from '13')"
        )
    batch = [GOOD | {"id": n, "params": {"action": "a", "payload": {"n": n}}} for n in range(20)]
    answers = (await rpc.post(batch)).json()
    assert answers[13]["error"]["code"] == -32602
    assert "thirteen" not in json.dumps(answers)
    assert [answer["id"] for answer in answers if "result" in answer] == [n for n in range(20) if n != 13]
    row = await task_of(answers[14]["result"]["id"])
    assert json.loads(row["payload"]) == {"n": 14}


async def test_enqueue_wakes_a_listener_of_the_database(rpc: Rpc, store: Store) -> None:
    heard = asyncio.Event()
    connection = await store.connect()
    await connection.add_listener("penstock_work", lambda *_: heard.set())
    await rpc.result("enqueue", {"action": "a"})
    await asyncio.wait_for(heard.wait(), 10)
    await connection.close()


# status


STATUS_FIELDS = [
    "id", "action", "state", "attempts", "max_attempts", "priority", "run_at", "created_at", "updated_at", "progress",
    "result", "error",
]  # fmt: skip


async def test_status_has_exactly_the_fields_of_the_contract(rpc: Rpc) -> None:
    added = await rpc.result("enqueue", {"action": "a", "priority": -5})
    status = await rpc.result("status", {"id": added["id"]})
    assert list(status) == STATUS_FIELDS
    assert (status["state"], status["attempts"], status["max_attempts"], status["priority"]) == ("SCHEDULED", 0, 10, -5)
    assert all(INSTANT.fullmatch(status[name]) for name in ("run_at", "created_at", "updated_at"))
    assert (status["progress"], status["result"], status["error"]) == (None, None, None)


async def test_status_of_a_finished_task_holds_its_result_and_no_error(rpc: Rpc, store: Store) -> None:
    added = await rpc.result("enqueue", {"action": "a"})
    await settle(store, '{"n": 12345678901234567890123}')
    response = await rpc.post({"jsonrpc": "2.0", "method": "status", "params": {"id": added["id"]}, "id": 1})
    assert '"result":{"n": 12345678901234567890123}' in response.text
    assert (response.json()["result"]["state"], response.json()["result"]["error"]) == ("SUCCESS", None)


async def test_status_of_a_failed_task_holds_its_error_and_in_detail_every_attempt(rpc: Rpc, store: Store) -> None:
    added = await rpc.result("enqueue", {"action": "a", "payload": [1], "unique_key": "u", "timeout": 9})
    error = {"code": -32000, "message": "boom"}
    await settle(store, json.dumps(error), fail=True)
    status = await rpc.result("status", {"id": added["id"], "detail": True})
    keys = ("unique_key", "ordering_key", "limit_key", "labels", "expires_at")
    assert list(status) == [*STATUS_FIELDS, "payload", *keys, "timeout", "claim", "worker", "failures", "claimed_at"]
    assert (status["state"], status["error"], status["result"]) == ("CRITICAL_ERROR", error, None)
    assert (status["payload"], status["unique_key"], status["ordering_key"], status["timeout"]) == ([1], "u", None, 9.0)
    [failure] = status["failures"]
    assert (failure["attempt"], failure["claim"], failure["error"]) == (1, status["claim"], error)
    assert INSTANT.fullmatch(failure["at"])


async def test_progress_of_a_running_task_is_shown(rpc: Rpc, store: Store) -> None:
    added = await rpc.result("enqueue", {"action": "a"})
    async with store.transaction() as session:
        dispatch = await claim.claim(session, 1)
        assert dispatch is not None
        await settling.note_heartbeats(
            session, {(added["id"], dispatch.tasks[0].claim): '{"percent":40,"note":"half"}'}
        )
    status = await rpc.result("status", {"id": added["id"]})
    assert (status["state"], status["attempts"]) == ("ACQUIRED", 1)
    assert status["progress"] == {"percent": 40, "note": "half"}


async def test_status_of_several_keeps_their_order_with_null_for_an_unknown_one(rpc: Rpc) -> None:
    first, second = [(await rpc.result("enqueue", {"action": "a"}))["id"] for _ in range(2)]
    statuses = await rpc.result("status", {"ids": [second, 999_999, str(first), second]})
    assert [status and status["id"] for status in statuses] == [second, None, first, second]


async def test_status_of_an_unknown_id_is_no_such_task(rpc: Rpc) -> None:
    assert await rpc.error("status", {"id": 4711}) == {
        "code": -32004, "message": "No such task: 4711", "data": {"id": 4711},
    }  # fmt: skip


# cancel and retry


async def test_cancelled_task_can_be_retried_but_not_cancelled_again(rpc: Rpc) -> None:
    task_id = (await rpc.result("enqueue", {"action": "a"}))["id"]
    assert await rpc.result("cancel", {"id": task_id}) == {"id": task_id, "state": "CANCELLED"}
    assert (await rpc.error("cancel", {"id": task_id}))["code"] == -32009
    assert await rpc.result("retry", {"id": task_id}) == {"id": task_id, "state": "SCHEDULED"}
    assert (await rpc.error("retry", {"id": task_id}))["data"] == {"id": task_id, "state": "SCHEDULED"}


async def test_finished_task_can_be_neither_cancelled_nor_retried(rpc: Rpc, store: Store) -> None:
    task_id = (await rpc.result("enqueue", {"action": "a"}))["id"]
    await settle(store)
    for method in ("cancel", "retry"):
        error = await rpc.error(method, {"id": task_id})
        assert (error["code"], error["data"]) == (-32009, {"id": task_id, "state": "SUCCESS"})
    assert (await rpc.result("status", {"id": task_id}))["state"] == "SUCCESS"


async def test_change_of_an_unknown_task_is_no_such_task(rpc: Rpc) -> None:
    for method in ("cancel", "retry"):
        assert (await rpc.error(method, {"id": 4711}))["code"] == -32004


# list


async def listed(rpc: Rpc, **params: Any) -> tuple[list[int], int]:
    """Ids of all pages, and how many pages there were."""
    ids: list[int] = []
    pages, cursor = 0, None
    while True:
        page = await rpc.result("list", params | ({} if cursor is None else {"cursor": cursor}))
        ids += [task["id"] for task in page["tasks"]]
        pages += 1
        cursor = page["cursor"]
        if cursor is None:
            return ids, pages
        assert isinstance(cursor, str)


async def test_list_pages_through_live_and_settled_tasks_newest_first(rpc: Rpc, store: Store) -> None:
    async with store.session() as session:
        ids = [answer.id for answer in await enqueue.enqueue(session, [NewTask("a")] * 7)]
    await settle(store)
    async with store.session() as session:
        ids += [answer.id for answer in await enqueue.enqueue(session, [NewTask("b", delay_seconds=60)] * 6)]
    await rpc.result("cancel", {"id": ids[9]})
    assert await listed(rpc, limit=4) == (ids[::-1], 4)
    assert await listed(rpc) == (ids[::-1], 1)
    assert list((await rpc.result("list", {"limit": 1}))["tasks"][0]) == STATUS_FIELDS
    assert await listed(rpc, state="SUCCESS", limit=3) == (ids[6::-1], 3)
    assert await listed(rpc, state="CANCELLED") == ([ids[9]], 1)
    assert await listed(rpc, state="SCHEDULED") == ([i for i in ids[:6:-1] if i != ids[9]], 1)
    assert await listed(rpc, action="b") == (ids[:6:-1], 1)
    assert await listed(rpc, action="b", state="SUCCESS") == ([], 1)
    assert await listed(rpc, action="none such") == ([], 1)


async def test_list_finds_a_rare_task_behind_more_than_one_page_looks_at(
    rpc: Rpc, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.tasks.methods.SCAN_TASKS", 100)
    async with store.session() as session:
        rare = (await enqueue.enqueue(session, [NewTask("rare")]))[0].id
        await enqueue.enqueue(session, [NewTask("common")] * 450)
    ids, pages = await listed(rpc, action="rare", limit=10)
    assert ids == [rare]
    assert pages == 5
    assert (await listed(rpc, state="ERROR"))[0] == []


async def test_a_list_by_key_shows_a_task_that_it_found_ahead_of_its_place_once(
    rpc: Rpc, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.tasks.methods.SCAN_TASKS", 100)
    async with store.session() as session:
        old = [await enqueue.enqueue(session, [NewTask("a", ordering_key="k")]) for _ in range(6)]
        await enqueue.enqueue(session, [NewTask("common")] * 250)
        young = await enqueue.enqueue(session, [NewTask("a", ordering_key="k")])
    ids = [one.id for (one,) in (young, *reversed(old))]
    first = await rpc.result("list", {"key": "k", "limit": 5})
    assert [task["id"] for task in first["tasks"]] == ids[:5]
    assert (await listed(rpc, key="k", limit=5))[0] == ids
    assert (await rpc.error("list", {"key": "k", "cursor": "7-x"}))["data"]["field"] == "cursor"


async def test_list_reads_no_more_of_each_table_than_a_page(store: Store) -> None:
    """The plan, with many tasks: every table is walked by its index on id, and not sorted."""
    from penstock.db.statements import SQL

    async with store.transaction() as session:
        await session._connection.execute(
            """insert into penstock.task
                   (state, action, payload, run_at, priority, max_attempts, created_at, updated_at)
               select 'SCHEDULED', 'a', '{}', now(), 0, 10, now(), now() from generate_series(1, 20000)"""
        )
    await settle(store)
    async with store.session() as session:
        await session._connection.execute("analyze")
        statements = {
            "list_tasks": (2**62, 50, 50, None, 0, *[None] * 4),
            "list_live_tasks": (2**62, 50, 50, None, 0, *[None] * 4, State.SCHEDULED),
            "list_settled_tasks": (2**62, 50, 50, None, 0, *[None] * 4, State.SUCCESS),
        }
        for name, arguments in statements.items():
            rows = await session._connection.fetch(f"explain (analyze, format json) {SQL[name]}", *arguments)
            scans = list(scans_of(json.loads(rows[0][0])[0]["Plan"]))
            assert max(scan["Actual Rows"] for scan in scans) <= 50, name
            assert not [scan for scan in scans if scan["Node Type"] == "Seq Scan" and scan["Actual Rows"]], name


def scans_of(plan: dict[str, Any]) -> Any:
    if "Relation Name" in plan:
        yield plan
    for below in plan.get("Plans", ()):
        yield from scans_of(below)


# stats


async def test_stats_count_every_state_with_rates_and_lag(rpc: Rpc, store: Store) -> None:
    await asyncio.gather(*(rpc.result("enqueue", {"action": "a"}) for _ in range(4)))
    await settle(store)
    await rpc.result("enqueue", {"action": "b"})
    await settle(store, '{"code":-32000,"message":"x"}', fail=True)
    waiting = await rpc.result("enqueue", {"action": "b", "delay": 60})
    due = await rpc.result("enqueue", {"action": "a"})
    stats = await rpc.result("stats")
    assert stats["states"] == {
        "WAITING": 0, "SCHEDULED": 2, "ACQUIRED": 0, "ERROR": 0, "SUCCESS": 4, "CRITICAL_ERROR": 1, "CANCELLED": 0,
    }  # fmt: skip
    assert stats["actions"] == {"a": {"SCHEDULED": 1, "SUCCESS": 4}, "b": {"SCHEDULED": 1, "CRITICAL_ERROR": 1}}
    assert stats["rates"] == {
        "enqueued_per_second": round(7 / 60, 3), "succeeded_per_second": round(4 / 60, 3),
        "failed_per_second": round(1 / 60, 3),
    }  # fmt: skip
    assert stats["lag"]["due"] == 1
    assert 0 <= stats["lag"]["oldest_due_seconds"] < 60
    assert waiting["id"] < due["id"]


@pytest.mark.parametrize("params", [None, {"tenant": "acme"}])
async def test_stats_tell_no_more_actions_apart_than_can_be_read(rpc: Rpc, store: Store, params: Any) -> None:
    async with store.transaction() as session:
        names = [f"made-up-{n}" for n in range(700)] + ["mail"] * 3 + ["other"] * 2
        await enqueue.enqueue(session, [NewTask(name, tenant="acme") for name in names])
    stats = await rpc.result("stats", params)
    assert len(stats["actions"]) == 500
    assert stats["actions"]["mail"] == {"SCHEDULED": 3}
    assert stats["actions"]["other"] == {"SCHEDULED": 2 + 700 - 498}
    assert stats["states"]["SCHEDULED"] == 705


async def test_stats_asked_again_at_once_cost_no_query(rpc: Rpc) -> None:
    before = counted(metrics.REGISTRY, "penstock_statement_seconds_count", statement="count_live")
    batch = [{"jsonrpc": "2.0", "method": "stats", "id": n} for n in range(50)]
    answers = (await rpc.post(batch)).json()
    assert len({json.dumps(answer["result"]) for answer in answers}) == 1
    assert counted(metrics.REGISTRY, "penstock_statement_seconds_count", statement="count_live") - before == 1


# rejected


async def reject(store: Store, *bodies: str, source: str = "inbound") -> list[int]:
    async with store.session() as session:
        await enqueue.insert_rejected(session, source, [(body, "a reason") for body in bodies])
        rows = await session.fetch("list_rejected_page", None, len(bodies), None, 10**9)
    return [row["id"] for row in rows][::-1]


async def test_rejected_are_listed_newest_first_with_their_text_and_reason(rpc: Rpc, store: Store) -> None:
    ids = await reject(store, "{nonsense", "half \ud800", "third")
    page = await rpc.result("rejected.list", {"limit": 2})
    assert [entry["id"] for entry in page["rejected"]] == ids[:0:-1]
    assert list(page["rejected"][0]) == ["id", "source", "body", "reason", "at"]
    assert page["rejected"][1]["body"] == "half \\xed\\xa0\\x80"
    assert INSTANT.fullmatch(page["rejected"][0]["at"])
    last = await rpc.result("rejected.list", {"cursor": page["cursor"]})
    assert last["rejected"][0] | {"at": ""} == {
        "id": ids[0], "source": "inbound", "body": "{nonsense", "reason": "a reason", "at": "",
    }  # fmt: skip
    assert last["cursor"] is None


async def test_rejected_page_of_large_bodies_is_cut_and_goes_on(
    rpc: Rpc, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.api.rejected.REJECTED_PAGE_BYTES", 5000)
    ids = await reject(store, *["x" * 100] * 160)
    page = await rpc.result("rejected.list", {"limit": 1000})
    assert len(page["rejected"]) == 50
    following = await rpc.result("rejected.list", {"limit": 1000, "cursor": page["cursor"]})
    seen = [entry["id"] for entry in page["rejected"] + following["rejected"]]
    assert seen == ids[: -len(seen) - 1 : -1]


async def test_retried_rejected_request_becomes_a_task(rpc: Rpc, store: Store) -> None:
    [good] = await reject(store, '{"jsonrpc":"2.0","method":"submit:export","params":{"objectID":5}}')
    [bad] = await reject(store, '{"jsonrpc":"2.0","method":"submitt:export","params":{}}')
    answer = await rpc.result("rejected.retry", {"ids": [good, bad, 999]})
    assert (answer["retried"], answer["unknown"]) == (1, [999])
    assert [entry["id"] for entry in answer["still_rejected"]] == [bad]
    assert "unknown method" in answer["still_rejected"][0]["reason"]
    [left] = (await rpc.result("rejected.list"))["rejected"]
    assert (left["id"], left["reason"]) == (bad, answer["still_rejected"][0]["reason"])
    [task] = (await rpc.result("list"))["tasks"]
    assert task["action"] == "export"


async def test_part_of_a_rejected_batch_is_never_accepted_twice(rpc: Rpc, store: Store) -> None:
    good, bad = '{"jsonrpc":"2.0","method":"enqueue","params":{"action":"a"}}', '{"jsonrpc":"2.0","method":"huh"}'
    [batch] = await reject(store, f"[{good},{bad},{good}]")
    answer = await rpc.result("rejected.retry", {"ids": [batch]})
    assert answer["retried"] == 0
    [rest] = answer["still_rejected"]
    [left] = (await rpc.result("rejected.list"))["rejected"]
    assert (left["id"], left["body"]) == (rest["id"], bad)
    assert (await rpc.result("rejected.retry", {"ids": [rest["id"]]}))["still_rejected"] == [rest]
    assert len((await rpc.result("list"))["tasks"]) == 2


async def test_retried_rejected_result_settles_its_task(rpc: Rpc, store: Store) -> None:
    task_id = (await rpc.result("enqueue", {"action": "a"}))["id"]
    async with store.session() as session:
        dispatch = await claim.claim(session, 1)
    assert dispatch is not None
    name = claim_id(task_id, dispatch.tasks[0].claim)
    body = f'[{{"jsonrpc":"2.0","result":7,"id":"{name}"}},{{"id":"{claim_id(1, 1)}"}}]'
    [both] = await reject(store, body, source="results")
    answer = await rpc.result("rejected.retry", {"ids": [both]})
    assert [entry["reason"] for entry in answer["still_rejected"]] == ["holds neither result nor error"]
    status = await rpc.result("status", {"id": task_id})
    assert (status["state"], status["result"]) == ("SUCCESS", 7)


async def test_one_rejected_message_is_shown_whole(rpc: Rpc, store: Store) -> None:
    ids = await reject(store, "first", "x" * 100_000, source="results")
    shown = await rpc.result("rejected.show", {"id": ids[1]})
    assert (shown["id"], shown["source"], shown["body"]) == (ids[1], "results", "x" * 100_000)
    error = await rpc.error("rejected.show", {"id": ids[1] + 1})
    assert (error["code"], error["data"]) == (-32005, {"id": ids[1] + 1})


async def test_rejected_of_one_queue_are_listed_retried_and_purged_page_by_page(rpc: Rpc, store: Store) -> None:
    good = '{"jsonrpc":"2.0","method":"enqueue","params":{"action":"a"}}'
    inbound = await reject(store, *[good] * 3, f"[{good},7]", *[good] * 3)
    results = await reject(store, "r1", "r2", source="results")
    listed = (await rpc.result("rejected.list", {"source": "results"}))["rejected"]
    assert [entry["id"] for entry in listed] == results[::-1]
    calls, retried, still, cursor = 0, 0, [], None
    while calls < 10:
        calls += 1
        answer = await rpc.result("rejected.retry", {"limit": 3, "cursor": cursor, "source": "inbound"})
        retried += answer["retried"]
        still += answer["still_rejected"]
        cursor = answer["cursor"]
        if cursor is None:
            break
    assert (calls, retried, len(still)) == (3, 6, 1)
    assert still[0]["id"] > max(inbound), "the rest of a message is a record of its own, and on no later page"
    assert len((await rpc.result("list", {"limit": 100}))["tasks"]) == 7
    answer = await rpc.result("rejected.purge", {"limit": 2})
    assert answer == {"purged": 2, "cursor": str(results[1])}
    assert await rpc.result("rejected.purge", {"limit": 2, "cursor": answer["cursor"]}) == {"purged": 1, "cursor": None}


async def test_rejected_bytes_that_are_no_text_stay_rejected(rpc: Rpc, store: Store) -> None:
    async with store.session() as session:
        await session.fetch("insert_rejected", ["inbound"], [b"\xff\x00{"], ["odd"])
    [entry] = (await rpc.result("rejected.list"))["rejected"]
    assert entry["body"] == "\\xff\x00{"
    answer = await rpc.result("rejected.retry", {"ids": [entry["id"]]})
    assert answer["still_rejected"] == [{"id": entry["id"], "reason": "Parse error: not UTF-8 at byte 0"}]


async def test_purged_rejected_are_gone(rpc: Rpc, store: Store) -> None:
    ids = await reject(store, "a", "b", "c")
    assert await rpc.result("rejected.purge", {"ids": [*ids[:2], 999]}) == {"purged": 2, "cursor": None}
    assert [entry["id"] for entry in (await rpc.result("rejected.list"))["rejected"]] == [ids[2]]


# Bad input: a clear error, and a good neighbour in the same batch is accepted

DEEP = '{"x":' * 150 + "1" + "}" * 150
ONE_BAD_ENTRY = [
    ("NUL in the payload", "enqueue", '{"action":"a","payload":{"x":"\\u0000"}}', -32602, "payload"),
    ("half a surrogate pair", "enqueue", '{"action":"a","payload":{"x":"\\ud800"}}', -32600, None),
    ("payload nested too deeply", "enqueue", '{"action":"a","payload":' + DEEP + "}", -32602, "payload"),
    ("no such method", "enqueu", '{"action":"a"}', -32601, None),
    ("action missing", "enqueue", "{}", -32602, "action"),
    ("param unknown", "enqueue", '{"action":"a","prio":1}', -32602, "prio"),
    ("action of another type", "enqueue", '{"action":1}', -32602, "action"),
    ("priority of another type", "enqueue", '{"action":"a","priority":"high"}', -32602, "priority"),
    ("priority a fraction", "enqueue", '{"action":"a","priority":1.5}', -32602, "priority"),
    ("priority too high", "enqueue", '{"action":"a","priority":32768}', -32602, "priority"),
    ("priority too low", "enqueue", '{"action":"a","priority":-32769}', -32602, "priority"),
    ("priority beyond 64 bits", "enqueue", '{"action":"a","priority":99999999999999999999}', -32602, "priority"),
    ("action empty", "enqueue", '{"action":""}', -32602, "action"),
    ("action empty in submit", "submit:", "{}", -32602, "action"),
    ("action of 10 kB", "enqueue", '{"action":"' + "a" * 10_240 + '"}', -32602, "action"),
    ("action of 10 kB in submit", "submit:" + "a" * 10_240, "{}", -32602, "action"),
    ("action with a control character", "enqueue", '{"action":"a\\nb"}', -32602, "action"),
    ("payload a string", "enqueue", '{"action":"a","payload":"x"}', -32602, "payload"),
    ("payload null", "enqueue", '{"action":"a","payload":null}', -32602, "payload"),
    ("payload over the limit", "enqueue", '{"action":"a","payload":["' + "x" * 262_144 + '"]}', -32013, None),
    ("payload over the limit in submit", "submit:a", '["' + "x" * 262_144 + '"]', -32013, None),
    ("run_at in the year 275760", "enqueue", '{"action":"a","run_at":"+275760-09-13T00:00:00Z"}', -32602, "run_at"),
    ("run_at in that year as a number", "enqueue", '{"action":"a","run_at":8640000000000000}', -32602, "run_at"),
    ("run_at tomorrow", "enqueue", '{"action":"a","run_at":"tomorrow"}', -32602, "run_at"),
    ("run_at without a zone", "enqueue", '{"action":"a","run_at":"2030-01-01T00:00:00"}', -32602, "run_at"),
    ("run_at and delay", "enqueue", '{"action":"a","run_at":"2030-01-01T00:00:00Z","delay":1}', -32602, "delay"),
    ("delay negative", "enqueue", '{"action":"a","delay":-1}', -32602, "delay"),
    ("delay of ten thousand years", "enqueue", '{"action":"a","delay":1e12}', -32602, "delay"),
    ("max_attempts zero", "enqueue", '{"action":"a","max_attempts":0}', -32602, "max_attempts"),
    ("timeout zero", "enqueue", '{"action":"a","timeout":0}', -32602, "timeout"),
    ("unique_key empty", "enqueue", '{"action":"a","unique_key":""}', -32602, "unique_key"),
    ("objectID an object", "submit:a", '{"objectID":{}}', -32602, "objectID"),
    ("id unknown", "status", '{"id":4711}', -32004, None),
    ("id negative", "status", '{"id":-1}', -32602, "id"),
    ("id a word", "cancel", '{"id":"first"}', -32602, "id"),
    ("id beyond 64 bits", "retry", '{"id":9223372036854775808}', -32602, "id"),
    ("id and ids", "status", '{"id":1,"ids":[1]}', -32602, "id"),
    ("ids over the limit", "status", '{"ids":[' + ",".join(["1"] * 1001) + "]}", -32602, "ids"),
    ("state unknown", "list", '{"state":"DONE"}', -32602, "state"),
    ("limit zero", "list", '{"limit":0}', -32602, "limit"),
    ("limit over the limit", "list", '{"limit":1001}', -32602, "limit"),
    ("cursor of no list", "list", '{"cursor":"x"}', -32602, "cursor"),
    ("params of stats", "stats", '{"x":1}', -32602, "x"),
]  # fmt: skip


async def test_bad_request_gets_a_clear_error_and_harms_no_neighbour(rpc: Rpc) -> None:
    for name, method, params, code, field in ONE_BAD_ENTRY:
        bad = f'{{"jsonrpc":"2.0","method":{json.dumps(method)},"params":{params},"id":"bad"}}'
        response = await rpc.post(f"[{json.dumps(GOOD)},{bad},{json.dumps(GOOD)}]")
        assert response.status_code == 200, name
        first, second, third = response.json()
        assert (first["id"], second["id"], third["id"]) == ("good", "bad", "good"), name
        assert "result" in first, name
        assert "result" in third, name
        assert second["error"]["code"] == code, name
        if field is not None:
            assert second["error"]["data"]["field"] == field, name
        alone = (await rpc.post(bad)).json()
        assert (alone["error"]["code"], alone["id"]) == (code, "bad"), name
    states = (await rpc.result("stats"))["actions"]
    assert states == {"good": {"SCHEDULED": 2 * len(ONE_BAD_ENTRY)}}


async def test_a_number_beyond_64_bits_is_no_bad_input(rpc: Rpc) -> None:
    body = '{"jsonrpc":"2.0","method":"submit:a","params":{"n":-99999999999999999999999999},"id":1}'
    task_id = (await rpc.post(body)).json()["result"]["id"]
    assert (await rpc.result("status", {"id": task_id, "detail": True}))["payload"] == {"n": -(10**26 - 1)}


BAD_BODIES = [
    ("not JSON", b"<xml/>", -32700),
    ("not UTF-8", json.dumps([GOOD]).encode() + b"\xff", -32700),
    ("NaN", f'[{json.dumps(GOOD)},{{"jsonrpc":"2.0","method":"submit:a","params":[NaN],"id":1}}]'.encode(), -32700),
    ("Infinity", b'{"jsonrpc":"2.0","method":"submit:a","params":[Infinity],"id":1}', -32700),
    ("10,000 deep", b'{"jsonrpc":"2.0","method":"submit:a","params":' + b"[" * 10_000 + b"]" * 10_000 + b"}", -32700),
    ("50,000 requests", json.dumps([{"jsonrpc": "2.0", "method": "x", "id": 1}] * 50_000).encode(), -32600),
    ("empty batch", b"[]", -32600),
]


async def test_bad_body_is_refused_whole_and_the_next_request_is_served(rpc: Rpc) -> None:
    for accepted, (name, body, code) in enumerate(BAD_BODIES, 1):
        answer = (await rpc.post(body)).json()
        assert (answer["error"]["code"], answer["id"]) == (code, None), name
        assert (await rpc.post(GOOD)).json()["result"]["duplicate"] is False, name
        assert len((await rpc.result("list"))["tasks"]) == accepted, name


# HTTP


async def test_body_over_the_limit_is_refused_declared_or_not(store: Store, settings: Settings) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(64):
            yield b" " * 1024

    settings = settings.model_copy(update={"request_limit_bytes": 16_384})
    async with running(store, settings) as api, httpx.AsyncClient(base_url=api.url) as http:
        for content in (b" " * 65_536, chunks()):
            response = await http.post("/rpc", content=content, headers=JSON)
            assert response.status_code == 413
            assert response.json()["error"]["code"] == -32013
            assert response.json()["error"]["data"]["limit"] == 16_384
        assert (await http.post("/rpc", json=GOOD)).json()["result"]["state"] == "SCHEDULED"


async def test_index_names_the_api_and_other_paths_and_methods_are_refused_in_json(rpc: Rpc) -> None:
    card = (await rpc.http.get("/")).json()
    assert card == {"name": "penstock", "version": __version__, "rpc": "/rpc", "discover": "rpc.discover"}
    for response, status in (
        (await rpc.http.get("/rpc"), 405),
        (await rpc.http.put("/rpc", content=b"{}"), 405),
        (await rpc.http.post("/"), 405),
        (await rpc.http.get("/../etc/passwd"), 404),
        (await rpc.http.post("/rpcx", content=b"{}"), 404),
    ):
        assert response.status_code == status
        assert "error" in response.json()


async def test_open_api_serves_loopback_names_alone(rpc: Rpc) -> None:
    port = rpc.http.base_url.port
    for host in (f"localhost:{port}", f"127.0.0.1:{port}", f"[::1]:{port}", "127.0.0.1"):
        assert (await rpc.post(GOOD, host=host)).status_code == 200, host
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "10.0.0.1", "[", ""):
        response = await rpc.post(GOOD, host=host)
        assert (response.status_code, response.json()["error"]["code"]) == (403, -32003), host
    assert (await rpc.http.get("/", headers={"host": "evil.example"})).status_code == 403


async def test_open_api_refuses_pages_of_other_origins(rpc: Rpc) -> None:
    own = str(rpc.http.base_url).rstrip("/")
    assert (await rpc.post(GOOD, origin=own)).status_code == 200
    for origin in ("https://evil.example", "null", "http://127.0.0.1:1", "http://localhost"):
        assert (await rpc.post(GOOD, origin=origin)).status_code == 403, origin
    assert len((await rpc.result("list"))["tasks"]) == 1


async def test_api_with_keys_asks_for_one_of_them(
    store: Store, settings: Settings, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    keys = (SecretStr("first-key"), SecretStr("schlüssel"))
    settings = settings.model_copy(update={"api_keys": keys})
    async with running(store, settings) as api, httpx.AsyncClient(base_url=api.url) as http:
        for headers in (
            {}, {"Authorization": "Bearer wrong"}, {"Authorization": "first-key"}, {"Authorization": "Basic first-key"},
            {"X-API-Key": "first-ke"}, {"X-API-Key": ""}, {"Authorization": "Bearer"},
        ):  # fmt: skip
            response = await http.post("/rpc", json=GOOD, headers=headers)
            assert (response.status_code, response.json()["error"]["code"]) == (401, -32003), headers
            assert response.headers["www-authenticate"] == "Bearer"
        refused = counted(metrics.REGISTRY, "penstock_refused_total", reason="key")
        for path in ("payload", "events"):
            response = await http.get(f"/tasks/1/{path}")
            assert (response.status_code, response.headers.get("www-authenticate")) == (401, "Bearer")
        assert counted(metrics.REGISTRY, "penstock_refused_total", reason="key") == refused + 2
        for good in (
            {"Authorization": "Bearer first-key"}, {"authorization": "bearer first-key"}, {"X-API-Key": "first-key"},
            {"X-API-Key": "first-key", "Host": "api.example", "Origin": "https://app.example"},
            {b"X-API-Key": "schlüssel".encode()},
        ):  # fmt: skip
            assert (await http.post("/rpc", json=GOOD, headers=good)).status_code == 200, good
        assert (await http.get("/", headers={"Host": "api.example"})).status_code == 200
    captured = capsys.readouterr()
    assert "first-key" not in captured.out + captured.err + caplog.text


async def test_requests_are_counted_by_method_and_outcome(rpc: Rpc) -> None:
    def count(method: str, outcome: str) -> float:
        return counted(metrics.REGISTRY, "penstock_requests_total", method=method, outcome=outcome)

    cases = [("enqueue", "ok"), ("submit", "ok"), ("enqueue", "-32602"), ("unknown", "-32601"), ("unknown", "-32600")]
    before = {case: count(*case) for case in cases}
    requests = [
        GOOD, {"jsonrpc": "2.0", "method": "submit:a"}, GOOD | {"params": {}}, GOOD | {"method": "x" * 500}, 5,
    ]  # fmt: skip
    await rpc.post(requests)
    assert {case: count(*case) - before[case] for case in cases} == dict.fromkeys(cases, 1)


async def test_discover_describes_the_methods(rpc: Rpc) -> None:
    document = await rpc.result("rpc.discover")
    assert {"enqueue", "status", "submit:<action>"} <= {method["name"] for method in document["methods"]}


# Running


async def test_port_that_is_taken_is_named(store: Store, settings: Settings) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        api = Api(store=store, settings=settings.model_copy(update={"http_port": port}))
        with pytest.raises(SettingsError, match=rf"127\.0\.0\.1:{port} .*PENSTOCK_HTTP_PORT"):
            await api.open()
        await api.close()


async def test_request_in_hand_is_answered_when_the_api_stops(store: Store, settings: Settings) -> None:
    """A lock holds the insert; the api is asked to stop; once the lock is gone the caller still gets its answer."""
    blocker = await store.connect()
    async with running(store, settings) as api, httpx.AsyncClient(base_url=api.url, timeout=30) as http:
        transaction = blocker.transaction()
        await transaction.start()
        await blocker.execute("lock table penstock.task in access exclusive mode")
        asking = asyncio.create_task(http.post("/rpc", json=GOOD))
        while not await blocker.fetchval("select count(*) from pg_locks where not granted"):
            await asyncio.sleep(0.01)
        api.stop()
        await transaction.rollback()
        answer = (await asking).json()
    assert answer["result"]["state"] == "SCHEDULED"
    row = await blocker.fetchrow("select state::text from penstock.task where id = $1", answer["result"]["id"])
    assert row["state"] == "SCHEDULED"
    await blocker.close()


async def test_postgres_going_away_is_503_with_a_reference_and_passes(
    store: Store, settings: Settings, postgres: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged = captured_log(monkeypatch)
    async with running(store, settings) as api, httpx.AsyncClient(base_url=api.url, timeout=60) as http:
        rpc = Rpc(http)
        admin = await store.connect()
        database = await admin.fetchval("select current_database()")
        await admin.close()
        other = Store(postgres.dsn("postgres"))
        async with other.session() as session:
            await session._connection.execute(f'alter database "{database}" allow_connections false')
            await session._connection.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity where datname = $1", database
            )
            responses = [await rpc.post(GOOD) for _ in range(3)]
            batch = await rpc.post([GOOD, {"jsonrpc": "2.0", "method": "nope", "id": 2}])
            await session._connection.execute(f'alter database "{database}" allow_connections true')
        await other.close()
        away = responses[-1]
        assert away.status_code == 503
        error = away.json()["error"]
        assert (error["code"], error["message"]) == (-32603, "Temporarily unavailable, try again")
        assert batch.status_code == 200
        assert [answer["error"]["code"] for answer in batch.json()] == [-32603, -32601]
        assert (await rpc.post(GOOD)).json()["result"]["state"] == "SCHEDULED"
    assert error["data"]["ref"] in [line["ref"] for line in logged if line["event"] == "request_unavailable"]
    assert "postgresql://" not in json.dumps(logged)
