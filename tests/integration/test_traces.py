"""One trace from the enqueue of a task through every process and every attempt, over real Postgres and SQS."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from time import monotonic
from typing import Any

import httpx
import msgspec
import psycopg
import pytest
from opentelemetry import propagate, trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased, Sampler
from opentelemetry.trace import SpanKind, StatusCode
from pydantic import SecretStr

import penstock
from penstock import AsyncClient, Call, Client, Context, Fail, InboundClient, Retry, action
from penstock.brokers.base import Outgoing
from penstock.brokers.sqs import SqsQueue
from penstock.db.pool import Store
from penstock.payloads.codec import PayloadCodec
from penstock.protocol.reports import encode_progress, encode_result
from penstock.protocol.task import NewTask
from penstock.resulter import Resulter
from penstock.runtime import metrics
from penstock.runtime.loop import Service
from penstock.runtime.tracing import active
from penstock.runtime.tracing.spans import Spans
from penstock.scheduler.process import Scheduler
from penstock.settings.model import Settings
from penstock.settings.payload_texts import new_key
from penstock.submitter import Submitter
from penstock.supervisor.process import Supervisor
from penstock.supervisor.repair import Repair
from penstock.tasks import claim as claims
from penstock.tasks import enqueue as enqueuing
from penstock.tasks import reschedule
from penstock.tasks import settle as settling
from penstock.worker.handlers.actions import Registry
from penstock.worker.process import Worker
from tests.claims import claim_id
from tests.integration.apis import JSON, queues_of, running

PATIENCE_SECONDS = 60.0
TRACE_ID, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE_ID}-{CALLER}-01"
UNSAMPLED = f"00-{TRACE_ID}-{CALLER}-00"

TaskOf = Callable[[int], Awaitable[Any]]


class Tracer:
    """A provider that keeps its spans here."""

    def __init__(self, sampler: Sampler) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(sampler=sampler)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = self.provider.get_tracer("app")

    def named(self, name: str) -> list[ReadableSpan]:
        """Ended spans of that name, in the order in which they began."""
        spans = [span for span in self.exporter.get_finished_spans() if span.name == name]
        return sorted(spans, key=lambda span: span.start_time or 0)

    def one(self, name: str) -> ReadableSpan:
        (span,) = self.named(name)
        return span


@pytest.fixture(params=[ParentBased(ALWAYS_ON)], ids=["sampled"])
def tracer(request: pytest.FixtureRequest) -> Iterator[Tracer]:
    tracer = Tracer(request.param)
    active.use(Spans(tracer.provider))
    yield tracer
    active.use(None)
    tracer.provider.shutdown()


@pytest.fixture
def settings(settings: Settings, request: pytest.FixtureRequest) -> Settings:
    """Payloads are encrypted where the test says by which keys."""
    keys = tuple(SecretStr(key) for key in getattr(request, "param", ()))
    return settings.model_copy(update={"payload_keys": keys})


@pytest.fixture
def store(store: Store, settings: Settings) -> Store:
    store.codec = PayloadCodec(settings)
    return store


@pytest.fixture
def registry(tracer: Tracer, settings: Settings) -> Registry:
    registry = Registry()
    tried: set[int] = set()

    @action("add", registry=registry)
    async def add(ctx: Context, a: int, b: int) -> int:
        with tracer.tracer.start_as_current_span("inside"):
            return a + b

    @action("plain", registry=registry)
    def plain(ctx: Context) -> None:
        with tracer.tracer.start_as_current_span("in a thread"):
            pass

    @action("twice", registry=registry)
    async def twice(ctx: Context) -> bool:
        tried.add(ctx.claim)
        if len(tried) < 3:
            raise Retry(delay=0) if len(tried) == 1 else ValueError("no")
        return True

    @action("bad", registry=registry)
    async def bad(ctx: Context) -> None:
        raise Fail("never")

    @action("parent", registry=registry)
    async def parent(ctx: Context) -> None:
        ctx.spawn("add", {"a": 1, "b": 2})

    @action("double", batch=10, linger=0.05, registry=registry)
    async def double(calls: list[Call[Item]]) -> list[int]:
        with tracer.tracer.start_as_current_span("inside the batch"):
            return [call.params.n * 2 for call in calls]

    return registry


class Item(msgspec.Struct):
    n: int


@pytest.fixture
async def pipeline(store: Store, settings: Settings, registry: Registry) -> AsyncIterator[None]:
    async with all_processes(store, settings, registry):
        yield


@asynccontextmanager
async def all_processes(store: Store, settings: Settings, registry: Registry) -> AsyncIterator[None]:
    """All but the api, pass after pass."""
    transport, queues, dead_letters = queues_of(settings)

    def open_queue(name: str, label: str) -> Any:
        return transport.queue(name, label=label)

    worker = Worker(outbound=queues["outbound"], results=queues["results"], settings=settings, registry=registry)
    services: list[Service] = [
        Submitter(store=store, inbound=queues["inbound"], settings=settings),
        Scheduler(store=store, outbound=queues["outbound"], settings=settings, open_queue=open_queue),
        worker,
        Resulter(store=store, results=queues["results"], settings=settings),
        Supervisor(
            store=store, queues=queues, dead_letters=dead_letters, settings=settings, open_queue=open_queue
        ),
    ]  # fmt: skip
    async with passing(services):
        yield
        worker.stop_taking()
        await worker.drain(5)
    await worker.close()
    await transport.close()


@asynccontextmanager
async def passing(services: list[Service]) -> AsyncIterator[None]:
    async def passes(service: Service) -> None:
        while True:
            if not await service.run_once():
                await asyncio.sleep(0.02)

    for service in services:
        await service.open()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(passes(service)) for service in services]
        tasks += [group.create_task(_run(side)) for service in services for side in service.side_tasks().values()]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()


async def _run(side: Callable[[], Awaitable[None]]) -> None:
    await side()


async def lost_with_its_worker(
    store: Store, settings: Settings, outbound: SqsQueue, results: SqsQueue, sql: Any
) -> int:
    """The only task is sent, a worker takes it, sends a heartbeat, and is gone, long ago; returns the claim."""
    scheduler = Scheduler(store=store, outbound=outbound, settings=settings, open_queue=lambda name, label: outbound)
    await scheduler.open()
    assert await scheduler.run_once() == 1
    while not (messages := await outbound.receive(wait_seconds=1, visibility_seconds=30)):
        pass
    await outbound.delete(messages)
    claim_id = json.loads(messages[0].body)["id"]
    await results.send([Outgoing(encode_progress(claim_id), {"worker": "host-3:77"})])
    resulter = Resulter(store=store, results=results, settings=settings)
    await resulter.open()
    while not await resulter.run_once():
        pass
    long_ago = timedelta(seconds=settings.stale_after_seconds + 1)
    await sql.execute(
        "update penstock.task set claimed_at = now() - $1::interval, heartbeat_at = now() - $1::interval", long_ago
    )
    return int(claim_id.split(":")[1])


async def until(what: str, look: Callable[[], Awaitable[Any]]) -> Any:
    deadline = monotonic() + PATIENCE_SECONDS
    while not (found := await look()):
        assert monotonic() < deadline, f"waited for {what}"
        await asyncio.sleep(0.05)
    return found


async def settled(task_of: TaskOf, *ids: int) -> None:
    async def look() -> bool:
        states = [(await task_of(task_id))["state"] for task_id in ids]
        return all(state in ("SUCCESS", "CRITICAL_ERROR") for state in states)

    await until(f"{ids} to settle", look)


async def spans_of(tracer: Tracer, name: str, count: int = 1) -> list[ReadableSpan]:
    """Spans of that name, once there are so many; a span ends a moment after what it stands for."""

    async def look() -> bool:
        return len(tracer.named(name)) >= count

    await until(f"{count} spans {name}", look)
    return tracer.named(name)


def ids_of(span: ReadableSpan) -> tuple[str, str]:
    return f"{span.context.trace_id:032x}", f"{span.context.span_id:016x}"


def parent_of(span: ReadableSpan) -> str | None:
    return None if span.parent is None else f"{span.parent.span_id:016x}"


def links_of(span: ReadableSpan) -> list[str]:
    return [f"{link.context.span_id:016x}" for link in span.links]


async def post(url: str, body: Any, **headers: str) -> Any:
    async with httpx.AsyncClient() as http:
        answer = await http.post(f"{url}/rpc", content=json.dumps(body), headers=JSON | headers)
    return answer.json()


def call(method: str, params: Any, number: int = 1) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "method": method, "params": params}


async def test_a_task_is_one_trace_from_the_callers_span_to_the_settled_result(
    tracer: Tracer, store: Store, settings: Settings, pipeline: None, task_of: TaskOf
) -> None:
    async with running(store, settings) as api:
        body = call("enqueue", {"action": "add", "payload": {"a": 1, "b": 2}})
        answer = await post(api.url, body, traceparent=TRACEPARENT, tracestate="rojo=1,congo=t61")
        task_id = answer["result"]["id"]
        await settled(task_of, task_id)
        (settle,) = await spans_of(tracer, "settle results")
        status = await post(api.url, call("status", {"id": task_id}))
    assert status["result"]["trace_id"] == TRACE_ID
    server, enqueue = tracer.named("POST /rpc")[0], tracer.one("enqueue add")
    send, process, inside = tracer.one("send add"), tracer.one("process add"), tracer.one("inside")
    assert {ids_of(span)[0] for span in (server, enqueue, send, process, inside, settle)} == {TRACE_ID}
    tree = [parent_of(span) for span in (server, enqueue, send, process, inside, settle)]
    at = [ids_of(span)[1] for span in (server, enqueue, process)]
    assert tree == [CALLER, at[0], at[1], at[1], at[2], at[2]]
    kinds = [span.kind for span in (server, enqueue, send, process)]
    assert kinds == [SpanKind.SERVER, SpanKind.PRODUCER, SpanKind.PRODUCER, SpanKind.CONSUMER]
    assert process.attributes is not None
    assert process.attributes["messaging.message.id"] == str(task_id)
    assert process.attributes["messaging.destination.name"] == "add"
    assert process.status.status_code is not StatusCode.ERROR
    assert process.context.trace_state.to_header() == "rojo=1,congo=t61"
    assert (await task_of(task_id))["trace"] == f"00-{TRACE_ID}-{at[1]}-01 rojo=1,congo=t61"


@pytest.mark.parametrize("settings", [(), (new_key(),)], indirect=True, ids=["in the clear", "encrypted"])
async def test_attempts_are_children_of_the_enqueue_and_each_links_to_the_one_before(
    tracer: Tracer, store: Store, settings: Settings, pipeline: None, task_of: TaskOf
) -> None:
    async with store.session() as session:
        (made,) = await enqueuing.enqueue(session, [NewTask("twice", trace=TRACEPARENT)])
    await settled(task_of, made.id)
    assert ('"sealed"' in (await task_of(made.id))["failures"]) is bool(settings.payload_keys)
    attempts = await spans_of(tracer, "process twice", 3)
    enqueue = tracer.one("enqueue twice")
    assert [ids_of(span)[0] for span in attempts] == [TRACE_ID] * 3
    assert [parent_of(span) for span in attempts] == [ids_of(enqueue)[1]] * 3
    first, second, third = attempts
    assert [links_of(span) for span in attempts] == [[], [ids_of(first)[1]], [ids_of(second)[1]]]
    assert [span.status.status_code for span in attempts] == [StatusCode.ERROR, StatusCode.ERROR, StatusCode.UNSET]
    assert second.attributes is not None
    assert second.attributes["error.type"] == "ValueError"
    if settings.payload_keys:
        assert second.events == (), "the collector would have what is encrypted everywhere else"
    else:
        (event,) = second.events
        assert event.attributes is not None
        assert (event.name, event.attributes["exception.message"]) == ("exception", "no")
    assert third.events == ()


async def test_a_failure_for_good_ends_in_error(tracer: Tracer, store: Store, pipeline: None, task_of: TaskOf) -> None:
    async with store.session() as session:
        (made,) = await enqueuing.enqueue(session, [NewTask("bad")])
    await settled(task_of, made.id)
    (attempt,) = await spans_of(tracer, "process bad")
    assert attempt.status.status_code is StatusCode.ERROR
    row = await task_of(made.id)
    assert json.loads(row["error"])["traceparent"].split("-")[1:3] == list(ids_of(attempt))
    # Retried by hand, it is still of its trace, and the attempt links to the one of its former life.
    async with store.transaction() as session:
        await reschedule.restart(session, [made.id])
    again = (await spans_of(tracer, "process bad", 2))[1]
    assert ids_of(again)[0] == ids_of(attempt)[0]
    assert links_of(again) == [ids_of(attempt)[1]]


@pytest.mark.parametrize("max_attempts", [5, 1], ids=["in time", "at the cap"])
async def test_an_attempt_whose_worker_is_gone_stands_in_the_trace_and_the_next_one_links_to_it(
    tracer: Tracer, store: Store, settings: Settings, outbound: SqsQueue, results: SqsQueue, sql: Any,
    task_of: TaskOf, registry: Registry, max_attempts: int,
) -> None:  # fmt: skip
    async with store.session() as session:
        (made,) = await enqueuing.enqueue(
            session, [NewTask("add", '{"a":1,"b":2}', trace=TRACEPARENT, max_attempts=max_attempts)]
        )
    claim = await lost_with_its_worker(store, settings, outbound, results, sql)
    repair = Repair(store=store, queue_of=lambda _: outbound, results=results, settings=settings, empty_seconds=0)
    assert await repair.run_once() == 1

    (lost,), (enqueue,) = tracer.named("lost add"), tracer.named("enqueue add")
    assert (ids_of(lost)[0], parent_of(lost), links_of(lost)) == (TRACE_ID, ids_of(enqueue)[1], [])
    assert (lost.status.status_code, lost.status.description) == (
        StatusCode.ERROR,
        "its worker stopped sending heartbeats",
    )
    assert lost.kind is SpanKind.INTERNAL
    assert lost.attributes is not None
    assert dict(lost.attributes) == {
        "messaging.system": "penstock",
        "messaging.operation.name": "lost",
        "messaging.operation.type": "process",
        "messaging.destination.name": "add",
        "messaging.message.id": str(made.id),
        "penstock.claim": claim,
        "penstock.worker": "host-3:77",
        "error.type": "StaleTask",
    }
    assert lost.start_time is not None
    assert lost.end_time is not None
    assert (lost.end_time - lost.start_time) / 1e9 == pytest.approx(settings.stale_after_seconds + 1, abs=30)
    (failure,) = json.loads((await task_of(made.id))["failures"])
    assert failure["error"]["traceparent"] == f"00-{TRACE_ID}-{ids_of(lost)[1]}-01"

    chain = [lost]
    if max_attempts > 1:
        await sql.execute("update penstock.task set run_at = now()")
        await lost_with_its_worker(store, settings, outbound, results, sql)
        assert await repair.run_once() == 1
        chain.append(tracer.named("lost add")[1])
        await sql.execute("update penstock.task set run_at = now()")
    async with all_processes(store, settings, registry):
        await settled(task_of, made.id)
        chain += await spans_of(tracer, "process add")
    assert [ids_of(span)[0] for span in chain] == [TRACE_ID] * len(chain)
    assert [parent_of(span) for span in chain] == [ids_of(enqueue)[1]] * len(chain)
    assert [links_of(span) for span in chain] == [[], *([ids_of(span)[1]] for span in chain[:-1])]
    assert chain[-1].status.status_code is StatusCode.UNSET
    assert (await task_of(made.id))["state"] == "SUCCESS"


async def test_an_attempt_that_is_answered_while_it_is_repaired_is_not_told_as_lost(
    tracer: Tracer, store: Store, settings: Settings, outbound: SqsQueue, results: SqsQueue, sql: Any, task_of: TaskOf
) -> None:
    async with store.session() as session:
        (made,) = await enqueuing.enqueue(session, [NewTask("add", trace=TRACEPARENT)])
    claim = await lost_with_its_worker(store, settings, outbound, results, sql)
    repair = Repair(store=store, queue_of=lambda _: outbound, results=results, settings=settings, empty_seconds=0)
    async with store.transaction() as session:
        assert await settling.finish(session, {(made.id, claim): "3"}) == 1
        repairing = asyncio.create_task(repair.run_once())
        # It has found the task, and waits for its row.
        await until("the repair", lambda: sql.fetchval("select count(*) from pg_locks where not granted"))
    assert await repairing == 0
    assert (await task_of(made.id))["state"] == "SUCCESS"
    assert tracer.named("lost add") == []


async def test_what_a_task_spawns_continues_its_trace(tracer: Tracer, store: Store, pipeline: None) -> None:
    async with store.session() as session:
        await enqueuing.enqueue(session, [NewTask("parent", trace=TRACEPARENT)])
    (process,) = await spans_of(tracer, "process add")
    assert ids_of(process)[0] == TRACE_ID
    parent = tracer.one("process parent")
    assert parent_of(tracer.one("enqueue add")) == ids_of(parent)[1]


async def test_steps_of_a_workflow_and_their_children_continue_its_trace(
    tracer: Tracer, store: Store, settings: Settings, pipeline: None
) -> None:
    steps = [
        {"name": "one", "action": "plain"},
        {"name": "two", "action": "parent", "after": ["one"]},
    ]
    async with running(store, settings) as api:
        answer = await post(api.url, call("workflow.create", {"steps": steps}), traceparent=TRACEPARENT)
        assert "result" in answer
        child = (await spans_of(tracer, "process add"))[0]
    inside = (await spans_of(tracer, "in a thread"))[0]
    assert parent_of(inside) == ids_of(tracer.one("process plain"))[1]
    seen = [tracer.one("process plain"), tracer.one("process parent"), child]
    assert [ids_of(span)[0] for span in seen] == [TRACE_ID] * 3


async def test_a_workflow_from_the_inbound_queue_continues_the_trace_of_its_message(
    tracer: Tracer, inbound: SqsQueue, pipeline: None
) -> None:
    steps = [{"name": "one", "action": "plain"}, {"name": "two", "action": "add", "payload": {"a": 1, "b": 1}}]
    steps[1]["after"] = ["one"]
    await inbound.send([Outgoing(json.dumps(call("workflow.create", {"steps": steps})), {"traceparent": TRACEPARENT})])
    for name in ("process plain", "process add"):
        (span,) = await spans_of(tracer, name)
        assert (ids_of(span)[0], parent_of(span)) == (TRACE_ID, CALLER)


async def test_a_batched_handler_runs_in_a_span_that_links_to_each_attempt(
    tracer: Tracer, store: Store, pipeline: None, task_of: TaskOf
) -> None:
    async with store.session() as session:
        made = await enqueuing.enqueue(session, [NewTask("double", f'{{"n":{n}}}') for n in range(3)])
    await settled(task_of, *(task.id for task in made))
    attempts = await spans_of(tracer, "process double", 3)
    assert len({ids_of(span)[0] for span in attempts}) == 3
    calls = await spans_of(tracer, "process batch double")
    linked = {span_id for span in calls for span_id in links_of(span)}
    assert linked == {ids_of(span)[1] for span in attempts}
    assert {parent_of(span) for span in tracer.named("inside the batch")} <= {ids_of(span)[1] for span in calls}


async def test_messages_of_the_inbound_queue_continue_the_trace_of_their_attributes(
    tracer: Tracer, store: Store, settings: Settings, inbound: SqsQueue, pipeline: None
) -> None:
    traced = {"traceparent": TRACEPARENT}
    await inbound.send([Outgoing(json.dumps(call("submit:add", {"a": 1, "b": 2})), traced)])
    await inbound.send([Outgoing(json.dumps(call("submit:bad", {})), {"traceparent": "00-junk", "tracestate": "="})])
    (process,) = await spans_of(tracer, "process add")
    assert ids_of(process)[0] == TRACE_ID
    assert parent_of(tracer.one("enqueue add")) == CALLER
    (other,) = await spans_of(tracer, "process bad")
    assert ids_of(other)[0] != TRACE_ID
    assert tracer.one("enqueue bad").parent is None


async def test_clients_pass_the_active_span_on(
    tracer: Tracer, store: Store, settings: Settings, pipeline: None
) -> None:
    async with running(store, settings) as api, AsyncClient(api.url) as client:
        with tracer.tracer.start_as_current_span("caller") as caller:
            await client.enqueue("add", {"a": 1, "b": 2})
            with Client(api.url) as blocking:
                await asyncio.to_thread(blocking.enqueue, "plain")
            async with InboundClient(settings.inbound_queue, settings.sqs_endpoint_url, "us-east-1") as queue:
                await queue.enqueue("bad")
        mine = f"{caller.get_span_context().trace_id:032x}"
        for name in ("process add", "process plain", "process bad"):
            (span,) = await spans_of(tracer, name)
            assert ids_of(span)[0] == mine


async def test_an_enqueue_in_the_callers_own_transaction_belongs_to_the_callers_span(
    tracer: Tracer, sql: Any, settings: Settings, task_of: TaskOf, database_url: str
) -> None:
    traced = settings.model_copy(update={"traces": True})
    caller = propagate.extract({"traceparent": TRACEPARENT, "tracestate": "rojo=1"})
    with tracer.tracer.start_as_current_span("caller", caller) as span:
        async with sql.transaction():
            first = await penstock.enqueue(sql, "add", unique_key="a", settings=traced)
        again = await penstock.enqueue(sql, "add", unique_key="a", settings=traced)
        other = await penstock.enqueue(sql, "add", settings=settings)
        with psycopg.connect(database_url) as connection:
            many = penstock.enqueue_many_sync(connection, [{"action": "add"}, {"action": "add"}], settings=traced)
    own = f"00-{TRACE_ID}-{span.get_span_context().span_id:016x}-01 rojo=1"
    for task in (first, *many):
        assert (await task_of(task["id"]))["trace"] == own
    assert again["duplicate"]
    assert (await task_of(other["id"]))["trace"] is None


async def test_a_trace_that_sql_enqueues_goes_through_to_the_attempt(
    tracer: Tracer, sql: Any, pipeline: None, task_of: TaskOf
) -> None:
    options = "ordering_key => $3, traceparent => $4, tracestate => 'a=b'"
    enqueue = f"select id from penstock_enqueue($1, $2::json, {options})"
    plain = await sql.fetchval(enqueue, "add", '{"a":1,"b":2}', None, TRACEPARENT)
    keyed = await sql.fetchval(enqueue, "plain", "{}", "o", TRACEPARENT)
    await settled(task_of, plain, keyed)
    for name in ("process add", "process plain"):
        (span,) = await spans_of(tracer, name)
        assert (ids_of(span)[0], parent_of(span)) == (TRACE_ID, CALLER)
        assert span.context.trace_state.to_header() == "a=b"


async def test_many_tasks_at_once_link_to_what_was_done_with_them_together(
    tracer: Tracer, store: Store, settings: Settings, outbound: SqsQueue
) -> None:
    async with store.session() as session:
        keyed = [NewTask("add", unique_key=str(n), trace=f"00-{n:032x}-{CALLER}-01") for n in range(1, 4)]
        made = await enqueuing.enqueue(session, [*keyed, NewTask("add", trace=UNSAMPLED)])
    scheduler = Scheduler(
        store=store, outbound=outbound, settings=settings, open_queue=lambda name, label: outbound
    )  # fmt: skip
    await scheduler.open()
    assert await scheduler.run_once() == 4
    sends = tracer.named("send add")
    assert {ids_of(span)[0] for span in sends} == {f"{n:032x}" for n in range(1, 4)}
    batch = tracer.one("send batch")
    assert batch.attributes is not None
    assert batch.attributes["messaging.batch.message_count"] == 4
    assert all(links_of(span) == [ids_of(batch)[1]] for span in sends)
    assert set(links_of(batch)) == {ids_of(span)[1] for span in tracer.named("enqueue add")}
    messages: dict[int, Any] = {}
    while len(messages) < 4:
        for message in await outbound.receive(wait_seconds=1, visibility_seconds=30):
            messages[int(json.loads(message.body)["id"].split(":")[0])] = message.attributes["traceparent"]
    assert messages[made[3].id].endswith("-00")
    assert [messages[task.id].split("-")[1] for task in made[:3]] == [f"{n:032x}" for n in range(1, 4)]


@pytest.mark.parametrize("tracer", [ParentBased(ALWAYS_OFF)], ids=["unsampled"], indirect=True)
async def test_what_is_not_sampled_travels_on_and_makes_no_span(
    tracer: Tracer, store: Store, settings: Settings, pipeline: None, task_of: TaskOf
) -> None:
    async with running(store, settings) as api:
        answer = await post(api.url, call("enqueue", {"action": "parent"}), traceparent=UNSAMPLED)
        task_id = answer["result"]["id"]
        await settled(task_of, task_id)
        child = await until("the child", lambda: task_of(task_id + 1))
    for row in (await task_of(task_id), child):
        assert row["trace"].startswith(f"00-{TRACE_ID}-")
        assert row["trace"].endswith("-00")
    assert tracer.exporter.get_finished_spans() == ()


async def test_a_workers_junk_harms_no_result(
    tracer: Tracer, store: Store, settings: Settings, outbound: SqsQueue, results: SqsQueue, task_of: TaskOf
) -> None:
    async with store.session() as session:
        made = await enqueuing.enqueue(session, [NewTask("add") for _ in range(3)])
        claimed = await claims.claim(session, 10)
    assert claimed is not None
    junk = ['"00-zz-01"', "7", '{"a":[]}']
    bodies = [
        f'{encode_result(claim_id(task.id, task.claim), "true")[:-1]},"traceparent":{value},"tracestate":[1]}}'
        for task, value in zip(claimed.tasks, junk, strict=True)
    ]
    await results.send([Outgoing(f"[{','.join(bodies)}]")])
    resulter = Resulter(store=store, results=results, settings=settings)
    await resulter.open()
    while not await resulter.run_once():
        pass
    assert [(await task_of(task.id))["state"] for task in made] == ["SUCCESS"] * 3


async def test_run_times_and_waits_have_exemplars_of_their_traces(
    tracer: Tracer, store: Store, pipeline: None, task_of: TaskOf
) -> None:
    from prometheus_client.openmetrics.exposition import generate_latest

    async with store.session() as session:
        (made,) = await enqueuing.enqueue(session, [NewTask("add", '{"a":1,"b":1}', trace=TRACEPARENT)])
    await settled(task_of, made.id)
    lines = generate_latest(metrics.REGISTRY).decode().splitlines()
    for name in ("penstock_run_seconds_bucket", "penstock_queue_wait_seconds_bucket"):
        assert any(line.startswith(name) and f'# {{trace_id="{TRACE_ID}"}}' in line for line in lines), name


async def test_without_tracing_a_callers_trace_changes_nothing(
    store: Store, settings: Settings, outbound: SqsQueue, task_of: TaskOf
) -> None:
    assert active.active() is None
    async with running(store, settings) as api:
        answer = await post(api.url, call("enqueue", {"action": "add"}), traceparent=TRACEPARENT)
    assert (await task_of(answer["result"]["id"]))["trace"] is None
    scheduler = Scheduler(
        store=store, outbound=outbound, settings=settings, open_queue=lambda name, label: outbound
    )  # fmt: skip
    await scheduler.open()
    assert await scheduler.run_once() == 1
    while not (messages := await outbound.receive(wait_seconds=1, visibility_seconds=30)):
        pass
    assert messages[0].attributes == {}
    assert trace.get_current_span().get_span_context().is_valid is False
