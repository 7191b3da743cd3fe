"""Durable steps: through scheduler's messages, worker, results queue and resulter, with real queues and Postgres."""

from __future__ import annotations

import ast
import asyncio
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec import Raw

from penstock.brokers.base import Message
from penstock.brokers.sqs import SqsQueue
from penstock.db.pool import Store
from penstock.methods.inbound import accept_inbound, read_inbound
from penstock.payloads.codec import PayloadCodec
from penstock.protocol.errors import InvalidParams
from penstock.protocol.journal import Entry, add_entries, encode_entry, encode_step
from penstock.protocol.reports import (
    Stepped,
    decode_reports,
    encode_error,
    encode_notification,
    encode_progress,
    encode_result,
)
from penstock.protocol.requests import join_batch
from penstock.protocol.retry import Backoff
from penstock.protocol.sealed import SEALED_ENCODING, Reference, encode_reference
from penstock.protocol.task import Claimed, NewTask
from penstock.resulter import Resulter
from penstock.results.apply import ApplySummary, apply_reports
from penstock.settings.model import Settings, load_settings
from penstock.settings.payload_texts import new_key
from penstock.supervisor.retention import Retention
from penstock.tasks import claim as claims
from penstock.tasks import enqueue
from penstock.worker.handlers.actions import REGISTRY, Registry, action
from penstock.worker.handlers.context import Call, Context, TaskCancelled
from penstock.worker.handlers.outcomes import Fail
from penstock.worker.handlers.steps import Step, StepFailed
from penstock.worker.process import Worker
from tests.integration.apis import running as serving
from tests.integration.cli.test_task_commands import run
from tests.integration.doors import request
from tests.integration.test_resulter import drained, name
from tests.integration.test_waits import World
from tests.integration.worker.test_worker import running, take
from tests.packs import pack_messages
from tests.s3 import S3Bucket
from tests.waiting import wait_until

LATER = timedelta(days=400)


class Line:
    """One task on its way through the pipeline, attempt by attempt."""

    def __init__(self, store: Store, outbound: SqsQueue, results: SqsQueue, settings: Settings) -> None:
        self.store, self.outbound, self.results, self.settings = store, outbound, results, settings
        self.resulter = Resulter(store=store, results=results, settings=settings)
        self.ran: list[str] = []

    async def enqueue(self, *tasks: NewTask) -> list[int]:
        async with self.store.transaction() as session:
            return [one.id for one in await enqueue.enqueue(session, tasks or [NewTask("order")])]

    async def claim(self) -> list[Claimed]:
        async with self.store.session() as session:
            batch = await claims.claim(session, 100, now=datetime.now(UTC) + LATER)
            assert batch is not None
            await claims.confirm(session, batch.id)
        return batch.tasks

    async def send(self) -> list[Claimed]:
        await self.store.read_fence()
        tasks = await self.claim()
        packed = pack_messages(
            tasks, {}, max_tasks=10, max_bytes=self.outbound.limits.max_message_bytes, max_seconds=10,
            fence=self.store.fence,
        )  # fmt: skip
        assert (await self.outbound.send([one.message for one in packed])).failed == []
        return tasks

    def worker(self, handler: Any, *, batch: int | None = None, **changes: Any) -> Worker:
        registry = Registry()
        action("order", registry=registry, batch=batch)(handler)
        settings = self.settings.model_copy(update=changes)
        return Worker(outbound=self.outbound, results=self.results, settings=settings, registry=registry)

    async def work(self, handler: Any, **changes: Any) -> None:
        """One message, by a worker with this handler; its reports stay in the results queue."""
        worker = handler if isinstance(handler, Worker) else self.worker(handler, **changes)
        async with running(worker):
            await take(worker, 1)
            await asyncio.wait_for(worker.settle(), 60)

    async def attempt(self, handler: Any, **changes: Any) -> Claimed:
        """The next attempt of the only task, its reports recorded."""
        (task,) = await self.send()
        await self.work(handler, **changes)
        await drained(self.resulter)
        return task

    async def apply(self, *texts: str) -> ApplySummary:
        async with self.store.transaction() as session:
            return await apply_reports(session, decode_reports(join_batch(texts), batch_limit=100), self.settings)

    async def take_reports(self) -> list[Message]:
        """What is in the results queue, which loses it."""
        taken: list[Message] = []
        while found := await self.results.receive(wait_seconds=0, visibility_seconds=30):
            await self.results.delete(found)
            taken += found
        return taken

    def ran_now(self) -> list[str]:
        ran, self.ran = self.ran, []
        return ran

    def refuse(self) -> None:
        raise OSError("refused")

    def does(self, name: str, result: Any = None) -> Callable[[], Any]:
        def function() -> Any:
            self.ran.append(name)
            return name if result is None else result

        return function


@pytest.fixture
def line(store: Store, outbound: SqsQueue, results: SqsQueue, settings: Settings) -> Line:
    return Line(store, outbound, results, settings)


async def journal(sql: Any) -> list[tuple[str, int, Any]]:
    """(name, repetition, result or error's type)"""
    rows = await sql.fetch(
        "select name, repetition, entry from penstock.journal_entry order by position, name, repetition"
    )
    return [(row[0], row[1], value_of(json.loads(row[2]))) for row in rows]


def value_of(entry: dict[str, Any]) -> Any:
    return entry["error"]["data"]["type"] if "error" in entry else entry["result"]


def entry(name: str, result: Any = 1, position: int = 0, **more: Any) -> str:
    return encode_entry(Entry(name=name, position=position, result=Raw(json.dumps(result).encode()), **more))


# Running once


async def test_a_later_attempt_runs_no_finished_step_again(line: Line, task_of: Any, sql: Any) -> None:
    fails = True

    async def order(ctx: Context, item: str) -> list[Any]:
        charge = await ctx.step("charge", line.does("charge", {"id": 7, "item": item}))
        again = await ctx.step("charge", line.does("charge again"))
        if fails:
            raise RuntimeError("no paper")
        return [charge, again, await ctx.step("mail", send, charge["id"], copies=2)]

    async def send(number: int, copies: int) -> list[int]:
        line.ran.append("mail")
        return [number, copies]

    (task_id,) = await line.enqueue(NewTask("order", payload='{"item":"pen"}'))
    first = await line.attempt(order)
    assert line.ran_now() == ["charge", "charge again"]
    assert first.journal is None
    assert await journal(sql) == [("charge", 0, {"id": 7, "item": "pen"}), ("charge", 1, "charge again")]
    fails = False
    second = await line.attempt(order)
    assert [one["name"] for one in json.loads(second.journal or "[]")] == ["charge", "charge"]
    assert line.ran_now() == ["mail"]
    seen = await task_of(task_id)
    assert (seen["state"], seen["attempts"]) == ("SUCCESS", 2)
    assert json.loads(seen["result"]) == [{"id": 7, "item": "pen"}, "charge again", [7, 2]]


