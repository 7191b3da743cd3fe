"""Waiting for results: over HTTP, from both clients, from the shell; packed results; and what is emptied before its
record."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from time import monotonic
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from penstock import AsyncClient, Client
from penstock.api.long_polls import LongPolls
from penstock.brokers.sqs import SqsQueue
from penstock.cli.app import app
from penstock.db.context import within
from penstock.db.notify import CHANNEL
from penstock.db.pool import Store
from penstock.db.statements import SQL
from penstock.local.postgres import EmbeddedPostgres
from penstock.methods.inbound import read_inbound
from penstock.protocol.compression import ENCODING, pack_result
from penstock.protocol.errors import (
    InvalidParams,
    ResultCancelled,
    ResultGone,
    ResultTimeout,
    StateConflict,
    TaskFailed,
    TaskNotFound,
    TooSlow,
    Unavailable,
)
from penstock.protocol.reports import encode_result
from penstock.protocol.task import Failure, NewTask
from penstock.resulter import Resulter
from penstock.settings.model import Settings, load_settings
from penstock.settings.values import DAY
from penstock.supervisor.bulk_jobs import BulkJobs
from penstock.supervisor.payloads import PayloadRetention
from penstock.tasks import claim as claims
from penstock.tasks import enqueue, reschedule, settle
from penstock.tasks.methods import retry
from penstock.tasks.params import ResultParams, RetryParams
from tests.claims import claim_id
from tests.integration.apis import JSON, running
from tests.integration.doors import postgres_away, put, sample


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


async def make(store: Store, count: int = 1, **options: Any) -> list[int]:
    async with store.session() as session:
        return [task.id for task in await enqueue.enqueue(session, [NewTask("a", '{"n":1}', **options)] * count)]


async def claim(store: Store) -> tuple[int, list[int]]:
    """(claim, ids) of all that is due."""
    async with store.transaction() as session:
        dispatch = await claims.claim(session, 10_000)
    assert dispatch is not None
    return dispatch.id, [task.id for task in dispatch.tasks]


async def finish(store: Store, claimed: int, ids: Sequence[int], result: str = '{{"of":{}}}') -> None:
    """As a resulter does: commit, then a wake-up."""
    async with store.transaction() as session:
        assert await settle.finish(session, {(task_id, claimed): result.format(task_id) for task_id in ids}) == len(ids)
    async with store.session() as session:
        await session.fetch("notify_work", CHANNEL, "")


async def fail(store: Store, claimed: int, task_id: int) -> None:
    error = '{"code": -32000, "message": "no luck", "data": {"traceback": "Traceback: here"}}'
    async with store.transaction() as session:
        assert await settle.fail(session, [Failure(task_id, claimed, error, None)])
    async with store.session() as session:
        await session.fetch("notify_work", CHANNEL, "")


async def ask(http: httpx.AsyncClient, **params: Any) -> Any:
    body = {"jsonrpc": "2.0", "method": "result", "params": params, "id": 1}
    return (await http.post("/rpc", json=body, timeout=90)).json()


# Over HTTP


async def test_a_task_is_answered_when_it_settles_and_not_before(store: Store, settings: Settings) -> None:
    (task_id,) = await make(store)
    claimed, _ = await claim(store)
    async with running(store, settings) as api, httpx.AsyncClient(base_url=api.url, headers=JSON) as http:
        asking = asyncio.create_task(ask(http, id=task_id, timeout=60))
        await until(lambda: api._methods.long_polls._waits == 1)
        assert not asking.done()
        await finish(store, claimed, [task_id])
        expected = {"id": task_id, "state": "SUCCESS", "result": {"of": task_id}, "error": None}
        assert (await asking)["result"] == expected
        assert (await ask(http, id=str(task_id)))["result"] == expected
        assert api._methods.long_polls._waiting == {}
        assert sample("penstock_result_waits") == 0


async def test_when_the_time_is_up_the_state_is_told_and_how_to_ask_again(store: Store, settings: Settings) -> None:
    (task_id,) = await make(store)
    async with running(store, settings) as api, httpx.AsyncClient(base_url=api.url, headers=JSON) as http:
        for timeout in (0, 0.05):
            assert (await ask(http, id=task_id, timeout=timeout))["result"] == {
                "id": task_id, "state": "SCHEDULED", "result": None, "error": None,
                "again": "it has not settled within the timeout: call result again with this id",
            }  # fmt: skip
        assert (await ask(http, id=4711))["error"] == {
            "code": -32004, "message": "No such task: 4711", "data": {"id": 4711},
        }  # fmt: skip
        for wrong in ({}, {"id": 1, "ids": [1]}, {"id": 1, "timeout": 61}, {"id": 1, "wait": "some"}, {"ids": []}):
            assert (await ask(http, **wrong))["error"]["code"] == -32602, wrong


async def test_all_waits_for_the_last_and_any_answers_those_that_have_settled(store: Store, settings: Settings) -> None:
    ids = await make(store, 3)
    claimed, _ = await claim(store)
    async with running(store, settings) as api, httpx.AsyncClient(base_url=api.url, headers=JSON) as http:
        every = asyncio.create_task(ask(http, ids=[*ids, ids[0]], timeout=60))
        some = asyncio.create_task(ask(http, ids=ids, timeout=60, wait="any"))
        await until(lambda: api._methods.long_polls._waits == 6)
        await finish(store, claimed, ids[1:2])
        assert [entry["id"] for entry in (await some)["result"]] == [ids[1]]
        assert not every.done()
        await fail(store, claimed, ids[0])
        async with store.transaction() as session:
            await settle.cancel(session, [ids[2]], "not wanted")
        outcomes = (await every)["result"]  # no wake-up came with the last change: the watch looks on its own
        assert [entry["id"] for entry in outcomes] == [*ids, ids[0]]
        assert [entry["state"] for entry in outcomes] == ["CRITICAL_ERROR", "SUCCESS", "CANCELLED", "CRITICAL_ERROR"]
        assert outcomes[0]["error"]["message"] == "no luck"
        assert outcomes[2]["reason"] == "not wanted"
        unknown = (await ask(http, ids=[ids[0], 4711], timeout=60))["result"]
        assert unknown[1] == {"id": 4711, "state": None, "result": None, "error": None}


async def test_a_task_that_is_retried_is_waited_for_again(store: Store, settings: Settings) -> None:
    (task_id,) = await make(store)
    async with running(store, settings) as api, httpx.AsyncClient(base_url=api.url, headers=JSON) as http:
        async with store.transaction() as session:
            await settle.cancel(session, [task_id])
            await reschedule.restart(session, [task_id])
        asking = asyncio.create_task(ask(http, id=task_id, timeout=60))
        await until(lambda: api._methods.long_polls._waits == 1)
        claimed, _ = await claim(store)
        await finish(store, claimed, [task_id])
        assert (await asking)["result"]["state"] == "SUCCESS"


def test_the_inbound_queue_has_no_way_back_for_a_result(settings: Settings) -> None:
    inbound = read_inbound('{"jsonrpc": "2.0", "method": "result", "params": {"id": 1}}', settings)
    ((_, reason),) = inbound.refused
    assert reason == "result only answers, and a queue has no way back: ask over HTTP"


async def test_entries_of_a_batch_wait_together_and_harm_no_neighbour(store: Store, settings: Settings) -> None:
    ids = await make(store, 2)
    claimed, _ = await claim(store)
    async with running(store, settings) as api, httpx.AsyncClient(base_url=api.url, headers=JSON) as http:
        params: list[dict[str, Any]] = [{"id": ids[0], "timeout": 60}, {"id": 0, "timeout": 60}, {"id": ids[1], "x": 1}]
        body = [{"jsonrpc": "2.0", "method": "result", "params": p, "id": n} for n, p in enumerate(params)]
        asking = asyncio.create_task(http.post("/rpc", json=body, timeout=90))
        await until(lambda: api._methods.long_polls._waits >= 1)
        await finish(store, claimed, ids)
        answers = {answer["id"]: answer for answer in (await asking).json()}
        assert answers[0]["result"]["state"] == "SUCCESS"
        assert answers[1]["error"]["code"] == -32004
        assert answers[2]["error"]["data"]["field"] == "x"


async def test_a_client_that_hangs_up_leaves_nothing_behind(store: Store, settings: Settings) -> None:
    ids = await make(store, 5)
    async with running(store, settings) as api:
        async with httpx.AsyncClient(base_url=api.url, headers=JSON) as http:
            asking = [asyncio.create_task(ask(http, ids=ids, timeout=60)) for _ in range(3)]
            await until(lambda: api._methods.long_polls._waits == 15)
            for task in asking:
                task.cancel()
            await asyncio.wait(asking)
        results = api._methods.long_polls
        await until(lambda: results._waits == 0 and results._of_callers.total() == 0)
        assert results._waiting == {}


async def test_an_api_that_stops_answers_at_once_with_what_there_is(store: Store, settings: Settings) -> None:
    ids = await make(store, 2)
    claimed, _ = await claim(store)
    async with httpx.AsyncClient(headers=JSON) as http:
        async with running(store, settings) as api:
            http.base_url = httpx.URL(api.url)
            asking = asyncio.create_task(ask(http, ids=ids, timeout=60))
            await until(lambda: api._methods.long_polls._waits == 2)
            async with store.transaction() as session:
                await settle.finish(session, {(ids[0], claimed): "1"})
            stopping = monotonic()
        assert monotonic() - stopping < 30  # of the 60 that it would have waited
        outcomes = (await asking)["result"]
    assert [entry["state"] for entry in outcomes] == ["SUCCESS", "ACQUIRED"]
    assert "again" in outcomes[1]


async def test_waits_are_bounded_and_told_so(store: Store, settings: Settings) -> None:
    ids = await make(store, 5)
    few = settings.model_copy(update={"result_waits_limit": 4, "http_connections": 4})
    async with running(store, few) as api, httpx.AsyncClient(base_url=api.url, headers=JSON) as http:
        refused = (await ask(http, ids=ids, timeout=60))["error"]
        assert (refused["code"], refused["data"]) == (-32025, {"limit": 4, "retry_after": 1})
        assert "Too many tasks" in refused["message"]
        assert len((await ask(http, ids=ids, timeout=0))["result"]) == 5, "a look is none"
        waiting = [asyncio.create_task(ask(http, id=ids[0], timeout=60)) for _ in range(2)]
        await until(lambda: api._methods.long_polls._of_callers.total() == 2)
        assert "Too many requests" in (await ask(http, id=ids[0], timeout=60))["error"]["message"]
        async with store.transaction() as session:
            await settle.cancel(session, ids)
        assert [(await task)["result"]["state"] for task in waiting] == ["CANCELLED"] * 2


async def test_one_caller_leaves_waits_to_the_others(store: Store, settings: Settings) -> None:
    (task_id,) = await make(store)
    one, other = "one-long-secret-key", "other-long-secret-key"
    few = load_settings(**settings.model_dump() | {"http_connections": 8, "api_keys": entries(one=one, other=other)})
    async with running(store, few) as api, httpx.AsyncClient(base_url=api.url, headers=JSON) as http:

        async def wait(key: str) -> Any:
            body = {"jsonrpc": "2.0", "method": "result", "params": {"id": task_id, "timeout": 60}, "id": 1}
            return (await http.post("/rpc", json=body, timeout=90, headers={"X-API-Key": key})).json()

        waiting = [asyncio.create_task(wait(one)) for _ in range(2)]
        await until(lambda: api._methods.long_polls._of_callers.total() == 2)
        assert (await wait(one))["error"]["data"] == {"limit": 2, "retry_after": 1}
        waiting.append(asyncio.create_task(wait(other)))
        await until(lambda: api._methods.long_polls._of_callers.total() == 3)
        async with store.transaction() as session:
            await settle.cancel(session, [task_id])
        assert [(await task)["result"]["state"] for task in waiting] == ["CANCELLED"] * 3


def entries(**keys: str) -> str:
    return ",".join(f"{name}:read:{sha256(key.encode()).hexdigest()}" for name, key in keys.items())


async def test_a_watch_outlives_a_postgres_that_goes_away(
    store: Store, settings: Settings, postgres: EmbeddedPostgres, database_url: str
) -> None:
    (task_id,) = await make(store)
    claimed, _ = await claim(store)
    async with running(store, settings) as api, httpx.AsyncClient(base_url=api.url, headers=JSON) as http:
        looks = sample("penstock_statement_seconds_count", statement="read_settled")
        asking = asyncio.create_task(ask(http, id=task_id, timeout=60))
        await until(lambda: sample("penstock_statement_seconds_count", statement="read_settled") > looks)
        pool = await store.open()
        # The other look may be under way; then the last session has left its connection to the next.
        await until(lambda: pool.get_size() - pool.get_idle_size() == 1 and store._spare is not None)
        async with postgres_away(postgres, database_url):
            await asyncio.sleep(0)
            assert (await http.post("/rpc", json={"jsonrpc": "2.0", "method": "result", "params": [1], "id": 1})
                    ).status_code == 503  # fmt: skip
        await finish(store, claimed, [task_id])
        assert (await asking)["result"]["state"] == "SUCCESS"


async def test_a_thousand_waits_cost_one_connection_and_one_statement_a_look(
    store: Store, settings: Settings, sql: Any
) -> None:
    ids = await make(store, 1000)
    claimed, _ = await claim(store)
    async with running(store, settings) as api, httpx.AsyncClient(base_url=api.url, headers=JSON) as http:
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=api.url, headers=JSON, limits=limits) as many:
            asking = [asyncio.create_task(ask(many, ids=ids[n : n + 10], timeout=60)) for n in range(0, 1000, 10)]
            await until(lambda: api._methods.long_polls._waits == 1000)
            listening = "select count(*) from pg_stat_activity where application_name = 'penstock-test-listen'"
            await wait_for_rows(sql, listening, 1)
            before = sample("penstock_statement_seconds_count", statement="read_settled")
            await finish(store, claimed, ids)
            answers = await asyncio.gather(*asking)
        assert all(entry["result"] == {"of": entry["id"]} for answer in answers for entry in answer["result"])
        assert sample("penstock_statement_seconds_count", statement="read_settled") - before < 20
        assert (await ask(http, id=ids[0], timeout=0))["result"]["state"] == "SUCCESS"


async def wait_for_rows(sql: Any, query: str, count: int) -> None:
    async with asyncio.timeout(60):
        while await sql.fetchval(query) != count:
            await asyncio.sleep(0.01)


async def test_results_that_fill_an_answer_leave_the_rest_to_the_next(
    store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.runtime.budget.ANSWER_BYTES", 1000)
    ids = await make(store, 8)
    claimed, _ = await claim(store)
    await finish(store, claimed, ids, '"' + "x" * 400 + '{}"')
    async with running(store, settings) as api, httpx.AsyncClient(base_url=api.url, headers=JSON) as http:
        outcomes = (await ask(http, ids=ids, timeout=60))["result"]
        told = [entry for entry in outcomes if "again" not in entry]
        assert 1 <= len(told) < 8
        assert [entry["id"] for entry in outcomes] == ids
        left = [entry for entry in outcomes if "again" in entry]
        assert {(entry["state"], entry["result"]) for entry in left} == {("SUCCESS", None)}
        async with AsyncClient(api.url) as client:
            results = await asyncio.gather(*(client.result(task_id) for task_id in ids))
        assert [len(result) for result in results] == [401] * 8


async def test_one_look_goes_on_behind_results_that_fill_it_in_bytes(
    store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.runtime.budget.ANSWER_BYTES", 1000)
    ids = await make(store, 2)
    claimed, _ = await claim(store)
    polls = LongPolls(store, store.session, settings)  # no watch looks again
    asking = [asyncio.create_task(polls.answer([ResultParams(id=task_id, timeout=60)])) for task_id in ids]
    await until(lambda: polls._waits == 2)
    await polls._first_looks.drain()
    await finish(store, claimed, ids, '"' + "é" * 600 + '{}"')
    await polls._look([ids])
    outcomes = await asyncio.wait_for(asyncio.gather(*asking), 10)
    assert [(one.id, one.state) for (one,) in outcomes] == [(task_id, "SUCCESS") for task_id in ids]


async def test_one_look_has_no_more_errors_at_once_than_an_answer_has_room_for(
    store: Store, settings: Settings, sql: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.runtime.budget.ANSWER_BYTES", 1000)
    ids = await make(store, 8)
    async with store.transaction() as session:
        await settle.cancel(session, ids)
    await sql.execute("update penstock.task_history set failures = $1", json.dumps([{"error": "é" * 200}]))
    assert len(await sql.fetch(SQL["read_settled"], ids, 1000)) == 3
    polls = LongPolls(store, store.session, settings)  # no watch looks again
    asking = [asyncio.create_task(polls.answer([ResultParams(id=task_id, timeout=0)])) for task_id in ids]
    outcomes = await asyncio.gather(*asking)
    assert [(one.id, len(one.error)) for (one,) in outcomes] == [(task_id, 402) for task_id in ids]


# From a program and from the shell


async def test_results_awaited_together_share_one_connection(store: Store, settings: Settings) -> None:
    ids = await make(store, 1000)
    claimed, _ = await claim(store)
    async with running(store, settings) as api, AsyncClient(api.url) as client:
        posts = 0
        post = client._http.post

        async def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal posts
            posts += 1
            return await post(*args, **kwargs)

        client._http.post = counted  # type: ignore[method-assign]
        awaiting = [asyncio.create_task(client.result(task_id, timeout=90)) for task_id in ids]
        await until(lambda: api._methods.long_polls._waits == 1000)
        assert len(api._servers["http"]._server.server_state.connections) == 1
        for start in range(0, 1000, 250):
            await finish(store, claimed, ids[start : start + 250])
        assert await asyncio.gather(*awaiting) == [{"of": task_id} for task_id in ids]
        assert posts < 20
        assert client._results.polls == []


async def test_a_task_awaited_later_joins_those_that_are_awaited(store: Store, settings: Settings) -> None:
    ids = await make(store, 3)
    claimed, _ = await claim(store)
    async with running(store, settings) as api, AsyncClient(api.url) as client:
        results = api._methods.long_polls
        first = asyncio.create_task(client.result(ids[0]))
        await until(lambda: results._waits == 1)
        second = asyncio.create_task(client.result(ids[1]))
        twice = asyncio.create_task(client.result(ids[1]))
        await until(lambda: set(results._waiting) == {ids[0], ids[1]} and results._waits == 2)
        assert len(client._results.polls) == 1
        await finish(store, claimed, [ids[1]])
        assert await second == await twice == {"of": ids[1]}
        first.cancel()
        await asyncio.wait((first,))
        await until(lambda: results._waits == 0 and client._results.polls == [])
        await finish(store, claimed, [ids[2]])
        assert await client.result(ids[2], timeout=0) == {"of": ids[2]}


async def test_a_wrong_id_fails_no_wait_but_its_own(store: Store, settings: Settings) -> None:
    (task_id,) = await make(store)
    claimed, _ = await claim(store)
    wrong: list[Any] = [-1, 2**63, "x", 1.5, None]
    async with running(store, settings) as api, AsyncClient(api.url) as client:
        ids: list[Any] = [task_id, str(task_id)]
        awaiting = [asyncio.create_task(client.result(one)) for one in ids]
        await until(lambda: api._methods.long_polls._waits == 1)
        for one in wrong:
            with pytest.raises((InvalidParams, TypeError)):
                await asyncio.wait_for(client.result(one), 10)
        await finish(store, claimed, [task_id])
        assert await asyncio.wait_for(asyncio.gather(*awaiting), 30) == [{"of": task_id}] * 2


async def test_both_clients_raise_what_came_of_the_task(store: Store, settings: Settings, sql: Any) -> None:
    failed, cancelled, gone, waiting = await make(store, 4)
    claimed, _ = await claim(store)
    await fail(store, claimed, failed)
    await finish(store, claimed, [gone])
    await sql.execute("update penstock.task_history set result = 'null', result_gone = true where id = $1", gone)
    async with store.transaction() as session:
        await settle.cancel(session, [cancelled], "not wanted")

    async def expect(result: Callable[..., Any]) -> None:
        with pytest.raises(TaskFailed, match=f"task {failed} failed: no luck") as told:
            await result(failed)
        assert (told.value.id, told.value.state, told.value.error["code"]) == (failed, "CRITICAL_ERROR", -32000)
        with pytest.raises(ResultCancelled, match="was cancelled: not wanted") as off:
            await result(cancelled)
        assert off.value.reason == "not wanted"
        with pytest.raises(ResultGone, match="no longer kept"):
            await result(gone)
        with pytest.raises(TaskNotFound):
            await result(4711)
        for timeout in (0, 0.05):
            with pytest.raises(TimeoutError) as late:
                await result(waiting, timeout=timeout)
            assert isinstance(late.value, ResultTimeout)
            assert late.value.state == "ACQUIRED"

    async with running(store, settings) as api, AsyncClient(api.url) as client:
        await expect(client.result)
        with Client(api.url) as blocking:
            await expect(lambda *args, **kwargs: asyncio.to_thread(blocking.result, *args, **kwargs))
            task = asyncio.create_task(asyncio.to_thread(blocking.result, waiting))
            await until(lambda: api._methods.long_polls._waits == 1)
            await finish(store, claimed, [waiting])
            assert await task == {"of": waiting}


async def test_a_client_waits_on_while_the_api_is_replaced_and_gives_up_on_one_that_never_was(
    store: Store, settings: Settings
) -> None:
    (task_id,) = await make(store)
    claimed, _ = await claim(store)
    async with running(store, settings) as api:
        client = AsyncClient(api.url)
        awaiting = asyncio.create_task(client.result(task_id))
        await until(lambda: api._methods.long_polls._waits == 1)
        port = int(api.url.rpartition(":")[2])
    async with running(Store(store.database_url), settings.model_copy(update={"http_port": port})):
        await finish(store, claimed, [task_id])
        assert await awaiting == {"of": task_id}
    await client.close()
    async with AsyncClient("http://127.0.0.1:9") as nowhere:
        with pytest.raises(Unavailable, match="cannot be reached"):
            await nowhere.result(1)


async def test_an_answer_that_is_none_is_raised_and_not_waited_for() -> None:
    async with AsyncClient() as client:

        async def strange(*_: Any, **__: Any) -> httpx.Response:
            return httpx.Response(200, json={"jsonrpc": "2.0", "id": 0, "result": 17})

        client._http.post = strange  # type: ignore[method-assign]
        with pytest.raises(TypeError):
            await client.result(1)
        assert client._results.polls == []


async def test_close_lets_go_of_whoever_waits(store: Store, settings: Settings) -> None:
    (task_id,) = await make(store)
    async with running(store, settings) as api:
        client = AsyncClient(api.url)
        awaiting = asyncio.create_task(client.result(task_id))
        await until(lambda: api._methods.long_polls._waits == 1)
        await client.close()
        with pytest.raises(asyncio.CancelledError):
            await awaiting
        await until(lambda: api._methods.long_polls._waits == 0)


async def test_the_async_client_has_every_method_of_the_other(store: Store, settings: Settings) -> None:
    names = {name for name in vars(Client) if not name.startswith("_")}
    assert names == {name for name in vars(AsyncClient) if not name.startswith("_")}
    async with running(store, settings) as api, AsyncClient(api.url) as client:
        task = await client.enqueue("a", {"n": 1}, ordering_key="o")
        assert [t["state"] for t in await client.enqueue_many([{"action": "b"}, {"action": "c"}])] == ["SCHEDULED"] * 2
        assert (await client.status(task["id"]))["action"] == "a"
        assert [t and t["id"] for t in await client.status([1, 99])] == [1, None]
        assert (await client.reschedule(1, delay=60))["state"] == "SCHEDULED"
        assert (await client.cancel(1, reason="r"))["state"] == "CANCELLED"
        assert (await client.retry(1))["state"] == "SCHEDULED"
        assert len((await client.list(action="b"))["tasks"]) == 1
        assert (await client.set_limits("a", max_in_flight=2))["max_in_flight"] == 2
        assert (await client.pause("a"))["paused"]
        assert not (await client.resume("a"))["paused"]
        assert [rule["action"] for rule in await client.actions()] == ["a"]
        await client.set_route("r", "queue")
        assert [route["name"] for route in await client.routes()] == ["r"]
        await client.delete_route("r")
        assert (await client.stats())["states"]["SCHEDULED"] == 3
        assert (await client.ordering_list()) == {"keys": [], "cursor": None}
        assert not (await client.ordering_release("o"))["released"]
        assert (await client.bulk_cancel(action="b", dry_run=True))["count"] == 1
        for started in (await client.bulk_retry(all=True), await client.bulk_delete(all=True)):
            assert (await client.job(started["job"]))["state"] == "RUNNING"
        job = await client.bulk_reschedule(all=True, delay=1)
        assert (await client.cancel_job(job["job"]))["state"] == "CANCELLED"
        assert (await client.wait_job(job["job"]))["state"] == "CANCELLED"
        assert len((await client.jobs())["jobs"]) == 3
        results = await client.batch([("status", {"id": 1}), ("status", {"id": 99})])
        assert (results[0]["id"], type(results[1])) == (1, TaskNotFound)
        made = await client.schedules.create("s", "@hourly", "a")
        assert (await client.schedules.list())["schedules"][0]["name"] == made["name"] == "s"
        with pytest.raises(InvalidParams):
            await client.enqueue("")


async def test_the_command_prints_the_result_and_tells_by_its_exit_code(store: Store, settings: Settings) -> None:
    good, bad, open_ = await make(store, 3)
    claimed, _ = await claim(store)
    await finish(store, claimed, [good])
    await fail(store, claimed, bad)

    def use(url: str) -> None:
        def run(*arguments: str) -> tuple[int, str]:
            done = CliRunner().invoke(app, [*arguments, "--api-url", url])
            return done.exit_code, done.output

        code, output = run("task", "result", str(good))
        assert (code, json.loads(output)) == (0, {"of": good})
        code, output = run("task", "result", str(bad))
        assert code == 3
        assert f"task {bad} failed: no luck" in output
        assert "Traceback: here" in output
        code, output = run("task", "result", str(open_), "--timeout", "0")
        assert (code, "ACQUIRED" in output) == (4, True)
        code, output = run("enqueue", "later", "--delay", "60", "--wait", "--wait-timeout", "0")
        assert (code, "SCHEDULED" in output) == (4, True)
        assert run("enqueue", "later", "--wait-timeout", "1")[0] == 2

    async with running(store, settings) as api:
        await asyncio.to_thread(use, api.url)


# Packed results on their way


def packed(name: str, text: str) -> str:
    return encode_result(name, f'"{text}"', encoding=ENCODING)


async def test_a_packed_result_is_stored_as_it_was_and_a_bomb_is_a_failed_attempt(
    store: Store, results: SqsQueue, settings: Settings, sql: Any
) -> None:
    ids = await make(store, 5)
    claimed, _ = await claim(store)
    text = json.dumps({"rows": ["ü\u20ac", 1.0] * 10_000}, ensure_ascii=False)
    bomb = pack_result("[" + "0," * 2_000_000 + "0]")
    bodies = [
        packed(claim_id(ids[0], claimed), pack_result(text)),
        packed(claim_id(ids[1], claimed), bomb),
        packed(claim_id(ids[2], claimed), "AAAA"),
        json.dumps({"jsonrpc": "2.0", "encoding": "br", "result": "AAAA", "id": claim_id(ids[3], claimed)}),
        packed(claim_id(ids[4], claimed), pack_result("{not json")),
    ]
    await put(results, bodies[0], "[" + ",".join(bodies[1:]) + "]")
    resulter = Resulter(store=store, results=results, settings=settings)
    while await resulter.run_once():
        pass
    assert await sql.fetchval("select result::text from penstock.task_history where id = $1", ids[0]) == text
    failures = await sql.fetch("select failures -> -1 -> 'error' ->> 'message' from penstock.task order by id")
    told = [row[0] for row in failures]
    assert told[0] == (
        "the result unpacks to more than 900000 bytes; 900000 are the limit of one, 16777216 of a message"
    )
    assert told[1].startswith("the packed result cannot be read: ")
    assert told[2] == "the result has the encoding 'br'; gzip is known"
    assert told[3].startswith("the packed result cannot be read: JSON is malformed")


# What is emptied before its record


@pytest.fixture
def emptying(store: Store, settings: Settings) -> PayloadRetention:
    kept = {"payload_retention_seconds": DAY + 60.0, "result_retention_seconds": 60.0}
    return PayloadRetention(store=store, settings=settings.model_copy(update=kept))


async def walk(emptying: PayloadRetention, now: datetime) -> int:
    """Rounds until there is no more to look at."""
    total = 0
    for _ in range(40):
        total += await emptying.run_once(now=now)
    return total


async def test_results_go_before_payloads_and_payloads_before_records(
    store: Store, settings: Settings, sql: Any, emptying: PayloadRetention
) -> None:
    done, failed, cancelled = await make(store, 3)
    (empty,) = [task.id for task in await enqueue_empty(store)]
    claimed, _ = await claim(store)
    await finish(store, claimed, [done])
    await finish(store, claimed, [empty], "null")
    await fail(store, claimed, failed)
    async with store.transaction() as session:
        await settle.cancel(session, [cancelled])
    (live,) = await make(store)
    settled_at = await sql.fetchval("select max(finished_at) from penstock.task_history")
    today = settled_at.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    assert await walk(emptying, today + timedelta(days=1)) == 0, "it was not kept for a minute, and a margin, yet"
    assert await walk(emptying, today + timedelta(days=1, hours=2)) == 1
    query = "select id, payload::text, result::text, payload_gone, result_gone from penstock.task_history order by id"
    assert [tuple(row) for row in await sql.fetch(query)] == [
        (done, '{"n":1}', "null", None, True), (failed, '{"n":1}', None, None, None),
        (cancelled, '{"n":1}', None, None, None), (empty, "{}", "null", None, None),
    ]  # fmt: skip
    assert await walk(emptying, today + timedelta(days=2, hours=2)) == 3
    assert [tuple(row)[3:] for row in await sql.fetch(query)] == [
        (True, True), (True, None), (True, None), (None, None),
    ]  # fmt: skip
    assert await sql.fetchval("select payload::text from penstock.task where id = $1", live) == '{"n":1}'

    async with running(store, settings) as api:
        with Client(api.url) as client:
            task = await asyncio.to_thread(client.status, done, detail=True)
            assert (task["payload"], task["payload_gone"], task["result"], task["result_gone"]) == (
                None,
                True,
                None,
                True,
            )
            assert "payload_gone" not in await asyncio.to_thread(client.status, empty, detail=True)
            with pytest.raises(StateConflict, match="its payload is gone") as refused:
                await asyncio.to_thread(client.retry, failed)
            assert refused.value.data == {"id": failed, "state": "CRITICAL_ERROR", "payload_gone": True}
    async with store.transaction() as session:
        assert await reschedule.restart(session, [failed, cancelled]) == {}
        with pytest.raises(StateConflict, match="its payload is gone"):
            await retry.carry_out(within(session, settings), RetryParams(cancelled))


async def enqueue_empty(store: Store) -> Any:
    async with store.session() as session:
        return await enqueue.enqueue(session, [NewTask("a")])


async def test_a_bulk_retry_tells_of_payloads_that_are_gone(
    store: Store, settings: Settings, sql: Any, emptying: PayloadRetention
) -> None:
    ids = await make(store, 2)
    async with store.transaction() as session:
        await settle.cancel(session, ids)
    await sql.execute("update penstock.task_history set payload_gone = true where id = $1", ids[0])
    async with running(store, settings) as api:
        with Client(api.url) as client:
            job = (await asyncio.to_thread(client.bulk_retry, states=["CANCELLED"]))["job"]
            jobs = BulkJobs(store=store, changed=lambda: None)
            while await jobs.run_once():
                pass
            ended = await asyncio.to_thread(client.job, job)
    assert (ended["changed"], ended["refused"]) == (1, 1)
    assert "its payload is gone" in ended["errors"][0]["reason"]


async def test_many_that_settled_at_once_are_emptied_step_by_step_and_seen_once(
    store: Store, settings: Settings, sql: Any, emptying: PayloadRetention, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.supervisor.payloads._MOST", 100)
    monkeypatch.setattr("penstock.supervisor.payloads._FEW", 25)
    for _ in range(12):
        ids = await make(store, 80)
        claimed, _ids = await claim(store)
        await finish(store, claimed, ids)
    looked: list[int] = []
    real = PayloadRetention._step

    async def counted(self: PayloadRetention, *args: Any, **kwargs: Any) -> int | None:
        changed = await real(self, *args, **kwargs)
        looked.append(changed or 0)
        return changed

    monkeypatch.setattr(PayloadRetention, "_step", counted)
    later = datetime.now(UTC) + timedelta(days=3)
    assert await walk(emptying, later) == 2 * 960
    assert max(looked) <= 100
    assert await sql.fetchval("select count(*) from penstock.task_history where payload_gone and result_gone") == 960
    assert await walk(emptying, later) == 0
    other = PayloadRetention(store=store, settings=settings)
    assert await other.run_once() == 0, "nothing is emptied unless it is asked for"


async def test_a_step_that_takes_too_long_is_made_smaller(
    store: Store, settings: Settings, database_url: str, sql: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.supervisor.payloads._MOST", 64)
    monkeypatch.setattr("penstock.supervisor.payloads._FEW", 16)
    ids = await make(store, 60)
    claimed, _ = await claim(store)
    await finish(store, claimed, ids)
    await sql.execute(
        "update penstock.task_history set finished_at = finished_at - id * interval '1 ms'; "
        "create function penstock.slow() returns trigger language plpgsql as "
        "'begin perform pg_sleep(0.02); return null; end'; "
        "create trigger slow after update on penstock.task_history for each row execute function penstock.slow()"
    )
    later = datetime.now(UTC) + timedelta(days=3)
    given = settings.model_copy(update={"payload_retention_seconds": 60.0})
    async with Store(database_url, statement_timeout_seconds=0.5) as short:
        emptying = PayloadRetention(store=short, settings=given)
        for _ in range(8):
            with suppress(TooSlow):
                await emptying.run_once(now=later)
    assert await sql.fetchval("select count(*) from penstock.task_history where payload_gone") == 60


async def test_two_supervisors_that_empty_do_not_wait_for_each_other(
    store: Store, sql: Any, emptying: PayloadRetention
) -> None:
    ids = await make(store, 3)
    claimed, _ = await claim(store)
    await finish(store, claimed, ids)
    await sql.execute(
        "create function penstock.slow() returns trigger language plpgsql as "
        "'begin perform pg_sleep(1); return null; end'; "
        "create trigger slow before update on penstock.task_history for each statement execute function penstock.slow()"
    )
    later = datetime.now(UTC) + timedelta(days=3)
    emptied = 0
    while not emptied:
        emptied += sum(await asyncio.gather(emptying.run_once(now=later), emptying.run_once(now=later)))
    assert emptied + await walk(emptying, later) == 6


async def test_what_a_handlers_own_transaction_settles_late_is_emptied_too(
    store: Store, sql: Any, emptying: PayloadRetention
) -> None:
    await make(store)
    number, (task_id,) = await claim(store)
    async with sql.transaction():
        tomorrow = (await sql.fetchval("select now()")).replace(hour=0, minute=0, second=0, microsecond=0)
        tomorrow += timedelta(days=1)
        assert await sql.fetchval("select public.penstock_settle($1, '1')", f"{task_id}:{number}")
        await walk(emptying, tomorrow + timedelta(minutes=50))
    await walk(emptying, tomorrow + timedelta(hours=2))
    assert await sql.fetchval("select result_gone from penstock.task_history where id = $1", task_id)


async def test_a_look_of_the_emptying_reads_its_stretch_and_not_the_history(sql: Any) -> None:
    await sql.execute("set timezone = 'UTC'")  # as partitions are cut
    await sql.execute(
        "insert into penstock.task_history (id, state, action, payload, priority, run_at, attempts, max_attempts,"
        " claim, claimed_at, created_at, updated_at, finished_at, result)"
        """ select n, 'SUCCESS', 'a', '{"n": 1}', 0, now(), 1, 1, 1, now(), now(), now(),"""
        " date_trunc('day', now()) + n * interval '1 s', '1' from generate_series(1, 80000) n"
    )
    await sql.execute("analyze penstock.task_history")
    await sql.fetch(SQL["summarize_settled"], [await sql.fetchval("select to_char(now(), 'YYYYMMDD')")])
    await sql.execute("set enable_seqscan = off")
    midnight = await sql.fetchval("select date_trunc('day', now())")
    stretch = midnight + timedelta(seconds=100), midnight + timedelta(seconds=160)
    rows = await sql.fetch("explain (analyze, costs off, timing off) " + SQL["empty_payloads"], *stretch)
    plan = "\n".join(row[0] for row in rows)
    assert "Bitmap Index Scan on task_success_" in plan
    assert "Seq Scan" not in plan.replace("(never executed)", "")
    passed_by = [int(number) for number in re.findall(r"Rows Removed by Index Recheck: (\d+)", plan)]
    assert sum(passed_by) < 20_000
    assert await sql.fetchval("select count(*) from penstock.task_history where payload_gone") == 60


async def test_a_look_for_live_tasks_reads_them_by_their_key_and_the_history_not_at_all(store: Store, sql: Any) -> None:
    ids = await make(store, 500)
    claimed, _ = await claim(store)
    await finish(store, claimed, ids[:200])
    await sql.execute("set enable_seqscan = off")
    rows = await sql.fetch("explain (analyze, costs off, timing off) " + SQL["read_settled"], ids[200:], 10_000)
    plan = "\n".join(row[0] for row in rows)
    assert "_pkey" in plan
    assert "Seq Scan" not in plan
    history = [line for line in plan.splitlines() if "on task_success" in line or "on task_cancelled" in line]
    assert history
    assert all("never executed" in line for line in history)
    told = await sql.fetch(SQL["read_settled"], ids, 10**9)
    assert {row["id"] for row in told} == set(ids[:200])
