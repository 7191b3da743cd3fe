"""A function of AWS Lambda: events of an SQS mapping, results in the queue, and which messages come again."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import botocore.session
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import penstock
from penstock.payloads.codec import PayloadCodec, aad_of, payload_aad
from penstock.protocol.errors import TASK_TIMEOUT, Unavailable
from penstock.protocol.message_attributes import TIMEOUT_ATTRIBUTE, encode_tenants
from penstock.protocol.reports import Failed, Report, Stepped, Succeeded, Waiting, decode_reports
from penstock.protocol.requests import encode_call, join_batch
from penstock.runtime.tracing import active
from penstock.settings.model import Settings, load_settings
from penstock.settings.payload_texts import new_key
from penstock.worker import lambda_handler as module
from penstock.worker.handlers import lifespan
from penstock.worker.handlers.actions import Registry, action
from tests.docs_blocks import all_blocks

# As AWS documents an event of a standard queue, with an attribute that the sender gave.
RECORD = json.loads((Path(__file__).parent / "lambda_event.json").read_text("utf-8"))["Records"][0]


@pytest.fixture
def database_url() -> str:
    """No test here touches Postgres."""
    return "postgresql://nobody@127.0.0.1:1/none"


@dataclass
class Function:
    """The deployed function. milliseconds: that an invocation may take."""

    registry: Registry
    settings: Settings
    reports: list[Report] = field(default_factory=list)
    milliseconds: int = 30_000

    def get_remaining_time_in_millis(self) -> int:
        return self.milliseconds

    def invoke(self, *bodies: str, **attributes: str) -> list[str]:
        """The places of the messages that are to come again."""
        given = {name: {"stringValue": text, "dataType": "String"} for name, text in attributes.items()}
        given |= RECORD["messageAttributes"]
        records = [
            {**RECORD, "messageId": f"m{place}", "body": body, "messageAttributes": given}
            for place, body in enumerate(bodies)
        ]
        answer = penstock.lambda_handler({"Records": records}, self)
        assert set(answer) == {"batchItemFailures"}
        return [failure["itemIdentifier"] for failure in answer["batchItemFailures"]]

    def outcomes(self) -> dict[int, Report]:
        """What the results queue holds, by task; all of it was sent before the invocation ended."""
        client = botocore.session.get_session().create_client(
            "sqs", endpoint_url=self.settings.sqs_endpoint_url, region_name="us-east-1"
        )
        url = client.get_queue_url(QueueName=self.settings.results_queue)["QueueUrl"]
        while messages := client.receive_message(QueueUrl=url, MaxNumberOfMessages=10).get("Messages"):
            for message in messages:
                self.reports += decode_reports(message["Body"], batch_limit=1000)
                client.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])
        return {r.task_id: r for r in self.reports if isinstance(r, Succeeded | Failed | Waiting)}


@pytest.fixture
def function(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[Function]:
    for name in ("sqs_endpoint_url", "aws_region", "results_queue", "visibility_timeout_seconds"):
        monkeypatch.setenv(f"PENSTOCK_{name.upper()}", str(getattr(settings, name)))
    monkeypatch.setenv("PENSTOCK_ANNOUNCE_ACTIONS", "false")
    registry = Registry()
    monkeypatch.setattr(module, "REGISTRY", registry)
    environment = module._Environment()
    monkeypatch.setattr(module, "_environment", lambda: environment)
    yield Function(registry, settings)
    environment._runner.run(environment._close())
    environment._runner.close()


def call(task_id: int, name: str, payload: str = "{}") -> str:
    return encode_call(task_id, 1, name, payload)


def test_the_tasks_of_an_event_are_run_and_answered_before_it_ends(function: Function) -> None:
    @action("total", registry=function.registry)
    async def total(ctx: penstock.Context, numbers: list[int]) -> int:
        return sum(numbers)

    @action("plain", registry=function.registry)
    def plain(ctx: penstock.Context) -> str:
        return f"{ctx.tenant} {ctx.redelivered}"

    @action("fails", registry=function.registry)
    async def fails(ctx: penstock.Context, how: str) -> None:
        raise {"fail": penstock.Fail("no"), "retry": penstock.Retry(60), "snooze": penstock.Snooze(30)}[how]

    pack = join_batch([call(1, "total", '{"numbers": [1, 2]}'), call(2, "fails", '{"how": "fail"}')])
    others = [call(3, "fails", '{"how": "retry"}'), call(4, "fails", '{"how": "snooze"}'), call(5, "total")]
    assert function.invoke(pack, *others) == []
    assert function.invoke(call(6, "plain"), **encode_tenants([(6, "acme")])) == []
    found = function.outcomes()
    assert isinstance(found[1], Succeeded)
    assert found[1].result == "3"
    assert isinstance(found[6], Succeeded)
    assert found[6].result == '"acme False"'
    errors = {task_id: json.loads(found[task_id].error) for task_id in (2, 3, 4, 5)}  # type: ignore[union-attr]
    assert [errors[task_id]["data"]["type"] for task_id in (2, 3, 4, 5)] == ["Fail", "Retry", "Snooze", "BadParams"]


def test_a_message_that_cannot_be_read_comes_again_and_the_others_do_not(function: Function) -> None:
    @action("ok", registry=function.registry)
    async def ok(ctx: penstock.Context) -> None: ...

    assert function.invoke("{not json", call(1, "ok"), '{"jsonrpc": "2.0", "method": "ok", "id": "x"}') == ["m0", "m2"]
    assert list(function.outcomes()) == [1]


def test_a_handler_is_stopped_before_the_invocation_ends(function: Function) -> None:
    @action("long", registry=function.registry)
    async def long(ctx: penstock.Context) -> None:
        await asyncio.sleep(60)

    @action("short", registry=function.registry, timeout=0.1)
    async def short(ctx: penstock.Context) -> None:
        await asyncio.sleep(60)

    assert function.invoke(call(2, "short")) == []  # so that the worker is open
    function.milliseconds = 3000
    assert function.invoke(call(1, "long"), call(2, "short")) == []
    found = function.outcomes()
    assert {json.loads(found[task_id].error)["code"] for task_id in (1, 2)} == {TASK_TIMEOUT}  # type: ignore[union-attr]
    seconds = [json.loads(found[task_id].error)["data"] for task_id in (1, 2)]  # type: ignore[union-attr]
    assert seconds[1]["limit_seconds"] == 0.1
    assert 0 < seconds[0]["limit_seconds"] < 3


def test_an_invocation_that_has_no_time_left_runs_nothing_and_spends_no_attempt(function: Function) -> None:
    @action("ok", registry=function.registry)
    async def ok(ctx: penstock.Context) -> None: ...

    function.milliseconds = 1
    assert function.invoke(call(1, "ok"), call(2, "ok")) == ["m0", "m1"]
    assert function.outcomes() == {}


def test_what_did_not_begin_in_time_comes_again_and_runs_in_the_next_invocation(
    function: Function, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_WORKER_CONCURRENCY", "1")
    runs: list[int] = []

    @action("quick", registry=function.registry)
    async def quick(ctx: penstock.Context) -> None: ...

    @action("stubborn", registry=function.registry)
    async def stubborn(ctx: penstock.Context) -> None:
        runs.append(ctx.task_id)
        until = time.monotonic() + (30 if len(runs) == 1 else 0)
        while time.monotonic() < until:
            try:
                await asyncio.sleep(1)
            except asyncio.CancelledError:
                if runs == [1] and time.monotonic() < until - 29:
                    continue
                raise

    assert function.invoke(call(3, "quick")) == []  # so that the worker is open
    function.milliseconds = 2000
    left = function.invoke(call(1, "stubborn"), call(2, "stubborn"))
    assert "m1" in left
    assert runs == [1]
    function.milliseconds = 30_000
    assert function.invoke(call(2, "stubborn")) == []
    assert isinstance(function.outcomes()[2], Succeeded)
    assert runs == [1, 2]


@dataclass
class Pool:
    number: int


def test_invocations_share_what_a_lifespan_opened(function: Function, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifespan, "LIFESPANS", {})
    opened: list[str] = []

    @penstock.lifespan
    async def pool() -> AsyncIterator[Pool]:
        opened.append("pool")
        yield Pool(len(opened))

    @action("uses", registry=function.registry)
    async def uses(ctx: penstock.Context, pool: Pool = penstock.inject()) -> int:
        return pool.number

    for task_id in (1, 2):
        assert function.invoke(call(task_id, "uses")) == []
    assert [r.result for r in function.outcomes().values() if isinstance(r, Succeeded)] == ["1", "1"]
    assert opened == ["pool"]


def test_sealed_payloads_are_opened_and_steps_reported(function: Function, monkeypatch: pytest.MonkeyPatch) -> None:
    key = new_key()
    monkeypatch.setenv("PENSTOCK_PAYLOAD_KEYS", key)
    codec = PayloadCodec(load_settings())

    @action("secret", registry=function.registry)
    async def secret(ctx: penstock.Context, word: str) -> str:
        return await ctx.step("upper", word.upper)

    sealed = codec.encode('{"word": "hush"}', payload_aad("secret", None))
    assert function.invoke(call(7, "secret", sealed), **{TIMEOUT_ATTRIBUTE: "20"}) == []
    outcome = function.outcomes()[7]
    assert isinstance(outcome, Succeeded)
    assert codec.decode_inline(outcome.result, aad_of("result", 7)) == '"HUSH"'
    assert any(isinstance(report, Stepped) for report in function.reports)


def test_steps_begin_for_as_long_as_the_invocation_lasts(function: Function, monkeypatch: pytest.MonkeyPatch) -> None:
    short = load_settings().model_copy(update={"visibility_timeout_seconds": 0})
    monkeypatch.setattr(module, "load_settings", lambda: short)

    @action("stepwise", registry=function.registry)
    async def stepwise(ctx: penstock.Context) -> list[str]:
        return [await ctx.step(name, name.upper) for name in ("a", "b")]

    for task_id in (1, 2):
        assert function.invoke(call(task_id, "stepwise")) == []
    assert [r.result for r in function.outcomes().values() if isinstance(r, Succeeded)] == ['["A","B"]'] * 2


def test_spans_are_exported_before_an_invocation_ends(function: Function, monkeypatch: pytest.MonkeyPatch) -> None:
    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=60_000))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    monkeypatch.setattr(active, "_active", None)
    monkeypatch.setenv("PENSTOCK_TRACES", "true")

    @action("ok", registry=function.registry)
    async def ok(ctx: penstock.Context) -> None: ...

    for _ in range(2):
        assert function.invoke(call(1, "ok")) == []
        assert [span.name for span in exporter.get_finished_spans()] == ["process ok"]
        exporter.clear()
    provider.shutdown()


class Collector(InMemorySpanExporter):
    """It does not answer until it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may_answer = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.may_answer.wait(60)
        return super().export(spans)


