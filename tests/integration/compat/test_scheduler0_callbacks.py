"""Callbacks of scheduler0's jobs: what is sent, in which parts, and the outcome of each; then the whole way of one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from penstock.brokers.sqs import SqsQueue
from penstock.compat.actions import MODULES
from penstock.compat.scheduler0.jobs import ACTION, NEVER, Job, payload_of
from penstock.db.notify import Notifier
from penstock.db.pool import Store
from penstock.resulter import Resulter
from penstock.scheduler.process import Scheduler
from penstock.schedules.firing import ScheduleFiring
from penstock.schedules.policy import render
from penstock.settings.model import Settings, load_settings
from penstock.worker.deliveries.errors import NotDelivered
from penstock.worker.deliveries.http_client import AddressRefused
from penstock.worker.deliveries.registry import Deliveries
from penstock.worker.handlers.actions import Registry
from penstock.worker.handlers.context import Call, Context
from penstock.worker.process import Worker
from tests.integration.compat.test_scheduler0_api import job, opened
from tests.integration.doors import no_routes
from tests.integration.http_servers import Request, answer, serving
from tests.integration.worker import test_worker

NOW = NEVER.replace(year=2030)
Send = Callable[..., Any]


@pytest.fixture
async def make() -> AsyncIterator[Callable[..., Send]]:
    """Makes what runs one batch of callbacks, given payloads of tasks as JSON."""
    opened: list[Deliveries] = []

    def make(**settings: Any) -> Send:
        registry = Registry()
        given = {"deliveries": ACTION, "http_allow": "127.0.0.0/8"} | settings
        opened.append(Deliveries(load_settings(**given), registry, MODULES))
        handler = registry.get(ACTION)
        assert handler is not None

        async def send(payloads: Sequence[bytes], note: Callable[[int, Any], None] = lambda n, outcome: None) -> Any:
            calls = [
                Call(Context(n, 1, ACTION), handler.fit(payload), partial(note, n))
                for n, payload in enumerate(payloads)
            ]
            return await handler.function(calls)

        return send

    yield make
    for deliveries in opened:
        await deliveries.close()


def fired(url: str, job_id: int = 1, minute: int = 0, **more: Any) -> bytes:
    """The payload of a task that a job's schedule has made."""
    given = Job(
        id=job_id, project_id=3, spec="@every 1m", callback_url=url, execution_type="http", start_date=NEVER,
        end_date=NEVER, last_execution_date=NEVER, timezone="UTC", date_created=NOW, **more,
    )  # fmt: skip
    instant = NOW + timedelta(minutes=minute)
    return render(payload_of(given).decode(), f"scheduler0:{job_id}", 100 + job_id, instant).encode()


def jobs_in(request: Request) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(request.body)
    return found


async def test_jobs_of_one_url_are_one_array(make: Callable[..., Send]) -> None:
    async with serving([answer(204)]) as server:
        assert await make()([fired(f"{server.url}/a?x=1", n, data=f"d{n}") for n in (1, 2)]) == [{"status": 204}] * 2
    (request,) = server.requests
    assert (request.method, request.target) == ("POST", "/a?x=1")
    assert request.headers["content-type"] == "application/json"
    assert request.headers["x-payload-chunk-id"] == "0"
    first, second = jobs_in(request)
    assert first == {
        "id": 1, "projectId": 3, "spec": "@every 1m", "callbackUrl": f"{server.url}/a?x=1", "data": "d1",
        "executionType": "http", "startDate": "0001-01-01T00:00:00Z", "endDate": "0001-01-01T00:00:00Z",
        "lastExecutionDate": "2030-01-01T00:00:00.000000Z", "timezone": "UTC", "dateCreated": "2030-01-01T00:00:00Z",
        "executionId": first["executionId"],
    }  # fmt: skip
    assert second["id"] == 2


async def test_the_execution_id_is_that_of_the_job_and_the_due_time(make: Callable[..., Send]) -> None:
    async with serving([answer()]) as server:
        send = make()
        for batch in ([(1, 0), (2, 0), (1, 1)], [(1, 0)]):  # the last one is tried again
            await send([fired(server.url, job_id, minute) for job_id, minute in batch])
    first, second = (jobs_in(request) for request in server.requests)
    ids = [told["executionId"] for told in first]
    assert len(set(ids)) == 3
    assert [told["executionId"] for told in second] == ids[:1]
    assert all(len(one) >= 200 and set(one) <= set("0123456789abcdef") for one in ids)


