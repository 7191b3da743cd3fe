"""The scenarios: each brings up a stack of its own, works it, and returns figures."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg
import httpx
from rich.progress import Progress

from penstock.bench.measure import read_usage
from penstock.errors import StackError
from penstock.local.children import Output
from penstock.local.stack import Stack
from penstock.store import Store
from penstock.tasks import NewTask

ACTION = "bench.noop"
_INSERT_BATCH = 2000
_STUCK_SECONDS = 60.0


@dataclass(frozen=True)
class Options:
    """tasks: how many. workers: worker processes. rate: enqueues a second, for latency. data_dir: empty or absent."""

    tasks: int
    workers: int
    rate: float
    data_dir: Path


Scenario = Callable[[Options, Progress], Coroutine[Any, Any, dict[str, Any]]]


async def drain(options: Options, progress: Progress) -> dict[str, Any]:
    """A backlog of no-op tasks, enqueued before; the time until the last one has settled."""
    async with _stack(options) as stack:
        state = stack.state()
        connection = await asyncpg.connect(state["database_url"])
        scheduler = next(entry["pid"] for entry in state["processes"] if entry["name"] == "scheduler")
        os.kill(scheduler, signal.SIGSTOP)  # nothing may start before everything is there
        try:
            await _fill(state["database_url"], options.tasks, progress)
        finally:
            started = time.perf_counter()
            os.kill(scheduler, signal.SIGCONT)
        before = await read_usage(state, connection)  # a stopped process would not answer for its metrics
        await _settled(connection, options.tasks, progress)
        seconds = time.perf_counter() - started
        used = await read_usage(state, connection) - before
        attempts = await connection.fetchval("select sum(attempts)::bigint from penstock.task_history")
        await connection.close()
    return {
        "tasks": options.tasks,
        "workers": options.workers,
        "seconds": round(seconds, 2),
        "tasks_per_second": round(options.tasks / seconds),
        "attempts": attempts,
        **used.per_task(options.tasks),
    }


async def latency(options: Options, progress: Progress) -> dict[str, Any]:
    """Single enqueues over HTTP at a steady rate on an idle pipeline; the time from enqueue to claim and to SUCCESS.

    By the database's clock: from the commit's transaction start to the claim's, and to the settling one's.
    """
    async with _stack(options) as stack:
        state = stack.state()
        connection = await asyncpg.connect(state["database_url"])
        bar = progress.add_task("enqueueing", total=options.tasks)
        calls: list[float] = []
        async with httpx.AsyncClient(base_url=state["api"], timeout=30) as client:

            async def one(number: int) -> None:
                begun = time.perf_counter()
                request = {"jsonrpc": "2.0", "method": "enqueue", "id": number, "params": {"action": ACTION}}
                reply = (await client.post("/rpc", json=request)).json()
                if "error" in reply:
                    raise StackError(f"the api refused a benchmark task: {reply['error']}")
                calls.append(time.perf_counter() - begun)
                progress.advance(bar)

            start = time.perf_counter()
            async with asyncio.TaskGroup() as group:
                for number in range(options.tasks):
                    await asyncio.sleep(max(0.0, start + number / options.rate - time.perf_counter()))
                    group.create_task(one(number))
        await _settled(connection, options.tasks, progress)
        rows = await connection.fetch(
            "select extract(epoch from claimed_at - created_at)::float8 as claimed,"
            " extract(epoch from finished_at - created_at)::float8 as settled from penstock.task_history"
        )
        await connection.close()
    return {
        "tasks": options.tasks,
        "rate_per_second": options.rate,
        "enqueue_call_ms": _percentiles(calls),
        "enqueue_to_claim_ms": _percentiles([row["claimed"] for row in rows]),
        "enqueue_to_success_ms": _percentiles([row["settled"] for row in rows]),
    }


SCENARIOS: dict[str, Scenario] = {"drain": drain, "latency": latency}


def _stack(options: Options) -> Stack:
    options.data_dir.mkdir(parents=True, exist_ok=True)
    log = (options.data_dir / "bench.log").open("wb")
    os.environ.setdefault("PENSTOCK_LOG_LEVEL", "warning")
    return Stack(
        options.data_dir,
        port=0,
        workers=options.workers,
        apps=["penstock.bench.noop"],
        output=Output(log, colour=False),
    )


async def _fill(database_url: str, tasks: int, progress: Progress) -> None:
    bar = progress.add_task("enqueueing", total=tasks)
    store = Store(database_url, application_name="penstock-bench")
    try:
        for start in range(0, tasks, _INSERT_BATCH):
            count = min(_INSERT_BATCH, tasks - start)
            async with store.session() as session:
                await session.enqueue([NewTask(ACTION, f'{{"n":{n}}}') for n in range(start, start + count)])
            progress.advance(bar, count)
    finally:
        await store.close()


async def _settled(connection: asyncpg.Connection[Any], tasks: int, progress: Progress) -> None:
    """Wait until so many tasks are in the history. Raises StackError when nothing has moved for a minute."""
    bar = progress.add_task("settling", total=tasks)
    done, moved = 0, time.monotonic()
    while done < tasks:
        await asyncio.sleep(0.1)
        now = await connection.fetchval(
            "select coalesce(sum(count), 0)::bigint from penstock.tally where event = 'SUCCESS'"
        )
        if now > done:
            done, moved = now, time.monotonic()
            progress.update(bar, completed=done)
        elif time.monotonic() - moved > _STUCK_SECONDS:
            raise StackError(
                f"only {done} of {tasks} tasks settled and nothing moves; see bench.log in the data folder"
            )


def _percentiles(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    last = len(ordered) - 1
    return {f"p{share}": round(ordered[round(last * share / 100)] * 1000, 2) for share in (50, 95, 99)}