async def test_a_plain_function_has_steps_too(line: Line, task_of: Any) -> None:
    calls = 0

    def order(ctx: Context) -> Any:
        nonlocal calls
        calls += 1
        charge = ctx.step_sync("charge", line.does("charge", [1, 2]))
        if calls == 1:
            raise RuntimeError("once")
        return charge

    (task_id,) = await line.enqueue()
    await line.attempt(order)
    await line.attempt(order)
    assert line.ran_now() == ["charge"]
    assert json.loads((await task_of(task_id))["result"]) == [1, 2]


async def test_a_result_is_in_each_attempt_what_json_makes_of_it(line: Line, task_of: Any) -> None:
    async def order(ctx: Context) -> Any:
        return str(await ctx.step("pair", lambda: (1, datetime(2030, 1, 31, tzinfo=UTC))))

    (task_id,) = await line.enqueue()
    await line.attempt(order)
    assert json.loads((await task_of(task_id))["result"]) == "[1, '2030-01-31T00:00:00Z']"


async def test_steps_side_by_side_may_finish_in_any_order(line: Line, task_of: Any) -> None:
    calls = 0

    async def order(ctx: Context) -> Any:
        nonlocal calls
        calls += 1
        gate = asyncio.Event()

        async def slow() -> str:
            line.ran.append("slow")
            await gate.wait()
            raise RuntimeError("not yet")

        async def quick() -> str:
            line.ran.append("quick")
            gate.set()
            return "quick"

        async def last() -> str:
            line.ran.append("last")
            return "last"

        return await asyncio.gather(ctx.step("slow", slow if calls == 1 else last), ctx.step("quick", quick))

    (task_id,) = await line.enqueue()
    await line.attempt(order)
    assert line.ran_now() == ["slow", "quick"]
    await line.attempt(order)
    assert line.ran_now() == ["last"]
    assert json.loads((await task_of(task_id))["result"]) == ["last", "quick"]


# A handler that was changed


@pytest.mark.parametrize(
    ("steps", "problem"),
    [
        (["pay"], "the handler calls its step 'pay', but the journal of the task has 'charge' next"),
        ([], "the handler ended without its step 'charge', which the journal of the task has"),
        (["charge"], "the handler ended without its step 'mail'"),
        (["charge", "charge", "mail"], "the handler calls its step 'charge#2', but the journal of the task has 'mail'"),
    ],
)
async def test_a_changed_or_missing_step_fails_the_attempt_before_another_runs(
    line: Line, task_of: Any, steps: list[str], problem: str
) -> None:
    names: Iterable[str] = ("charge", "mail")
    fails = True

    async def order(ctx: Context) -> None:
        for one in names:
            await ctx.step(one, line.does(one))
        if fails:
            raise RuntimeError("once")

    (task_id,) = await line.enqueue()
    await line.attempt(order)
    line.ran_now()
    names, fails = steps, False
    await line.attempt(order)
    error = json.loads((await task_of(task_id))["error"])
    assert error["data"]["type"] == "StepChanged"
    assert error["data"]["message"].startswith(problem)
    assert line.ran_now() == []
    names = ("charge", "mail", "new")
    await line.attempt(order)
    assert (await task_of(task_id))["state"] == "SUCCESS"
    assert line.ran_now() == ["new"]


async def test_a_handler_that_takes_no_context_any_more_is_changed_too(line: Line, task_of: Any) -> None:
    async def order(ctx: Context) -> None:
        await ctx.step("charge", line.does("charge"))
        raise RuntimeError("once")

    def plain() -> None:
        pass

    (task_id,) = await line.enqueue()
    await line.attempt(order)
    await line.attempt(plain)
    assert json.loads((await task_of(task_id))["error"])["data"]["type"] == "StepChanged"


# Sleeps and events


async def test_a_sleep_suspends_the_task_and_spends_no_attempt(line: Line, task_of: Any, sql: Any) -> None:
    until = datetime(2040, 1, 31, tzinfo=UTC)

    async def order(ctx: Context) -> str:
        await ctx.step("charge", line.does("charge"))
        await ctx.sleep(timedelta(hours=1))
        await ctx.step("remind", line.does("remind"))
        await ctx.sleep_until(until)
        return await ctx.step("ship", line.does("ship"))

    (task_id,) = await line.enqueue()
    await line.attempt(order)
    seen = await task_of(task_id)
    assert (seen["state"], seen["attempts"], seen["failures"]) == ("SCHEDULED", 0, None)
    assert timedelta(minutes=55) < seen["run_at"] - datetime.now(UTC) < timedelta(minutes=61)
    await line.attempt(order)
    assert (await task_of(task_id))["run_at"] == until
    await sql.execute("update penstock.task set run_at = now()")
    await line.attempt(order)
    seen = await task_of(task_id)
    assert (seen["state"], seen["attempts"], json.loads(seen["result"])) == ("SUCCESS", 1, "ship")
    assert line.ran_now() == ["charge", "remind", "ship"]
    names = [("charge", 0), ("ctx.sleep", 0), ("remind", 0), ("ctx.sleep", 1), ("ship", 0)]
    assert [(one[0], one[1]) for one in await journal(sql)] == names


async def test_sleeps_and_events_of_plain_functions(line: Line, task_of: Any) -> None:
    def order(ctx: Context) -> Any:
        ctx.sleep_sync(3600)
        ctx.sleep_until_sync(datetime(2001, 1, 1, tzinfo=UTC))
        return ctx.event_sync("t", timeout=60)

    (task_id,) = await line.enqueue()
    for _ in range(3):
        await line.attempt(order)
    world = World(line.store, line.settings)
    assert (await world.answer(result={"by": "Ann"}))[:2] == (task_id, "SCHEDULED")
    await line.attempt(order)
    assert json.loads((await task_of(task_id))["result"]) == {"by": "Ann"}


@pytest.mark.parametrize("comes_first", [False, True])
async def test_an_event_goes_on_in_the_same_handler(line: Line, task_of: Any, comes_first: bool, sql: Any) -> None:
    async def order(ctx: Context) -> Any:
        charge = await ctx.step("charge", line.does("charge"))
        approval = await ctx.event(f"approve-{ctx.task_id}", timeout=3600)
        return [charge, approval, await ctx.step("ship", line.does("ship"))]

    (task_id,) = await line.enqueue()
    world, token = World(line.store, line.settings), f"approve-{task_id}"
    if comes_first:
        assert await world.answer(token=token, result={"by": "Ann"}) == (None, None, True, False)
    await line.attempt(order)
    if not comes_first:
        assert (await task_of(task_id))["state"] == "WAITING"
        assert await world.answer(token=token, result={"by": "Ann"}) == (task_id, "SCHEDULED", False, False)
    seen = await task_of(task_id)
    assert (seen["state"], seen["attempts"]) == ("SCHEDULED", 0)
    assert await world.answer(token=token, result={"by": "Ann"}) == (task_id, "SCHEDULED", False, True)
    await line.attempt(order)
    assert json.loads((await task_of(task_id))["result"]) == ["charge", {"by": "Ann"}, "ship"]
    assert line.ran_now() == ["charge", "ship"]
    assert await journal(sql) == [("charge", 0, "charge"), ("ctx.event", 0, {"by": "Ann"}), ("ship", 0, "ship")]


