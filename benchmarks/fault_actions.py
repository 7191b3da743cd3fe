"""Handlers that harm the process that runs them, for ``benchmarks/worker_faults.py``."""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path

from penstock import Context, action


@action(process=True)
def plain(seconds: float) -> int:
    time.sleep(seconds)
    return os.getpid()


@action(process=True)
def segfault() -> None:
    ctypes.string_at(0)


@action(process=True, timeout=1)
def hang() -> None:
    time.sleep(600)


@action(process=True)
def exhaust() -> None:
    kept = []
    while True:
        kept.append(bytearray(16 * 2**20))


@action
async def block(ctx: Context, seconds: float, runs: str) -> None:
    """Stop the worker's event loop, and note that it ran."""
    with Path(runs).open("a", encoding="ascii") as file:  # noqa: ASYNC230 - as short as the rest is long
        file.write(f"{ctx.task_id}\n")
    time.sleep(seconds)  # noqa: ASYNC251 - that is the harm
