"""A program of every typed verb, which type checkers accept but for the lines marked ``# refused``. It is not run."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, timedelta
from decimal import Decimal
from typing import Any, TypedDict, assert_type
from uuid import UUID

import asyncpg
from pydantic import BaseModel

import penstock
from penstock import (
    Action,
    AsyncClient,
    Bound,
    Call,
    Client,
    Context,
    InboundClient,
    SyncInboundClient,
    Task,
    Wait,
    action,
)
from penstock.protocol import answers


class Size(BaseModel):
    width: int


@dataclass
class Image:
    url: str
    size: Size


class Row(TypedDict):
    id: UUID


@action("resize", timeout=30)
async def resize(ctx: Context, url: str, size: Size, day: date | None = None) -> Image:
    return Image(url, size)


@action
def plain(n: int) -> Row:
    return {"id": UUID(int=n)}


@action
async def album(ctx: Context, urls: list[str]) -> None:
    for url in urls:
        ctx.spawn(resize, url, Size(width=3))
        ctx.spawn(resize.with_options(priority=5), url=url, size=Size(width=3))
    ctx.spawn("resize", {"url": "a"}, priority=5)
    ctx.spawn(resize, 3, Size(width=3))  # refused
    ctx.spawn(plain, "many")  # refused
    ctx.spawn(plain)  # refused


@action("approve", max_attempts=3)
async def approve(ctx: Context, order: int) -> str | Wait:
    return ctx.wait()


@action(batch=100, linger=0.1)
async def index(calls: list[Call[Row]]) -> list[Decimal | Exception]:
    return [Decimal(call.params["id"].int) for call in calls]


def takes(resizing: Action[[str], int]) -> Bound[int]:
    return resizing.bind("a")


async def asynchronous(connection: asyncpg.Connection[Any], ctx: Context, size: Size) -> None:
    task = await resize.enqueue("a.png", size=size)
    assert_type(task, Task[Image])
    assert_type(task.id, int)
    assert_type(await task.result(timeout=3), Image)
    await task.status()
    await task.cancel(reason="enough")
    urgent = resize.with_options(priority=1, delay=timedelta(days=1), labels={"of": "test"}, unique=3.5)
    assert_type(await urgent.enqueue_in(connection, "a.png", size, day=date.today()), Task[Image])
    assert_type(await urgent.enqueue_many([urgent.bind("a", size), {"url": "b", "size": size}]), list[Task[Image]])
    assert_type(await (await approve.enqueue(order=1)).result(), str)
    assert_type(await (await index.enqueue({"id": UUID(int=1)})).result(), Decimal)
    assert_type(await resize(ctx, "a.png", size), Image)
    assert_type(plain(1), Row)

    await resize.enqueue("a.png")  # refused
    await resize.enqueue("a.png", size=3)  # refused
    await resize.enqueue("a.png", size=size, width=3)  # refused
    await resize.enqueue(ctx, "a.png", size)  # refused
    await index.enqueue({"id": 1})  # refused
    await resize("a.png", size)  # refused
    await resize.enqueue_in("a.png", size)  # refused


def blocking(connection: Any, size: Size) -> None:
    penstock.connect("http://127.0.0.1:8080", api_key="key")
    task = plain.enqueue_sync(n=1)
    assert_type(task.result_sync(timeout=3)["id"], UUID)
    task.status_sync()
    task.cancel_sync()
    assert_type(resize.enqueue_in_sync(connection, "a.png", size), Task[Image])
    assert_type(plain.enqueue_many_sync([{"n": 1}]), list[Task[Row]])
    assert_type(resize.task(17), Task[Image])
    assert_type(resize.bind("a.png", size), Bound[Image])

    resize.with_options(priorty=1)  # refused
    resize.with_options(priority="high")  # refused
    resize.with_options(unique="now")  # refused
    penstock.connect(17)  # refused
    takes(resize)  # refused
    task.result_sync(timeout="soon")  # refused


def by_name(client: Client, inbound: SyncInboundClient) -> None:
    task = client.enqueue("resize", {"url": "a"}, priority=5, delay=timedelta(minutes=1))
    assert_type(task, answers.Accepted)
    assert_type(task.id, int)
    assert_type(task["id"], Any)
    assert_type(client.status(task.id), answers.Task)
    assert_type(client.status(task.id, detail=True).failures[0].attempt, int)
    assert_type(client.status([1, 2]), list[answers.Task | None])
    assert_type(client.list(state="SUCCESS", limit=3).tasks, list[answers.Task])
    assert_type(client.set_limits("resize", rate=3, per="minute").rate, float | None)
    assert_type(client.stats().lag.due, int)
    assert_type(client.schedules.create("n", "@hourly", "resize", overlap="skip").upcoming, list[str])
    assert_type(client.workflows.wait(3, timeout=5).tree, list[answers.Step])
    assert_type(client.wait_job(7), answers.Job)
    inbound.enqueue("resize", {"url": "a"}, unique_key="a")
    inbound.schedules.pause("n")
    started = client.bulk_cancel(action="resize", older_than=60)
    if isinstance(started, answers.BulkStarted):
        assert_type(started.job, int)

    workflow = penstock.Workflow()
    step = workflow.step("resize", {"url": "a"}, timeout=5, on_failure="continue")
    workflow.map("resize", step, item_as="url", max_attempts=3)

    workflow.step("resize", on_failure="ignore")  # refused
    workflow.map("resize", step, unique_key="a")  # refused
    client.enqueue("resize", {}, priorty=5)  # refused
    client.enqueue(3)  # refused
    client.cancel(task.id, why="no")  # refused
    client.set_limits("resize", per="day")  # refused
    client.schedules.create("n", "@hourly", "resize", overlap="never")  # refused
    client.bulk_cancel(acton="resize")  # refused
    inbound.enqueue("resize", priorty=5)  # refused
    inbound.fail("token", "error", finall=True)  # refused
    _ = task.stat  # refused


async def by_name_asynchronous(client: AsyncClient, inbound: InboundClient, connection: Any) -> None:
    assert_type(await client.enqueue("resize", {"url": "a"}), answers.Accepted)
    assert_type(await client.status(1, detail=True), answers.TaskDetail)
    assert_type(await client.schedules.get("n"), answers.ScheduleDetail)
    assert_type(await penstock.enqueue(connection, "resize", {}, priority=3), answers.Accepted)
    await inbound.enqueue("resize", {"url": "a"}, unique_key="a")
    await inbound.workflows.cancel(key="k")

    await client.enqueue("resize", {}, priorty=5)  # refused
    await penstock.enqueue(connection, "resize", {}, priorty=3)  # refused
    await inbound.schedules.pause("n", why="no")  # refused


action("named", max_attempt=3)  # refused
action("named", linger=3)  # refused