async def test_a_failed_event_and_one_that_does_not_come_are_exceptions_in_the_handler(
    line: Line, task_of: Any
) -> None:
    async def order(ctx: Context) -> Any:
        said = []
        for token in ("first", "second"):
            try:
                await ctx.event(token, timeout=60)
            except TimeoutError as exc:
                said.append(str(exc))
            except StepFailed as exc:
                said.append(f"{exc.kind} {exc.message}")
        return said

    (task_id,) = await line.enqueue()
    world = World(line.store, line.settings)
    await line.attempt(order)
    assert (await world.answer("fail", "first", error="declined"))[:2] == (task_id, "SCHEDULED")
    await line.attempt(order)
    assert await world.give_up() == 1
    assert (await task_of(task_id))["state"] == "SCHEDULED"
    await line.attempt(order)
    late = "step ctx.event#2: WaitTimeout: no answer came before its wait timed out"
    assert json.loads((await task_of(task_id))["result"]) == ["Error declined", late]


async def test_a_sleep_beside_a_running_step_is_an_error(line: Line, task_of: Any) -> None:
    async def order(ctx: Context) -> None:
        async def slow() -> None:
            await asyncio.sleep(60)

        async with asyncio.TaskGroup() as group:
            group.create_task(ctx.step("slow", slow))
            group.create_task(ctx.sleep(1))

    (task_id,) = await line.enqueue()
    await line.attempt(order)
    assert "a step still runs: await the step first" in (await task_of(task_id))["error"]


async def test_a_task_group_may_suspend_its_task(line: Line, task_of: Any) -> None:
    async def order(ctx: Context) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(ctx.sleep(60))

    (task_id,) = await line.enqueue()
    await line.attempt(order)
    assert ((await task_of(task_id))["state"], (await task_of(task_id))["attempts"]) == ("SCHEDULED", 0)


# Retries, timeouts, final failures


async def test_a_step_with_retries_of_its_own_is_tried_within_the_attempt(line: Line, task_of: Any) -> None:
    quickly = Backoff(0.001, 1, 0.001)

    async def order(ctx: Context) -> Any:
        def flaky() -> str:
            line.ran.append("try")
            if len(line.ran) < 3:
                raise OSError("away")
            return "there"

        return await ctx.step(Step("fetch", retries=3, backoff=quickly), flaky)

    (task_id,) = await line.enqueue()
    await line.attempt(order)
    seen = await task_of(task_id)
    assert (seen["attempts"], json.loads(seen["result"]), len(line.ran_now())) == (1, "there", 3)


@pytest.mark.parametrize("is_plain", [False, True])
async def test_the_final_failure_of_a_step_is_kept_and_may_be_caught(line: Line, task_of: Any, is_plain: bool) -> None:
    calls = 0
    charge = Step("charge", retries=1, backoff=Backoff(0.001, 1, 0.001), timeout=0.05)

    def hangs() -> None:
        line.ran.append("charge")
        time.sleep(0.5)

    def end(ctx: Context, exc: StepFailed) -> str:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise RuntimeError("once more")
        return f"{exc.kind}: {exc.message}"

    async def order(ctx: Context) -> str:
        try:
            await ctx.step(charge, hangs)
        except StepFailed as exc:
            await ctx.step("refund", line.does("refund"))
            return end(ctx, exc)
        return "charged"

    def plain(ctx: Context) -> str:
        try:
            ctx.step_sync(charge, hangs)
        except StepFailed as exc:
            ctx.step_sync("refund", line.does("refund"))
            return end(ctx, exc)
        return "charged"

    (task_id,) = await line.enqueue()
    await line.attempt(plain if is_plain else order)
    assert line.ran_now() == ["charge", "charge", "refund"]
    await line.attempt(plain if is_plain else order)
    assert line.ran_now() == []
    assert json.loads((await task_of(task_id))["result"]) == "TimeoutError: not finished after 0.05 s"


async def test_a_final_failure_that_is_not_caught_ends_the_task_and_a_retry_runs_the_step_again(
    line: Line, task_of: Any, sql: Any
) -> None:
    is_broken = True

    def charge() -> str:
        line.ran.append("charge")
        if is_broken:
            raise Fail("declined")
        return "paid"

    async def order(ctx: Context) -> Any:
        return [await ctx.step("reserve", line.does("reserve")), await ctx.step("charge", charge)]

    (task_id,) = await line.enqueue()
    await line.attempt(order)
    seen = await task_of(task_id)
    assert (seen["state"], seen["attempts"]) == ("CRITICAL_ERROR", 1)
    assert json.loads(seen["error"])["data"]["type"] == "StepFailed"
    assert await journal(sql) == [("reserve", 0, "reserve"), ("charge", 0, "Fail")]
    is_broken = False
    async with line.store.transaction() as session:
        await World(line.store, line.settings).change(session, "retry", id=task_id)
    await line.attempt(order)
    assert line.ran_now() == ["reserve", "charge", "charge"]
    assert json.loads((await task_of(task_id))["result"]) == ["reserve", "paid"]


@pytest.mark.parametrize("reserves", [True, False])
async def test_reports_that_come_again_after_a_retry_bring_no_failed_step_back(
    line: Line, task_of: Any, sql: Any, reserves: bool
) -> None:
    is_broken = True

    def charge() -> str:
        if is_broken:
            raise Fail("declined")
        return "paid"

    async def order(ctx: Context) -> Any:
        return [await ctx.step("reserve", line.does("reserve")) if reserves else "", await ctx.step("charge", charge)]

    (task_id,) = await line.enqueue()
    (first,) = await line.send()
    await line.work(order)
    texts = [
        json.dumps(one)
        for message in await line.take_reports()
        for body in [json.loads(message.body)]
        for one in (body if isinstance(body, list) else [body])
    ]
    await line.apply(*texts)
    finished = [("reserve", 0, "reserve")] if reserves else []
    assert await journal(sql) == [*finished, ("charge", 0, "Fail")]
    async with line.store.transaction() as session:
        await World(line.store, line.settings).change(session, "retry", id=task_id)
    await line.apply(*texts)  # as after a resulter that died before it deleted the message
    assert await journal(sql) == finished
    if reserves:  # one that has finished stays so, however late its report
        await sql.execute("delete from penstock.journal_entry")
        await line.apply(encode_step(name(first), entry("reserve", "reserve")))
        assert await journal(sql) == finished
    is_broken = False
    await line.send()
    await line.apply(*texts)
    assert await journal(sql) == finished
    await line.work(order)
    await drained(line.resulter)
    assert json.loads((await task_of(task_id))["result"])[1] == "paid"


