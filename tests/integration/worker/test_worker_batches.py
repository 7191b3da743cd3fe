"""Batched handlers, and handlers that wait, in a worker between two real queues."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any

import msgspec
import pytest

from penstock.brokers.sqs import SqsQueue
from penstock.protocol.reports import Failed, RunTimes, Succeeded, Waiting, WaitPolicy, claim_of_token
from penstock.protocol.requests import encode_call
from penstock.worker.handlers.actions import Registry, action
from penstock.worker.handlers.context import Call, Context
from penstock.worker.handlers.outcomes import Fail, Retry
from tests.integration.worker import test_worker
from tests.integration.worker.test_worker import PATIENCE_SECONDS, Bench, eventually, running, take

bench, database_url, registry = test_worker.bench, test_worker.database_url, test_worker.registry


class Item(msgspec.Struct):
    n: int


def calls_of(action_: str, *numbers: int) -> list[str]:
    return [encode_call(n, 1, action_, json.dumps({"n": n})) for n in numbers]


def kinds(outcomes: dict[int, Succeeded | Failed]) -> dict[int, Any]:
    """By task: its result, or the type of its error."""
    return {
        task_id: json.loads(o.result) if isinstance(o, Succeeded) else json.loads(o.error)["data"]["type"]
        for task_id, o in outcomes.items()
    }


async def test_tasks_of_several_messages_are_gathered_up_to_the_batch(bench: Bench, registry: Registry) -> None:
    sizes: list[int] = []

    @action("double", batch=4, linger=60, registry=registry)
    async def double(calls: list[Call[Item]]) -> list[int]:
        sizes.append(len(calls))
        return [2 * call.params.n for call in calls]

    for numbers in ((1, 2), (3,), (4, 5)):
        await bench.send(*calls_of("double", *numbers))
    async with running(bench.worker()) as worker:
        await take(worker, 3)
        assert len(await bench.outcomes(4)) == 4  # the fifth waits for a batch
        assert sizes == [4]
        await asyncio.wait_for(worker.settle(), PATIENCE_SECONDS)  # nothing more can come
    assert kinds(await bench.outcomes(5)) == {n: 2 * n for n in range(1, 6)}
    assert sizes == [4, 1]
    assert await bench.left() == 0


@pytest.mark.parametrize("in_thread", [False, True])
async def test_a_task_may_be_answered_before_the_others_of_its_batch(
    in_thread: bool, bench: Bench, registry: Registry
) -> None:
    rest = threading.Event()

    def answer_first(calls: list[Call[Item]]) -> None:
        calls[0].answer(10 * calls[0].params.n)
        calls[1].answer(Retry(reason="not yet"))

    if in_thread:

        @action("act", batch=3, linger=60, registry=registry)
        def plain(calls: list[Call[Item]]) -> list[Any]:
            answer_first(calls)
            assert rest.wait(PATIENCE_SECONDS)
            return [None, None, "last"]

    else:

        @action("act", batch=3, linger=60, registry=registry)
        async def coroutine(calls: list[Call[Item]]) -> list[Any]:
            answer_first(calls)
            await asyncio.to_thread(rest.wait, PATIENCE_SECONDS)
            return [None, None, "last"]

    for number in (1, 2, 3):
        await bench.send(*calls_of("act", number))
    async with running(bench.worker()) as worker:
        await take(worker, 3)
        assert kinds(await bench.outcomes(2)) == {1: 10, 2: "Retry"}
        rest.set()
        assert kinds(await bench.outcomes(3)) == {1: 10, 2: "Retry", 3: "last"}
        await asyncio.wait_for(worker.settle(), PATIENCE_SECONDS)
    assert await bench.left() == 0


@pytest.mark.parametrize("linger", [0, 0.05])
async def test_a_batch_that_does_not_fill_starts_after_its_linger(
    bench: Bench, registry: Registry, linger: float
) -> None:
    sizes: list[int] = []

    @action("act", batch=100, linger=linger, registry=registry)
    def act(calls: list[Call[Item]]) -> list[int]:
        assert threading.current_thread() is not threading.main_thread()
        sizes.append(len(calls))
        return [call.params.n for call in calls]

    await bench.send(*calls_of("act", 1, 2, 3))
    async with running(bench.worker()) as worker:
        await take(worker, 1)
        assert kinds(await bench.outcomes(3)) == {1: 1, 2: 2, 3: 3}
    assert sizes == [3]


async def test_each_task_is_answered_by_itself(bench: Bench, registry: Registry, results: SqsQueue) -> None:
    @action("act", batch=10, max_attempts=3, registry=registry)
    async def act(calls: list[Call[Item]]) -> list[Any]:
        assert [call.ctx.task_id for call in calls] == [1, 2, 3, 4, 5, 6]
        return [
            "fine", Retry(delay=7), Fail("never"), ValueError("this one"), float("nan"), "x" * 2000,
        ]  # fmt: skip

    await bench.send(*calls_of("act", 1, 2, 3, 4, 5, 6))
    await bench.work(result_limit_bytes=1000)
    outcomes = await bench.outcomes(6)
    assert kinds(outcomes) == {1: "fine", 2: "Retry", 3: "Fail", 4: "ValueError", 5: "BadResult", 6: "BadResult"}
    failed = {task_id: o.hints for task_id, o in outcomes.items() if isinstance(o, Failed)}
    assert (failed[2].retry_after, failed[3].final, failed[4].max_attempts) == (7, True, 3)


async def test_bad_params_are_refused_alone_and_do_not_join(bench: Bench, registry: Registry) -> None:
    seen: list[int] = []

    @action("act", batch=2, linger=60, registry=registry)
    def act(calls: list[Call[Item]]) -> list[None]:
        seen.extend(call.params.n for call in calls)
        return [None] * len(calls)

    bad = [encode_call(8, 1, "act", '{"n":"x"}'), encode_call(9, 1, "act", "[1]")]
    await bench.send(*bad, *calls_of("act", 1, 2))
    await bench.work(worker_threads=1)
    outcomes = await bench.outcomes(4)
    assert kinds(outcomes) == {1: None, 2: None, 8: "BadParams", 9: "BadParams"}
    assert isinstance(outcomes[8], Failed)
    assert json.loads(outcomes[8].error)["data"]["field"] == "n"
    assert seen == [1, 2]


async def test_only_bad_params_leave_nothing_behind(bench: Bench, registry: Registry) -> None:
    action("act", batch=2, registry=registry)(_never)
    await bench.send(encode_call(1, 1, "act", '{"n":"x"}'))
    await bench.work()
    assert kinds(await bench.outcomes(1)) == {1: "BadParams"}
    assert await bench.left() == 0


def _never(calls: list[Call[Item]]) -> list[Any]:
    raise AssertionError("called")


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        ([1], "1 answers to 2 tasks"),
        ([1, 2, 3], "3 answers"),
        (None, "NoneType"),
        ({1: 1, 2: 2}, "dict"),
        ("ab", "str"),
    ],
)
async def test_answers_that_cannot_be_told_apart_are_nobodys(
    bench: Bench, registry: Registry, returned: Any, told: str
) -> None:
    @action("act", batch=2, registry=registry)
    async def act(calls: list[Call[Item]]) -> Any:
        return returned

    await bench.send(*calls_of("act", 1, 2))
    await bench.work()
    outcomes = await bench.outcomes(2)
    assert kinds(outcomes) == {1: "BadBatch", 2: "BadBatch"}
    assert all(told in json.loads(o.error)["message"] for o in outcomes.values() if isinstance(o, Failed))


@pytest.mark.parametrize("is_async", [True, False])
async def test_an_exception_of_the_call_fails_each_task(bench: Bench, registry: Registry, is_async: bool) -> None:
    def plain(calls: list[Call[Item]]) -> list[Any]:
        raise Retry(delay=5) from LookupError("no luck")

    async def act(calls: list[Call[Item]]) -> list[Any]:
        return plain(calls)

    action("act", batch=5, registry=registry)(act if is_async else plain)
    await bench.send(*calls_of("act", 1, 2, 3))
    await bench.work()
    outcomes = await bench.outcomes(3)
    assert kinds(outcomes) == {1: "Retry", 2: "Retry", 3: "Retry"}
    for outcome in outcomes.values():
        assert isinstance(outcome, Failed)
        assert outcome.hints.retry_after == 5
        assert "no luck" in json.loads(outcome.error)["data"]["traceback"]


@pytest.mark.parametrize("is_async", [True, False])
async def test_a_call_over_its_time_is_stopped_and_all_its_tasks_answered(
    bench: Bench, registry: Registry, is_async: bool
) -> None:
    ended = threading.Event()

    def plain(calls: list[Call[Item]]) -> list[Any]:
        ended.wait(PATIENCE_SECONDS)
        return [1] * len(calls)

    async def act(calls: list[Call[Item]]) -> list[Any]:
        await asyncio.sleep(3600)
        return []

    action("act", batch=3, timeout=0.2, registry=registry)(act if is_async else plain)
    try:
        await bench.send(*calls_of("act", 1, 2, 3))
        await bench.work()
        assert kinds(await bench.outcomes(3)) == dict.fromkeys((1, 2, 3), "TaskTimeout")
    finally:
        ended.set()


async def test_a_call_over_its_time_whose_tasks_were_all_answered_leaves_its_slot(
    bench: Bench, registry: Registry
) -> None:
    async def act(calls: list[Call[Item]]) -> list[Any]:
        for call in calls:
            call.answer(call.params.n)
        await asyncio.sleep(3600)
        return []

    action("act", batch=2, timeout=0.2, registry=registry)(act)
    await bench.send(*calls_of("act", 1, 2))
    await asyncio.wait_for(bench.work(), PATIENCE_SECONDS)
    assert kinds(await bench.outcomes(2)) == {1: 1, 2: 2}


async def test_tasks_of_different_time_limits_do_not_share_a_call(bench: Bench, registry: Registry) -> None:
    sizes: list[int] = []

    @action("act", batch=10, registry=registry)
    async def act(calls: list[Call[Item]]) -> list[int]:
        sizes.append(len(calls))
        return [1] * len(calls)

    await bench.send(*calls_of("act", 1, 2), timeout_seconds="30")
    await bench.send(*calls_of("act", 3))
    await bench.work(messages=2)
    await bench.outcomes(3)
    assert sorted(sizes) == [1, 2]


async def test_every_task_of_a_call_gives_signs_of_life_and_reports_its_own_progress(
    bench: Bench, registry: Registry
) -> None:
    go_on = asyncio.Event()

    @action("act", batch=2, registry=registry)
    async def act(calls: list[Call[Item]]) -> list[Any]:
        for call in calls:
            await call.ctx.progress(call.params.n * 10, f"n {call.params.n}")
        await go_on.wait()
        return [None, None]

    await bench.send(*calls_of("act", 1, 2))
    async with running(bench.worker(heartbeat_seconds=0.1)) as worker:
        await take(worker, 1)
        await bench.until(lambda: min(len(bench.signs(1)), len(bench.signs(2))) >= 3, "signs of both")
        go_on.set()
        await asyncio.wait_for(worker.settle(), PATIENCE_SECONDS)
    details = {n: {sign.detail for sign in bench.signs(n)} for n in (1, 2)}
    assert details == {n: {f'{{"percent":{n}0.0,"note":"n {n}"}}', None} for n in (1, 2)}


async def test_a_task_that_waits_for_company_gives_signs_of_life(bench: Bench, registry: Registry) -> None:
    action("act", batch=2, linger=60, registry=registry)(lambda calls: [None] * len(calls))
    await bench.send(*calls_of("act", 1))
    async with running(bench.worker(heartbeat_seconds=0.1)) as worker:
        await take(worker, 1)
        await bench.until(lambda: len(bench.signs(1)) >= 2, "signs")
        await asyncio.wait_for(worker.settle(), PATIENCE_SECONDS)


async def test_a_lost_task_is_dropped_before_its_call_and_told_during_it(bench: Bench, registry: Registry) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()
    cancelled: dict[int, bool] = {}

    @action("act", batch=3, linger=60, registry=registry)
    async def act(calls: list[Call[Item]]) -> list[Any]:
        begun.set()
        await go_on.wait()
        cancelled.update({call.params.n: call.ctx.cancelled for call in calls})
        return [call.params.n for call in calls]

    await bench.send(*calls_of("act", 1, 2))
    async with running(bench.worker()) as worker:
        runner = worker._runner
        await take(worker, 1)
        attempts = {attempt.claim.task_id: attempt for attempt in runner.attempts()}
        runner.lose(next(iter(attempts.values())))
        first = next(iter(attempts))
        await bench.send(*calls_of("act", 3))
        await take(worker, 1)  # full now, one of them lost
        await asyncio.wait_for(begun.wait(), PATIENCE_SECONDS)
        second = next(attempt for attempt in runner.attempts() if attempt.claim.task_id != first)
        runner.lose(second)
        go_on.set()
        await asyncio.wait_for(worker.settle(), PATIENCE_SECONDS)
        (left,) = {1, 2, 3} - {first, second.claim.task_id}
        assert kinds(await bench.outcomes(1)) == {left: left}
    assert cancelled == {left: False, second.claim.task_id: True}
    assert await bench.left() == 0


async def test_a_batch_of_which_all_are_lost_is_not_called(bench: Bench, registry: Registry) -> None:
    action("act", batch=2, linger=60, registry=registry)(_never)
    action("other", registry=registry)(lambda ctx: "ran")
    await bench.send(*calls_of("act", 1))
    await bench.send(encode_call(2, 1, "other", "{}"))
    async with running(bench.worker(worker_threads=1)) as worker:
        await take(worker, 2)
        for attempt in list(worker._runner.attempts()):
            if attempt.handler.name == "act":
                worker._runner.lose(attempt)
        await asyncio.wait_for(worker.settle(), PATIENCE_SECONDS)
    assert kinds(await bench.outcomes(1)) == {2: "ran"}
    assert await bench.left() == 0


async def test_what_waits_for_company_is_given_back_at_the_end(bench: Bench, registry: Registry) -> None:
    sizes: list[int] = []

    @action("act", batch=3, linger=60, registry=registry)
    async def act(calls: list[Call[Item]]) -> list[int]:
        sizes.append(len(calls))
        return [1] * len(calls)

    await bench.send(*calls_of("act", 1, 2, 3, 4))  # the fourth's message has begun, so it is finished
    await bench.send(*calls_of("act", 5), timeout_seconds="30")
    async with running(bench.worker()) as worker:
        await take(worker, 2)
        await bench.outcomes(3)
        worker.stop_taking()
        await asyncio.wait_for(worker.drain(PATIENCE_SECONDS), PATIENCE_SECONDS)
    assert set(await bench.outcomes(4)) == {1, 2, 3, 4}
    assert sizes == [3, 1]
    (message,) = await test_worker.receive(bench.outbound)
    assert '"id":"5:1"' in message.body


async def test_suspects_run_in_calls_of_their_own(bench: Bench, registry: Registry) -> None:
    sizes: list[int] = []

    @action("act", batch=10, linger=60, registry=registry)
    async def act(calls: list[Call[Item]]) -> list[int]:
        sizes.append(len(calls))
        return [1] * len(calls)

    await bench.send(*calls_of("act", 1, 2), suspect="1")
    async with running(bench.worker()) as worker:
        await take(worker, 1)
        await bench.outcomes(2)
    assert sizes == [1, 1]


async def test_the_time_of_a_call_is_shared_among_its_tasks(bench: Bench, registry: Registry) -> None:
    @action("act", batch=4, registry=registry)
    async def act(calls: list[Call[Item]]) -> list[Any]:
        await asyncio.sleep(0.3)
        return [None] * len(calls)

    await bench.send(*calls_of("act", 1, 2, 3, 4))
    began = time.monotonic()
    async with running(bench.worker()) as worker:
        await take(worker, 1)

        def told() -> list[RunTimes]:
            return [r for r in bench.reports if isinstance(r, RunTimes)]

        await bench.until(told, "run times")
        elapsed = time.monotonic() - began
        await asyncio.wait_for(worker.settle(), PATIENCE_SECONDS)
    ((count, seconds),) = (times.actions["act"] for times in told())
    assert count == 4
    assert 0.3 <= seconds <= elapsed


async def test_calls_count_against_the_concurrency(bench: Bench, registry: Registry) -> None:
    running_now, most = 0, 0

    @action("act", batch=2, registry=registry)
    async def act(calls: list[Call[Item]]) -> list[Any]:
        nonlocal running_now, most
        running_now += 1
        most = max(most, running_now)
        await asyncio.sleep(0.01)
        running_now -= 1
        return [None] * len(calls)

    await bench.send(*calls_of("act", *range(1, 41)))
    await bench.work(worker_concurrency=3)
    assert len(await bench.outcomes(40)) == 40
    assert most == 3


# Handlers that wait


async def test_a_handler_that_waits_reports_it_and_its_message_is_done(bench: Bench, registry: Registry) -> None:
    tokens: list[str] = []

    @action("ask", max_attempts=4, registry=registry)
    async def ask(ctx: Context) -> Any:
        tokens.append(ctx.wait_token())
        return ctx.wait(timeout=60, on_timeout="fail")

    @action("mine", registry=registry)
    def mine(ctx: Context) -> Any:
        return ctx.wait(f"order {ctx.task_id}")

    await bench.send(encode_call(1, 7, "ask", "{}"), encode_call(2, 7, "mine", "{}"))
    await bench.work()

    def waits() -> list[Waiting]:
        return [r for r in bench.reports if isinstance(r, Waiting)]

    await bench.until(lambda: len(waits()) == 2, "waits")
    by_task = {wait.task_id: wait for wait in waits()}
    assert by_task[1] == Waiting(1, 7, tokens[0], 60.0, WaitPolicy(final=True, max_attempts=4))
    assert by_task[2] == Waiting(2, 7, "order 2", None, WaitPolicy())
    assert claim_of_token(tokens[0]) == (1, 7)

    async def all_gone() -> bool:
        return await bench.left() == 0

    await eventually(all_gone, "an empty queue")


async def test_a_wait_of_another_task_is_refused(bench: Bench, registry: Registry) -> None:
    @action("act", batch=2, registry=registry)
    async def act(calls: list[Call[Item]]) -> list[Any]:
        return [calls[1].ctx.wait(), "fine"]

    await bench.send(*calls_of("act", 1, 2))
    await bench.work()
    assert kinds(await bench.outcomes(2)) == {1: "BadResult", 2: "fine"}