async def test_a_text_that_looks_like_a_template_stays_as_it_is(make: Callable[..., Send]) -> None:
    data = '{{run}} {{{schedule}}} {{ scheduled_time }} "\\{{run}}"\u00e4'
    async with serving([answer()]) as server:
        await make()([fired(f"{server.url}/{{{{run}}}}", data=data)])
    (told,) = jobs_in(server.requests[0])
    assert told["data"] == data
    assert told["callbackUrl"].endswith("/{{run}}")


async def test_arrays_are_split_under_the_limit_and_numbered_for_each_url(make: Callable[..., Send]) -> None:
    async with serving([answer()]) as server:
        send = make(scheduler0_payload_limit_bytes=2048)
        payloads = [
            fired(f"{server.url}/{n % 2}", n, data="x" * (5000 if n == 5 else 100 * (n % 3))) for n in range(1, 13)
        ]
        assert await send(payloads) == [{"status": 200}] * 12
    for target in ("/0", "/1"):
        requests = [request for request in server.requests if request.target == target]
        assert len(requests) > 1
        assert [request.headers["x-payload-chunk-id"] for request in requests] == [str(n) for n in range(len(requests))]
        ids = [told["id"] for request in requests for told in jobs_in(request)]
        assert ids == [n for n in range(1, 13) if n % 2 == int(target[1:])]
    for request in server.requests:
        assert len(request.body) <= 2048 or len(jobs_in(request)) == 1


async def test_what_one_url_or_chunk_does_is_the_outcome_of_its_own_jobs(make: Callable[..., Send]) -> None:
    async def broken(writer: asyncio.StreamWriter) -> None:
        writer.close()

    def answers(request: Request) -> Any:
        if request.target == "/bad":
            return answer(500, b"no")
        if request.target == "/broken":
            return broken
        return answer(503 if request.headers["x-payload-chunk-id"] == "1" else 200)

    async with serving(answers) as server:
        send = make(scheduler0_payload_limit_bytes=1100)
        urls = ["/good", "/bad", "/broken", "/good"]
        payloads = [fired(f"{server.url}{path}", n, data="x" * 200) for n, path in enumerate(urls, 1)]
        payloads += [fired("http://10.0.0.1/", 9), fired("ftp://x", 10)]
        good, bad, gone, late, private, senseless = await send(payloads)
    assert good == {"status": 200}
    for outcome in (bad, gone, late):
        assert isinstance(outcome, NotDelivered)
        assert outcome.delay is None
    assert "answered 500" in str(bad)
    assert isinstance(private, AddressRefused)
    assert isinstance(senseless, Exception)


async def test_retries_come_after_a_fixed_delay_if_a_setting_says_so(make: Callable[..., Send]) -> None:
    async with serving([answer(404)]) as server:
        (outcome,) = await make(scheduler0_retry_delay_seconds=3)([fired(server.url)])
    assert isinstance(outcome, NotDelivered)
    assert outcome.delay == 3
    (outcome,) = await make(scheduler0_retry_delay_seconds=3)([fired(server.url)])  # the server is gone
    assert isinstance(outcome, NotDelivered)
    assert outcome.delay == 3


async def test_any_status_is_a_success_if_a_setting_says_so(make: Callable[..., Send]) -> None:
    async with serving([answer(500)]) as server:
        assert await make(scheduler0_any_status=True)([fired(server.url)]) == [{"status": 500}]


async def test_redirects_are_followed(make: Callable[..., Send]) -> None:
    def answers(request: Request) -> bytes:
        return answer(307, Location="/there") if request.target == "/here" else answer()

    async with serving(answers) as server:
        assert await make()([fired(f"{server.url}/here")]) == [{"status": 200}]
    first, second = server.requests
    assert (second.method, second.target, second.body) == ("POST", "/there", first.body)


