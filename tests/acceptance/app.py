"""Actions that the acceptance tests run."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

from penstock import Call, Context, Wait, action


@action("echo")
async def echo(ctx: Context, **payload: Any) -> dict[str, Any]:
    return payload


@action("add")
def add(ctx: Context, a: int, b: int) -> int:
    time.sleep(0.01)
    return a + b


@action("always_fails")
async def always_fails(ctx: Context, **payload: Any) -> None:
    raise RuntimeError(f"no luck with {payload}")


@action("sleep")
async def sleep(ctx: Context, seconds: float, ledger: str | None = None) -> float:
    """Sleep, and leave one line in the ledger per run."""
    if ledger is not None:
        with Path(ledger).open("a") as file:
            file.write(f"{ctx.task_id}\n")
    await asyncio.sleep(seconds)
    return seconds


@action("mark")
async def mark(ctx: Context, name: str, ledger: str) -> None:
    """Leave the step's name in the ledger when it has run."""
    await asyncio.sleep(0.02)
    with Path(ledger).open("a") as file:
        file.write(f"{name}\n")


@action("until_cancelled")
async def until_cancelled(ctx: Context, ledger: str) -> None:
    """Leave a line in the ledger when it begins, and another when it is asked to stop."""
    with Path(ledger).open("a") as file:
        file.write("begun\n")
    await ctx.wait_cancelled()
    with Path(ledger).open("a") as file:
        file.write("stopped\n")


@action("kill_worker")
async def kill_worker(ctx: Context) -> None:
    os._exit(9)


@action("span")
async def span(ctx: Context, seconds: float, ledger: str, key: str) -> None:
    """Sleep, and leave in the ledger when that began and ended."""
    began = time.time()
    await asyncio.sleep(seconds)
    with Path(ledger).open("a") as file:
        file.write(json.dumps({"began": began, "ended": time.time(), "key": key, "task": ctx.task_id}) + "\n")


@action("whose")
async def whose(ctx: Context) -> dict[str, int]:
    return {"pid": os.getpid()}


@action("ask")
async def ask(ctx: Context, ledger: str) -> Wait:
    """Hand out a token, and leave it in the ledger, before it waits for it."""
    with Path(ledger).open("a") as file:
        file.write(f"{ctx.wait_token()}\n")
    return ctx.wait(timeout=600)


@action("add_many", batch=20)
async def add_many(calls: list[Call[dict[str, int]]]) -> list[dict[str, int]]:
    return [{"sum": sum(call.params.values()), "in": len(calls)} for call in calls]


@action("four_steps")
async def four_steps(ctx: Context, ledger: str, seconds: float) -> None:
    """Leave a line in the ledger when a step runs, and another when its report was sent."""

    def note(what: str, name: str) -> None:
        with Path(ledger).open("a") as file:
            file.write(f"{what} {ctx.task_id} {name} {os.getpid()}\n")

    async def run(name: str) -> None:
        note("ran", name)
        await asyncio.sleep(seconds)

    for name in "abcd":
        await ctx.step(name, run, name)
        note("reported", name)