async def test_a_result_that_json_cannot_hold_ends_the_task(line: Line, task_of: Any) -> None:
    async def order(ctx: Context) -> None:
        await ctx.step("charge", object)

    (task_id,) = await line.enqueue()
    await line.attempt(order)
    seen = await task_of(task_id)
    assert seen["state"] == "CRITICAL_ERROR"  # it would run again, and give the same
    assert "the step returned object, which is not JSON-serialisable" in seen["error"]


@pytest.mark.parametrize("is_encrypted", [False, True])
async def test_a_text_that_cannot_be_stored_is_the_same_in_each_attempt(
    database_url: str, outbound: SqsQueue, results: SqsQueue, settings: Settings, is_encrypted: bool
) -> None:
    if is_encrypted:
        settings = load_settings(**settings.model_dump() | {"payload_keys": new_key()})
    store = Store(database_url, application_name="penstock-test", codec=PayloadCodec(settings))
    line = Line(store, outbound, results, settings)
    seen: list[Any] = []

    def refuse() -> None:
        raise Fail("no file caf\udce9\0.txt")

    async def order(ctx: Context) -> None:
        title = await ctx.step("title", line.does("title", "nul \0"))
        try:
            await ctx.step("open", refuse)
        except StepFailed as exc:
            seen.append((title, exc.kind, exc.message))
        if len(seen) == 1:
            raise RuntimeError("once more")

    try:
        await line.enqueue()
        await line.attempt(order)
        await line.attempt(order)
    finally:
        await store.close()
    assert seen == [("nul \ufffd", "Fail", "no file caf\ufffd\ufffd.txt")] * 2


# Bounds


async def test_a_journal_is_bounded_in_steps_and_in_bytes(line: Line, task_of: Any) -> None:
    async def order(ctx: Context, name: str = "x", size: int = 1, letter: str = "x") -> None:
        for _ in range(5):
            await ctx.step(name, line.does(name, letter * size))

    (many,) = await line.enqueue(NewTask("order"))
    await line.attempt(order, steps_limit=3)
    (large,) = await line.enqueue(NewTask("order", payload='{"size":600}'))
    await line.attempt(order, steps_limit_bytes=1500)
    (wide,) = await line.enqueue(NewTask("order", payload='{"size":300,"letter":"語"}'))
    await line.attempt(order, steps_limit_bytes=1500)
    errors = [(await task_of(one))["state"] + (await task_of(one))["error"] for one in (many, large, wide)]
    assert "CRITICAL_ERROR" in errors[0]
    assert "the task has 3 durable steps; the limit is 3 (PENSTOCK_STEPS_LIMIT)" in errors[0]
    for error in errors[1:]:
        assert "CRITICAL_ERROR" in error
        assert "(PENSTOCK_STEPS_LIMIT_BYTES)" in error
    # The third result of the second task is too much, and of the third task the second, which has as many bytes.
    assert line.ran_now() == ["x"] * 3 + ["x"] * 3 + ["x"] * 2


async def test_the_resulter_keeps_to_the_bounds_whatever_a_worker_sends(line: Line, sql: Any) -> None:
    line.settings = line.settings.model_copy(update={"steps_limit": 2, "steps_limit_bytes": 1024})
    await line.enqueue()
    (task,) = await line.claim()
    for number in range(3):
        summary = await line.apply(encode_step(name(task), entry("charge", number, repetition=number)))
    assert [one[2] for one in await journal(sql)] == [0, 1]
    assert "the journal of its task is full" in summary.unreadable[0].reason
    assert (await line.apply(encode_step(name(task), entry("charge", 0)))).unreadable == []  # once more


async def test_the_bounds_of_a_journal_hold_for_steps_that_come_together(line: Line, sql: Any) -> None:
    line.settings = line.settings.model_copy(update={"steps_limit": 2})
    await line.enqueue()
    (task,) = await line.claim()
    steps = [encode_step(name(task), entry("charge", n, n, repetition=n)) for n in range(3)]
    assert len((await line.apply(*steps)).unreadable) == 1
    assert [one[2] for one in await journal(sql)] == [0, 1]
    assert len((await line.apply(*steps)).unreadable) == 1  # those that are there count once


async def test_an_answer_without_room_in_the_journal_is_refused_and_the_task_waits_on(
    line: Line, task_of: Any, sql: Any
) -> None:
    async def order(ctx: Context) -> Any:
        return await ctx.event("approval", timeout=3600)

    (task_id,) = await line.enqueue()
    await line.attempt(order)
    world = World(line.store, line.settings.model_copy(update={"steps_limit_bytes": 1024}))
    error = await world.refused(token="approval", result="x" * 2000)
    assert "result cannot be kept: the journal of its task is full" in error.message
    assert (await task_of(task_id))["state"] == "WAITING"
    assert await world.answer(token="approval", result="yes") == (task_id, "SCHEDULED", False, False)
    await line.attempt(order)
    assert json.loads((await task_of(task_id))["result"]) == "yes"


async def test_a_kept_answer_without_room_in_the_journal_fails_the_task(line: Line, task_of: Any) -> None:
    async def order(ctx: Context) -> Any:
        return await ctx.event("approval", timeout=3600)

    small = line.settings.model_copy(update={"steps_limit_bytes": 1024})
    (task_id,) = await line.enqueue()
    await World(line.store, line.settings).answer(token="approval", result="x" * 2000)
    await Line(line.store, line.outbound, line.results, small).attempt(order)
    seen = await task_of(task_id)
    assert seen["state"] == "CRITICAL_ERROR"
    assert "its journal has no room" in json.loads(seen["error"])["message"]


# Reports: late, out of order, again


async def test_the_outcome_has_the_steps_of_its_attempt_in_case_it_is_recorded_first(line: Line, sql: Any) -> None:
    async def order(ctx: Context) -> None:
        await ctx.step("charge", line.does("charge"))
        raise RuntimeError("after the step")

    await line.enqueue()
    await line.send()
    await line.work(order)
    texts = [json.loads(message.body) for message in await line.take_reports()]
    reports = [one for body in texts for one in (body if isinstance(body, list) else [body])]
    steps = [one for one in reports if one.get("method") == "step"]
    (failure,) = [one for one in reports if "error" in one]
    assert len(steps) == 1
    await line.apply(json.dumps(failure))
    assert await journal(sql) == [("charge", 0, "charge")]
    (again,) = await line.claim()
    assert [one["name"] for one in json.loads(again.journal or "[]")] == ["charge"]
    await line.apply(json.dumps(steps[0]))  # late
    assert await journal(sql) == [("charge", 0, "charge")]


