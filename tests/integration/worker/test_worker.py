from __future__ import annotations

import asyncio
import json
import logging
import math
import secrets
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field

import penstock.worker.runner
from penstock.brokers.base import Message, Outgoing, Queue, SendReport
from penstock.brokers.sqs import LIMITS, SqsQueue, SqsTransport
from penstock.payloads.codec import PayloadCodec
from penstock.protocol.compression import PACKED_PER_MESSAGE
from penstock.protocol.message_attributes import encode_tenants
from penstock.protocol.reports import (
    Failed,
    Progress,
    Report,
    RunTimes,
    SharedResult,
    Succeeded,
    Unreadable,
    decode_reports,
    encode_result,
)
from penstock.protocol.requests import encode_call, join_batch
from penstock.protocol.retry import Backoff
from penstock.runtime import metrics
from penstock.runtime.logs import TaskLogFilter
from penstock.settings.model import Settings, load_settings
from penstock.settings.payload_texts import new_key
from penstock.worker.handlers.actions import Registry, action
from penstock.worker.handlers.context import Call, Context
from penstock.worker.handlers.outcomes import Fail, Retry
from penstock.worker.leases import Lease
from penstock.worker.process import Worker
from penstock.worker.result_sender import Entry, ResultSender, Timings
from tests.claims import claim_id, pack_id
from tests.integration.doors import sample

PATIENCE_SECONDS = 30


@pytest.fixture
def database_url() -> str:
    """No test here touches Postgres."""
    return "postgresql://nobody@127.0.0.1:1/none"


@pytest.fixture
def registry() -> Registry:
    return Registry()


@dataclass
class Bench:
    """The two queues, what has come out of the results queue so far, and a worker between them."""

    outbound: SqsQueue
    results: SqsQueue
    settings: Settings
    registry: Registry
    reports: list[Report] = field(default_factory=list)

    def worker(self, results: Queue | None = None, **changes: Any) -> Worker:
        return Worker(
            outbound=self.outbound,
            results=results or self.results,
            settings=self.settings.model_copy(update=changes),
            registry=self.registry,
        )

    async def send(self, *calls: str, **attributes: str) -> None:
        report = await self.outbound.send([Outgoing(join_batch(calls), attributes)])
        assert report.failed == []

    async def work(self, *, messages: int = 1, **changes: Any) -> None:
        """One worker takes so many messages and settles them."""
        async with running(self.worker(**changes)) as worker:
            await take(worker, messages)
            await asyncio.wait_for(worker.settle(), PATIENCE_SECONDS)

    async def until(self, condition: Callable[[], object], what: str) -> None:
        """Read results until the condition is true."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"waited for {what}; there is {self.reports}"
            messages = await self.results.receive(wait_seconds=1, visibility_seconds=30)
            for message in messages:
                self.reports += decode_reports(message.body, batch_limit=10_000)
            await self.results.delete(messages)

    async def outcomes(self, count: int) -> dict[int, Succeeded | Failed]:
        """So many outcomes, by task id."""

        def found() -> dict[int, Succeeded | Failed]:
            return {r.task_id: r for r in self.reports if isinstance(r, Succeeded | Failed)}

        await self.until(lambda: len(found()) >= count, f"{count} outcomes")
        assert len([r for r in self.reports if isinstance(r, Succeeded | Failed)]) == count
        return found()

    async def result(self) -> Any:
        """The only outcome, which is a result."""
        (outcome,) = (await self.outcomes(1)).values()
        assert isinstance(outcome, Succeeded), outcome
        return json.loads(outcome.result)

    async def error(self) -> tuple[dict[str, Any], Failed]:
        """The only outcome, which is an error."""
        (outcome,) = (await self.outcomes(1)).values()
        assert isinstance(outcome, Failed), outcome
        return json.loads(outcome.error), outcome

    def signs(self, task_id: int) -> list[Progress]:
        return [r for r in self.reports if isinstance(r, Progress) and r.task_id == task_id]

    async def left(self) -> int:
        return (await self.outbound.depth()).total


@pytest.fixture
def bench(outbound: SqsQueue, results: SqsQueue, settings: Settings, registry: Registry) -> Bench:
    return Bench(outbound, results, settings, registry)


@asynccontextmanager
async def running(worker: Worker, *, without: Sequence[str] = ()) -> AsyncIterator[Worker]:
    """The worker's side tasks run, none of them ends."""
    wanted = {name: run for name, run in worker.side_tasks().items() if name not in without}
    sides = [asyncio.ensure_future(run()) for run in wanted.values()]
    try:
        yield worker
        assert not [task for task in sides if task.done()]
    finally:
        for task in sides:
            task.cancel()
        await asyncio.gather(*sides, return_exceptions=True)
        await worker.close()


async def take(worker: Worker, messages: int) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while messages > 0:
        assert time.monotonic() < deadline, f"{messages} messages did not come"
        messages -= await asyncio.wait_for(worker.run_once(), PATIENCE_SECONDS)