class Refusing(SpanProcessor):
    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        raise LookupError("no export")


def test_a_collector_that_does_not_answer_keeps_no_thread_from_handlers(
    function: Function, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider, collector = TracerProvider(), Collector()
    provider.add_span_processor(BatchSpanProcessor(collector, schedule_delay_millis=60_000))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    monkeypatch.setattr(active, "_active", None)
    monkeypatch.setattr(module, "_FLUSH_SECONDS", 0.05)
    monkeypatch.setenv("PENSTOCK_TRACES", "true")

    @action("ok", registry=function.registry)
    async def ok(ctx: penstock.Context) -> None:
        await asyncio.to_thread(str)

    count = min(32, (os.cpu_count() or 1) + 4) + 2  # more than the threads of asyncio.to_thread
    try:
        for task_id in range(1, count + 1):
            assert function.invoke(call(task_id, "ok")) == []
        (flushing,) = [thread for thread in threading.enumerate() if thread.name == "flush spans"]
    finally:
        collector.may_answer.set()
    flushing.join(30)
    assert [span.name for span in collector.get_finished_spans()] == ["process ok"] * count
    assert all(isinstance(outcome, Succeeded) for outcome in function.outcomes().values())
    provider.shutdown()


def test_a_failed_export_does_not_fail_the_invocation(
    function: Function, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    provider = TracerProvider()
    provider.add_span_processor(Refusing())
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    monkeypatch.setattr(active, "_active", None)
    monkeypatch.setenv("PENSTOCK_TRACES", "true")

    @action("ok", registry=function.registry)
    async def ok(ctx: penstock.Context) -> None: ...

    assert function.invoke(call(1, "ok")) == []
    assert "no export" in capfd.readouterr().err


def test_an_invocation_without_its_results_queue_fails_and_a_later_one_works(
    function: Function, monkeypatch: pytest.MonkeyPatch, make_queues: Callable[[Settings], None]
) -> None:
    @action("ok", registry=function.registry)
    async def ok(ctx: penstock.Context) -> None: ...

    monkeypatch.setenv("PENSTOCK_RESULTS_QUEUE", "missing")
    with pytest.raises(Unavailable):
        function.invoke(call(1, "ok"))
    monkeypatch.setenv("PENSTOCK_RESULTS_QUEUE", function.settings.results_queue)
    assert function.invoke(call(1, "ok")) == []
    assert isinstance(function.outcomes()[1], Succeeded)


def test_the_module_of_the_page_is_a_function(function: Function, monkeypatch: pytest.MonkeyPatch) -> None:
    (text,) = (block.text for block in all_blocks() if (block.page, block.info) == ("docs/lambda.md", "python shop.py"))
    monkeypatch.setattr(penstock, "action", partial(action, registry=function.registry), raising=False)
    namespace: dict[str, Any] = {"__name__": "shop"}
    exec(compile(text, "shop.py", "exec"), namespace)
    assert namespace["lambda_handler"] is penstock.lambda_handler
    assert function.invoke(call(1, "receipt", '{"order": 7}')) == []
    outcome = function.outcomes()[1]
    assert isinstance(outcome, Succeeded)
    assert json.loads(outcome.result) == {"order": 7}