async def test_a_late_report_of_an_older_claim_is_kept_and_its_outcome_is_not(
    line: Line, task_of: Any, sql: Any
) -> None:
    (task_id,) = await line.enqueue()
    (first,) = await line.claim()
    await line.apply(encode_error(name(first), 1, "x", {"retry_after": 0}))
    (second,) = await line.claim()
    summary = await line.apply(
        encode_step(name(first), entry("charge", "first")), add_entries(encode_result(name(first), "1"), [entry("b")])
    )
    assert (summary.succeeded, summary.stale) == (0, 1)
    assert await journal(sql) == [("b", 0, 1), ("charge", 0, "first")]
    # The newest claim's result counts: its attempt has gone on with it.
    await line.apply(encode_step(name(second), entry("charge", "second")))
    await line.apply(encode_step(name(first), entry("charge", "first")))
    assert await journal(sql) == [("b", 0, 1), ("charge", 0, "second")]
    assert (await task_of(task_id))["state"] == "ACQUIRED"


async def test_a_report_of_a_settled_or_unknown_task_or_of_a_future_claim_is_ignored(line: Line, sql: Any) -> None:
    first, second = await line.enqueue(NewTask("a"), NewTask("a"))
    done, live = await line.claim()
    await line.apply(encode_result(name(done), "1"))
    await line.apply(
        encode_step(name(done), entry("charge")),
        encode_step(f"{live.id}:{live.claim + 1}", entry("charge")),
        encode_step("999999:1", entry("charge")),
    )
    assert await journal(sql) == []
    assert (first, second) == (done.id, live.id)


async def test_a_report_that_makes_no_sense_is_rejected_and_harms_no_other(line: Line, sql: Any) -> None:
    await line.enqueue()
    (task,) = await line.claim()
    good = encode_step(name(task), entry("charge"))
    for change in (
        {"name": ""},
        {"name": "a\x01"},
        {"error": {"code": 1}},
        {"position": -1},
        {"at": -5},
        {"encoding": "br"},
    ):
        broken = json.loads(good)
        broken["params"] |= change
        summary = await line.apply(json.dumps(broken), good)
        assert len(summary.unreadable) == 1, change
    assert await journal(sql) == [("charge", 0, 1)]


# A worker that died


async def redeliver(line: Line) -> None:
    """A worker receives the message and dies; the lease ends."""
    (message,) = await line.outbound.receive(wait_seconds=1, visibility_seconds=30)
    await line.outbound.release([message])


async def test_a_message_that_comes_again_waits_for_the_reports_of_the_dead_worker(
    line: Line, task_of: Any, sql: Any
) -> None:
    async def order(ctx: Context) -> Any:
        return await ctx.step("charge", line.does("charge"))

    (task_id,) = await line.enqueue()
    (task,) = await line.send()
    await redeliver(line)
    await line.apply(encode_step(name(task), entry("charge", "reported by the dead")))
    await line.work(order)
    assert line.ran_now() == []
    await line.resulter._note.note()
    await drained(line.resulter)
    seen = await task_of(task_id)
    assert (seen["state"], seen["attempts"], seen["failures"]) == ("SCHEDULED", 0, None)
    held_seconds = line.settings.visibility_timeout_seconds
    assert seen["run_at"] > datetime.now(UTC) + timedelta(seconds=held_seconds / 2)
    await line.attempt(order)
    assert line.ran_now() == []
    assert json.loads((await task_of(task_id))["result"]) == "reported by the dead"


async def test_an_attempt_that_died_before_its_first_report_has_failed(line: Line, task_of: Any) -> None:
    async def order(ctx: Context) -> Any:
        return await ctx.step("charge", line.does("charge"))

    (task_id,) = await line.enqueue(NewTask("order", max_attempts=2))
    seen = []
    for _ in range(4):
        (task,) = await line.send()
        await redeliver(line)
        await line.work(order)
        await drained(line.resulter)
        row = await task_of(task_id)
        seen.append((task.suspect, row["state"], row["attempts"]))
    # Twice is free: perhaps no worker had begun it.
    free = (False, "SCHEDULED", 0)
    assert seen == [free, free, (True, "ERROR", 1), (True, "CRITICAL_ERROR", 2)]
    seen = await task_of(task_id)
    assert json.loads(seen["error"])["data"]["type"] == "Interrupted"
    assert line.ran_now() == []


@pytest.mark.parametrize("ends", ["between steps", "in a step", "and the message comes again", "and is extended late"])
async def test_no_step_begins_once_the_lease_has_ended(line: Line, task_of: Any, sql: Any, ends: str) -> None:
    async def order(ctx: Context) -> str:
        await ctx.step("charge", charge)
        if ends != "in a step":
            await freeze()
        return await ctx.step("mail", line.does("mail"))

    async def charge() -> None:
        line.ran.append("charge")
        if ends == "in a step":
            await freeze()

    async def freeze() -> None:
        """As of a process that was frozen for longer than its lease."""
        (lease,) = worker._leases._leases.values()
        lease.until = 0.0
        if ends == "and the message comes again":
            assert worker._leases.take(replace(lease.message, receive_count=3)) is None  # another worker died of it
        elif ends == "and is extended late":
            await worker._leases._extend([lease], line.outbound)
            assert lease.until > time.monotonic()

    worker = line.worker(order)
    (task_id,) = await line.enqueue()
    await line.send()
    await line.work(worker)
    await drained(line.resulter)
    assert line.ran_now() == ["charge"]
    assert ((await task_of(task_id))["state"], (await task_of(task_id))["attempts"]) == ("SCHEDULED", 0)
    assert await journal(sql) == [("charge", 0, None)]
    worker = line.worker(order)
    ends = "not"
    (again,) = await line.send()
    assert again.journal is not None


async def test_a_thread_that_goes_on_after_its_time_limit_begins_no_further_step(line: Line) -> None:
    go_on, is_over = threading.Event(), threading.Event()

    def order(ctx: Context) -> None:
        try:
            go_on.wait(60)
            ctx.step_sync("charge", line.does("charge"))
        finally:
            is_over.set()

    await line.enqueue()
    await line.send()
    worker = line.worker(order, task_timeout_seconds=0.2)
    async with running(worker):
        await take(worker, 1)
        await asyncio.wait_for(worker.settle(), 60)
        go_on.set()
        assert await asyncio.to_thread(is_over.wait, 60)
    assert line.ran_now() == []


async def test_a_thread_that_goes_on_after_its_time_limit_tries_no_step_again(line: Line) -> None:
    may_fail, tries, ended = threading.Event(), list[int](), list[BaseException]()

    def charge() -> None:
        tries.append(1)
        may_fail.wait(60)
        raise OSError("refused")

    def order(ctx: Context) -> None:
        try:
            ctx.step_sync(Step("charge", retries=5, backoff=Backoff(0.01, 1, 0.01)), charge)
        except BaseException as exc:
            ended.append(exc)
            raise

    await line.enqueue()
    await line.send()
    worker = line.worker(order, task_timeout_seconds=0.2)
    async with running(worker):
        await take(worker, 1)
        await asyncio.wait_for(worker.settle(), 60)
        may_fail.set()
        await asyncio.to_thread(wait_until, lambda: ended, "the end of the thread")
    assert isinstance(ended[0], TaskCancelled)
    assert len(tries) == 1