async def eventually(condition: Callable[[], Awaitable[object]], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not await condition():
        assert time.monotonic() < deadline, f"waited for {what}"
        await asyncio.sleep(0.02)


async def receive(queue: SqsQueue, wait_seconds: int = 5) -> list[Message]:
    return await queue.receive(wait_seconds=wait_seconds, visibility_seconds=30)


# Answers


async def test_a_handler_is_told_the_tenant_that_the_scheduler_names(bench: Bench, registry: Registry) -> None:
    seen: dict[int, str | None] = {}

    @action("a", registry=registry)
    async def one(ctx: Context) -> None:
        seen[ctx.task_id] = ctx.tenant

    @action("b", registry=registry, batch=10)
    async def many(calls: list[Call[Any]]) -> None:
        seen.update({call.ctx.task_id: call.ctx.tenant for call in calls})

    for tenants in ([(1, "acme"), (2, "acme")], [(3, "a"), (4, None), (5, "größe")], [(6, None), (7, None)]):
        calls = [encode_call(n, 1, "ab"[n % 2], '{"tenant":"forged"}' if n % 2 else "{}") for n, _ in tenants]
        await bench.send(*calls, **encode_tenants(tenants))
    await bench.work(messages=3)
    assert seen == {1: "acme", 2: "acme", 3: "a", 4: None, 5: "größe", 6: None, 7: None}
    await bench.send(encode_call(8, 1, "a", "{}"), tenant="no JSON")
    await bench.send(encode_call(9, 1, "a", "{}"))
    await bench.work(messages=2)
    assert 8 not in seen
    assert 9 in seen


async def test_async_handler_answers_with_what_it_returns(bench: Bench, registry: Registry) -> None:
    seen: list[Context] = []

    @action("add", registry=registry)
    async def add(ctx: Context, a: int, b: int) -> dict[str, int]:
        seen.append(ctx)
        return {"sum": a + b}

    await bench.send(encode_call(42, 7, "add", '{"a":1,"b":2}'))
    await bench.work()
    (outcome,) = (await bench.outcomes(1)).values()
    assert outcome == Succeeded(42, 7, None, '{"sum":3}')
    assert (seen[0].task_id, seen[0].claim, seen[0].action, seen[0].redelivered) == (42, 7, "add", False)
    assert await bench.left() == 0


async def test_plain_handler_runs_in_a_thread(bench: Bench, registry: Registry) -> None:
    @action(registry=registry)
    def where(ctx: Context) -> bool:
        return threading.current_thread() is threading.main_thread()

    await bench.send(encode_call(1, 1, "where", "{}"))
    await bench.work()
    assert await bench.result() is False


async def test_a_handler_without_a_context_gets_its_parameters_alone(bench: Bench, registry: Registry) -> None:
    @action("async", registry=registry)
    async def later(day: date, price: Decimal = Decimal(0)) -> list[Any]:
        return [day + timedelta(days=1), price]

    @action("plain", registry=registry)
    def nothing() -> str:
        return "done"

    await bench.send(encode_call(1, 1, "async", '{"day":"2030-01-31","price":"1.50"}'))
    await bench.send(encode_call(2, 1, "plain", "{}"))
    await bench.work(messages=2)
    outcomes = (await bench.outcomes(2)).values()
    assert {*outcomes} == {Succeeded(1, 1, None, '["2030-02-01","1.50"]'), Succeeded(2, 1, None, '"done"')}


async def test_plain_function_around_an_async_one_is_awaited(bench: Bench, registry: Registry) -> None:
    async def inner() -> str:
        return "inner"

    @action(registry=registry)
    def outer(ctx: Context) -> Any:
        return inner()

    await bench.send(encode_call(1, 1, "outer", "[]"))
    await bench.work()
    assert await bench.result() == "inner"


async def test_batch_is_answered_entry_by_entry(bench: Bench, registry: Registry) -> None:
    @action(registry=registry)
    async def double(ctx: Context, n: int) -> int:
        return 2 * n

    @action(registry=registry)
    def plain_double(ctx: Context, n: int) -> int:
        return 2 * n

    calls = [encode_call(n, 1, "double" if n % 2 else "plain_double", f"[{n}]") for n in range(1, 301)]
    await bench.send(*calls)
    await bench.work(worker_concurrency=20, worker_threads=4)
    outcomes = await bench.outcomes(300)
    assert {i: json.loads(o.result) for i, o in outcomes.items() if isinstance(o, Succeeded)} == {
        n: 2 * n for n in range(1, 301)
    }
    assert await bench.left() == 0


async def test_unknown_action_is_answered_with_the_nearest(bench: Bench, registry: Registry) -> None:
    counted = sample("penstock_run_seconds_count", action="unknown", outcome="error")
    action("export", registry=registry)(lambda ctx: None)
    await bench.send(encode_call(1, 1, "exprot", "{}"))
    await bench.work()
    error, failed = await bench.error()
    assert error["code"] == -32601
    assert "'exprot'" in error["message"]
    assert error["data"]["type"] == "UnknownAction"
    assert error["data"]["nearest"] == "export"
    assert failed.hints.spends_none
    assert sample("penstock_run_seconds_count", action="unknown", outcome="error") == counted + 1
    assert not [report for report in bench.reports if isinstance(report, RunTimes)]


async def test_params_that_do_not_fit_are_answered_and_nothing_is_called(bench: Bench, registry: Registry) -> None:
    calls = []

    @action("act", max_attempts=3, registry=registry)
    async def act(ctx: Context, n: int) -> None:
        calls.append(n)

    params = {"{}": "n", '{"n":1,"m":2}': "m", '{"n":"1"}': "n", "[1,2]": "params", "[]": "n"}
    await bench.send(*(encode_call(i, 1, "act", given) for i, given in enumerate(params)))
    await bench.work()
    outcomes = await bench.outcomes(len(params))
    for i, name in enumerate(params.values()):
        outcome = outcomes[i]
        assert isinstance(outcome, Failed)
        error = json.loads(outcome.error)
        assert error["code"] == -32602
        assert error["data"]["type"] == "BadParams"
        assert error["data"]["field"] == name
        assert error["data"]["problem"] in error["message"]
        assert outcome.hints.max_attempts == 3
    assert calls == []


async def test_bad_params_of_plain_functions_cost_no_thread(bench: Bench, registry: Registry) -> None:
    @action(registry=registry)
    def act(ctx: Context, n: int) -> int:
        return n

    await bench.send(*(encode_call(i, 1, "act", '{"n":"x"}') for i in range(1, 6)), encode_call(6, 1, "act", "[6]"))
    await bench.work(worker_threads=1)
    outcomes = await bench.outcomes(6)
    assert isinstance(outcomes[6], Succeeded)


async def test_type_error_inside_a_handler_is_no_matter_of_params(bench: Bench, registry: Registry) -> None:
    @action(registry=registry)
    async def act(ctx: Context, n: int) -> None:
        raise TypeError("act() missing 1 required positional argument: 'n'")

    await bench.send(encode_call(1, 1, "act", "[1]"))
    await bench.work()
    error, _ = await bench.error()
    assert error["code"] == -32000
    assert error["data"]["type"] == "TypeError"


@pytest.mark.parametrize("is_async", [True, False])
async def test_exception_is_answered_with_type_message_and_traceback(
    bench: Bench, registry: Registry, is_async: bool
) -> None:
    def deeper() -> None:
        raise LookupError("no luck")

    if is_async:

        @action("act", registry=registry)
        async def act(ctx: Context) -> None:
            deeper()
    else:

        @action("act", registry=registry)
        def plain_act(ctx: Context) -> None:
            deeper()

    await bench.send(encode_call(1, 1, "act", "{}"))
    await bench.work()
    error, failed = await bench.error()
    assert error["code"] == -32000
    assert error["message"] == "LookupError: no luck"
    assert error["data"]["type"] == "LookupError"
    assert error["data"]["message"] == "no luck"
    assert "in deeper" in error["data"]["traceback"]
    assert "runner.py" not in error["data"]["traceback"]
    assert "threads.py" not in error["data"]["traceback"]
    assert not failed.hints.final


async def test_a_failed_attempt_is_a_warning_with_message_and_traceback(
    bench: Bench, registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(ctx: Context, how: str) -> None:
        logging.getLogger("myapp").error("about to fail")
        if how == "retry":
            raise Retry(5, "not yet")
        raise LookupError("no luck")

    action("act", registry=registry)(fail)
    action("batched", batch=2, registry=registry)(lambda calls: 1 / 0)
    caplog.handler.addFilter(TaskLogFilter())
    caplog.set_level("INFO", "penstock")
    await bench.send(encode_call(1, 4, "act", '["fail"]'), encode_call(2, 4, "act", '["retry"]'))
    await bench.send(encode_call(3, 4, "act", "[5]"), encode_call(4, 4, "unknown", "{}"))
    await bench.send(encode_call(5, 4, "batched", "{}"), encode_call(6, 4, "batched", "{}"))
    await bench.work(messages=3)
    records = {r.msg["task_id"]: r for r in caplog.records if isinstance(r.msg, dict) and "error" in r.msg}
    assert {n: (r.levelname, r.msg["event"], r.msg["error"], r.msg["claim"]) for n, r in records.items()} == {
        1: ("WARNING", "task_failed", "LookupError", 4), 2: ("INFO", "task_failed", "Retry", 4),
        3: ("WARNING", "task_failed", "BadParams", 4), 4: ("WARNING", "task_failed", "UnknownAction", 4),
        5: ("WARNING", "task_failed", "ZeroDivisionError", 4), 6: ("WARNING", "task_failed", "ZeroDivisionError", 4),
    }  # fmt: skip
    told = {n: r.msg["message"] for n, r in records.items()}
    assert (told[1], told[2], told[5]) == ("no luck", "not yet", "division by zero")
    assert "how is wrong" in told[3]
    assert "no handler for action 'unknown'" in told[4]
    assert "in fail" in records[1].msg["traceback"]
    assert ["traceback" in records[n].msg for n in (2, 5, 6)] == [False, True, False]  # of one call, once
    assert {(r.task_id, r.claim, r.action) for r in caplog.records if r.name == "myapp"} == {  # type: ignore[attr-defined]
        (1, 4, "act"), (2, 4, "act"),
    }  # fmt: skip


async def test_what_is_in_payloads_can_be_kept_out_of_the_log(
    bench: Bench, registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(ctx: Context, card: str) -> None:
        raise LookupError(card)

    action("act", registry=registry)(fail)
    await bench.send(encode_call(1, 1, "act", '["4111"]'))
    await bench.work(log_failure_details=False)
    (record,) = [r for r in caplog.records if "task_failed" in r.getMessage()]
    assert record.getMessage() == "task_failed task_id=1 claim=1 action=act error=LookupError"


@pytest.mark.parametrize(("own", "setting", "cap"), [(None, 3, 3), (None, None, 7), (1, 3, 1), (5, 3, 5), (None, 9, 7)])
async def test_parameters_that_do_not_fit_have_attempts_of_their_own(
    bench: Bench, registry: Registry, own: int | None, setting: int | None, cap: int
) -> None:
    @action("act", max_attempts=7, bad_params_attempts=own, registry=registry)
    def act(ctx: Context, n: int) -> None: ...

    @action("batched", batch=2, max_attempts=7, bad_params_attempts=own, registry=registry)
    def batched(calls: list[Call[int]]) -> None: ...

    await bench.send(*(encode_call(i, 1, name, "{}") for i, name in enumerate(["act", "batched"])))
    await bench.work(bad_params_attempts=setting)
    outcomes = await bench.outcomes(2)
    assert [o.hints.max_attempts for _, o in sorted(outcomes.items()) if isinstance(o, Failed)] == [cap, cap]


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("cannot say")


RAISED = [
    SystemExit(3),
    KeyboardInterrupt(),
    asyncio.CancelledError(),
    GeneratorExit(),
    MemoryError(),
    TimeoutError("mine"),
    Unprintable(),
    ValueError("half a pair \ud800 and a nul \x00"),
    ValueError("\uffff\ufffe"),
    ValueError("long " * 1_000_000),
    ExceptionGroup("several", [ValueError("one"), OSError("two")]),
]


@pytest.mark.parametrize("is_async", [True, False])
async def test_whatever_a_handler_raises_is_answered_and_the_worker_goes_on(
    bench: Bench, registry: Registry, is_async: bool
) -> None:
    async def act(ctx: Context, which: int) -> None:
        raise RAISED[which]

    def plain_act(ctx: Context, which: int) -> None:
        raise RAISED[which]

    action("act", registry=registry)(act if is_async else plain_act)
    action("fine", registry=registry)(lambda ctx: "fine")
    await bench.send(
        *(encode_call(i, 1, "act", f"[{i}]") for i in range(len(RAISED))), encode_call(99, 1, "fine", "{}")
    )
    await bench.work()
    outcomes = await bench.outcomes(len(RAISED) + 1)
    assert isinstance(outcomes.pop(99), Succeeded)
    errors = {i: json.loads(outcome.error) for i, outcome in outcomes.items() if isinstance(outcome, Failed)}
    assert {i: error["data"]["type"] for i, error in errors.items()} == {
        i: type(raised).__name__ for i, raised in enumerate(RAISED)
    }
    assert all(len(json.dumps(error)) < 20_000 for error in errors.values())


async def test_stop_iteration_of_a_plain_handler_is_answered(bench: Bench, registry: Registry) -> None:
    @action(registry=registry)
    def act(ctx: Context) -> Any:
        return next(iter([]))

    await bench.send(encode_call(1, 1, "act", "{}"))
    await bench.work()
    error, _ = await bench.error()
    assert "StopIteration" in error["message"]


async def test_retry_and_fail_steer(bench: Bench, registry: Registry) -> None:
    @action("busy", registry=registry)
    async def busy(ctx: Context) -> None:
        raise Retry(delay=12.5, reason="come back")

    @action("later", registry=registry)
    def later(ctx: Context) -> None:
        raise Retry

    @action("never", registry=registry)
    async def never(ctx: Context) -> None:
        raise Fail("no such row")

    await bench.send(*(encode_call(i, 1, name, "{}") for i, name in enumerate(["busy", "later", "never"])))
    await bench.work()
    outcomes = await bench.outcomes(3)
    hints = {i: o.hints for i, o in outcomes.items() if isinstance(o, Failed)}
    assert (hints[0].retry_after, hints[0].final) == (12.5, False)
    assert (hints[1].retry_after, hints[1].final) == (None, False)
    assert (hints[2].retry_after, hints[2].final) == (None, True)
    error = json.loads(outcomes[2].error) if isinstance(outcomes[2], Failed) else {}
    assert error["data"] == {"type": "Fail", "message": "no such row", "final": True}


async def test_the_actions_own_attempts_and_backoff_travel_with_each_error(bench: Bench, registry: Registry) -> None:
    @action("act", max_attempts=4, backoff=Backoff(1, 3, 60, 0.1), registry=registry)
    async def act(ctx: Context) -> None:
        raise OSError("away")

    await bench.send(encode_call(1, 1, "act", "{}"))
    await bench.work()
    _, failed = await bench.error()
    assert failed.hints.max_attempts == 4
    backoff = failed.hints.backoff
    assert backoff is not None
    assert (backoff.base_seconds, backoff.factor, backoff.cap_seconds, backoff.jitter) == (1, 3, 60, 0.1)


class Item(BaseModel):
    id: uuid.UUID
    price: Decimal = Field(alias="unitPrice")
    weight: float = 1.5
    model_config = ConfigDict(populate_by_name=True)


@dataclass
class Line:
    item: Item
    at: datetime


class Color(Enum):
    RED = "red"


ITEM_ID = uuid.UUID("6f1c2f0a-5f0c-4b8e-9d5c-7f7b6f0f3b11")
ITEM = Item(id=ITEM_ID, price=Decimal("9.90"))
ITEM_JSON = {"id": str(ITEM_ID), "unitPrice": "9.90", "weight": 1.5}


def circle() -> list[Any]:
    items: list[Any] = []
    items.append(items)
    return items


def nested(levels: int) -> list[Any]:
    items: list[Any] = []
    for _ in range(levels - 1):
        items = [items]
    return items


NO_JSON = [
    (object(), "the handler returned object, which is not JSON-serialisable"),
    ([threading.Lock()], "_thread.lock is not JSON-serialisable"),
    (Item(id=ITEM_ID, price=Decimal(1), weight=math.nan), "NaN"),
    ({"a": [1, math.nan]}, "NaN"),
    (math.inf, "NaN or Infinity"),
    ({"a": "half \ud800"}, "surrogate"),
    (circle(), "holds itself"),
    (nested(101), "deeper"),
    ({(1, 2): 3}, "a dict with a tuple as a key"),
    ((n for n in ()), "generator"),
]


async def test_result_that_is_no_json_is_an_error_that_says_why(bench: Bench, registry: Registry) -> None:
    action("act", registry=registry)(lambda ctx, which: NO_JSON[which][0])
    await bench.send(*(encode_call(i, 1, "act", f"[{i}]") for i in range(len(NO_JSON))))
    await bench.work()
    for i, outcome in (await bench.outcomes(len(NO_JSON))).items():
        assert isinstance(outcome, Failed), NO_JSON[i]
        error = json.loads(outcome.error)
        assert error["data"]["type"] == "BadResult"
        assert NO_JSON[i][1] in error["message"]
        assert outcome.hints.final  # the handler has done its work: ten more runs would return the same


JSON = [None, "null", {"a": None}, [], "é\uffff\ufffe😀", nested(100), 2**63, {"text": "\u2028"}, "\x01"]


async def test_result_that_is_json_arrives_as_it_is(bench: Bench, registry: Registry) -> None:
    action("act", registry=registry)(lambda ctx, which: JSON[which])
    await bench.send(*(encode_call(i, 1, "act", f"[{i}]") for i in range(len(JSON))))
    await bench.work()
    outcomes = await bench.outcomes(len(JSON))
    assert [json.loads(o.result) for _, o in sorted(outcomes.items()) if isinstance(o, Succeeded)] == JSON


TYPED: list[tuple[Any, Any]] = [
    (ITEM, ITEM_JSON),
    ({"items": [ITEM]}, {"items": [ITEM_JSON]}),
    (Line(ITEM, datetime(2026, 1, 2, tzinfo=UTC)), {"item": ITEM_JSON, "at": "2026-01-02T00:00:00Z"}),
    ({ITEM_ID: Decimal("1.10")}, {str(ITEM_ID): "1.10"}),
    (Counter([True, True, None, 2]), {"true": 2, "null": 1, "2": 1}),
    ([Color.RED, {7}, timedelta(hours=1), Path("/tmp"), deque([1])], ["red", [7], "PT3600S", "/tmp", [1]]),
]


async def test_models_dataclasses_and_the_like_are_written_as_json(bench: Bench, registry: Registry) -> None:
    action("act", registry=registry)(lambda ctx, which: TYPED[which][0])
    await bench.send(*(encode_call(i, 1, "act", f"[{i}]") for i in range(len(TYPED))))
    await bench.work()
    outcomes = await bench.outcomes(len(TYPED))
    assert [json.loads(o.result) for _, o in sorted(outcomes.items()) if isinstance(o, Succeeded)] == [
        told for _, told in TYPED
    ]


async def test_result_over_the_limit_is_an_error_with_size_and_limit(bench: Bench, registry: Registry) -> None:
    action("ascii", registry=registry)(lambda ctx: "x" * 99)
    action("wide", registry=registry)(lambda ctx: "é" * 49)
    action("fits", registry=registry)(lambda ctx: "é" * 48)
    await bench.send(*(encode_call(i, 1, name, "{}") for i, name in enumerate(["ascii", "wide", "fits"])))
    await bench.work(result_limit_bytes=99)
    outcomes = await bench.outcomes(3)
    assert isinstance(outcomes[2], Succeeded)
    for task_id, size in ((0, 101), (1, 100)):
        outcome = outcomes[task_id]
        assert isinstance(outcome, Failed)
        error = json.loads(outcome.error)
        assert error["code"] == -32013
        assert (error["data"]["size"], error["data"]["limit"]) == (size, 99)
        assert outcome.hints.final


async def test_with_a_bucket_too_spawned_tasks_have_the_limit_of_a_message(bench: Bench, registry: Registry) -> None:
    @action("split", registry=registry)
    async def split(ctx: Context) -> None:
        for _ in range(3):
            ctx.spawn("child", {"text": "x" * 500_000})

    action("large", registry=registry)(lambda ctx: "x" * 6000)
    await bench.send(encode_call(1, 1, "split", "{}"))
    await bench.work(payload_bucket="s3://bucket")
    await bench.send(encode_call(2, 1, "large", "{}"))
    await bench.work(payload_bucket="s3://bucket", payload_max_bytes=5000)
    errors = [json.loads(one.error)["data"] for one in (await bench.outcomes(2)).values() if isinstance(one, Failed)]
    assert [error["type"] for error in errors] == ["TooManyChildren", "BadResult"]
    assert "the limit is 262144 (PENSTOCK_RESULT_LIMIT_BYTES)" in errors[0]["message"]
    assert "the limit is 5000 (PENSTOCK_PAYLOAD_MAX_BYTES)" in errors[1]["message"]


async def test_results_of_more_bytes_than_a_message_holds_all_arrive(bench: Bench, registry: Registry) -> None:
    action("big", registry=registry)(lambda ctx: "\uffff" * 60_000)  # grows to twice its size on its way
    await bench.send(*(encode_call(i, 1, "big", "{}") for i in range(8)))
    await bench.work(result_limit_bytes=900_000, result_compress_bytes=None)
    assert all(isinstance(o, Succeeded) for o in (await bench.outcomes(8)).values())


async def test_a_large_result_is_sent_packed_and_a_small_one_as_it_is(bench: Bench, registry: Registry) -> None:
    large = {"rows": [{"id": n, "name": "Straße"} for n in range(7_000)]}
    action("large", registry=registry)(lambda ctx: large)
    action("small", registry=registry)(lambda ctx: "x" * 60_000)
    action("noise", registry=registry)(lambda ctx: secrets.token_hex(40_000))
    await bench.send(
        *(encode_call(i, 1, name, "{}") for i, name in enumerate(["large", "small", "noise", *["large"] * 40]))
    )
    await bench.work()
    bodies: list[str] = []

    async def all_there() -> None:
        for message in await bench.results.receive(wait_seconds=1, visibility_seconds=30):
            bodies.append(message.body)
            bench.reports += decode_reports(message.body, batch_limit=10_000)
            await bench.results.delete([message])

    async with asyncio.timeout(PATIENCE_SECONDS):
        while len([r for r in bench.reports if isinstance(r, Succeeded)]) < 43:
            await all_there()
    results = {r.task_id: json.loads(r.result) for r in bench.reports if isinstance(r, Succeeded)}
    assert results[0] == results[42] == large
    assert (len(results[1]), len(results[2])) == (60_000, 80_000)
    entries = [entry for body in bodies for entry in _entries(json.loads(body))]
    packed = {entry["id"] for entry in entries if entry.get("encoding") == "gzip"}
    assert "0:1" in packed
    assert "1:1" not in packed
    assert sum(map(len, bodies)) < 41 * len(json.dumps(large)) / 4
    for body in bodies:
        assert sum("encoding" in entry for entry in _entries(json.loads(body))) <= PACKED_PER_MESSAGE


def _entries(body: Any) -> list[dict[str, Any]]:
    return body if isinstance(body, list) else [body]


async def test_an_answer_that_cannot_be_encrypted_is_a_failed_attempt_and_harms_no_other(
    bench: Bench, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = PayloadCodec.encode

    def broken(codec: PayloadCodec, text: str, aad: Any) -> str:
        if text == '"broken"':
            raise MemoryError
        return encode(codec, text, aad)

    @action("many", registry=registry, batch=2)
    async def many(calls: list[Call[Any]]) -> list[str]:
        return ["broken" if call.ctx.task_id == 1 else "fine" for call in calls]

    monkeypatch.setattr(PayloadCodec, "encode", broken)
    await bench.send(*(encode_call(n, 1, "many", "{}") for n in (1, 2)))
    await bench.work(payload_keys=load_settings(payload_keys=[new_key()]).payload_keys)
    outcomes = await bench.outcomes(2)
    failed = outcomes[1]
    assert isinstance(failed, Failed)
    assert json.loads(failed.error)["data"]["type"] == "AnswerNotEncrypted"
    assert not failed.hints.final
    assert isinstance(outcomes[2], Succeeded)


async def test_results_queue_that_takes_small_messages_only_gets_small_ones(
    bench: Bench, registry: Registry, transport: SqsTransport
) -> None:
    client = await transport.client()
    await client.set_queue_attributes(QueueUrl=await bench.results.url(), Attributes={"MaximumMessageSize": "2048"})
    action("fits", registry=registry)(lambda ctx: "x" * 500)
    action("big", registry=registry)(lambda ctx: "x" * 5000)
    await bench.send(*(encode_call(i, 1, "fits", "{}") for i in range(20)), encode_call(99, 1, "big", "{}"))
    await bench.work()
    outcomes = await bench.outcomes(21)
    refused = outcomes.pop(99)
    assert isinstance(refused, Failed)
    assert json.loads(refused.error)["data"]["type"] == "BadResult"
    assert all(isinstance(outcome, Succeeded) for outcome in outcomes.values())
    assert await bench.left() == 0


def signed_call(task_id: int, claim: int, name: str, payload: str) -> str:
    return encode_call(task_id, claim, name, payload, claim_id=claim_id(task_id, claim))


async def test_equal_results_of_a_message_with_a_pack_id_are_sent_as_one(bench: Bench, registry: Registry) -> None:
    @action("a", registry=registry)
    async def one(ctx: Context) -> str | None:
        if ctx.task_id == 3:
            raise Fail("no")
        return "odd" if ctx.task_id == 5 else None

    await bench.send(*(signed_call(n, 7, "a", "{}") for n in range(1, 11)), pack=pack_id(7, range(1, 11)))
    await bench.send(*(signed_call(n, 8, "a", "{}") for n in range(11, 21)))
    await bench.work(messages=2)
    settled = {1, 2, 4, 6, 7, 8, 9, 10}

    def shared() -> list[SharedResult]:
        return [report for report in bench.reports if isinstance(report, SharedResult)]

    await bench.until(lambda: settled <= {n for one in shared() for n in one.task_ids}, "shared results")
    assert {(one.claim, one.result) for one in shared()} == {(7, "null")}
    assert sorted(n for one in shared() for n in one.task_ids) == sorted(settled)
    outcomes = await bench.outcomes(12)
    assert sorted(outcomes) == [3, 5, *range(11, 21)]
    assert isinstance(outcomes[3], Failed)
    assert await bench.left() == 0


@pytest.mark.parametrize("pack", ["pack:7:1-9", "pack:7:2-11", "pack:8:1-10", "pack:7:10,1-9", "7:1-10", ""])
async def test_results_are_sent_alone_where_the_pack_id_is_not_that_of_the_messages_tasks(
    bench: Bench, registry: Registry, pack: str
) -> None:
    action("a", registry=registry)(lambda ctx: None)
    await bench.send(*(signed_call(n, 7, "a", "{}") for n in range(1, 11)), pack=pack or "-")
    await bench.work()
    assert sorted(await bench.outcomes(10)) == [*range(1, 11)]


async def test_a_batched_handler_shares_its_results_and_large_ones_are_sent_alone(
    bench: Bench, registry: Registry
) -> None:
    @action("many", batch=10, registry=registry)
    async def many(calls: list[Call[Any]]) -> list[Any]:
        return [call.params["text"] for call in calls]

    texts = ["x" * 300, "y" * 3000, "é" * 400]
    for number, text in enumerate(texts):
        ids = range(number * 10, number * 10 + 10)
        calls = [signed_call(n, 1, "many", json.dumps({"text": text})) for n in ids]
        await bench.send(*calls, pack=pack_id(1, ids))
    await bench.work(messages=3)
    assert sorted(await bench.outcomes(10)) == [*range(10, 20)]
    shared = [report for report in bench.reports if isinstance(report, SharedResult)]
    assert {(tuple(one.task_ids), one.result) for one in shared} == {
        (tuple(range(10)), json.dumps(texts[0])), (tuple(range(20, 30)), json.dumps(texts[2], ensure_ascii=False)),
    }  # fmt: skip
    assert await bench.left() == 0


async def test_what_tasks_spawn_goes_with_responses_of_their_own(bench: Bench, registry: Registry) -> None:
    action("a", registry=registry)(lambda ctx: ctx.spawn("next", {"n": 1}))
    await bench.send(*(signed_call(n, 7, "a", "{}") for n in range(1, 11)), pack=pack_id(7, range(1, 11)))
    await bench.work()
    outcomes = await bench.outcomes(10)
    assert {outcome.spawn for outcome in outcomes.values() if isinstance(outcome, Succeeded)} == {
        '[{"action":"next","payload":{"n":1}}]'
    }
    assert sorted(outcomes) == [*range(1, 11)]


async def test_a_shared_result_that_the_queue_refuses_is_sent_one_by_one() -> None:
    queue, settled = _Narrow(700), list[Lease]()
    sender = ResultSender(queue, load_settings(), sent=settled.append, timings=Timings())  # type: ignore[arg-type]
    lease = Lease(Message("m", "r", "", 1, None, {}), 9, 0.0, 30.0, "pack:1:" + ",".join(map(str, range(0, 800, 4))))
    for place in range(9):
        sender.answer(Entry(encode_result(f"{place}:1", "7"), lease, result="7", place=place))
    sending = asyncio.create_task(sender.run())
    try:
        await asyncio.wait_for(sender.wait_empty(), PATIENCE_SECONDS)
    finally:
        sending.cancel()
    reports = [report for body in queue.taken for report in decode_reports(body, batch_limit=10)]
    assert sorted(report.task_id for report in reports if isinstance(report, Succeeded)) == [*range(9)]
    assert len(reports) == 9
    assert settled == [lease] * 9


async def test_messages_are_made_no_smaller_than_the_results_queue_needs(bench: Bench, transport: SqsTransport) -> None:
    client = await transport.client()
    await client.set_queue_attributes(QueueUrl=await bench.results.url(), Attributes={"MaximumMessageSize": "16384"})
    sender = ResultSender(bench.results, load_settings(), sent=lambda lease: None, timings=Timings())
    for number in range(600):
        sender.answer(Entry(encode_result(f"{number}:1", '"' + "x" * (40_000 if number == 30 else 400) + '"')))
    sending = asyncio.create_task(sender.run())
    try:
        await asyncio.wait_for(sender.wait_empty(), 60)
    finally:
        sending.cancel()
    assert sender._max_bytes >= 8192
    assert len(await bench.outcomes(599)) == 599


# Time limits


@pytest.mark.parametrize("where", ["message", "action", "settings"])
async def test_task_over_its_time_is_stopped_and_answered(bench: Bench, registry: Registry, where: str) -> None:
    stopped = asyncio.Event()

    @action("hang", timeout=0.2 if where == "action" else 60 if where == "message" else None, registry=registry)
    async def hang(ctx: Context) -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            stopped.set()

    await bench.send(encode_call(1, 1, "hang", "{}"), **({"timeout_seconds": "0.2"} if where == "message" else {}))
    await bench.work(**({"task_timeout_seconds": 0.2} if where == "settings" else {}))
    error, _ = await bench.error()
    assert error["code"] == -32001
    assert error["data"]["type"] == "TaskTimeout"
    assert error["data"]["limit_seconds"] == 0.2
    assert "in hang" in error["data"]["traceback"]
    assert stopped.is_set()


async def test_timeout_attribute_of_no_sense_is_ignored(bench: Bench, registry: Registry) -> None:
    action("act", registry=registry)(lambda ctx: "done")
    await bench.send(encode_call(1, 1, "act", "{}"), timeout_seconds="soon")
    await bench.work()
    assert await bench.result() == "done"


async def test_thread_over_its_time_is_left_behind_and_its_place_taken(bench: Bench, registry: Registry) -> None:
    release = threading.Event()

    @action("hang", timeout=0.2, registry=registry)
    def hang(ctx: Context) -> str:
        release.wait(PATIENCE_SECONDS)
        return "too late"

    action("fine", registry=registry)(lambda ctx: "fine")
    await bench.send(encode_call(1, 1, "hang", "{}"), encode_call(2, 1, "fine", "{}"))
    try:
        await bench.work(worker_threads=1)
        outcomes = await bench.outcomes(2)
    finally:
        release.set()
    assert isinstance(outcomes[2], Succeeded)
    failed = outcomes[1]
    assert isinstance(failed, Failed)
    assert json.loads(failed.error)["code"] == -32001
    assert "in hang" in json.loads(failed.error)["data"]["traceback"]


async def test_worker_whose_threads_are_all_stuck_ends_loudly(bench: Bench, registry: Registry) -> None:
    release = threading.Event()

    @action("hang", timeout=0.1, registry=registry)
    def hang(ctx: Context) -> None:
        release.wait(PATIENCE_SECONDS)

    await bench.send(encode_call(1, 1, "hang", "{}"), encode_call(2, 1, "hang", "{}"))
    try:
        async with running(bench.worker(worker_threads=1), without=["watch threads"]) as worker:
            await take(worker, 1)
            with pytest.raises(RuntimeError, match="threads are stuck"):
                await asyncio.wait_for(worker.side_tasks()["watch threads"](), PATIENCE_SECONDS)
    finally:
        release.set()


async def test_handler_that_ignores_its_cancellation_is_answered_all_the_same(
    bench: Bench, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(penstock.worker.runner, "_CANCEL_SECONDS", 0.1)
    release = asyncio.Event()

    @action("deaf", timeout=0.1, registry=registry)
    async def deaf(ctx: Context) -> str:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                pass
        return "too late"

    await bench.send(encode_call(1, 1, "deaf", "{}"))
    await bench.work(worker_concurrency=1)
    error, _ = await bench.error()
    assert error["code"] == -32001
    release.set()


async def test_handlers_own_timeouts_are_its_own(bench: Bench, registry: Registry) -> None:
    @action(registry=registry)
    async def patient(ctx: Context) -> str:
        try:
            async with asyncio.timeout(0.05):
                await asyncio.sleep(3600)
        except TimeoutError:
            return "went on"
        return "never"

    await bench.send(encode_call(1, 1, "patient", "{}"))
    await bench.work()
    assert await bench.result() == "went on"


# Holding back no other task


async def test_slow_task_holds_back_neither_others_nor_their_answers(bench: Bench, registry: Registry) -> None:
    release = asyncio.Event()

    @action(registry=registry)
    async def slow(ctx: Context) -> str:
        await release.wait()
        return "slow"

    action("quick", registry=registry)(lambda ctx: "quick")
    await bench.send(*(encode_call(i, 1, "slow" if i == 0 else "quick", "{}") for i in range(5)))
    async with running(bench.worker()) as worker:
        await take(worker, 1)
        assert set(await bench.outcomes(4)) == {1, 2, 3, 4}
        assert await bench.left() == 1  # one of its tasks has no answer yet
        release.set()
        await asyncio.wait_for(worker.settle(), PATIENCE_SECONDS)
        assert 0 in await bench.outcomes(5)
        assert await bench.left() == 0


async def test_no_more_tasks_run_at_once_than_allowed(bench: Bench, registry: Registry) -> None:
    running_now, most = 0, 0

    @action(registry=registry)
    async def act(ctx: Context) -> None:
        nonlocal running_now, most
        running_now += 1
        most = max(most, running_now)
        await asyncio.sleep(0.01)
        running_now -= 1

    await bench.send(*(encode_call(i, 1, "act", "{}") for i in range(30)))
    await bench.work(worker_concurrency=3)
    assert len(await bench.outcomes(30)) == 30
    assert most == 3


async def test_busy_worker_leaves_messages_to_others(bench: Bench, registry: Registry) -> None:
    started, release = asyncio.Event(), asyncio.Event()

    @action(registry=registry)
    async def slow(ctx: Context) -> None:
        started.set()
        await release.wait()

    await bench.send(encode_call(1, 1, "slow", "{}"))
    async with running(bench.worker(worker_concurrency=1)) as worker:
        await take(worker, 1)
        await asyncio.wait_for(started.wait(), PATIENCE_SECONDS)
        await bench.send(encode_call(2, 1, "slow", "{}"))
        second = asyncio.create_task(worker.run_once())
        assert len(await receive(bench.outbound)) == 1
        assert not second.done()
        release.set()
        assert await asyncio.wait_for(second, PATIENCE_SECONDS) == 0
        await asyncio.wait_for(worker.settle(), PATIENCE_SECONDS)


async def test_threads_that_are_all_busy_do_not_hold_async_tasks_back(bench: Bench, registry: Registry) -> None:
    release = threading.Event()

    @action(registry=registry)
    def blocks(ctx: Context) -> None:
        release.wait(PATIENCE_SECONDS)

    @action(registry=registry)
    async def quick(ctx: Context) -> str:
        return "quick"

    await bench.send(*(encode_call(i, 1, "blocks", "{}") for i in range(3)), encode_call(9, 1, "quick", "{}"))
    async with running(bench.worker(worker_threads=1)) as worker:
        await take(worker, 1)
        try:
            assert set(await bench.outcomes(1)) == {9}
        finally:
            release.set()
        await asyncio.wait_for(worker.settle(), PATIENCE_SECONDS)
        assert len(await bench.outcomes(4)) == 4


# Messages


async def test_message_stays_until_its_answers_are_in_the_results_queue(
    bench: Bench, registry: Registry, transport: SqsTransport, settings: Settings
) -> None:
    action("act", registry=registry)(lambda ctx: "kept")
    missing = transport.queue(f"{settings.results_queue}-other", label="results")
    await bench.send(encode_call(1, 1, "act", "{}"))
    async with running(bench.worker(results=missing)) as worker:
        await take(worker, 1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(worker.settle(), 0.7)
        assert await bench.left() == 1
        await (await transport.client()).create_queue(QueueName=f"{settings.results_queue}-other")
        await asyncio.wait_for(worker.settle(), PATIENCE_SECONDS)
    (message,) = await receive(missing)
    report, told = decode_reports(message.body, batch_limit=10)
    assert isinstance(report, Succeeded)
    assert isinstance(told, RunTimes)
    assert list(told.actions) == ["act"]
    assert await bench.left() == 0


async def test_message_stays_hidden_while_its_task_runs(bench: Bench, registry: Registry) -> None:
    runs = 0

    @action(registry=registry)
    async def long(ctx: Context) -> str:
        nonlocal runs
        runs += 1
        await asyncio.sleep(5)
        return "done"

    await bench.send(encode_call(1, 1, "long", "{}"))
    async with running(bench.worker(visibility_timeout_seconds=3)) as worker:
        await take(worker, 1)
        settling = asyncio.create_task(worker.settle())
        while not settling.done():
            assert await receive(bench.outbound, wait_seconds=1) == []
        await settling
    assert await bench.result() == "done"
    assert runs == 1
    assert await bench.left() == 0


async def test_message_that_comes_again_is_not_run_twice_side_by_side(bench: Bench, registry: Registry) -> None:
    release = asyncio.Event()
    runs = 0

    @action(registry=registry)
    async def act(ctx: Context) -> None:
        nonlocal runs
        runs += 1
        await release.wait()

    await bench.send(encode_call(1, 1, "act", "{}"))
    async with running(bench.worker(visibility_timeout_seconds=3), without=["extend visibility"]) as worker:
        await take(worker, 2)  # the second time after its visibility timeout
        release.set()
        await asyncio.wait_for(worker.settle(), PATIENCE_SECONDS)
    assert len(await bench.outcomes(1)) == 1
    assert runs == 1
    assert await bench.left() == 0


async def test_hold_that_is_lost_is_logged_and_the_task_still_answered(
    bench: Bench, registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    release = asyncio.Event()

    @action(registry=registry)
    async def act(ctx: Context) -> str:
        await release.wait()
        return "done"

    await bench.send(encode_call(1, 1, "act", "{}"))

    async def lost() -> bool:
        return "message_lease_lost" in caplog.text

    async with running(bench.worker(visibility_timeout_seconds=3)) as worker:
        await take(worker, 1)
        await (await bench.outbound._transport.client()).purge_queue(QueueUrl=await bench.outbound.url())
        await eventually(lost, "the hold to be lost")
        release.set()
        await asyncio.wait_for(worker.settle(), PATIENCE_SECONDS)
    assert await bench.result() == "done"


async def test_body_that_cannot_be_read_stays_for_the_dead_letter_queue(bench: Bench, registry: Registry) -> None:
    action("act", registry=registry)(lambda ctx: None)
    for body in ("no json", "[]", '{"jsonrpc":"2.0","method":"act"}', '{"jsonrpc":"2.0","method":"act","id":5}'):
        assert (await bench.outbound.send([Outgoing(body)])).failed == []
    await bench.send(encode_call(1, 1, "act", "{}"))
    await bench.work(messages=5)
    assert set(await bench.outcomes(1)) == {1}
    assert await bench.left() == 4


async def test_stray_entries_of_a_good_batch_are_reported_and_hold_nothing_up(bench: Bench, registry: Registry) -> None:
    action("act", registry=registry)(lambda ctx: "ran")
    strays = [
        "17",
        '{"jsonrpc":"2.0","method":"act","params":{"lost":1}}',
        '{"jsonrpc":"1.0","method":"act","id":"2:2"}',
    ]
    await bench.send(encode_call(1, 1, "act", "{}"), *strays)
    await bench.work()
    await bench.until(lambda: len([r for r in bench.reports if not isinstance(r, RunTimes)]) == 4, "all four")
    assert await bench.result() == "ran"
    unreadable = [report for report in bench.reports if isinstance(report, Unreadable)]
    assert len(unreadable) == 3
    assert any("lost" in report.text for report in unreadable)
    assert await bench.left() == 0


# Heartbeats


async def test_redelivered_tasks_are_announced_before_any_starts(bench: Bench, registry: Registry) -> None:
    announced_first: list[bool] = []

    @action(registry=registry)
    async def act(ctx: Context) -> bool:
        await bench.until(lambda: bench.signs(1) and bench.signs(2), "both announced")
        announced_first.append(True)
        return ctx.redelivered

    await bench.send(encode_call(1, 1, "act", "{}"), encode_call(2, 1, "act", "{}"))
    await bench.outbound.release(await receive(bench.outbound))
    await bench.work()
    outcomes = await bench.outcomes(2)
    assert [o.result for o in outcomes.values() if isinstance(o, Succeeded)] == ["true", "true"]
    assert announced_first == [True, True]


async def test_long_tasks_give_signs_of_life_running_or_waiting(bench: Bench, registry: Registry) -> None:
    release = asyncio.Event()

    @action(registry=registry)
    async def act(ctx: Context) -> None:
        await release.wait()

    await bench.send(encode_call(1, 1, "act", "{}"), encode_call(2, 1, "act", "{}"))
    async with running(bench.worker(worker_concurrency=1, heartbeat_seconds=0.2)) as worker:
        await take(worker, 1)
        await bench.until(lambda: len(bench.signs(1)) >= 2 and len(bench.signs(2)) >= 2, "two signs of each")
        release.set()
        await asyncio.wait_for(worker.settle(), PATIENCE_SECONDS)
    assert all(sign.detail is None for sign in bench.signs(1))


async def test_quick_tasks_give_none(bench: Bench, registry: Registry) -> None:
    action("act", registry=registry)(lambda ctx: None)
    await bench.send(encode_call(1, 1, "act", "{}"))
    await bench.work()
    await bench.outcomes(1)
    assert bench.signs(1) == []


@pytest.mark.parametrize("is_async", [True, False])
async def test_progress_is_sent_while_the_task_runs(bench: Bench, registry: Registry, is_async: bool) -> None:
    seen = threading.Event()

    async def act(ctx: Context) -> None:
        await ctx.progress(40, "page 2 of 5")
        while not seen.is_set():
            await asyncio.sleep(0.01)

    def plain_act(ctx: Context) -> None:
        ctx.progress_sync(40, "page 2 of 5")
        seen.wait(PATIENCE_SECONDS)

    action("act", registry=registry)(act if is_async else plain_act)
    await bench.send(encode_call(1, 7, "act", "{}"))
    async with running(bench.worker()) as worker:
        await take(worker, 1)
        await bench.until(lambda: bench.signs(1), "progress")
        seen.set()
        await asyncio.wait_for(worker.settle(), PATIENCE_SECONDS)
    (sign,) = bench.signs(1)
    assert sign.claim == 7
    assert json.loads(sign.detail or "") == {"percent": 40.0, "note": "page 2 of 5"}


async def test_a_heartbeat_replaces_no_progress_that_is_not_sent_yet(bench: Bench, registry: Registry) -> None:
    @action("act", registry=registry)
    async def act(ctx: Context) -> None:
        await ctx.progress(40, "page 2 of 5")
        await ctx.progress()

    await bench.send(encode_call(1, 7, "act", "{}"))
    await bench.work()
    await bench.until(lambda: bench.signs(1), "progress")
    (sign,) = bench.signs(1)
    assert json.loads(sign.detail or "null") == {"percent": 40.0, "note": "page 2 of 5"}


# Stopping


async def test_stop_gives_back_at_once_what_has_not_started_and_drain_finishes_the_rest(
    bench: Bench, registry: Registry
) -> None:
    started, release = asyncio.Event(), asyncio.Event()

    @action(registry=registry)
    async def act(ctx: Context) -> str:
        started.set()
        await release.wait()
        return "finished"

    await bench.send(encode_call(1, 1, "act", "{}"))
    await bench.send(encode_call(2, 1, "act", "{}"))
    async with running(bench.worker(worker_concurrency=1)) as worker:
        await take(worker, 2)
        await asyncio.wait_for(started.wait(), PATIENCE_SECONDS)
        worker.stop_taking()
        (given_back,) = await receive(bench.outbound)
        assert await worker.run_once() == 0
        drain = asyncio.create_task(worker.drain(PATIENCE_SECONDS))
        await asyncio.sleep(0)
        assert not drain.done()
        release.set()
        await asyncio.wait_for(drain, PATIENCE_SECONDS)
        (outcome,) = (await bench.outcomes(1)).values()
        assert f'"id":"{3 - outcome.task_id}:1"' in given_back.body
        assert await bench.left() == 1


async def test_message_that_was_begun_is_finished_whole(bench: Bench, registry: Registry) -> None:
    started, release = asyncio.Event(), asyncio.Event()

    @action(registry=registry)
    async def act(ctx: Context) -> None:
        started.set()
        await release.wait()

    await bench.send(*(encode_call(i, 1, "act", "{}") for i in range(5)))
    async with running(bench.worker(worker_concurrency=1)) as worker:
        await take(worker, 1)
        await asyncio.wait_for(started.wait(), PATIENCE_SECONDS)
        worker.stop_taking()
        release.set()
        await asyncio.wait_for(worker.drain(PATIENCE_SECONDS), PATIENCE_SECONDS)
        assert len(await bench.outcomes(5)) == 5
        assert await bench.left() == 0


async def test_task_that_outlasts_the_grace_is_cut_and_given_back(bench: Bench, registry: Registry) -> None:
    started, cleaned_up = asyncio.Event(), asyncio.Event()

    @action(registry=registry)
    async def forever(ctx: Context) -> None:
        started.set()
        try:
            await asyncio.sleep(3600)
        finally:
            cleaned_up.set()

    action("quick", registry=registry)(lambda ctx: "kept")
    await bench.send(encode_call(1, 1, "forever", "{}"), encode_call(2, 1, "quick", "{}"))
    async with running(bench.worker()) as worker:
        await take(worker, 1)
        await asyncio.wait_for(started.wait(), PATIENCE_SECONDS)
        worker.stop_taking()
        await asyncio.wait_for(worker.drain(0.5), PATIENCE_SECONDS)
        assert cleaned_up.is_set()
        assert set(await bench.outcomes(1)) == {2}
        assert len(await receive(bench.outbound)) == 1
        assert await bench.left() == 1


async def test_drain_with_the_results_queue_away_ends_in_time_and_gives_back(
    bench: Bench, registry: Registry, transport: SqsTransport, settings: Settings
) -> None:
    action("act", registry=registry)(lambda ctx: None)
    missing = transport.queue(f"{settings.results_queue}-none", label="results")
    await bench.send(encode_call(1, 1, "act", "{}"))
    async with running(bench.worker(results=missing)) as worker:
        await take(worker, 1)
        worker.stop_taking()
        await asyncio.wait_for(worker.drain(0.5), PATIENCE_SECONDS)
        assert len(await receive(bench.outbound)) == 1


async def test_messages_that_arrive_after_the_stop_are_given_back(bench: Bench, registry: Registry) -> None:
    action("act", registry=registry)(lambda ctx: None)
    async with running(bench.worker(receive_wait_seconds=5, visibility_timeout_seconds=3)) as worker:
        receiving = asyncio.create_task(worker.run_once())
        await asyncio.sleep(0)
        worker.stop_taking()
        await bench.send(encode_call(1, 1, "act", "{}"))
        assert await asyncio.wait_for(receiving, PATIENCE_SECONDS) == 0
        # A long poll that is cut off may have taken it, until its visibility timeout.
        assert len(await receive(bench.outbound, wait_seconds=10)) == 1
        assert bench.reports == []


def test_worker_loads_no_database_driver() -> None:
    code = (
        "import penstock, penstock.worker.process, penstock.worker.handlers.actions, penstock.brokers.sqs, sys; "
        "penstock.action; found = {'asyncpg', 'sqlalchemy', 'alembic'} & set(sys.modules); assert not found, found"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env={"PYTHONPATH": ":".join(sys.path)}
    )
    assert done.returncode == 0, done.stderr


def test_stuck_thread_does_not_keep_a_process_alive() -> None:
    code = (
        "import asyncio, threading\n"
        "from penstock.worker.threads import Threads\n"
        "async def main():\n"
        "    threads = Threads(1)\n"
        "    threads.reserve()\n"
        "    threads.leave(threads.start(threading.Event().wait))\n"
        "    threads.close()\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env={"PYTHONPATH": ":".join(sys.path)}
    )
    assert done.returncode == 0, done.stderr


async def test_message_can_name_no_code_but_the_registered_handlers(
    bench: Bench, registry: Registry, tmp_path: Path
) -> None:
    """Neither the method nor the payload is ever looked up among modules: they are names, and values for a handler."""
    ran = []

    @action("mine", registry=registry)
    async def mine(ctx: Context, **values: Any) -> int:
        ran.append(values)
        return len(values)

    mark = tmp_path / "mark"
    names = [
        "os.system", "os:system", "subprocess.run", "__import__", "builtins.exec", "antigravity", "penstock.db.migrate",
        "mine.__call__", "../mine", "mine\u0000", "handlers.REGISTRY", "__class__",
    ]  # fmt: skip
    payload = json.dumps({"command": f"touch {mark}", "args": ["touch", str(mark)], "__module__": "os"})
    before = set(sys.modules)
    await bench.send(*(encode_call(number, 1, name, payload) for number, name in enumerate(names, 1)))
    await bench.send(encode_call(99, 1, "mine", json.dumps({"__module__": "antigravity", "py/object": "os.system"})))
    await bench.work(messages=2)
    outcomes = await bench.outcomes(len(names) + 1)
    for number in range(1, len(names) + 1):
        outcome = outcomes[number]
        assert isinstance(outcome, Failed), names[number - 1]
        assert "no handler" in json.loads(outcome.error)["message"]
    assert isinstance(outcomes[99], Succeeded)
    assert ran == [{"__module__": "antigravity", "py/object": "os.system"}]
    assert not mark.exists()
    assert "antigravity" not in set(sys.modules) - before


# What may kill a worker


@pytest.mark.parametrize("sign", ["attribute", "third delivery"])
async def test_a_suspect_starts_when_others_are_done_and_has_the_worker_to_itself(
    bench: Bench, registry: Registry, sign: str
) -> None:
    seen: list[str] = []

    @action(registry=registry)
    async def suspect(ctx: Context) -> None:
        seen.append("suspect begins")
        await asyncio.sleep(0.3)
        seen.append("suspect ends")

    @action(registry=registry)
    async def other(ctx: Context) -> None:
        seen.append("other begins")
        await asyncio.sleep(0.2)
        seen.append("other ends")

    if sign == "attribute":
        await bench.send(encode_call(1, 1, "suspect", "{}"), suspect="1")
    else:
        await bench.send(encode_call(1, 1, "suspect", "{}"))
        for _ in range(2):
            await bench.outbound.release(await receive(bench.outbound))
    await bench.send(encode_call(2, 1, "other", "{}"))
    async with running(bench.worker()) as worker:
        await take(worker, 2)
        await asyncio.wait_for(worker.settle(), PATIENCE_SECONDS)
    assert "suspect ends" in seen
    begins = seen.index("suspect begins")
    assert seen[begins + 1] == "suspect ends"
    assert sorted(await bench.outcomes(2)) == [1, 2]
    assert bench.signs(1), "a suspect is announced before it starts"


async def test_answers_of_others_are_safe_before_a_suspect_starts(bench: Bench, registry: Registry) -> None:
    safe: list[bool] = []

    @action(registry=registry)
    async def suspect(ctx: Context) -> None:
        await bench.until(lambda: any(isinstance(r, Succeeded) and r.task_id == 2 for r in bench.reports), "the other")
        safe.append(True)

    action("other", registry=registry)(lambda ctx: None)
    await bench.send(encode_call(2, 1, "other", "{}"))
    await bench.send(encode_call(1, 1, "suspect", "{}"), suspect="1")
    async with running(bench.worker()) as worker:
        await take(worker, 2)
        await asyncio.wait_for(worker.settle(), PATIENCE_SECONDS)
    assert safe == [True]


async def test_suspects_that_wait_for_their_turn_send_heartbeats(bench: Bench, registry: Registry) -> None:
    """The supervisor would fail them, and send them again while they run here."""

    @action("suspect", registry=registry)
    async def suspect() -> None:
        pass

    for task_id in (1, 2):
        await bench.send(encode_call(task_id, 1, "suspect", "{}"), suspect="1")
    worker = bench.worker(heartbeat_seconds=0.2)
    async with running(worker):
        async with worker._starting:
            taking = asyncio.create_task(take(worker, 2))
            await bench.until(lambda: min(len(bench.signs(1)), len(bench.signs(2))) > 2, "heartbeats of both")
        await taking
        await asyncio.wait_for(worker.settle(), PATIENCE_SECONDS)
    assert len(await bench.outcomes(2)) == 2


async def test_a_long_suspect_holds_others_back_for_a_moment_only(bench: Bench, registry: Registry) -> None:
    release = asyncio.Event()

    @action(registry=registry)
    async def suspect(ctx: Context) -> None:
        await asyncio.wait_for(release.wait(), PATIENCE_SECONDS)

    @action(registry=registry)
    async def other(ctx: Context) -> None:
        release.set()

    await bench.send(encode_call(1, 1, "suspect", "{}"), suspect="1")
    async with running(bench.worker()) as worker:
        await take(worker, 1)
        await bench.send(encode_call(2, 1, "other", "{}"))
        await take(worker, 1)
        await asyncio.wait_for(worker.settle(), PATIENCE_SECONDS)
    assert all(isinstance(outcome, Succeeded) for outcome in (await bench.outcomes(2)).values())


async def test_suspects_that_have_not_started_are_given_back_at_a_stop(bench: Bench, registry: Registry) -> None:
    started, release = asyncio.Event(), asyncio.Event()

    @action(registry=registry)
    async def act(ctx: Context) -> None:
        started.set()
        await release.wait()

    await bench.send(encode_call(1, 1, "act", "{}"), suspect="1")
    await bench.send(encode_call(2, 1, "act", "{}"), suspect="1")
    async with running(bench.worker()) as worker:
        taking = asyncio.create_task(take(worker, 2))
        await asyncio.wait_for(started.wait(), PATIENCE_SECONDS)
        worker.stop_taking()
        release.set()
        await asyncio.wait_for(worker.drain(PATIENCE_SECONDS), PATIENCE_SECONDS)
        taking.cancel()
        assert len(await bench.outcomes(1)) == 1
        assert len(await receive(bench.outbound)) == 1


async def test_a_worker_whose_threads_are_all_busy_is_saturated(
    bench: Bench, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()

    @action("plain", registry=registry)
    def plain(ctx: Context) -> None:
        go_on.wait(PATIENCE_SECONDS)

    def threads(state: str) -> float | None:
        return metrics.REGISTRY.get_sample_value("penstock_threads", {"state": state})

    delays = metrics.REGISTRY.get_sample_value("penstock_start_delay_seconds_count") or 0
    monkeypatch.setattr(penstock.worker.runner, "_WAITING_SECONDS", 0.05)
    monkeypatch.setattr(penstock.worker.runner, "_DELAY_NOTED_SECONDS", 0)
    await bench.send(*(encode_call(n, 1, "plain", "{}") for n in range(1, 4)))
    async with running(bench.worker(worker_threads=2)) as worker:
        assert worker.saturation() is None
        await take(worker, 1)
        await asyncio.sleep(0.1)
        assert (threads("busy"), threads("idle"), threads("left")) == (2, 0, 0)
        assert "a task waits for one of 2 threads" in (worker.saturation() or "")
        go_on.set()
        await asyncio.wait_for(worker.settle(), PATIENCE_SECONDS)
        assert (worker.saturation(), threads("busy")) == (None, 0)
    assert metrics.REGISTRY.get_sample_value("penstock_start_delay_seconds_count") == delays + 3


class _Narrow:
    """A results queue that is set to take small messages."""

    label, limits = "results", LIMITS

    def __init__(self, most: int = 5000) -> None:
        self.taken: list[str] = []
        self._most = most

    async def send(self, messages: Sequence[Outgoing]) -> SendReport:
        refused = [n for n, one in enumerate(messages) if len(one.body) > self._most]
        self.taken += [one.body for n, one in enumerate(messages) if n not in refused]
        return SendReport(refused, "too long" if refused else None, frozenset(refused))


async def test_an_answer_that_is_sent_at_once_and_refused_becomes_an_error() -> None:
    queue = _Narrow()
    sender = ResultSender(queue, load_settings(), sent=lambda lease: None, timings=Timings())  # type: ignore[arg-type]
    lease = Lease(Message("m", "r", "", 1, None, {}), 1, 0.0, 30.0)
    await sender.send_now([Entry(encode_result("1:1", json.dumps("x" * 9000)), lease)])
    ((report,),) = [decode_reports(body, batch_limit=10) for body in queue.taken]
    assert isinstance(report, Failed)
    assert json.loads(report.error)["data"]["type"] == "BadResult"
