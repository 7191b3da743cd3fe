"""Lifespans, whose values handlers are given by type, and hooks around attempts."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from typing import Any

import aiohttp
import anyio
import pytest
import sentry_sdk

from penstock.brokers.base import Outgoing
from penstock.brokers.sqs import SqsQueue
from penstock.protocol.errors import SettingsError, Unavailable
from penstock.protocol.message_attributes import encode_tenants
from penstock.protocol.reports import Failed, Succeeded
from penstock.protocol.requests import encode_call
from penstock.runtime.loop import Loop
from penstock.settings.model import Settings
from penstock.worker.handlers.actions import REGISTRY, Registry, action
from penstock.worker.handlers.context import Call, Context
from penstock.worker.handlers.lifespan import HOOKS, LIFESPANS, Resources, around_attempt, inject, lifespan
from penstock.worker.handlers.outcomes import Retry
from penstock.worker.process import Worker
from tests.docs_blocks import all_blocks
from tests.integration.worker.test_worker import Bench, running, take


@pytest.fixture
def database_url() -> str:
    """No test here touches Postgres."""
    return "postgresql://nobody@127.0.0.1:1/none"


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    LIFESPANS.clear()
    HOOKS.clear()


@pytest.fixture
def registry() -> Registry:
    return Registry()


@pytest.fixture
def bench(outbound: SqsQueue, results: SqsQueue, settings: Settings, registry: Registry) -> Bench:
    return Bench(outbound, results, settings, registry)


@asynccontextmanager
async def opened(bench: Bench) -> AsyncIterator[Worker]:
    worker = bench.worker()
    await worker.open()
    async with running(worker):
        yield worker


class Pool:
    def __init__(self) -> None:
        self.is_open = True


async def test_lifespans_are_open_while_the_worker_works_and_given_by_type(bench: Bench, registry: Registry) -> None:
    events: list[str] = []
    pool = Pool()

    @lifespan
    async def first() -> AsyncGenerator[Pool, None]:
        events.append("open")
        yield pool
        events.append("closed")
        pool.is_open = False

    @lifespan
    async def second() -> AsyncGenerator[dict[str, int], None]:
        yield {"a": 1}
        events.append("second closed")
        raise LookupError("its end fails")

    @lifespan(process=True)
    async def elsewhere() -> AsyncGenerator[Pool, None]:
        raise AssertionError("not in a worker")
        yield

    @action(registry=registry)
    async def on_loop(ctx: Context, n: int, pool: Pool = inject()) -> list[Any]:
        return [n, pool.is_open]

    @action(registry=registry)
    def in_thread(a: int, settings: dict = inject(), **rest: int) -> list[Any]:  # type: ignore[type-arg]
        return [settings["a"], a, rest]

    @action(registry=registry, batch=5)
    async def many(calls: list[Call[dict[str, int]]], pool: Pool = inject()) -> list[bool]:
        return [pool.is_open for _ in calls]

    async with opened(bench) as worker:
        calls = [("on_loop", {"n": 1}), ("in_thread", {"a": 2, "b": 3}), ("many", {})]
        calls += [("on_loop", {"n": 1, "pool": 1}), ("in_thread", {"a": 1, "settings": 1})]
        await bench.send(*(encode_call(n, 1, name, json.dumps(given)) for n, (name, given) in enumerate(calls, 1)))
        await take(worker, 1)
        outcomes = await bench.outcomes(5)
    results = [json.loads(o.result) for n, o in sorted(outcomes.items()) if isinstance(o, Succeeded)]
    assert results == [[1, True], [1, 2, {"b": 3}], True]
    for task_id, name in ((4, "pool"), (5, "settings")):  # a payload cannot give them
        refused = outcomes[task_id]
        assert isinstance(refused, Failed)
        assert f"{name} is no parameter" in json.loads(refused.error)["data"]["message"]
    assert events == ["open", "second closed", "closed"]


async def test_what_no_lifespan_gives_is_an_error_when_the_worker_starts(bench: Bench, registry: Registry) -> None:
    @action(registry=registry)
    async def act(pool: Pool = inject()) -> None: ...

    worker = bench.worker()
    with pytest.raises(SettingsError, match="'act' takes a Pool as pool, which no @lifespan yields"):
        await worker.open()
    await worker.close()
    with pytest.raises(SettingsError, match="annotate pool with the class"):

        @action(registry=registry)
        async def untyped(ctx: Context, pool=inject()) -> None: ...  # type: ignore[no-untyped-def]

    with pytest.raises(SettingsError, match="one yield"):
        lifespan(act)
    with pytest.raises(SettingsError, match="one yield"):
        around_attempt(act)

    @lifespan
    async def empty() -> AsyncGenerator[None, None]:
        if False:
            yield

    with pytest.raises(SettingsError, match="ended without a yield"):
        await Resources(in_child=False).open()


async def test_a_lifespan_that_fails_closes_the_others_and_all_are_opened_again() -> None:
    events: list[str] = []

    @lifespan
    async def first() -> AsyncGenerator[Pool, None]:
        events.append("open")
        yield Pool()
        events.append("closed")

    @lifespan
    async def second() -> AsyncGenerator[dict[str, int], None]:
        if events == ["open"]:
            raise Unavailable("not yet")
        yield {"a": 1}

    resources = Resources(in_child=False)
    with pytest.raises(Unavailable):
        await resources.open()
    assert events == ["open", "closed"]
    await resources.open()
    assert resources.values({"b": dict}) == {"b": {"a": 1}}
    await resources.close()
    assert events == ["open", "closed"] * 2


async def test_a_lifespan_is_opened_and_closed_by_one_task(caplog: pytest.LogCaptureFixture) -> None:
    events: list[str] = []

    @lifespan
    async def group() -> AsyncGenerator[Pool, None]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.sleep, 600)
            yield Pool()
            tasks.cancel_scope.cancel()
        events.append("left")

    resources = Resources(in_child=False)
    await asyncio.create_task(resources.open())
    await resources.close()
    assert events == ["left"]
    assert "lifespan_not_closed" not in caplog.text


async def test_a_stop_while_a_lifespan_is_opened_closes_the_others() -> None:
    events: list[str] = []

    @lifespan
    async def first() -> AsyncGenerator[Pool, None]:
        yield Pool()
        events.append("closed")

    @lifespan
    async def second() -> AsyncGenerator[dict[str, int], None]:
        events.append("opening")
        await asyncio.sleep(600)
        yield {}

    resources = Resources(in_child=False)
    opening = asyncio.create_task(resources.open())
    while not events:
        await asyncio.sleep(0)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert events == ["opening", "closed"]
    await resources.close()


async def test_a_worker_ends_when_the_task_group_of_a_lifespan_fails(bench: Bench, registry: Registry) -> None:
    events: list[str] = []

    async def fail() -> None:
        await asyncio.sleep(0.05)
        raise LookupError("gone")

    @lifespan
    async def group() -> AsyncGenerator[Pool, None]:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fail())
            try:
                yield Pool()
            finally:
                events.append("closed")

    @action(registry=registry)
    async def act(pool: Pool = inject()) -> None: ...

    async with asyncio.timeout(60):
        assert await Loop(bench.worker(), passes=1, grace_seconds=5).run() == 1
    assert events == ["closed"]


@pytest.mark.parametrize("kind", ["asyncio", "anyio"])
async def test_a_worker_does_not_start_when_a_task_group_fails_while_other_lifespans_open(
    bench: Bench, kind: str
) -> None:
    events: list[str] = []
    is_opening = asyncio.Event()

    async def fail() -> None:
        await is_opening.wait()
        raise LookupError("gone")

    @lifespan
    async def group() -> AsyncGenerator[Pool, None]:
        try:
            if kind == "asyncio":
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(fail())
                    yield Pool()
            else:
                async with anyio.create_task_group() as scope:
                    scope.start_soon(fail)
                    yield Pool()
        finally:
            events.append("left")

    @lifespan
    async def slow() -> AsyncGenerator[dict[str, int], None]:
        is_opening.set()
        await asyncio.sleep(600)
        yield {}

    async with asyncio.timeout(60):
        with pytest.raises(RuntimeError, match="while others were opened"):
            await Loop(bench.worker(), passes=1, grace_seconds=5).run()
    assert events == ["left"]


async def test_a_cancel_scope_that_breaks_is_left_though_newer_lifespans_are_cut_at_their_end(bench: Bench) -> None:
    events: list[str] = []
    are_open = asyncio.Event()

    async def fail() -> None:
        await are_open.wait()
        raise LookupError("gone")

    @lifespan
    async def oldest() -> AsyncGenerator[set[int], None]:
        yield set()
        await asyncio.sleep(0.01)
        events.append("closed")

    @lifespan
    async def group() -> AsyncGenerator[Pool, None]:
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(fail)
                yield Pool()
        finally:
            events.append("left")

    @lifespan
    async def newest() -> AsyncGenerator[dict[str, int], None]:
        are_open.set()
        yield {}
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            events.append("cut")
            raise

    async with asyncio.timeout(60):
        assert await Loop(bench.worker(), passes=1, grace_seconds=5).run() == 1
    assert events == ["cut", "left", "closed"]


async def test_hooks_see_the_context_and_the_failure_of_each_attempt(bench: Bench, registry: Registry) -> None:
    (page,) = [
        block.text for block in all_blocks() if block.page == "docs/lifespans.md" and block.info == "python hooks"
    ]
    names: dict[str, Any] = {"__name__": "page"}
    exec(page, names)
    ended: list[Any] = []

    @around_attempt
    def swallow(ctx: Context) -> Iterator[None]:
        if ctx.action == "closed":
            raise PermissionError("not now")
        try:
            yield
        except LookupError:
            pass
        ended.append(ctx.task_id)
        if ctx.action == "in_thread":
            raise OSError("the hook's own")

    @action(registry=registry)
    async def fails(ctx: Context) -> None:
        raise LookupError("gone")

    @action(registry=registry)
    def in_thread(ctx: Context) -> Any:
        return names["tenant"].get()

    @action(registry=registry)
    async def closed() -> None:
        raise AssertionError("it is not called")

    @action(registry=registry, batch=5)
    async def many(calls: list[Call[Any]]) -> list[Any]:
        return [None if call.ctx.task_id == 4 else ValueError("bad") for call in calls]

    calls = [
        encode_call(n, 1, name, "{}") for n, name in enumerate(["fails", "in_thread", "closed", "many", "many"], 1)
    ]
    body = Outgoing("[" + ",".join(calls) + "]", encode_tenants([(n, "acme") for n in range(1, 6)]))
    assert (await bench.outbound.send([body])).failed == []
    async with opened(bench) as worker:
        await take(worker, 1)
        outcomes = await bench.outcomes(5)
    failed = {n: json.loads(o.error)["data"]["type"] for n, o in outcomes.items() if isinstance(o, Failed)}
    assert failed == {1: "LookupError", 3: "PermissionError", 5: "ValueError"}
    assert outcomes[2].result == '"acme"'  # type: ignore[union-attr]
    assert names["tenant"].get() is None
    assert sorted(names["failures"]) == [
        "closed 3: PermissionError('not now')", "fails 1: LookupError('gone')", "many 5: ValueError('bad')",
    ]  # fmt: skip
    assert sorted(ended) == [1, 2, 4]


async def test_the_lifespan_of_the_page_is_given_to_its_handler() -> None:
    (page,) = [block.text for block in all_blocks() if block.page == "docs/lifespans.md" and block.info == "python app"]
    names: dict[str, Any] = {"__name__": "page"}
    exec(page, names)
    handler = REGISTRY.pop("notify")
    resources = Resources(in_child=False)
    await resources.open()
    resources.check("notify", handler.injected)
    assert type(resources.values(handler.injected)["http"]) is aiohttp.ClientSession
    assert handler.payload((), {"url": "http://localhost/"}) == {"url": "http://localhost/"}
    await resources.close()


class Sink(ThreadingHTTPServer):
    """A Sentry that keeps the events it receives."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _SinkHandler)
        self.events: list[dict[str, Any]] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def dsn(self) -> str:
        return f"http://public@127.0.0.1:{self.server_address[1]}/1"