async def test_a_worker_that_stops_gives_the_task_back_with_its_steps(line: Line, task_of: Any, sql: Any) -> None:
    begun = asyncio.Event()

    async def order(ctx: Context) -> str:
        await ctx.step("charge", line.does("charge"))
        begun.set()
        await asyncio.sleep(60 if not line.ran.count("mail") else 0)
        return "done"

    (task_id,) = await line.enqueue()
    await line.send()
    worker = line.worker(order)
    async with running(worker):
        await take(worker, 1)
        await asyncio.wait_for(begun.wait(), 60)
        await worker.drain(0.5)
    assert (await line.outbound.depth()).total == 0
    await drained(line.resulter)
    seen = await task_of(task_id)
    assert (seen["state"], seen["attempts"]) == ("SCHEDULED", 0)
    line.ran.append("mail")
    await line.attempt(order)
    assert line.ran_now() == ["charge", "mail"]
    assert (await task_of(task_id))["state"] == "SUCCESS"


async def test_a_claim_has_every_step_that_was_recorded_before_it_ended(
    line: Line, sql: Any, database_url: str
) -> None:
    """The claiming statement began before the report was recorded, and does not see it."""
    await line.enqueue()
    (first,) = await line.claim()
    failed = add_entries(encode_error(name(first), 1, "x", {"retry_after": 0}), [entry("a")])
    await line.apply(failed)
    await sql.execute("select pg_advisory_lock(1)")
    await sql.execute(
        "create function waits() returns trigger language plpgsql set lock_timeout = 0 as "
        "'begin perform pg_advisory_xact_lock(1); return new; end'"
    )
    await sql.execute(
        "create trigger waits before update on penstock.task for each row when (new.state = 'ACQUIRED') "
        "execute function waits()"
    )
    claiming = asyncio.create_task(line.claim())
    waits = "select from pg_locks where locktype = 'advisory' and not granted"
    async with asyncio.timeout(60):
        while not await sql.fetch(waits):
            await asyncio.sleep(0.01)
    await line.apply(encode_step(name(first), entry("b", position=1)))
    await sql.execute("select pg_advisory_unlock(1)")
    (again,) = await claiming
    assert [one["name"] for one in json.loads(again.journal or "[]")] == ["a", "b"]


async def test_a_step_is_recorded_while_its_attempt_ends(line: Line, sql: Any) -> None:
    """The report reads that the claim holds the task, and waits for the one that gives the task back."""
    await line.enqueue()
    (first,) = await line.claim()
    async with line.store.transaction() as session:
        suspension = decode_reports(encode_notification("suspend", id=name(first), seconds=60), batch_limit=100)
        await apply_reports(session, suspension, line.settings)
        recording = asyncio.create_task(line.apply(encode_step(name(first), entry("a"))))
        async with asyncio.timeout(60):
            while not await sql.fetch("select from pg_locks where not granted"):
                await asyncio.sleep(0.01)
    await recording
    assert [name for name, *_ in await journal(sql)] == ["a"]
    assert [tuple(row) for row in await sql.fetch("select state::text, heartbeat_at from penstock.task")] == [
        ("SCHEDULED", None)
    ]


async def test_a_claim_is_not_given_up_whose_step_was_recorded(line: Line, task_of: Any) -> None:
    """A send whose answer is lost has sent some of its messages: what workers have begun must not be sent again."""
    task_id, _ = await line.enqueue(NewTask("order"), NewTask("order"))
    first = await line.claim()
    await line.apply(*(encode_error(name(one), 1, "x", {"retry_after": 0}) for one in first))
    await line.apply(*(encode_step(name(one), entry("a")) for one in first))  # late, so it is no heartbeat of the next
    begun, _ = again = await line.claim()
    await line.apply(encode_step(name(begun), entry("b", position=1)))
    async with line.store.transaction() as session:
        assert await claims.release(session, [(one.id, one.claim) for one in again]) == 1
    assert begun.id == task_id
    assert [(await task_of(one.id))["state"] for one in again] == ["ACQUIRED", "ERROR"]


# Starting again from a step


async def test_a_retry_may_run_again_from_a_step_on(line: Line, task_of: Any, sql: Any) -> None:
    is_broken = True

    async def order(ctx: Context) -> None:
        for one in ("a", "b", "b", "c"):
            await ctx.step(one, line.does(one))
        if is_broken:
            raise Fail("wrong")

    (task_id,) = await line.enqueue()
    first = await line.attempt(order)
    assert line.ran_now() == ["a", "b", "b", "c"]
    world = World(line.store, line.settings)
    with pytest.raises(InvalidParams, match=rf"no durable step of task {task_id}: it has a, b, b#2, c"):
        async with line.store.transaction() as session:
            await world.change(session, "retry", id=task_id, from_step="d")
    assert (await task_of(task_id))["state"] == "CRITICAL_ERROR"
    is_broken = False
    async with line.store.transaction() as session:
        await world.change(session, "retry", id=task_id, from_step="b#2")
    # A report that was on its way brings no step back.
    await line.apply(encode_step(name(first), entry("c", "late", position=3)))
    assert [(one[0], one[1]) for one in await journal(sql)] == [("a", 0), ("b", 0)]
    await line.attempt(order)
    assert line.ran_now() == ["b", "c"]
    assert (await task_of(task_id))["state"] == "SUCCESS"


async def test_a_retry_from_a_step_that_the_queue_brings_and_that_is_refused_changes_nothing(
    line: Line, task_of: Any, sql: Any
) -> None:
    (task_id,) = await line.enqueue()
    (task,) = await line.claim()
    await line.apply(encode_step(name(task), entry("charge")))
    settings = line.settings.model_copy(update={"inbound_methods": ("retry",)})

    async def retry(step: str) -> str:
        inbound = read_inbound(request("retry", {"id": task_id, "from_step": step}), settings)
        async with line.store.transaction() as session:
            await accept_inbound(session, inbound, settings, source="inbound")
        ((_, reason),) = inbound.refused
        return reason

    assert "ACQUIRED" in await retry("charge")
    assert await journal(sql) == [("charge", 0, 1)]
    await line.apply(encode_error(name(task), 1, "x", {"final": True}))
    assert "names no durable step" in await retry("charg")
    assert (await task_of(task_id))["state"] == "CRITICAL_ERROR"


@pytest.mark.parametrize("given", [{"until": "9999-01-01T00:00:00Z"}, {"seconds": -1}, {"seconds": "x"}])
async def test_a_suspension_that_makes_no_sense_is_a_failed_attempt(
    line: Line, task_of: Any, given: dict[str, Any]
) -> None:
    (task_id,) = await line.enqueue()
    (task,) = await line.claim()
    applied = await line.apply(encode_notification("suspend", id=name(task), **given))
    assert (applied.failed, applied.unreadable) == (1, [])
    assert json.loads((await task_of(task_id))["error"])["data"]["type"] == "BadSuspend"