async def test_a_url_that_does_not_answer_in_time_fails_alone(make: Callable[..., Send]) -> None:
    async def never(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(3600)

    async with serving(lambda request: never if request.target == "/slow" else answer()) as server:
        send = make(scheduler0_timeout_seconds=0.2)
        slow, quick = await send([fired(f"{server.url}/slow", 1), fired(f"{server.url}/quick", 2)])
    assert isinstance(slow, NotDelivered)
    assert "within 0.2 s" in str(slow)
    assert quick == {"status": 200}


async def test_a_slow_url_does_not_hold_back_what_is_known_of_the_others(
    make: Callable[..., Send], settings: Settings
) -> None:
    known: dict[int, Any] = {}
    hurry = asyncio.Event()

    async def slow(writer: asyncio.StreamWriter) -> None:
        await hurry.wait()
        await answer(500)(writer)

    def note(number: int, outcome: Any) -> None:
        known[number] = outcome
        if len(known) == 2:
            hurry.set()

    async with serving(lambda request: slow if request.target == "/slow" else answer(503)) as server:
        payloads = [fired(f"{server.url}/{path}", n) for n, path in enumerate(("slow", "a", "b"))]
        outcomes = await make(scheduler0_timeout_seconds=30)(payloads, note)
    assert [type(outcome) for outcome in outcomes] == [NotDelivered] * 3
    assert list(known) in ([1, 2, 0], [2, 1, 0])


def test_a_payload_without_its_members_is_refused_by_the_worker() -> None:
    registry = Registry()
    Deliveries(load_settings(deliveries=ACTION), registry, MODULES)
    handler = registry.get(ACTION)
    assert handler is not None
    with pytest.raises(Exception, match="url"):
        handler.fit(b"{}")


# The whole way


async def test_a_job_is_called_back_at_its_time_and_its_execution_is_seen(
    store: Store, settings: Settings, outbound: SqsQueue, results: SqsQueue, sql: Any
) -> None:
    registry = Registry()
    settings = settings.model_copy(update={"deliveries": (ACTION,), "http_allow": ("127.0.0.1",)})
    async with serving([answer(500), answer(200)]) as server, opened(store, settings) as door:
        made = await door.jobs(*[job(await door.project(), callbackUrl=f"{server.url}/callback", data="x")] * 3)
        due = await sql.fetchval("select date_trunc('second', now())")
        await sql.execute("update penstock.schedule_clock set next_at = $1, due_at = $1", due)
        firing = ScheduleFiring(store=store, notifier=Notifier(store), settings=settings)
        assert (await firing.run_once()).tasks == 3
        deliveries = Deliveries(settings, registry, MODULES)
        scheduler = Scheduler(store=store, outbound=outbound, settings=settings, open_queue=no_routes)
        resulter = Resulter(store=store, results=results, settings=settings)
        worker = Worker(outbound=outbound, results=results, settings=settings, registry=registry)
        await scheduler.open()

        async def states() -> list[str]:
            found = await door.data("GET", "/executions?limit=10&offset=0")
            return [str(run["state"]) for run in found["executions"]]

        async def pump() -> bool:
            await scheduler.run_once()
            await resulter.run_once()
            return await states() == ["1", "1", "1"]

        async with test_worker.running(worker):
            receiving = asyncio.create_task(_receive(worker))
            await test_worker.eventually(pump, "all callbacks to succeed")
            receiving.cancel()
        await scheduler.close()
        await deliveries.close()
        runs = (await door.data("GET", "/executions?limit=10&offset=0"))["executions"]
    told = [one for request in server.requests for one in jobs_in(request)]
    assert len(jobs_in(server.requests[0])) == 3  # one message, so one batch; each is tried again at its own time
    assert {one["id"] for one in told} == {one["id"] for one in made}
    assert {one["executionId"] for one in told} == {run["uniqueId"] for run in runs}
    assert all(one["lastExecutionDate"] == told[0]["lastExecutionDate"] for one in told)
    assert await sql.fetchval("select array_agg(attempts) from penstock.task_history") == [2, 2, 2]
    assert await sql.fetchval("select max(max_attempts) from penstock.task_history") == 6


async def _receive(worker: Worker) -> None:
    while True:
        if not await worker.run_once():
            await asyncio.sleep(0.02)
