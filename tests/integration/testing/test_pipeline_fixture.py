"""`penstock_pipeline`: real passes over a database of the test, whose clock moves."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg
import pytest

import penstock
from penstock import AsyncClient, Call, Client, Context
from penstock.protocol.errors import TaskNotFound
from penstock.testing.pipeline import Pipeline
from penstock.worker.handlers.actions import Registry, action


@pytest.fixture
def ran() -> list[Any]:
    return []


@pytest.fixture
def pipeline(penstock_pipeline: Pipeline, ran: list[Any]) -> Pipeline:
    registry = penstock_pipeline._registry = Registry()

    @action("note", registry=registry)
    async def note(ctx: Context, n: int) -> int:
        ran.append((n, ctx.redelivered))
        return n

    @action("wait", registry=registry)
    async def wait(ctx: Context) -> Any:
        return ctx.wait("token", timeout=3600, on_timeout="fail")

    return penstock_pipeline


async def test_all_processes_work_until_nothing_is_due(pipeline: Pipeline, ran: list[Any]) -> None:
    connection = await asyncpg.connect(pipeline.database_url)
    await connection.execute("create table orders (id int default 0, at timestamptz default now())")
    transaction = connection.transaction()
    await transaction.start()
    await penstock.enqueue(connection, "note", {"n": 0})
    await transaction.rollback()
    async with connection.transaction():
        await penstock.enqueue(connection, "note", {"n": 1})
    async with AsyncClient() as client, penstock.InboundClient("any") as inbound:
        second = (await client.enqueue("note", {"n": 2}, delay=86_400))["id"]
        await inbound.enqueue("note", {"n": 3}, ordering_key="k")
        await inbound.enqueue("note", {"n": 4}, ordering_key="k")
        pipeline.fail("note", times=2)
        pipeline.crash("note")
        with pytest.raises(AssertionError, match="drain"):
            await client.result(second)
        await pipeline.drain()
        assert sorted(n for n, again in ran if not again) == [1, 3, 4]
        assert len([n for n, again in ran if again]) == 1  # whose first worker died
        assert [task.state for task in pipeline.enqueued("note", {"n": 2})] == ["SCHEDULED"]
        pipeline.clock.advance(days=1)
        await pipeline.drain()
        assert await client.result(second) == 2
    assert sum(task.attempts for task in pipeline.enqueued("note")) == 6
    await connection.execute("insert into orders default values")
    assert await connection.fetchval("select at > pg_catalog.now() + interval '1 day' from orders")
    await connection.close()


async def test_a_result_that_no_answer_has_room_for_is_downloaded_from_the_fixture(pipeline: Pipeline) -> None:
    @action("long", registry=pipeline._registry)
    async def long(n: int) -> str:
        return "x" * 200_000

    async with AsyncClient() as client:
        tasks = [(await client.enqueue("long", {"n": n}))["id"] for n in range(50)]
        await pipeline.drain()
        results = await asyncio.gather(*map(client.result, tasks))
        assert {len(one) for one in results} == {200_000}
        assert await client.download(tasks[0], "payload") == {"n": 0}
        with pytest.raises(TaskNotFound):
            await client.download(4711, "payload")


async def test_a_message_that_is_stored_leaves_its_queue(pipeline: Pipeline, ran: list[Any]) -> None:
    async with penstock.InboundClient("any") as inbound:
        await inbound.enqueue("note", {"n": 1})
    await pipeline.drain()
    assert not any(queue.messages for queue in pipeline._queues.values())
    for _ in range(2):
        pipeline.clock.advance(days=6)  # longer than receipts are kept
        await pipeline.drain()
    assert ran == [(1, False)]


async def test_a_sleep_or_a_snooze_after_a_failed_attempt_ends_by_the_clock_alone(pipeline: Pipeline) -> None:
    runs: list[str] = []

    @action("sleeps", registry=pipeline._registry)
    async def sleeps(ctx: Context) -> None:
        runs.append("sleeps")
        if runs.count("sleeps") == 1:
            raise ValueError("once")
        await ctx.sleep(86_400)

    @action("snoozes", registry=pipeline._registry)
    async def snoozes() -> None:
        runs.append("snoozes")
        if runs.count("snoozes") == 1:
            raise ValueError("once")
        if runs.count("snoozes") == 2:
            raise penstock.Snooze(86_400)

    async with AsyncClient() as client:
        for name in ("sleeps", "snoozes"):
            await client.enqueue(name)
        await pipeline.drain()
        assert [task.state for task in pipeline.enqueued()] == ["ERROR", "ERROR"]
        assert sorted(runs) == ["sleeps", "sleeps", "snoozes", "snoozes"]
        pipeline.clock.advance(days=1)
        await pipeline.drain()
        assert [task.state for task in pipeline.enqueued()] == ["SUCCESS", "SUCCESS"]


def test_schedules_workflows_waits_and_limits_follow_the_clock(pipeline: Pipeline, ran: list[Any]) -> None:
    with Client() as client:
        client.schedules.create("nightly", "30 2 * * *", "note", {"n": 1})
        for _ in range(3):
            pipeline.clock.advance(days=1)
            pipeline.drain_sync()
        assert ran == [(1, False)] * 3
        client.schedules.delete("nightly")
        flow = penstock.Workflow()
        flow.chain(flow.step("note", {"n": 2}), flow.step("note", {"n": 3}, name="then"))
        client.workflows.create(flow)
        waiting = client.enqueue("wait")["id"]
        client.set_limits("note", rate=1, per="hour", burst=1)
        pipeline.drain_sync()
        assert ran[3:] == [(2, False)]
        pipeline.clock.advance(minutes=59)
        pipeline.drain_sync()
        assert len(ran) == 4
        assert client.status(waiting)["state"] == "WAITING"
        pipeline.clock.advance(minutes=2)
        pipeline.drain_sync()
        assert ran[4:] == [(3, False)]
        assert client.status(waiting)["error"]["data"]["type"] == "WaitTimeout"


def test_a_drain_carries_out_imports_and_jobs(pipeline: Pipeline, ran: list[Any]) -> None:
    with Client() as client:
        names = [f"s{n}" for n in range(600)]
        started = client.schedules.create_many(
            {"name": name, "expression": "@yearly", "action": "note", "payload": {"n": 1}} for name in names
        )
        client.enqueue("note", {"n": 2}, delay=3600)
        job = client.bulk_cancel(action="note")
        pipeline.drain_sync()
        assert client.schedules.import_status(started["id"])["created"] == 600
        assert client.job(job["job"])["state"] == "DONE"
        pipeline.clock.advance(hours=2)
        pipeline.drain_sync()
        assert ran == []


def test_each_test_has_its_own_database_and_clock(pipeline: Pipeline) -> None:
    assert pipeline.enqueued() == []
    assert not pipeline.clock.offset


async def test_a_worker_that_dies_behind_a_step_runs_it_once(pipeline: Pipeline, ran: list[Any]) -> None:
    @action("order", registry=pipeline._registry)
    async def order(ctx: Context) -> int:
        await ctx.step("charge", ran.append, "charge")
        await ctx.step("ship", ran.append, "ship")
        return len(ran)

    async with AsyncClient() as client:
        task_id = (await client.enqueue("order"))["id"]
        pipeline.crash("order", after_step="charge")
        await pipeline.drain()
        pipeline.clock.advance(minutes=2)  # until what the dead worker has reported is recorded for sure
        await pipeline.drain()
        assert await client.result(task_id) == 2
    assert ran == ["charge", "ship"]
    (task,) = pipeline.enqueued("order")
    assert task.attempts == 1


async def test_a_worker_dies_with_a_result_that_its_tasks_share(pipeline: Pipeline, ran: list[Any]) -> None:
    @action("all", registry=pipeline._registry, batch=8)
    async def handle_all(calls: list[Call[Any]]) -> list[None]:
        ran.append((len(calls), calls[0].ctx.redelivered))
        return [None] * len(calls)

    async with AsyncClient() as client:
        await client.enqueue_many([{"action": "all"}] * 80)  # so many that messages of 8 are sent
    pipeline.crash("all")
    await pipeline.drain()
    assert ran == [(8, False), (8, True), *[(8, False)] * 9]
    assert not pipeline.faults.dying