async def test_a_suspension_until_the_first_instant_there_is_goes_on_at_once(line: Line, task_of: Any) -> None:
    (task_id,) = await line.enqueue()
    (task,) = await line.claim()
    await line.apply(encode_notification("suspend", id=name(task), until="0001-01-01T00:00:00Z"))
    assert abs((await task_of(task_id))["run_at"] - datetime.now(UTC)) < timedelta(minutes=1)
    assert len(await line.claim()) == 1


async def test_the_page_of_a_task_shows_its_steps(line: Line, store: Store, settings: Settings) -> None:
    async def order(ctx: Context) -> None:
        await ctx.step("charge <b>", line.does("charge", {"id": 7}))
        await ctx.sleep(0)
        await ctx.step(Step("ship", retries=0), line.refuse)

    (task_id,) = await line.enqueue()
    await line.attempt(order)
    await line.attempt(order)
    async with serving(store, settings) as api, httpx.AsyncClient(base_url=api.url) as client:
        page = (await client.get(f"/tasks/{task_id}")).text
        assert page.count("<rect x=") == 3
        assert "charge &lt;b&gt;" in page
        assert "OSError: refused" in page
        assert page.count("Retry from this step") == 3
        assert page.count('name="from_step"') == 3
    async with store.transaction() as session:
        await World(store, settings).change(session, "retry", id=task_id, from_step="ship")
    await line.attempt(order)
    assert line.ran_now() == ["charge"]


# What goes with it


async def test_status_and_task_show_have_the_steps(line: Line, store: Store, settings: Settings, sql: Any) -> None:
    async def order(ctx: Context) -> None:
        await ctx.step("charge", line.does("charge", {"id": 7}))
        await ctx.step("charge", line.does("again"))

        def decline() -> None:
            raise Fail("declined")

        await ctx.step("ship", decline)

    (task_id,) = await line.enqueue()
    await line.attempt(order)
    async with serving(store, settings) as api, httpx.AsyncClient(base_url=api.url) as client:
        call = {"jsonrpc": "2.0", "method": "status", "params": {"id": task_id, "detail": True}, "id": 1}
        task = (await client.post("/rpc", json=call)).json()["result"]
        out = await asyncio.to_thread(run, api.url, "task", "show", str(task_id))
    steps = task["steps"]
    assert [(one["name"], one["repetition"], one["result"], one["tries"]) for one in steps] == [
        ("charge", 0, {"id": 7}, 1), ("charge", 1, "again", 1), ("ship", 0, None, 1),
    ]  # fmt: skip
    assert steps[2]["error"]["data"]["type"] == "Fail"
    assert all(one["seconds"] >= 0 and one["began_at"] and one["worker"] for one in steps)
    assert task["state"] == "CRITICAL_ERROR"
    lines = [one.split("  ", 1)[1] for one in out.splitlines() if "  step " in one]
    assert [line.split(" done")[0].split(" failed")[0] for line in lines] == [
        "step charge",
        "step charge#2",
        "step ship",
    ]
    assert lines[0].endswith(': {"id": 7}')
    assert lines[2].endswith(": Fail: declined")


async def test_a_journal_goes_with_the_record_of_its_task(
    line: Line, store: Store, settings: Settings, sql: Any
) -> None:
    await line.enqueue(*[NewTask("order") for _ in range(3)])
    for task in await line.claim():
        await line.apply(encode_step(name(task), entry("charge")), encode_result(name(task), "1"))
    retention = Retention(store=store, settings=settings)
    assert await retention._delete_gone("journal") == 0
    await sql.execute("delete from penstock.task_history where id = (select min(id) from penstock.task_history)")
    assert await retention._delete_gone("journal") == 1
    assert len(await journal(sql)) == 2


async def test_a_batched_handler_has_no_steps(line: Line, task_of: Any) -> None:
    async def orders(calls: list[Call[Any]]) -> list[Any]:
        return [await call.ctx.step("charge", line.does("charge")) for call in calls]

    (task_id,) = await line.enqueue()
    await line.attempt(orders, batch=2)
    assert "durable steps need a handler of single tasks" in (await task_of(task_id))["error"]
    assert line.ran_now() == []


async def test_a_task_that_has_begun_its_journal_neither_expires_nor_is_replaced(line: Line, task_of: Any) -> None:
    unique = NewTask("order", unique_key="k", expires_at=datetime.now(UTC) + LATER * 2)
    (task_id,) = await line.enqueue(unique)
    (task,) = await line.claim()
    await line.apply(add_entries(encode_notification("suspend", id=name(task), seconds=60), [entry("ctx.sleep", None)]))
    newer = NewTask("order", payload='{"new":true}', unique_key="k", unique="live", on_duplicate="replace")
    async with line.store.transaction() as session:
        (found,) = await enqueue.enqueue(session, [newer])
    assert (found.id, found.replaced) == (task_id, False)
    seen = await task_of(task_id)
    assert (seen["payload"], seen["expires_at"], seen["state"]) == ("{}", None, "SCHEDULED")


@pytest.mark.parametrize("late", [False, True])
async def test_a_task_that_was_given_back_before_its_first_step_does_not_expire_after_it(
    line: Line, task_of: Any, late: bool
) -> None:
    (task_id,) = await line.enqueue(NewTask("order", expires_at=datetime.now(UTC) + LATER * 2))
    (task,) = await line.claim()
    await line.apply(encode_notification("suspend", id=name(task), redelivered=True))
    assert (await task_of(task_id))["expires_at"] is not None
    if not late:
        (task,) = await line.claim()
        await line.apply(encode_progress(name(task)))
    await line.apply(encode_step(name(task), entry("charge")))
    assert (await task_of(task_id))["expires_at"] is None


async def test_a_step_is_reported_before_it_returns(line: Line) -> None:
    seen: list[int] = []

    async def order(ctx: Context) -> None:
        await ctx.step("charge", line.does("charge"))
        seen.append((await line.results.depth()).total)

    await line.enqueue()
    await line.attempt(order)
    assert seen == [1]


async def test_a_context_of_a_test_runs_steps_without_a_worker() -> None:
    ctx = Context(1, 1, "order")
    assert await ctx.step("charge", lambda: (1, 2)) == [1, 2]
    assert ctx.step_sync("charge", lambda: None) is None

    def broken() -> None:
        raise Fail("declined")

    with pytest.raises(StepFailed, match="step mail: Fail: declined"):
        await ctx.step(Step("mail", retries=3), broken)

    def missing() -> None:
        raise Fail("no file caf\udce9.txt")

    with pytest.raises(StepFailed, match="no file caf\ufffd"):
        await ctx.step("open", missing)


def test_reports_of_steps_are_read() -> None:
    (report,) = decode_reports(encode_step("6:4", entry("charge", 0.50, at=1.5, seconds=0.25)), batch_limit=1)
    assert isinstance(report, Stepped)
    assert (report.task_id, report.claim, report.entry.value, report.entry.at) == (6, 4, "0.5", 1.5)


