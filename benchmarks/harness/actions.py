"""The handlers that benchmarks run: they do next to nothing, so that what is measured is the pipeline."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

from penstock.worker.handlers.actions import action
from penstock.worker.handlers.context import Call, Context
from penstock.worker.handlers.outcomes import Retry

NOOP = "bench.noop"
NOOP_INBOUND = "bench.noop_inbound"  # tasks of the inbound queue, named differently from those over HTTP
NOOP_BATCHED = "bench.noop_batched"
CLOCK = "bench.clock"
SLOW = "bench.slow"
FAILING = "bench.failing"
APP = "benchmarks.harness.actions"
STARTS = "BENCH_STARTS"  # the folder in which each worker notes its first call, as the peers' do

_first: list[int] = []


@action(NOOP)
async def noop(ctx: Context, **payload: Any) -> None:
    note_start()


@action(NOOP_INBOUND)
async def noop_inbound(ctx: Context, **payload: Any) -> None:
    return None


@action(NOOP_BATCHED, batch=2000)
async def noop_batched(calls: list[Call[dict[str, Any]]]) -> list[None]:
    note_start()
    return [None for _ in calls]


@action(CLOCK)
async def clock(ctx: Context, **payload: Any) -> int:
    """When it started: epoch microseconds, which JSON's numbers hold exactly."""
    return now_us()


@action(SLOW)
async def slow(ctx: Context, seconds: float) -> None:
    await asyncio.sleep(seconds)


@action(FAILING)
async def failing(ctx: Context, again_after_seconds: float) -> None:
    raise Retry(again_after_seconds, "as the benchmark asked")


def note_start() -> None:
    """Only a process's first call does something."""
    if not _first:
        _first.append(time.time_ns())
        if folder := os.environ.get(STARTS):
            Path(folder, f"first.{os.getpid()}").write_text(str(_first[0]))


def now_us() -> int:
    """Epoch microseconds by this machine's clock."""
    return time.time_ns() // 1000