class _SinkHandler(BaseHTTPRequestHandler):
    server: Sink

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
        lines = body.split(b"\n")
        events = [item for head, item in pairwise(lines[1:]) if head.startswith(b"{") and b'"type":"event"' in head]
        self.server.events += map(json.loads, events)
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def sink() -> Iterator[Sink]:
    sink = Sink()
    yield sink
    sentry_sdk.get_client().close()
    sentry_sdk.init()  # of no use any more
    sink.shutdown()
    sink.server_close()


async def test_failed_attempts_reach_sentry_with_their_task(bench: Bench, registry: Registry, sink: Sink) -> None:
    (page,) = [
        block.text for block in all_blocks() if (block.page, block.info) == ("docs/lifespans.md", "python sentry")
    ]
    exec(page, {"__name__": "page", "SENTRY_DSN": sink.dsn})

    @action(registry=registry)
    def fails(ctx: Context) -> None:
        sentry_sdk.set_tag("order", ctx.task_id * 10)
        raise LookupError(f"order {ctx.task_id} is gone")

    @action(registry=registry)
    async def asks(ctx: Context) -> None:
        raise Retry(5)

    @action(registry=registry)
    async def works(ctx: Context) -> None:
        sentry_sdk.set_tag("leaked", True)

    calls = [encode_call(n, n + 4, name, "{}") for n, name in enumerate(["works", "fails", "asks", "fails"], 1)]
    body = Outgoing("[" + ",".join(calls) + "]", encode_tenants([(n, "acme") for n in range(1, 5)]))
    assert (await bench.outbound.send([body])).failed == []
    async with opened(bench) as worker:
        await take(worker, 1)
        await bench.outcomes(4)
    await asyncio.to_thread(sentry_sdk.flush, 10)
    found = sorted(sink.events, key=lambda event: event["tags"]["penstock.task_id"])
    assert [event["exception"]["values"][-1]["value"] for event in found] == ["order 2 is gone", "order 4 is gone"]
    tags = found[0]["tags"]
    assert {key: str(value) for key, value in tags.items()} == {
        "penstock.action": "fails", "penstock.task_id": "2", "penstock.claim": "6", "penstock.tenant": "acme",
        "order": "20",
    }  # fmt: skip
    assert found[0]["transaction"] == "fails"
