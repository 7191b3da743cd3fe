"""`penstock_inline`: the rules of production, without infrastructure."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import penstock
from penstock import AsyncClient, Call, Client, Context
from penstock.protocol import errors, in_process
from penstock.protocol.reports import make_token
from penstock.settings.model import load_settings
from penstock.settings.payload_texts import new_key
from penstock.testing.faults import ALONE, WorkerCrash
from penstock.testing.inline import Inline, InlineTask
from penstock.worker.handlers.actions import Registry, action

Ran = list[Any]


@pytest.fixture
def ran() -> Ran:
    return []


@pytest.fixture
def inline(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> Iterator[Inline]:
    registry = Registry()

    @action("note", registry=registry, backoff=penstock.Backoff(10, 2, 100, 0))
    async def note(ctx: Context, n: int, again: bool = False) -> int:
        ran.append((n, ctx.claim, ctx.redelivered, ctx.tenant))
        if again:
            raise penstock.Retry(60)
        return n

    @action("plain", registry=registry)
    def plain(n: int) -> str:
        ran.append(threading.get_ident())
        return f"plain {n}"

    @action("parent", registry=registry)
    async def parent(ctx: Context, count: int) -> None:
        for n in range(count):
            ctx.spawn("note", {"n": n})

    @action("wait", registry=registry)
    async def wait(ctx: Context, token: str) -> Any:
        return ctx.wait(token, timeout=3600, on_timeout="fail")

    @action("together", registry=registry, batch=10)
    async def together(calls: list[Call[dict[str, int]]]) -> list[int]:
        ran.append([call.params["n"] for call in calls])
        return [call.params["n"] for call in calls]

    @action("fragile", registry=registry)
    async def fragile(ctx: Context) -> None:
        ran.append(ctx.redelivered)
        if not ctx.redelivered:
            raise WorkerCrash

    @action("slow", registry=registry)
    async def slow(ctx: Context) -> None:
        await asyncio.sleep(60)

    made = Inline(registry)
    monkeypatch.setattr(in_process, "substitute", made)
    return made


async def test_tasks_of_every_client_are_recorded_with_the_answers_of_the_api(inline: Inline, ran: Ran) -> None:
    async with AsyncClient() as client:
        first = await client.enqueue("note", {"n": 1}, priority=3, labels={"team": "a"})
        assert first == {"id": 1, "state": "SCHEDULED", "duplicate": False}
        assert [one["id"] for one in await client.enqueue_many([{"action": "note", "payload": {"n": 2}}] * 2)] == [2, 3]
    with Client() as blocking:
        assert blocking.enqueue("note", {"n": 4})["id"] == 4
        with pytest.raises(penstock.InvalidParams, match="max_attempts"):
            blocking.enqueue("note", {"n": 4}, max_attempts=0)
    assert (await penstock.enqueue(None, "note", {"n": 5}, run_at=datetime(2020, 1, 1, tzinfo=UTC)))["id"] == 5
    assert penstock.enqueue_many_sync(None, [{"action": "note", "payload": {"n": 6}}])[0]["id"] == 6
    async with penstock.InboundClient("any") as inbound:
        await inbound.enqueue("note", {"n": 7})
    assert [task.payload["n"] for task in inline.enqueued("note")] == [1, 2, 2, 4, 5, 6, 7]
    assert [task.id for task in inline.enqueued(payload={"n": 2})] == [2, 3]
    assert inline.enqueued("note", {"m": 2}) == inline.enqueued("other") == []
    assert len(await inline.drain()) == 7
    assert [n for n, *_ in ran] == [1, 5, 2, 2, 4, 6, 7]  # by priority, then by time
    assert [task.result for task in inline.tasks] == [1, 2, 2, 4, 5, 6, 7]


async def test_a_task_without_labels_is_shown_as_by_the_api(inline: Inline) -> None:
    async with AsyncClient() as client:
        await client.enqueue("note", {"n": 1})
        assert (await client.status(1, detail=True)).labels == {}


async def test_a_payload_that_a_client_would_encrypt_arrives(inline: Inline) -> None:
    payloads = load_settings(payload_keys=new_key())
    async with penstock.InboundClient("any", payloads=payloads) as inbound:
        await inbound.enqueue("note", {"n": 1})
    assert [task.payload for task in inline.tasks] == [{"n": 1}]


async def test_no_test_reads_the_events_of_an_api(inline: Inline) -> None:
    async with AsyncClient(timeout=0.1) as client:
        await client.enqueue("note", {"n": 1})
        with pytest.raises(errors.MethodNotFound, match="no stream of events"):
            await anext(client.events(1))


async def test_a_unique_key_decides_as_in_production(inline: Inline) -> None:
    key: dict[str, Any] = {"unique_key": "a"}
    assert not (await penstock.enqueue(None, "note", {"n": 1}, **key))["duplicate"]
    assert await penstock.enqueue(None, "note", {"n": 2}, **key) == {"id": 1, "state": "SCHEDULED", "duplicate": True}
    replaced = await penstock.enqueue(None, "note", {"n": 3}, on_duplicate="replace", **key)
    assert (replaced["id"], replaced["replaced"], inline.tasks[0].payload) == (1, True, {"n": 3})
    fresh = await penstock.enqueue(None, "note", {"n": 3}, unique_key="b", on_duplicate="replace")
    assert (fresh["duplicate"], fresh["replaced"]) == (False, False)
    with pytest.raises(penstock.DuplicateTask):
        await penstock.enqueue(None, "note", {"n": 4}, on_duplicate="error", **key)
    with Client() as client, pytest.raises(penstock.DuplicateTask):
        client.enqueue("note", {"n": 4}, on_duplicate="error", **key)
    assert not (await penstock.enqueue(None, "note", {"n": 5}, tenant="acme", **key))["duplicate"]
    await inline.drain()
    assert (await penstock.enqueue(None, "note", {"n": 6}, **key))["state"] == "SUCCESS"
    assert not (await penstock.enqueue(None, "note", {"n": 6}, unique="live", **key))["duplicate"]
    inline.clock.advance(minutes=5)
    assert (await penstock.enqueue(None, "note", {"n": 7}, unique=600, **key))["duplicate"]
    assert not (await penstock.enqueue(None, "note", {"n": 7}, unique=200, **key))["duplicate"]


async def test_failures_are_repeated_by_the_backoff_of_the_action(inline: Inline, ran: Ran) -> None:
    start = inline.clock.now()
    await penstock.enqueue(None, "note", {"n": 1})
    (task,) = inline.tasks
    inline.fail("note", times=2, error=ValueError("no"))
    await inline.drain(retries=False)
    assert (task.state, task.attempts, task.error["data"]["type"]) == ("ERROR", 1, "ValueError")
    assert timedelta(seconds=10) <= task.due_at - start < timedelta(seconds=20)
    await inline.drain()
    assert (task.state, task.attempts, task.error, len(task.errors)) == ("SUCCESS", 3, None, 2)
    assert timedelta(seconds=30) <= inline.clock.now() - start < timedelta(seconds=60)
    assert [claim for _, claim, *_ in ran] == [3]
    await penstock.enqueue(None, "note", {"n": 2, "again": True}, max_attempts=3)
    await inline.drain()
    assert (inline.tasks[1].state, inline.tasks[1].attempts) == ("CRITICAL_ERROR", 3)
    await penstock.enqueue(None, "note", {"n": "one"}, max_attempts=1)
    await inline.drain()
    assert inline.tasks[2].error["data"]["type"] == "BadParams"


async def test_a_crash_runs_the_attempt_again_and_no_other(inline: Inline, ran: Ran) -> None:
    await penstock.enqueue_many(None, [{"action": "note", "payload": {"n": n}, "tenant": "acme"} for n in range(3)])
    inline.crash("note")
    await inline.drain()
    assert ran == [(0, 1, False, "acme"), (0, 1, True, "acme"), (1, 1, False, "acme"), (2, 1, False, "acme")]
    assert [task.attempts for task in inline.tasks] == [1, 1, 1]
    ran.clear()
    await penstock.enqueue(None, "fragile")
    await inline.drain()
    assert ran == [False, True]


async def test_a_task_that_no_worker_survives_fails_its_attempts(inline: Inline, ran: Ran) -> None:
    await penstock.enqueue(None, "note", {"n": 1}, max_attempts=2)
    inline.crash("note", times=100)
    await inline.drain()
    assert (inline.tasks[0].state, inline.tasks[0].error["data"]["type"]) == ("CRITICAL_ERROR", "StaleTask")
    assert len(ran) == 10


async def test_delays_expiry_and_ordering_keys(inline: Inline, ran: Ran) -> None:
    await penstock.enqueue(None, "note", {"n": 1}, delay=timedelta(days=3))
    await penstock.enqueue(None, "note", {"n": 2}, delay=60, expires_in=30)
    await penstock.enqueue(None, "note", {"n": 3}, ordering_key="k")
    await penstock.enqueue(None, "note", {"n": 4}, ordering_key="k", priority=9)
    await inline.drain()
    inline.clock.advance(days=2, hours=23)
    await inline.drain()
    assert [n for n, *_ in ran] == [3, 4]
    assert (inline.tasks[1].state, inline.tasks[1].reason) == ("CANCELLED", "expired")
    inline.clock.advance(hours=1)
    await inline.drain()
    assert [n for n, *_ in ran] == [3, 4, 1]
    with pytest.raises(ValueError, match="moves on"):
        inline.clock.advance(days=-1)


async def test_a_task_waits_behind_an_unsettled_one_of_its_ordering_key(inline: Inline, ran: Ran) -> None:
    async with AsyncClient() as client:
        first = await client.enqueue("note", {"n": 1}, ordering_key="k", delay=60)
        second = await client.enqueue("note", {"n": 2}, ordering_key="k")
        third = await client.enqueue("note", {"n": 3}, ordering_key="k")
        await client.enqueue("note", {"n": 4})
        assert [first.state, second.state, third.state] == ["SCHEDULED", "WAITING", "WAITING"]
        await inline.drain()
        assert (await client.status(third.id)).state == "WAITING"
        assert inline.tasks[1].is_pending
        await client.cancel(first.id)
        assert [(await client.status(one.id)).state for one in (second, third)] == ["SCHEDULED", "WAITING"]
        assert (await client.retry(first.id)).state == "WAITING"
        await inline.drain()
    assert [n for n, *_ in ran] == [4, 2, 1, 3]


async def test_a_failed_task_holds_its_ordering_key_where_the_settings_say_so(inline: Inline, ran: Ran) -> None:
    inline._settings = load_settings(**ALONE, ordering_on_critical_error="hold")
    inline.fail("note")
    async with AsyncClient() as client:
        first = await client.enqueue("note", {"n": 1}, ordering_key="k", max_attempts=1)
        second = await client.enqueue("note", {"n": 2}, ordering_key="k")
        await inline.drain()
        assert [(await client.status(one.id)).state for one in (first, second)] == ["CRITICAL_ERROR", "WAITING"]
        assert (await client.retry(first.id)).state == "SCHEDULED"
        await inline.drain()
    assert [n for n, *_ in ran] == [1, 2]


async def test_spawned_tasks_batches_and_plain_functions(inline: Inline, ran: Ran) -> None:
    await penstock.enqueue(None, "parent", {"count": 2})
    assert [task.action for task in await inline.drain()] == ["parent", "note", "note"]
    ran.clear()
    await penstock.enqueue_many(None, [{"action": "together", "payload": {"n": n}} for n in range(4)])
    await inline.drain()
    assert ran == [[0, 1, 2, 3]]
    inline.fail("together")
    await penstock.enqueue(None, "together", {"n": 9})
    await inline.drain()
    assert inline.enqueued("together", {"n": 9})[0].attempts == 2
    await penstock.enqueue(None, "plain", {"n": 5})
    await inline.drain()
    assert inline.enqueued("plain")[0].result == "plain 5"
    assert ran[-1] != threading.get_ident()


async def test_waits_are_answered_before_in_time_or_never(inline: Inline) -> None:
    async with AsyncClient() as client:
        tasks = [(await client.enqueue("wait", {"token": token}))["id"] for token in ("early", "asked", "late")]
        assert (await client.complete("early", 1))["kept"]
        await inline.drain()
        assert await client.result(tasks[0]) == 1
        shown = await client.status(tasks[1], detail=True)
        assert (shown["state"], shown["waits_for"]["token"]) == ("WAITING", "asked")
        assert (await client.complete("asked", {"yes": True}))["state"] == "SUCCESS"
        with pytest.raises(AssertionError, match="drain"):
            await client.result(tasks[2])
        inline.clock.advance(hours=2)
        await inline.drain()
        with pytest.raises(penstock.TaskFailed, match="wait timed out"):
            await client.result(tasks[2])


async def test_other_methods_change_tasks_or_say_what_to_use(inline: Inline) -> None:
    async with AsyncClient() as client:
        task = (await client.enqueue("note", {"n": 1}, delay=60))["id"]
        await client.reschedule(task, delay=0, priority=4)
        assert inline.tasks[0].new.priority == 4
        await client.cancel(task, reason="no")
        with pytest.raises(penstock.StateConflict):
            await client.cancel(task)
        with pytest.raises(penstock.ResultCancelled):
            await client.result(task)
        await client.retry(task)
        await inline.drain()
        assert await client.result(task) == 1
        assert await client.status([task, 99]) == [await client.status(task), None]
        with pytest.raises(penstock.TaskNotFound):
            await client.status(99)
        with pytest.raises(penstock.RpcError, match="penstock_pipeline"):
            await client.stats()


async def test_what_a_test_forgot_is_said(inline: Inline) -> None:
    await penstock.enqueue(None, "nowhere")
    with pytest.raises(LookupError, match="no handler of action 'nowhere'"):
        await inline.drain()
    with pytest.raises(ValueError, match="before_answer"):
        inline.crash("note", before_answer=False)


async def test_a_task_without_a_handler_leaves_the_others_to_a_later_run(inline: Inline, ran: Ran) -> None:
    await penstock.enqueue(None, "note", {"n": 1}, priority=9)
    await penstock.enqueue(None, "nowhere")
    with pytest.raises(LookupError):
        await inline.drain()
    assert [task.state for task in inline.tasks] == ["SCHEDULED", "SCHEDULED"]
    action("nowhere", registry=inline._registry)(lambda: None)
    assert len(await inline.drain()) == 2
    assert [n for n, *_ in ran] == [1]


async def test_a_retry_from_an_unknown_step_changes_nothing(inline: Inline) -> None:
    async with AsyncClient() as client:
        task = (await client.enqueue("note", {"n": 1}))["id"]
        await client.cancel(task, reason="no")
        with pytest.raises(penstock.InvalidParams, match="from_step"):
            await client.retry(task, from_step="typo")
    assert (inline.tasks[0].state, inline.tasks[0].reason) == ("CANCELLED", "no")


async def test_typed_actions_reach_it_too(inline: Inline) -> None:
    @action("typed", registry=inline._registry)
    async def typed(n: int) -> int:
        return n + 1

    task = await typed.enqueue(n=1)
    inside = await typed.enqueue_in(None, n=2)
    assert (await typed.with_options(priority=3).enqueue(n=3)).id == 3
    await inline.drain()
    assert [await task.result(), await inside.result()] == [2, 3]
    assert inline.tasks[2].new.priority == 3


async def test_a_time_limit_holds(inline: Inline) -> None:
    await penstock.enqueue(None, "slow", timeout=0.01, max_attempts=1)
    await inline.drain()
    assert inline.tasks[0].error["data"]["type"] == "TaskTimeout"


async def test_what_a_handler_logs_and_emits_is_kept(inline: Inline) -> None:
    @action("talk", registry=inline._registry, output="prints")
    async def talk(ctx: Context) -> None:
        logging.getLogger("shop").warning("running low of %s", "pens")
        await ctx.emit({"n": 1})
        print("printed")

    await penstock.enqueue(None, "talk")
    (task,) = await inline.drain()
    assert (task.logs, task.chunks) == (["running low of pens", "printed"], [{"n": 1}])


async def test_steps_are_kept_over_attempts_crashes_and_suspensions(inline: Inline, ran: Ran) -> None:
    @action("order", registry=inline._registry, backoff=penstock.Backoff(10, 2, 100, 0))
    async def order(ctx: Context) -> Any:
        for name in ("charge", "mail"):
            await ctx.step(name, ran.append, name)
        await ctx.sleep(3600)
        if ctx.claim < 3:
            raise RuntimeError("once")
        return await ctx.event("t", timeout=60)

    async with AsyncClient() as client:
        await client.enqueue("order")
    (task,) = await inline.drain()
    assert (task.attempts, task.state, ran) == (0, "SCHEDULED", ["charge", "mail"])
    inline.clock.advance(hours=1)
    (task,) = await inline.drain()
    assert (task.attempts, task.state, len(task.errors)) == (2, "WAITING", 1)
    async with AsyncClient() as client:
        await client.complete("t", {"by": "Ann"})
    (task,) = await inline.drain()
    assert (task.result, ran, [key[0] for key in task.steps]) == (
        {"by": "Ann"}, ["charge", "mail"], ["charge", "mail", "ctx.sleep", "ctx.event"],
    )  # fmt: skip


async def test_a_handler_puts_its_task_off_and_holds_its_key_without_spending_attempts(monkeypatch: Any) -> None:
    registry, ran = Registry(), list[str]()

    @action("sync", registry=registry)
    async def sync(account: str) -> str:
        ran.append(account)
        if ran == ["a"]:
            raise penstock.RateLimited(retry_after=60, key=account)
        if account == "poll" and len(ran) < 5:
            raise penstock.Snooze(timedelta(minutes=5), "not ready")
        return account

    inline = Inline(registry)
    monkeypatch.setattr(in_process, "substitute", inline)

    async def add(key: str) -> InlineTask:
        task = await sync.with_options(limit_key=key, max_attempts=1).enqueue(key)
        return inline.tasks[task.id - 1]

    first, poll = await add("a"), await add("poll")
    await inline.drain()
    second, other = await add("a"), await add("b")
    await inline.drain()
    assert [one.state for one in (first, second, other, poll)] == ["SCHEDULED", "SCHEDULED", "SUCCESS", "SCHEDULED"]
    assert (first.snoozes, second.snoozes, poll.snoozes, first.attempts) == (1, 0, 1, 0)
    inline.clock.advance(seconds=60)
    await inline.drain()
    assert (first.state, second.state, poll.state) == ("SUCCESS", "SUCCESS", "SCHEDULED")
    inline.clock.advance(minutes=5)
    await inline.drain()
    assert (poll.state, poll.attempts, poll.errors) == ("SUCCESS", 1, [])
    with Client() as client:
        assert client.status(poll.id, detail=True)["snoozes"] == 1


async def test_a_task_is_put_off_so_often_and_then_fails(monkeypatch: Any) -> None:
    registry = Registry()

    @action("poll", registry=registry)
    async def poll() -> None:
        raise penstock.Snooze(1)

    inline = Inline(registry)
    monkeypatch.setattr(in_process, "substitute", inline)
    monkeypatch.setattr(inline, "_settings", load_settings(**ALONE, snooze_limit=2))
    await poll.enqueue()
    for _ in range(3):
        await inline.drain()
        inline.clock.advance(seconds=1)
    (task,) = inline.tasks
    assert (task.state, task.snoozes, task.error["data"]["type"]) == ("CRITICAL_ERROR", 2, "PutOffTooOften")
    with Client() as client:
        client.retry(task.id)
    await inline.drain()
    assert (task.state, task.snoozes) == ("SCHEDULED", 1)


@pytest.mark.parametrize("step", ["charge", "charge#2", "ship"])
async def test_a_worker_that_dies_after_a_reported_step_runs_each_step_once(monkeypatch: Any, step: str) -> None:
    registry, ran = Registry(), list[str]()

    @action("order", registry=registry)
    async def order(ctx: Context) -> int:
        for name in ("charge", "charge", "ship"):
            await ctx.step(name, ran.append, name)
        return len(ran)

    inline = Inline(registry)
    monkeypatch.setattr(in_process, "substitute", inline)
    inline.crash("order", after_step=step)
    inline.crash("another", after_step=step)
    await order.enqueue()
    await inline.drain()
    (task,) = inline.tasks
    assert (task.state, task.result, task.attempts) == ("SUCCESS", 3, 1)
    assert ran == ["charge", "charge", "ship"]


def test_a_crash_needs_a_place(inline: Inline) -> None:
    with pytest.raises(ValueError, match="needs a place"):
        inline.crash("note", before_answer=False)


async def test_a_handler_spawns_another_with_checked_arguments(monkeypatch: Any) -> None:
    registry = Registry()

    @action("child", registry=registry)
    async def child(n: int) -> int:
        return n

    @action("parent", registry=registry)
    async def parent(ctx: Context) -> None:
        ctx.spawn(child, 1)
        ctx.spawn(child.with_options(priority=5), n=2)
        with pytest.raises(penstock.InvalidParams, match="n is wrong"):
            ctx.spawn(child, n="three")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="no 'unique_key'"):
            ctx.spawn(child.with_options(unique_key="k"), n=4)

    inline = Inline(registry)
    monkeypatch.setattr(in_process, "substitute", inline)
    await parent.enqueue()
    await inline.drain()
    told = [(task.payload, task.new.priority, task.result) for task in inline.enqueued("child")]
    assert told == [({"n": 1}, 0, 1), ({"n": 2}, 5, 2)]


async def test_a_drain_ends_beside_a_limit_that_holds_what_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry()

    @action("held", registry=registry)
    async def held(ctx: Context, fails: bool) -> None:
        if ctx.claim == 1:
            raise ValueError("once") if fails else penstock.RateLimited(retry_after=3600)

    inline = Inline(registry)
    monkeypatch.setattr(in_process, "substitute", inline)
    with Client() as client:
        for fails in (True, False):
            client.enqueue("held", {"fails": fails})
    began = inline.clock.now()
    await asyncio.wait_for(inline.drain(), 60)
    assert inline.clock.now() - began >= timedelta(hours=1)
    assert [task.state for task in inline.tasks] == ["SUCCESS", "SUCCESS"]


async def test_a_task_that_has_begun_its_steps_does_not_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry()

    @action("order", registry=registry)
    async def order(ctx: Context) -> int:
        await ctx.step("charge", lambda: 1)
        if ctx.claim == 1:
            raise penstock.Retry(3600)
        return 7

    inline = Inline(registry)
    monkeypatch.setattr(in_process, "substitute", inline)
    with Client() as client:
        client.enqueue("order", expires_in=60)
    await inline.drain()
    assert (inline.tasks[0].state, inline.tasks[0].result) == ("SUCCESS", 7)


async def test_a_task_whose_unique_key_another_has_taken_is_not_retried(inline: Inline) -> None:
    async with AsyncClient() as client:
        ids = []
        for n in range(2):
            ids.append((await client.enqueue("note", {"n": n}, unique_key="k", unique="live")).id)
            await client.cancel(ids[n])
        with pytest.raises(penstock.StateConflict, match="now has its unique key") as refused:
            await client.retry(ids[0])
        assert refused.value.data["holder"] == ids[1]
        assert (await client.retry(ids[1])).state == "SCHEDULED"


async def test_a_retry_forgets_an_expiry_that_has_passed(inline: Inline, ran: Ran) -> None:
    async with AsyncClient() as client:
        task = await client.enqueue("note", {"n": 1}, delay=60, expires_in=30)
        inline.clock.advance(seconds=60)
        await inline.drain()
        assert inline.tasks[0].reason == "expired"
        await client.retry(task["id"])
        await inline.drain()
    assert (inline.tasks[0].state, [n for n, *_ in ran]) == ("SUCCESS", [1])


async def test_a_replaced_task_forgets_an_expiry_that_has_passed(inline: Inline, ran: Ran) -> None:
    again: dict[str, Any] = {"unique_key": "k", "on_duplicate": "replace"}
    async with AsyncClient() as client:
        await client.enqueue("note", {"n": 1}, delay=60, expires_in=30, **again)
        inline.clock.advance(seconds=60)
        assert (await client.enqueue("note", {"n": 2}, **again)).replaced
        await inline.drain()
        assert [n for n, *_ in ran] == [2]
        await client.enqueue("note", {"n": 3}, delay=60, **again | {"unique_key": "l"})
        assert (await client.enqueue("note", {"n": 4}, expires_in=30, **again | {"unique_key": "l"})).replaced
        inline.clock.advance(seconds=60)
        await inline.drain()
    assert inline.tasks[-1].reason == "expired"


async def test_the_longest_of_several_holds_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry()

    @action("call", registry=registry)
    async def call(ctx: Context, seconds: float) -> None:
        if seconds and ctx.claim == 1:
            raise penstock.RateLimited(seconds)

    inline = Inline(registry)
    monkeypatch.setattr(in_process, "substitute", inline)
    async with AsyncClient() as client:
        for seconds in (3600, 1):
            await client.enqueue("call", {"seconds": seconds})
        await inline.drain()
        await client.enqueue("call", {"seconds": 0})
        inline.clock.advance(seconds=2)
        await inline.drain()
        assert [task.state for task in inline.tasks] == ["SCHEDULED"] * 3
        inline.clock.advance(hours=1)
        await inline.drain()
        assert [task.state for task in inline.tasks] == ["SUCCESS"] * 3
        await client.enqueue("call", {"seconds": 1e15})
        await inline.drain()  # held for a day, as in production
    assert inline.tasks[3].state == "SCHEDULED"


async def test_a_worker_dies_before_it_reports_that_its_task_sleeps(inline: Inline, ran: Ran) -> None:
    @action("nap", registry=inline._registry)
    async def nap(ctx: Context) -> str:
        ran.append((ctx.claim, ctx.redelivered))
        await ctx.sleep(60)
        return "slept"

    await penstock.enqueue(None, "nap")
    inline.crash("nap")
    (task,) = await inline.drain()
    assert (ran, inline.faults.dying) == ([(1, False), (1, True), (2, False)], set())
    inline.clock.advance(seconds=60)
    await inline.drain()
    assert (task.result, ran[3:]) == ("slept", [(3, False)])


async def test_a_spawned_task_is_of_its_parents_tenant(inline: Inline, ran: Ran) -> None:
    await penstock.enqueue(None, "parent", {"count": 1}, tenant="acme")
    await inline.drain()
    assert (ran, inline.tasks[1].new.tenant) == ([(0, 1, False, "acme")], "acme")


async def test_spawned_tasks_that_make_no_sense_fail_their_parent(inline: Inline) -> None:
    @action("spawn", registry=inline._registry)
    async def spawn(ctx: Context) -> None:
        ctx.spawn("note", {"n": 1}, priority=10**6)

    await penstock.enqueue(None, "spawn")
    await inline.drain()
    (task,) = inline.tasks
    assert (task.state, task.attempts, task.error["data"]["type"]) == ("CRITICAL_ERROR", 1, "BadChildren")


async def test_a_task_that_waits_or_has_begun_its_steps_keeps_what_it_was_asked(inline: Inline) -> None:
    @action("order", registry=inline._registry)
    async def order(ctx: Context, n: int) -> None:
        await ctx.step("charge", lambda: n)
        await ctx.sleep(3600)

    async with AsyncClient() as client:
        waiting = (await client.enqueue("wait", {"token": "t"}, unique_key="k"))["id"]
        begun = (await client.enqueue("order", {"n": 1}, unique_key="k"))["id"]
        await inline.drain()
        given: dict[str, Any] = {"unique_key": "k", "on_duplicate": "replace", "delay": 0, "priority": 1}
        again = await client.enqueue("wait", {"token": "u"}, **given)
        assert again == {"id": waiting, "state": "WAITING", "duplicate": True, "replaced": False}
        again = await client.enqueue("order", {"n": 2}, **given)
        assert again == {"id": begun, "state": "SCHEDULED", "duplicate": True, "replaced": False}
        assert [(task.payload, task.new.priority) for task in inline.tasks] == [({"token": "t"}, 0), ({"n": 1}, 0)]
        with pytest.raises(penstock.StateConflict, match="WAITING; it cannot be rescheduled"):
            await client.reschedule(waiting, delay=0)
        await client.reschedule(begun, delay=0)  # ends its sleep
        await inline.drain()
        assert await client.result(begun) is None


async def test_a_sleep_or_a_snooze_after_a_failed_attempt_leaves_its_task_in_error(inline: Inline) -> None:
    runs: list[str] = []

    @action("sleeps", registry=inline._registry)
    async def sleeps(ctx: Context) -> None:
        runs.append("sleeps")
        if runs.count("sleeps") == 1:
            raise ValueError("once")
        await ctx.sleep(86_400)

    @action("snoozes", registry=inline._registry)
    async def snoozes() -> None:
        runs.append("snoozes")
        if runs.count("snoozes") == 1:
            raise ValueError("once")
        if runs.count("snoozes") == 2:
            raise penstock.Snooze(86_400)

    for name in ("sleeps", "snoozes"):
        await penstock.enqueue(None, name)
    await inline.drain()
    assert [(task.state, task.attempts) for task in inline.tasks] == [("ERROR", 1), ("ERROR", 1)]
    assert sorted(runs) == ["sleeps", "sleeps", "snoozes", "snoozes"]  # they end by the clock alone
    inline.clock.advance(days=1)
    await inline.drain()
    assert [task.state for task in inline.tasks] == ["SUCCESS", "SUCCESS"]


async def test_a_full_answer_has_the_steps_and_the_failed_attempts(inline: Inline) -> None:
    @action("order", registry=inline._registry)
    async def order(ctx: Context) -> None:
        await ctx.step("charge", lambda: {"id": 7})
        await ctx.sleep(60)
        await ctx.step(penstock.Step("ship", retries=0), int, "no number")

    async with AsyncClient() as client:
        plain = (await client.enqueue("note", {"n": 1}))["id"]
        task = (await client.enqueue("order"))["id"]
        await inline.drain()
        inline.clock.advance(seconds=60)
        await inline.drain(retries=False)
        assert "steps" not in await client.status(plain, detail=True)
        shown = await client.status(task, detail=True)
    assert [(step["name"], step["result"], step["claim"]) for step in shown["steps"]] == [
        ("charge", {"id": 7}, 1), ("ctx.sleep", None, 1), ("ship", None, 2),
    ]  # fmt: skip
    assert shown["steps"][2]["error"]["data"]["type"] == "ValueError"
    assert shown["steps"][0]["began_at"] <= shown["steps"][0]["recorded_at"] < shown["steps"][2]["recorded_at"]
    assert [(failure["attempt"], failure["claim"]) for failure in shown["failures"]] == [(1, 2)]


async def test_a_task_whose_worker_always_dies_in_its_first_step_fails(inline: Inline, ran: Ran) -> None:
    async def die() -> None:
        raise WorkerCrash

    @action("order", registry=inline._registry)
    async def order(ctx: Context) -> None:
        ran.append(ctx.redelivered)
        await ctx.step("charge", die)

    await penstock.enqueue(None, "order", max_attempts=2)
    await asyncio.wait_for(inline.drain(), 20)
    (task,) = inline.tasks
    assert (task.state, [error["data"]["type"] for error in task.errors]) == ("CRITICAL_ERROR", ["Interrupted"] * 2)
    assert (task.claim, ran) == (4, [False, True] * 4)  # twice is free: perhaps no worker had begun it
    with Client() as client:
        client.retry(task.id)
    await asyncio.wait_for(inline.drain(), 20)
    assert (task.state, task.claim) == ("CRITICAL_ERROR", 8)


async def test_the_first_answer_of_a_token_counts(inline: Inline) -> None:
    async with AsyncClient() as client:
        tasks = [(await client.enqueue("wait", {"token": token}))["id"] for token in ("asked", "cancelled", "late")]
        await inline.drain()
        await client.complete("asked", {"a": 1, "b": 2})
        again = await client.complete("asked", {"b": 2, "a": 1})
        assert again == {"id": tasks[0], "state": "SUCCESS", "kept": False, "duplicate": True}
        with pytest.raises(penstock.StateConflict, match="different answer"):
            await client.fail("asked", "no")
        await client.cancel(tasks[1])
        inline.clock.advance(hours=2)
        await inline.drain()
        for token, state in (("cancelled", "CANCELLED"), ("late", "CRITICAL_ERROR")):
            with pytest.raises(penstock.StateConflict, match=f"{state}; it cannot be answered"):
                await client.complete(token, 1)
        assert await client.complete("early", 1) == {"id": None, "state": None, "kept": True, "duplicate": False}
        assert (await client.complete("early", 1))["duplicate"]
        with pytest.raises(penstock.StateConflict, match="different answer"):
            await client.complete("early", 2)


async def test_an_answer_between_two_attempts_is_for_a_token_of_the_handlers_own(inline: Inline) -> None:
    made: list[str] = []

    @action("ask", registry=inline._registry)
    async def ask(ctx: Context, token: str | None) -> Any:
        made.append(ctx.wait_token())
        return ctx.wait(token, timeout=60)

    async with AsyncClient() as client:
        own, other = [(await client.enqueue("ask", {"token": token}))["id"] for token in ("own", None)]
        for task_id, problem in ((other, "by a token of that attempt"), (99, "No such task")):
            with pytest.raises(penstock.RpcError, match=problem):
                await client.complete(make_token(task_id, 1), 1)
        await inline.drain()
        inline.clock.advance(seconds=60)
        await inline.drain(retries=False)
        assert (await client.complete("own", "late"))["kept"]
        with pytest.raises(penstock.StateConflict, match="ERROR; it cannot be answered"):
            await client.complete(made[1], "late")
        await inline.drain()
        assert await client.result(own) == "late"
        assert inline.tasks[1].state == "WAITING"


async def test_a_token_is_one_tasks_at_a_time(inline: Inline) -> None:
    async with AsyncClient() as client:
        first, second = [(await client.enqueue("wait", {"token": "t"}, max_attempts=1))["id"] for _ in range(2)]
        of_tenant = (await client.enqueue("wait", {"token": "t"}, tenant="acme"))["id"]
        await inline.drain()
        error = inline.tasks[1].error
        assert (inline.tasks[1].state, error["data"]["type"], error["data"]["holder"]) == (
            "CRITICAL_ERROR", "TokenTaken", first,
        )  # fmt: skip
        assert (await client.status(of_tenant, detail=True))["waits_for"]["token"] == "t"
        assert (await client.complete("t", 1))["id"] == first
        await client.retry(second)
        await inline.drain()
        assert (await client.complete("t", 2))["id"] == second
        assert (await client.complete("t", 3, tenant="acme"))["id"] == of_tenant


async def test_parameters_of_a_handler_may_have_any_name(inline: Inline) -> None:
    @action("log", registry=inline._registry)
    async def log(ctx: Context, action: str, first: int = 0) -> str:
        return f"{action} {first}"

    @action("count", registry=inline._registry)
    def count(_: int, first: int) -> int:
        return _ + first

    async with AsyncClient() as client:
        await client.enqueue("log", {"action": "read", "first": 1})
        await client.enqueue("count", {"_": 2, "first": 3})
        await inline.drain(retries=False)
    assert [task.result for task in inline.tasks] == ["read 1", 5]
