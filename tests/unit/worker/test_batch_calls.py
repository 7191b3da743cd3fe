"""Batches: registration, parameters, and that no answer ever reaches another task than its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

import msgspec
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from penstock.brokers.base import Message
from penstock.payloads.codec import PayloadCodec
from penstock.protocol.errors import InvalidParams, SettingsError
from penstock.protocol.reports import Failed, Succeeded, Waiting, decode_report
from penstock.protocol.requests import ClaimId
from penstock.settings.model import load_settings
from penstock.worker.attempt import Attempt
from penstock.worker.handlers.actions import Handler, Registry, action
from penstock.worker.handlers.context import Call, Context
from penstock.worker.handlers.lifespan import Resources
from penstock.worker.handlers.outcomes import Fail, Retry
from penstock.worker.leases import Lease
from penstock.worker.result_sender import Timings
from penstock.worker.runner import Runner
from penstock.worker.threads import Threads

if TYPE_CHECKING:
    from decimal import Decimal as OnlyForCheckers


class AStruct(msgspec.Struct):
    n: int
    m: str = "m"


@dataclass
class ADataclass:
    n: int


class ATypedDict(TypedDict):
    n: int


class Odd:
    """No type that can be checked."""


def fit(function: Callable[..., Any], params: str) -> Any:
    return Handler("act", function, batch=5).fit(params.encode())


def test_parameters_are_converted_to_what_the_calls_are_declared_to_hold() -> None:
    def structs(calls: list[Call[AStruct]]) -> None: ...
    def dataclasses(calls: Sequence[Call[ADataclass]]) -> None: ...
    def dicts(calls: list[Call[ATypedDict]]) -> None: ...
    def anything(calls: list[Call[Any]]) -> None: ...
    def bare(calls: list[Call]) -> None: ...  # type: ignore[type-arg]
    def silent(calls): ...  # type: ignore[no-untyped-def]
    def lists(calls: list[Call[tuple[int, str]]]) -> None: ...

    assert fit(structs, '{"n":1}') == AStruct(1, "m")
    assert fit(dataclasses, '{"n":1}') == ADataclass(1)
    assert fit(dicts, '{"n":1}') == {"n": 1}
    assert fit(lists, '[1,"x"]') == (1, "x")
    assert fit(anything, "[1]") == fit(bare, "[1]") == fit(silent, "[1]") == [1]
    assert fit(silent, "") == {}


@pytest.mark.parametrize(
    ("params", "field"),
    [("{}", "params"), ('{"n":"1"}', "n"), ('{"n":1,"m":2}', "m"), ("[1]", "params"), ("{", "params")],
)
def test_parameters_that_do_not_fit_are_named(params: str, field: str) -> None:
    def structs(calls: list[Call[AStruct]]) -> None: ...

    with pytest.raises(InvalidParams) as caught:
        fit(structs, params)
    assert caught.value.data["field"] == field


def _no_parameter() -> None: ...
def _two(calls: list[Call[AStruct]], more: int) -> None: ...
def _of_one_task(ctx: Context, n: int) -> None: ...
def _context_alone(ctx: Context) -> None: ...
def _no_calls(calls: list[AStruct]) -> None: ...
def _one_call(calls: Call[AStruct]) -> None: ...
def _by_name(*, calls: list[Call[AStruct]]) -> None: ...
def _odd(calls: list[Call[Odd]]) -> None: ...
def _unknown(calls: list[Call[OnlyForCheckers]]) -> None: ...


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (_no_parameter, "must take one parameter"), (_two, "must take one parameter"),
        (_of_one_task, "must take one parameter"), (_by_name, "must take one parameter"),
        (_context_alone, "must be a list"), (_no_calls, "must be a list"), (_one_call, "must be a list"),
        (_odd, "cannot be checked"), (_unknown, "name 'OnlyForCheckers' is not defined"),
    ],
)  # fmt: skip
def test_a_function_that_takes_no_list_of_calls_is_refused(function: Callable[..., Any], told: str) -> None:
    with pytest.raises(SettingsError, match=told) as caught:
        Handler("act", function, batch=5)
    assert "'act'" in str(caught.value)


@pytest.mark.parametrize(
    "given_", [{"batch": 0}, {"batch": True}, {"batch": 1.5}, {"batch": 10_001}, {"linger": 1},
               {"batch": 2, "linger": -1}, {"batch": 2, "linger": float("nan")}, {"batch": 2, "linger": 61}],
)  # fmt: skip
def test_numbers_that_make_no_sense_are_refused(given_: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=r"batch|linger"):
        action("act", registry=Registry(), **given_)(lambda calls: [])


def test_a_handler_of_a_batch_can_be_tried_by_itself() -> None:
    calls = [Call(Context(n, 1, "act"), AStruct(n)) for n in range(3)]
    assert [call.params.n for call in calls] == [call.ctx.task_id for call in calls]


def test_the_context_of_a_call_is_made_when_it_is_asked_for_and_once() -> None:
    made: list[Context] = []

    def make() -> Context:
        made.append(Context(7, 1, "act"))
        return made[-1]

    call = Call(make, {"n": 1})
    call.answer("no one waits for it")
    assert not made
    assert call.ctx is call.ctx is made[0]
    assert repr(call) == "Call(task_id=7, params={'n': 1})"


class World:
    """A runner whose answers are caught."""

    def __init__(self, concurrency: int) -> None:
        self.threads = Threads(2)
        self.answers: list[tuple[Attempt, str]] = []
        settings = load_settings(
            worker_concurrency=concurrency, task_timeout_seconds=60, result_limit_bytes=1024, result_compress_bytes=None
        )
        self.runner = Runner(
            settings=settings,
            threads=self.threads,
            codec=PayloadCodec(),
            timings=Timings(),
            answer=lambda attempt, text: self.answers.append((attempt, text)),
            progress=lambda *_: None,
            resources=Resources(in_child=False),
            send_step=lambda _attempt, _entry: asyncio.sleep(0),
            send_output=lambda *_: None,
        )

    def attempt(self, handler: Handler, task_id: int, lease: Lease) -> Attempt:
        params = msgspec.Raw(f'{{"n":{task_id}}}'.encode())
        return Attempt(
            handler, handler.timeout or 60, lease.received_at, f"{task_id}:1", ClaimId(task_id, 1), params, lease,
            lease.received_at,
        )  # fmt: skip


EXPECTED = {
    "result": Succeeded, "none": Succeeded, "raise": Failed, "retry": Failed, "fail": Failed, "wait": Waiting,
    "bad": Failed,
}  # fmt: skip
fates = st.sampled_from(sorted(EXPECTED))


def outcome_of(fate: str, call: Call[AStruct]) -> Any:
    n = call.params.n
    match fate:
        case "result":
            return {"n": n}
        case "none":
            return None
        case "raise":
            return ValueError(f"n {n}.")
        case "retry":
            return Retry(delay=n, reason=f"n {n}.")
        case "fail":
            return Fail(f"n {n}.")
        case "wait":
            return call.ctx.wait(f"n {n}.")
    return {n}.__iter__()


@given(
    messages=st.lists(st.lists(fates, min_size=1, max_size=6), min_size=1, max_size=6),
    batch=st.integers(1, 7),
    linger=st.sampled_from([0, 0.001, 60]),
    concurrency=st.integers(1, 3),
    is_async=st.booleans(),
    lost=st.sets(st.integers(0, 35), max_size=5),
    alone=st.booleans(),
)
@hypothesis_settings(deadline=None, max_examples=150)
def test_every_task_has_its_own_answer_and_no_other(
    messages: list[list[str]], batch: int, linger: float, concurrency: int, is_async: bool, lost: set[int], alone: bool
) -> None:
    fate_of = [fate for message in messages for fate in message]
    called: list[int] = []

    def plain(calls: list[Call[AStruct]]) -> list[Any]:
        assert 1 <= len(calls) <= (1 if alone else batch)
        called.extend(call.ctx.task_id for call in calls)
        answers = [outcome_of(fate_of[call.params.n], call) for call in calls]
        calls.clear()  # a handler may change its list
        return answers

    async def asynchronous(calls: list[Call[AStruct]]) -> list[Any]:
        await asyncio.sleep(0)
        return plain(calls)

    async def run() -> World:
        world = World(concurrency)
        handler = Handler("act", asynchronous if is_async else plain, batch=batch, linger=linger)
        number = 0
        for place, message in enumerate(messages):
            lease = Lease(Message(str(place), "r", "", 1, None, {}), len(message), 0.0, 30.0)
            attempts = [world.attempt(handler, number + n, lease) for n in range(len(message))]
            number += len(message)
            for attempt in attempts:
                if attempt.claim.task_id in lost:
                    world.runner.lose(attempt)
            world.runner.add(attempts, alone=alone)
            if place % 2:
                await asyncio.sleep(0)
        await asyncio.wait_for(world.runner.wait_empty(), 30)
        world.threads.close()
        world.runner.close()
        return world

    world = asyncio.run(run())
    assert sorted(attempt.claim.task_id for attempt, _ in world.answers) == list(range(len(fate_of)))
    assert sorted(called) == [n for n in range(len(fate_of)) if n not in lost]
    for attempt, text in world.answers:
        n = attempt.claim.task_id
        if n in lost:
            continue
        report = decode_report(text)
        assert type(report) is EXPECTED[fate_of[n]]
        assert isinstance(report, Succeeded | Failed | Waiting)
        assert report.task_id == n
        if fate_of[n] == "result":
            assert isinstance(report, Succeeded)
            assert json.loads(report.result) == {"n": n}
        elif fate_of[n] not in ("none", "bad"):
            assert f"n {n}." in text
