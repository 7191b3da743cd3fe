"""Who ran a task: reported by workers with their messages, kept with each attempt, shown by the api."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from penstock.brokers.base import Outgoing
from penstock.brokers.sqs import SqsQueue
from penstock.db.pool import Store
from penstock.protocol.message_attributes import WORKER_ATTRIBUTE
from penstock.protocol.reports import decode_reports, encode_notification, encode_progress, encode_result
from penstock.protocol.requests import encode_call, join_batch
from penstock.protocol.task import Claimed, Failure, NewTask
from penstock.resulter import Resulter
from penstock.results.apply import apply_reports
from penstock.settings.model import Settings
from penstock.supervisor.repair import Repair
from penstock.tasks import reschedule, settle
from penstock.worker.handlers.actions import Registry, action
from penstock.worker.handlers.context import Context
from penstock.worker.process import Worker
from tests.integration.apis import JSON
from tests.integration.apis import running as serving
from tests.integration.test_resulter import claim, claimed, drained, error, name
from tests.integration.worker.test_worker import running as working

TaskOf = Callable[[int], Any]
PATIENCE_SECONDS = 60


@pytest.fixture
def resulter(store: Store, results: SqsQueue, settings: Settings) -> Resulter:
    return Resulter(store=store, results=results, settings=settings)


async def report(resulter: Resulter, results: SqsQueue, worker: str | None, *texts: str) -> None:
    attributes = {} if worker is None else {WORKER_ATTRIBUTE: worker}
    assert (await results.send([Outgoing(join_batch(texts), attributes)])).failed == []
    assert await drained(resulter) == 1


async def run_again(sql: Any, store: Store, task: Claimed) -> Claimed:
    """The next attempt of a task that has failed."""
    await sql.execute("update penstock.task set run_at = now() - interval '1 s' where id = $1", task.id)
    (again,) = await claim(store)
    return again


async def failures(task_of: TaskOf, task: Claimed) -> list[tuple[int, Any]]:
    kept = json.loads((await task_of(task.id))["failures"])
    return [(failure["attempt"], failure["worker"]) for failure in kept]


async def test_each_attempt_keeps_who_ran_it(
    resulter: Resulter, results: SqsQueue, store: Store, task_of: TaskOf, sql: Any
) -> None:
    (task,) = await claimed(store, NewTask("a"))
    assert (await task_of(task.id))["worker"] is None
    await report(resulter, results, "one:7", error(task))
    again = await run_again(sql, store, task)
    assert (await task_of(task.id))["worker"] is None  # the newest claim has no report yet
    await report(resulter, results, "two:8", encode_progress(name(again), 40))
    assert (await task_of(task.id))["worker"] == "two:8"
    await report(resulter, results, "two:8", encode_result(name(again), "1"))
    assert (await task_of(task.id))["worker"] == "two:8"
    assert await failures(task_of, task) == [(1, "one:7")]


async def test_one_message_of_many_results_tells_it_once_for_all(
    resulter: Resulter, results: SqsQueue, store: Store, task_of: TaskOf
) -> None:
    tasks = await claimed(store, *(NewTask("a") for _ in range(5)))
    texts = [encode_result(name(task), "1") for task in tasks[:4]] + [error(tasks[4], final=True)]
    await report(resulter, results, "one:7", *texts)
    assert [(await task_of(task.id))["worker"] for task in tasks] == ["one:7"] * 5
    assert await failures(task_of, tasks[4]) == [(1, "one:7")]


@pytest.mark.parametrize("told", [None, " ", "x" * 101, "\u00e4"])
async def test_of_a_worker_that_does_not_tell_nothing_is_known(
    resulter: Resulter, results: SqsQueue, store: Store, task_of: TaskOf, told: str | None
) -> None:
    done, failed, given_up = await claimed(store, *(NewTask("a") for _ in range(3)))
    texts = encode_result(name(done), "1"), error(failed), error(given_up, final=True)
    await report(resulter, results, told, *texts)
    assert [(await task_of(task.id))["worker"] for task in (done, failed, given_up)] == [None] * 3
    assert await failures(task_of, failed) == await failures(task_of, given_up) == [(1, None)]


async def test_a_task_whose_worker_fell_silent_says_which_one_it_was(
    store: Store,
    outbound: SqsQueue,
    results: SqsQueue,
    settings: Settings,
    task_of: TaskOf,
    resulter: Resulter,
    sql: Any,
) -> None:
    (task,) = await claimed(store, NewTask("a"))
    await report(resulter, results, "one:7", encode_progress(name(task)))
    await sql.execute(
        "update penstock.task set claimed_at = claimed_at - $1 * interval '1 s', heartbeat_at = heartbeat_at - "
        "$1 * interval '1 s'",
        settings.stale_after_seconds + 1,
    )
    repair = Repair(store=store, queue_of=lambda _: outbound, results=results, settings=settings, empty_seconds=0)
    assert await repair.run_once() == 1
    assert await failures(task_of, task) == [(1, "one:7")]


async def test_a_task_that_waits_for_an_event_keeps_who_ran_it(
    store: Store, settings: Settings, task_of: TaskOf
) -> None:
    (task,) = await claimed(store, NewTask("a"))
    async with store.transaction() as session:
        texts = encode_notification("wait", id=name(task), token="t", timeout=60)
        await apply_reports(session, decode_reports(texts, batch_limit=10, worker="one:7"), settings)
    assert (await task_of(task.id))["worker"] == "one:7"
    async with serving(store, settings) as api, httpx.AsyncClient(base_url=api.url, headers=JSON) as http:
        body = {"jsonrpc": "2.0", "method": "task.complete", "params": {"token": "t", "result": 1}, "id": 1}
        assert (await http.post("/rpc", json=body)).json()["result"]["state"] == "SUCCESS"
    assert (await task_of(task.id))["worker"] == "one:7"


async def test_a_task_that_is_cancelled_while_it_runs_keeps_it_and_one_that_starts_anew_forgets_it(
    store: Store, resulter: Resulter, results: SqsQueue, task_of: TaskOf
) -> None:
    (task,) = await claimed(store, NewTask("a"))
    await report(resulter, results, "one:7", encode_progress(name(task)))
    async with store.transaction() as session:
        assert await settle.cancel(session, [task.id]) == {task.id}
    assert (await task_of(task.id))["worker"] == "one:7"
    async with store.transaction() as session:
        await reschedule.restart(session, [task.id])
    assert (await task_of(task.id))["worker"] is None


async def test_a_worker_tells_its_name_and_the_api_shows_it(
    store: Store, settings: Settings, outbound: SqsQueue, results: SqsQueue, resulter: Resulter
) -> None:
    registry = Registry()

    @action("a", registry=registry)
    def run(ctx: Context, fail: bool) -> None:
        if fail:
            raise ValueError("boom")

    done, failed = await claimed(
        store, NewTask("a", payload='{"fail":false}'), NewTask("a", payload='{"fail":true}', max_attempts=1)
    )
    calls = [
        encode_call(task.id, task.claim, task.action, task.payload, claim_id=name(task)) for task in (done, failed)
    ]
    assert (await outbound.send([Outgoing(join_batch(calls))])).failed == []
    named = settings.model_copy(update={"worker_name": "press 4"})
    async with working(Worker(outbound=outbound, results=results, settings=named, registry=registry)) as worker:
        while not await worker.run_once():
            pass
        await asyncio.wait_for(worker.settle(), PATIENCE_SECONDS)
    while not await drained(resulter):
        pass
    async with serving(store, settings) as api, httpx.AsyncClient(base_url=api.url, headers=JSON) as http:
        request = {"method": "status", "params": {"ids": [done.id, failed.id], "detail": True}}
        answer = (await http.post("/rpc", json={"jsonrpc": "2.0", "id": 1, **request})).json()["result"]
        assert [task["worker"] for task in answer] == ["press 4", "press 4"]
        assert [failure["worker"] for failure in answer[1]["failures"]] == ["press 4"]
        for task in (done, failed):
            page = (await http.get(f"/tasks/{task.id}", headers={"Accept": "text/html"})).text
            assert "ran on press 4" in page
            assert '<dd class="mono">press 4</dd>' in page


async def test_entries_of_failures_that_an_older_process_wrote_are_shown(
    store: Store, settings: Settings, sql: Any
) -> None:
    (task,) = await claimed(store, NewTask("a"))
    async with store.transaction() as session:
        await settle.fail(session, [Failure(task.id, task.claim, '{"code":1,"message":"x"}', None)])
    await sql.execute("update penstock.task_history set failures = failures #- '{0,worker}'")
    async with serving(store, settings) as api, httpx.AsyncClient(base_url=api.url, headers=JSON) as http:
        request = {"jsonrpc": "2.0", "id": 1, "method": "status", "params": {"id": task.id, "detail": True}}
        (failure,) = (await http.post("/rpc", json=request)).json()["result"]["failures"]
    assert failure["worker"] is None
