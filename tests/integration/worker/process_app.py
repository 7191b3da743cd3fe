"""Handlers that run in child processes."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from penstock import Call, Context, Fail, Retry, Wait, action, inject, lifespan
from penstock.protocol import trace_context
from penstock.worker.leases import Lease
from penstock.worker.processes import child

log = logging.getLogger(__name__)


class Model:
    def __init__(self) -> None:
        self.pid = os.getpid()


@lifespan(process=True)
async def model() -> AsyncGenerator[Model, None]:
    opened = os.environ.get("PROCESS_APP_OPENED")
    if opened:
        with Path(opened).open("a", encoding="ascii") as file:
            file.write("opened\n")
        if Path(opened).read_text("ascii").count("opened") == 1:
            raise ConnectionError("the first time")
    yield Model()
    if opened:
        with Path(opened).open("a", encoding="ascii") as file:
            file.write("closed\n")


@action(process=True)
def with_model(model: Model = inject()) -> bool:
    return model.pid == os.getpid()


@action(process=True)
def plain(ctx: Context, number: int, seconds: float = 0.0) -> dict[str, Any]:
    time.sleep(seconds)
    return {"number": number, "pid": os.getpid(), "tenant": ctx.tenant}


@action(process=True, output="prints")
def write(ctx: Context, crashes: bool = False) -> None:
    log.warning("logged")
    ctx.emit_sync({"chunk": True})
    print("printed")
    if crashes:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGSEGV)


@action(process=True)
def record(ctx: Context, holds: bool) -> str:
    """As `penstock.settle` leaves the context."""
    ctx.note_settled(holds=holds)
    if not holds:
        raise Fail("rolled back")
    return "recorded elsewhere"


@action(process=True)
def segfault(ctx: Context) -> None:
    ctypes.string_at(0)


@action(process=True)
def die_behind_answer(ctx: Context) -> str:
    """As of a destructor that runs once the answer is sent."""
    vars(child).update(resident_bytes=lambda: os.kill(os.getpid(), signal.SIGSEGV))  # what the end of a call asks for
    return "done"


@action(process=True, timeout=0.5)
def hang_behind_answer(ctx: Context) -> str:
    vars(child).update(resident_bytes=lambda: time.sleep(600))
    return "done"


@action(process=True)
def exhaust_group(ctx: Context, members: str) -> None:
    """Run out of the memory of a control group, so that the kernel kills this process."""
    Path(members).write_text(str(os.getpid()), "ascii")
    kept = []
    while True:
        kept.append(os.urandom(1 << 20))


@action(process=True, max_attempts=3)
def leave(ctx: Context, code: int) -> None:
    os._exit(code)


@action(process=True, timeout=0.5)
def hang(ctx: Context) -> None:
    time.sleep(600)


@action(process=True, timeout=0.5)
async def hang_on_loop(ctx: Context) -> None:
    time.sleep(600)


@action(process=True, timeout=0.5)
async def sleep(ctx: Context) -> None:
    await asyncio.sleep(600)


@action(process=True)
def exhaust(ctx: Context) -> None:
    kept = []
    while True:
        kept.append(bytearray(16 * 2**20))


@action(process=True)
def grow(ctx: Context, megabytes: int) -> int:
    globals()["kept"] = b"x" * (megabytes * 2**20)
    return os.getpid()


@action(process=True, batch=10)
def spread(calls: list[Call[dict[str, int]]]) -> list[Any]:
    for call in calls:
        call.ctx.spawn("plain", {"number": 1})
    return [None] * len(calls)


@action(process=True)
async def talk(ctx: Context) -> str:
    log.warning("a line of the child")
    ctx.spawn("plain", {"number": 1})
    while not ctx.lease_lost:
        await ctx.progress(40, "nearly")  # without a pause: it has to learn of the loss all the same
        await asyncio.sleep(0.02)
    await ctx.progress(50, "lease lost")
    await ctx.wait_cancelled()
    await ctx.progress(60, f"cancelled {ctx.cancelled}")
    return "over"


@action(process=True)
def decide(ctx: Context, what: str) -> Wait | None:
    match what:
        case "retry":
            raise Retry(30, "not yet")
        case "fail":
            raise Fail("never")
        case "wait":
            return ctx.wait(timeout=60)
        case _:
            raise LookupError(what)


@action(process=True, batch=10, linger=0.3)
def many(calls: list[Call[dict[str, int]]]) -> list[Any]:
    calls[0].answer("early")
    if any(call.params.get("poison") for call in calls):
        os.kill(os.getpid(), signal.SIGKILL)
    return [{"size": len(calls)} for _ in calls]


@action(process=True)
def trace(ctx: Context) -> list[str]:
    from opentelemetry import trace as api

    tracer = api.get_tracer("app")
    with tracer.start_as_current_span("inside") as span:
        current = trace_context.current()
        assert current is not None
        return [current.trace_id, f"{span.get_span_context().trace_id:032x}"]


@action(process=True)
def by_steps(ctx: Context, size: int = 1) -> None:
    first = ctx.step_sync("first", lambda: "run again")
    ctx.step_sync("second", lambda: [first, os.getpid()])
    ctx.step_sync("third", lambda: "x" * size)
    ctx.sleep_sync(60)


@action(process=True)
async def by_awaited_steps(ctx: Context) -> Any:
    return [await ctx.step("first", os.getpid), await ctx.step("second", os.getpid), os.getpid()]


@action(process=True)
def step_once_extended(ctx: Context) -> int:
    assert isinstance(ctx.lease, Lease)
    until = ctx.lease.until
    ctx.progress_sync(50)
    while ctx.lease.until == until:
        time.sleep(0.02)
    pid: int = ctx.step_sync("late", os.getpid)
    return pid


@action(process=True, output="logs")
async def leave_running(ctx: Context) -> None:
    async def go_on() -> None:
        await asyncio.sleep(0.1)
        log.warning("too late")
        await ctx.step("too late", os.getpid)

    globals()["left"] = asyncio.create_task(go_on())


@action(process=True)
async def leave_thread(ctx: Context) -> int:
    globals()["left"] = asyncio.create_task(asyncio.to_thread(time.sleep, 600))
    await asyncio.sleep(0)
    return os.getpid()


@action(process=True)
def fork_and_end(ctx: Context) -> int | None:
    """As a pool of multiprocessing ends its processes; returns the exit code."""
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    process.start()
    process.terminate()
    process.join(10)
    code = process.exitcode
    process.kill()
    return code
