"""The whole life of tasks, by the processes' own passes, over each transport."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest

from penstock import Call, Context, Fail, InboundClient, Retry, action
from penstock.brokers.base import Outgoing, Queue, Transport
from penstock.brokers.opening import create_queues, open_transport, queue_names
from penstock.db.pool import Store
from penstock.protocol.task import State
from penstock.resulter import Resulter
from penstock.runtime.loop import Service
from penstock.scheduler.process import Scheduler
from penstock.settings.broker_urls import DEAD_LETTER_SUFFIX
from penstock.settings.model import Settings, load_settings
from penstock.submitter import Submitter
from penstock.supervisor.process import Supervisor
from penstock.worker.handlers.actions import Registry
from penstock.worker.process import Worker
from tests.brokers import KINDS, broker_settings
from tests.integration.apis import JSON, running
from tests.integration.doors import request as rpc_request

PATIENCE_SECONDS = 60.0


class Item(msgspec.Struct):
    n: int


TaskOf = Callable[[int], Awaitable[Any]]


@pytest.fixture(params=KINDS)
def settings(request: pytest.FixtureRequest, database_url: str) -> Settings:
    return load_settings(
        **broker_settings(request.param, request, f"t-{secrets.token_hex(4)}"),
        database_url=database_url,
        inbound_methods="*",
        receive_wait_seconds=1,
        visibility_timeout_seconds=30,
        heartbeat_seconds=0.2,
        retry_base_seconds=0.05,
        retry_cap_seconds=0.2,
        poll_seconds=0.05,
        http_port=0,
        grace_seconds=5,
    )


@pytest.fixture
async def transport(settings: Settings) -> AsyncIterator[Transport]:
    await create_queues(settings)
    transport = open_transport(settings)
    yield transport
    await transport.close()


@pytest.fixture
def queues(transport: Transport, settings: Settings) -> dict[str, Queue]:
    return {label: transport.queue(name, label=label) for label, name in queue_names(settings).items()}


@pytest.fixture
def registry() -> Registry:
    registry = Registry()
    tried: set[int] = set()

    @action("add", registry=registry)
    async def add(ctx: Context, a: int, b: int) -> int:
        await ctx.progress(50, "half")
        return a + b

    @action("once_more", registry=registry)
    async def once_more(ctx: Context) -> bool:
        tried.add(ctx.claim)
        if len(tried) == 1:
            raise Retry(delay=0)
        return True

    @action("long", registry=registry)
    async def long(ctx: Context) -> str:
        await asyncio.sleep(1)
        return "long"

    @action("refuse", registry=registry)
    async def refuse(ctx: Context) -> None:
        raise Fail("never")

    @action("double", batch=10, linger=0.05, registry=registry)
    async def double(calls: list[Call[Item]]) -> list[int]:
        return [call.params.n * 2 for call in calls]

    return registry


@asynccontextmanager
async def passing(*services: Service) -> AsyncIterator[None]:
    """Every service opened, its side tasks running, pass after pass until the block ends."""

    async def passes(service: Service) -> None:
        while True:
            if not await service.run_once():
                await asyncio.sleep(0.02)

    async with AsyncExitStack() as stack:
        for service in services:
            await service.open()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(passes(service)) for service in services]
            tasks += [group.create_task(run()) for service in services for run in service.side_tasks().values()]
            try:
                yield
            finally:
                for service in services:
                    if isinstance(service, Worker):
                        service.stop_taking()
                        await service.drain(5)
                for task in tasks:
                    task.cancel()
        stack.push_async_callback(services[0].close)


async def until(what: str, look: Callable[[], Awaitable[Any]]) -> Any:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (found := await look()):
        assert time.monotonic() < deadline, f"waited for {what}"
        await asyncio.sleep(0.1)
    return found


async def test_tasks_live_their_whole_life(
    store: Store,
    settings: Settings,
    transport: Transport,
    queues: dict[str, Queue],
    registry: Registry,
    task_of: TaskOf,
) -> None:
    options: dict[str, Any] = (
        {"endpoint_url": settings.sqs_endpoint_url, "region": settings.aws_region}
        if settings.transport.kind == "sqs"
        else {"transport_url": settings.transport.text}
    )
    async with InboundClient(settings.inbound_queue, **options) as client:
        await client.enqueue("add", {"a": 1, "b": 2})
        await client.enqueue("once_more")
        await client.enqueue("long")
        await client.enqueue_many([{"action": "double", "payload": {"n": n}} for n in range(20)])
        await client.enqueue("refuse")

    def opened(name: str, label: str) -> Queue:
        return transport.queue(name, label=label)

    services = (
        Submitter(store=store, inbound=queues["inbound"], settings=settings),
        Scheduler(store=store, outbound=queues["outbound"], settings=settings, open_queue=opened),
        Worker(outbound=queues["outbound"], results=queues["results"], settings=settings, registry=registry),
        Resulter(store=store, results=queues["results"], settings=settings),
        Supervisor(store=store, queues=queues, settings=settings, open_queue=opened),
    )

    async def all_settled() -> list[Any]:
        tasks = [await task_of(number) for number in range(1, 25)]
        return tasks if all(task is not None and State(task["state"]).final for task in tasks) else []

    async with passing(*services):
        tasks = await until("24 settled tasks", all_settled)
    by_action: dict[str, list[Any]] = {}
    for task in tasks:
        by_action.setdefault(task["action"], []).append(task)
    assert {action: {task["state"] for task in found} for action, found in by_action.items()} == {
        "add": {"SUCCESS"}, "once_more": {"SUCCESS"}, "long": {"SUCCESS"}, "double": {"SUCCESS"},
        "refuse": {"CRITICAL_ERROR"},
    }  # fmt: skip
    assert [task["result"] for task in by_action["add"]] == ["3"]
    assert [task["attempts"] for task in by_action["once_more"]] == [2]
    assert sorted(int(task["result"]) for task in by_action["double"]) == [2 * n for n in range(20)]
    assert by_action["long"][0]["attempts"] == 1


@asynccontextmanager
async def calling(store: Store, settings: Settings) -> AsyncIterator[tuple[Any, httpx.AsyncClient]]:
    """A function that calls methods of a running api, and a client of its pages."""
    async with running(store, settings) as api, httpx.AsyncClient(base_url=api.url, timeout=60, headers=JSON) as http:

        async def call(method: str, **params: Any) -> Any:
            answer = (await http.post("/rpc", content=rpc_request(method, params, id=1))).json()
            assert "result" in answer, answer
            return answer["result"]

        yield call, http


async def test_dead_letters_are_listed_shown_sent_again_and_purged(
    store: Store, settings: Settings, transport: Transport, queues: dict[str, Queue]
) -> None:
    bodies = {
        "inbound": rpc_request("enqueue", {"action": "add", "payload": {"a": 1, "b": 1}}),
        "outbound": rpc_request("add", {}, id="7:1"),
        "results": rpc_request("progress", {"id": "7:1"}),
    }
    dead = {
        label: transport.queue(name + DEAD_LETTER_SUFFIX, label=label + DEAD_LETTER_SUFFIX)
        for label, name in queue_names(settings).items()
    }
    for label, body in bodies.items():
        assert (await dead[label].send([Outgoing(body), Outgoing("{ no json")])).failed == []

    async with calling(store, settings) as (call, _):

        async def counted() -> bool:
            found = await call("dlq.stats")
            return {row["queue"]: row["messages"] for row in found["queues"]} == dict.fromkeys(bodies, 2)

        await until("the counts of dead letters", counted)
        for label, body in bodies.items():
            listed = (await call("dlq.list", queue=label))["messages"]
            assert len(listed) == 2, label
            shown = [await call("dlq.show", queue=label, id=letter["id"]) for letter in listed]
            assert {letter["body"] for letter in shown} == {body, "{ no json"}
            wanted = next(letter["id"] for letter in shown if letter["body"] == body)
            replayed = await call("dlq.replay", queue=label, ids=[wanted])
            assert replayed["replayed"] + replayed["dropped"] == 1, replayed
            (left,) = (await call("dlq.list", queue=label))["messages"]
            assert left["id"] != wanted
            assert (await call("dlq.purge", queue=label, ids=[left["id"]]))["purged"] == 1
            assert (await call("dlq.list", queue=label))["messages"] == []
    came = []
    while not came:
        came = await queues["inbound"].receive(wait_seconds=1, visibility_seconds=30)
    assert [message.body for message in came] == [bodies["inbound"]]
    assert came[0].original_id != came[0].id


@pytest.mark.parametrize("settings", ["amqp", "kafka"], indirect=True)
@pytest.mark.parametrize(
    ("label", "body", "shown"),
    [
        ("inbound", '{"method":"a\udcff', r'{"method":"a\xff'),
        ("outbound", '[{"jsonrpc":"2.0","method":"a\udcff","id":"7:1"}]', r'"method":"a\xff"'),
        ("results", "\udcc3", r"\xc3"),
    ],
    ids=["inbound", "outbound", "results"],
)
async def test_a_dead_letter_that_is_not_utf8_is_shown_and_sent_again_as_it_came(
    store: Store, settings: Settings, transport: Transport, queues: dict[str, Queue], label: str, body: str, shown: str
) -> None:
    name = queue_names(settings)[label] + DEAD_LETTER_SUFFIX
    assert (await transport.queue(name, label=label + DEAD_LETTER_SUFFIX).send([Outgoing(body)])).failed == []
    async with calling(store, settings) as (call, http):

        async def listed() -> Any:
            return (await call("dlq.list", queue=label))["messages"]

        (dead,) = await until("the dead letter", listed)
        assert shown in (await call("dlq.show", queue=label, id=dead["id"]))["body"]
        page = await http.get(f"/queues/{label}/dead/{dead['id']}", headers={"Accept": "text/html"})
        assert r"\x" in page.text
        assert dead["bytes"] == len(body)
        replayed = await call("dlq.replay", queue=label, ids=[dead["id"]])
        if label == "outbound":
            assert "it holds what no worker understands" in replayed["left"][0]["reason"]
            return
        consumer = (
            Submitter(store=store, inbound=queues["inbound"], settings=settings)
            if label == "inbound"
            else Resulter(store=store, results=queues["results"], settings=settings)
        )
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not await consumer.run_once():
                pass
        (rejected,) = (await call("rejected.list"))["rejected"]
        assert rejected["body"] == shown  # so it came as it was
