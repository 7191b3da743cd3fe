"""Answers and places of calls that end in unusual ways."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from opentelemetry.sdk.trace import TracerProvider

from penstock.brokers.base import Message
from penstock.client.exchanges import error_of
from penstock.protocol.reports import Failed, Report, Succeeded, Suspended, decode_report
from penstock.runtime.tracing import active
from penstock.runtime.tracing.spans import Spans
from penstock.worker.handlers.actions import Handler
from penstock.worker.handlers.context import Call, Context
from penstock.worker.handlers.lifespan import HOOKS
from penstock.worker.handlers.outcomes import Retry
from penstock.worker.handlers.steps import Suspend
from penstock.worker.leases import Lease
from tests.unit.worker.test_batch_calls import World


def lease() -> Lease:
    return Lease(Message("m", "r", "", 1, None, {}), 1, 0.0, float("inf"))


async def outcomes(handler: Handler, count: int, *, concurrency: int = 10) -> Mapping[int, Report]:
    """Of tasks of the handler, by their number, which is their parameter too."""
    world = World(concurrency)
    world.runner.add([world.attempt(handler, number, lease()) for number in range(count)])
    try:
        await asyncio.wait_for(world.runner.wait_empty(), 10)
    finally:
        world.threads.close()
        world.runner.close()
    return {attempt.claim.task_id: decode_report(text) for attempt, text in world.answers}


def error(report: Report) -> dict[str, Any]:
    assert isinstance(report, Failed), report
    data: dict[str, Any] = json.loads(report.error)["data"]
    return data


async def test_a_thread_that_ends_in_the_moment_of_its_time_limit_is_not_left_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started, may_end, has_told = threading.Event(), threading.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    call_soon = loop.call_soon_threadsafe

    def tell(*arguments: Any) -> asyncio.Handle:
        handle = call_soon(*arguments)
        has_told.set()
        return handle

    def act(n: int) -> None:
        started.set()
        may_end.wait(10)

    world = World(concurrency=3)
    world.runner.add([world.attempt(Handler("act", act, timeout=0.05), 0, lease())])
    await asyncio.sleep(0)
    assert started.wait(10)
    monkeypatch.setattr(loop, "call_soon_threadsafe", tell)
    may_end.set()
    assert has_told.wait(10)
    time.sleep(0.1)  # a busy event loop: it learns of the end and of the time limit in the same turn
    await asyncio.wait_for(world.runner.wait_empty(), 10)
    ((_, text),) = world.answers
    assert error(decode_report(text))["type"] == "TaskTimeout"
    assert world.threads.left == 0
    for _ in range(world.threads.size):
        assert world.threads.has_room
        world.threads.reserve()
    assert not world.threads.has_room
    world.threads.close()
    world.runner.close()


class Careless(Retry):
    def __init__(self) -> None:
        """It leaves out that of its base, so that it has no delay."""


async def test_what_the_api_refuses_a_client_in_a_handler_puts_the_task_off() -> None:
    refused = {"code": -32029, "message": "Too many requests"}
    raised = [error_of({**refused, "data": {"retry_after": 7}}), error_of(refused)]

    async def act(n: int) -> None:
        raise raised[n]

    reports = await outcomes(Handler("act", act), 2)
    hints = [reports[n].hints for n in range(2)]  # type: ignore[union-attr]
    assert [(one.retry_after, one.snooze, one.hold) for one in hints] == [(7, True, "action"), (1, True, "action")]


async def test_an_exception_that_cannot_be_read_fails_its_task_alone() -> None:
    async def act(n: int) -> int:
        if n == 0:
            raise Careless
        return n

    async def several(calls: list[Call[Any]]) -> list[Any]:
        return [Careless(), 1]

    for handler in (Handler("act", act, max_attempts=3), Handler("act", several, batch=2, max_attempts=3)):
        reports = await outcomes(handler, 2)
        told = error(reports[0])
        assert (told["type"], told["max_attempts"]) == ("Careless", 3)
        assert "no attribute 'delay'" in told["message"]
        assert isinstance(reports[1], Succeeded)


class Faceless(Exception):
    @property  # type: ignore[misc]
    def __class__(self) -> type:
        raise RuntimeError("no class")


class Closed(Exception):
    def __getattribute__(self, name: str) -> Any:
        raise SystemExit(name)


async def test_an_exception_that_cannot_be_asked_for_its_class_fails_its_task() -> None:
    def act(n: int) -> int:
        if n < 2:
            raise (Faceless, Closed)[n]
        return n

    async def several(calls: list[Call[Any]]) -> list[Any]:
        return [Faceless(), Closed(), 2]

    reports = await outcomes(Handler("act", act), 3)
    assert [error(reports[n])["type"] for n in range(2)] == ["Faceless", "Closed"]
    assert isinstance(reports[2], Succeeded)
    reports = await outcomes(Handler("act", several, batch=3), 3)
    assert [type(reports[n]) for n in range(3)] == [Failed, Failed, Succeeded]


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("cannot say")


@dataclass
class Zero:
    n: int

    def __post_init__(self) -> None:
        if self.n:
            raise Unprintable if self.n == 1 else SystemExit(self.n)


async def test_parameters_of_a_batch_whose_check_ends_in_anything_fail_their_task_alone() -> None:
    async def several(calls: list[Call[Zero]]) -> list[int]:
        return [call.params.n for call in calls]

    reports = await outcomes(Handler("act", several, batch=2), 3)
    assert isinstance(reports[0], Succeeded)
    assert error(reports[2])["type"] == "SystemExit"
    assert isinstance(reports[1], Failed)  # its text fails too


@pytest.fixture
def traced() -> Iterator[None]:
    active.use(Spans(TracerProvider()))
    yield
    active.use(None)


async def test_an_exception_without_a_text_is_answered_while_it_is_traced(traced: None) -> None:
    async def act(n: int) -> None:
        raise Unprintable

    assert error((await outcomes(Handler("act", act), 1))[0])["type"] == "Unprintable"


def _none(calls: list[Call[Any]]) -> None:
    """It returns no list."""


def _too_few(calls: list[Call[Any]]) -> list[int]:
    calls.clear()  # a handler may change its list
    return [1]


@pytest.mark.parametrize("function", [_none, _too_few])
async def test_hooks_of_a_batch_without_an_answer_for_each_task_see_its_failure(
    monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any]
) -> None:
    seen: list[tuple[int, str]] = []

    @contextmanager
    def hook(ctx: Context) -> Iterator[None]:
        try:
            yield
        except BaseException as exc:
            seen.append((ctx.task_id, type(exc).__name__))
            raise
        seen.append((ctx.task_id, "no failure"))

    monkeypatch.setitem(HOOKS, "hook", hook)
    reports = await outcomes(Handler("act", function, batch=2), 2)
    assert {error(report)["type"] for report in reports.values()} == {"BadBatch"}
    assert sorted(seen) == [(0, "Unfit"), (1, "Unfit")]


@pytest.mark.parametrize("count", [1, 3])
async def test_a_hook_that_refuses_one_task_of_a_batch_fails_it_alone(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    left: list[int] = []

    @contextmanager
    def outer(ctx: Context) -> Iterator[None]:
        yield
        left.append(ctx.task_id)

    @contextmanager
    def refusing(ctx: Context) -> Iterator[None]:
        if ctx.task_id == 0:
            raise Retry(5, "not now")
        yield

    def act(calls: list[Call[Any]]) -> list[int]:
        return [call.params["n"] for call in calls]

    monkeypatch.setitem(HOOKS, "outer", outer)
    monkeypatch.setitem(HOOKS, "refusing", refusing)
    reports = await outcomes(Handler("act", act, batch=count), count)
    assert error(reports[0])["message"] == "not now"
    assert {n: report.result for n, report in reports.items() if n} == {n: str(n) for n in range(1, count)}  # type: ignore[union-attr]
    assert sorted(left) == [*range(1, count)]


async def test_raw_json_that_is_none_fails_its_own_task() -> None:
    texts = [b'{"a":null}', b'{"a":', b"", b"1,2", b'"\xff"', b"nan"]

    async def act(n: int) -> Any:
        return {"rows": msgspec.Raw(texts[n])} if n else msgspec.Raw(texts[n])

    reports = await outcomes(Handler("act", act), len(texts))
    assert reports[0].result == texts[0].decode()  # type: ignore[union-attr]
    told = [error(reports[n]) for n in range(1, len(texts))]
    assert [(one["type"], one["final"]) for one in told] == [("BadResult", True)] * 5


async def test_a_suspension_within_nested_task_groups_is_one() -> None:
    async def sleep() -> None:
        raise Suspend(seconds=5)

    async def inner() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(sleep())

    async def act(n: int) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(inner())

    assert isinstance((await outcomes(Handler("act", act), 1))[0], Suspended)


async def test_a_blocking_step_of_a_coroutine_fails_its_task_and_not_the_worker() -> None:
    async def act(ctx: Context, n: int) -> Any:
        return ctx.step_sync("charge", int)

    async def other(ctx: Context, n: int) -> Any:
        return await asyncio.to_thread(ctx.step_sync, "charge", int)

    assert "await ctx.step" in error((await outcomes(Handler("act", act), 1))[0])["message"]
    assert isinstance((await outcomes(Handler("act", other), 1))[0], Succeeded)


owner: ContextVar[int | None] = ContextVar("owner", default=None)


async def test_a_task_that_has_waited_for_its_slot_sees_no_context_variable_of_the_one_before() -> None:
    async def act(n: int) -> int | None:
        before = owner.get()
        owner.set(n)
        return before

    async def several(calls: list[Call[Any]]) -> list[int | None]:
        return [await act(call.params["n"]) for call in calls]

    for handler in (Handler("act", act), Handler("act", several, batch=1)):
        reports = await outcomes(handler, 3, concurrency=1)
        assert {report.result for report in reports.values()} == {"null"}  # type: ignore[union-attr]


async def test_each_task_of_a_batch_whose_result_does_not_fit_has_its_own_reason() -> None:
    async def several(calls: list[Call[Any]]) -> list[str]:
        return ["x" * (2000 + call.params["n"]) for call in calls]

    usual = gc.get_threshold()
    gc.set_threshold(1)  # what the worker raised for one task is gone before the next one
    try:
        reports = await outcomes(Handler("act", several, batch=50), 50)
    finally:
        gc.set_threshold(*usual)
    told = {n: error(report)["message"] for n, report in reports.items()}
    assert told == {n: f"the result is {2002 + n} bytes; the limit is 1024 (PENSTOCK_RESULT_LIMIT_BYTES)" for n in told}