async def test_the_examples_of_the_page_run(line: Line, task_of: Any) -> None:
    page = (Path(__file__).parents[2] / "docs" / "steps.md").read_text("utf-8")
    before = dict(REGISTRY)

    async def charge_card(card: str, reference: str) -> dict[str, Any]:
        return line.does("charge", {"id": reference})()

    def ship(item: str) -> str:
        line.ran.append("ship")
        raise Fail(f"no {item} left")

    names = {
        "charge_card": charge_card, "ship": ship, "reserve": lambda item: line.does("reserve")(),
        "refund": lambda charge: line.does(f"refund {charge}")(), "query": lambda month: line.does("query")(),
        "upload": lambda rows: line.does(f"upload {rows}")(),
    }  # fmt: skip
    try:
        for text in re.findall(r"^```python app\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
            exec(text, names)
        order, report = REGISTRY["order"].function, REGISTRY["report"].function
    finally:
        REGISTRY.clear()
        REGISTRY.update(before)
    (task_id,) = await line.enqueue(NewTask("order", payload='{"item":"pen","card":"c"}'))
    await line.attempt(order)
    world = World(line.store, line.settings)
    assert (await world.answer(token=f"approve-{task_id}", result={"by": "Ann"}))[:2] == (task_id, "SCHEDULED")
    await line.attempt(order)
    await line.attempt(order)
    assert json.loads((await task_of(task_id))["result"]) == {"failed": "no pen left"}
    assert line.ran_now() == ["charge", "reserve", "ship", f"refund order-{task_id}"]
    (task_id,) = await line.enqueue(NewTask("order", payload='{"month":"May"}'))
    await line.attempt(report)
    await line.attempt(report)
    assert json.loads((await task_of(task_id))["result"]) == "upload query"


# Workers in other languages


STEPS_SCRIPT = Path(__file__).parents[1] / "acceptance" / "foreign_steps.py"


def test_the_script_with_steps_imports_nothing_of_ours() -> None:
    tree = ast.parse(STEPS_SCRIPT.read_text())
    imported = {
        name.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names
    }
    assert imported == {"botocore", "json", "os", "sys"}
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]


async def test_a_foreign_worker_that_dies_runs_no_reported_step_again(line: Line, task_of: Any, tmp_path: Path) -> None:
    line.settings = line.settings.model_copy(update={"visibility_timeout_seconds": 1})
    line.resulter = Resulter(store=line.store, results=line.results, settings=line.settings)
    urls = str(line.settings.sqs_endpoint_url), await line.outbound.url(), await line.results.url()
    command = [sys.executable, str(STEPS_SCRIPT), *urls, str(tmp_path / "log")]
    (task_id,) = await line.enqueue(NewTask("order", payload='{"dies_before":"ship"}'))
    await line.send()
    async with asyncio.timeout(120):
        died = await asyncio.create_subprocess_exec(*command, cwd=tmp_path)
        assert await died.wait() == 1
        worker = await asyncio.create_subprocess_exec(*command, cwd=tmp_path)
        try:
            while (await task_of(task_id))["state"] == "ACQUIRED":
                await line.resulter.run_once()
                await asyncio.sleep(0.1)
            assert (await task_of(task_id))["state"] == "SCHEDULED"
            await line.send()
            while (await task_of(task_id))["state"] != "SUCCESS":
                await line.resulter.run_once()
                await asyncio.sleep(0.1)
        finally:
            worker.kill()
            await worker.wait()
    seen = await task_of(task_id)
    assert (json.loads(seen["result"]), seen["attempts"]) == (["CHARGE", "RESERVE", "SHIP"], 1)
    assert (tmp_path / "log").read_text().split() == ["charge", "reserve", "ship"]


# Large and encrypted results


async def test_results_are_encrypted_and_large_ones_are_objects(
    database_url: str, outbound: SqsQueue, results: SqsQueue, settings: Settings, s3: S3Bucket, sql: Any
) -> None:
    settings = load_settings(**settings.model_dump() | s3.settings(payload_keys=new_key()))
    sealed = Store(database_url, application_name="penstock-test", codec=PayloadCodec(settings))
    line = Line(sealed, outbound, results, settings)
    large = "secret " * 1000

    async def order(ctx: Context) -> Any:
        small = await ctx.step("small", line.does("small", "secret"))
        big = await ctx.step("big", line.does("big", large))
        if ctx.claim == first.claim:
            try:
                await ctx.step("declined", refuse)
            except StepFailed:
                raise RuntimeError("once") from None
        try:
            await ctx.step("declined", refuse)
        except StepFailed as exc:
            return [small, big == large, exc.message]

    def refuse() -> None:
        raise Fail("secret number")

    try:
        await line.enqueue()
        (first,) = await line.send()
        await line.work(order)
        await drained(line.resulter)
        kept = await sql.fetch("select name, entry from penstock.journal_entry order by position")
        assert [one["name"] for one in kept] == ["small", "big", "declined"]
        assert not [one["entry"] for one in kept if "secret" in one["entry"]]
        assert len(kept[1]["entry"]) < 400
        (name_of_object,) = [row[0] for row in await sql.fetch("select name from penstock.payload_object")]
        assert [key.endswith(name_of_object) for key in s3.objects()] == [True]
        again = await line.attempt(order)
        assert "secret" not in (again.journal or "")
        assert line.ran_now() == ["small", "big"]
        looked = await sealed.fetch("look_at_objects", 0, 10, None)
        assert [row["doomed"] for row in looked] == [False]
        async with serving(sealed, settings) as api, httpx.AsyncClient(base_url=api.url) as client:
            call = {"jsonrpc": "2.0", "method": "status", "params": {"id": again.id, "detail": True}, "id": 1}
            task = (await client.post("/rpc", json=call)).json()["result"]
        assert task["result"] == ["secret", True, "secret number"]
        small, big, declined = task["steps"]
        assert (small["result"], big["result"], declined["error"]["message"]) == ("secret", None, "Fail: secret number")
        assert "stored as an object" in big["unread"]
        await sql.execute("delete from penstock.task_history")
        await Retention(store=sealed, settings=settings)._delete_gone("journal")
        assert [row["doomed"] for row in await sealed.fetch("look_at_objects", 0, 10, None)] == [True]
    finally:
        await sealed.close()


async def test_a_step_cannot_take_the_object_of_another_task(line: Line, sql: Any) -> None:
    first, _ = await line.enqueue(NewTask("a"), NewTask("a"))
    one, other = await line.claim()
    text = encode_reference(Reference(f"20300131/{'a' * 32}", None, 5000, "b" * 64))
    for task, stored in ((one, 1), (other, 0)):
        sealed = entry("big", json.loads(text), encoding=SEALED_ENCODING)
        summary = await line.apply(encode_step(name(task), sealed))
        assert len(summary.unreadable) == 1 - stored
    assert [row[0] for row in await sql.fetch("select task_id from penstock.journal_entry")] == [first]
