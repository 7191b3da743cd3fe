"""Handlers that leave a line in the ledger each time they run."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

from penstock import Context, action

LEDGER_VARIABLE = "CHAOS_LEDGER"  # the folder; each worker process writes a file of its own there

_file: int | None = None


def _note(ctx: Context) -> None:
    """One line by one write to a file opened for appending: it survives a kill, and nothing of it is ever torn."""
    global _file
    if _file is None:
        path = Path(os.environ[LEDGER_VARIABLE]) / f"runs-{os.getpid()}"
        _file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    # Not time.time(), which a scenario shifts.
    now = time.clock_gettime(time.CLOCK_REALTIME)
    os.write(_file, f"{ctx.task_id} {ctx.claim} {os.getpid()} {now:.3f}\n".encode())


@action("work")
async def work(ctx: Context, ms: int = 5) -> dict[str, Any]:
    _note(ctx)
    await asyncio.sleep(ms / 1000)
    return {"claim": ctx.claim}


@action("plain_work")
def plain_work(ctx: Context, ms: int = 5) -> dict[str, Any]:
    _note(ctx)
    time.sleep(ms / 1000)
    return {"claim": ctx.claim}


@action("poison")
async def poison(ctx: Context) -> None:
    """Takes its worker along, each time."""
    _note(ctx)
    os._exit(9)
