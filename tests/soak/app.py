"""Handlers of the soak."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from penstock import Context, action


@action("work")
async def work(ctx: Context, **_: Any) -> dict[str, int]:
    await asyncio.sleep(0.005)
    return {"claim": ctx.claim}


@action("limited")
async def limited(ctx: Context, **_: Any) -> None:
    await asyncio.sleep(0.005)


@action("flaky")
async def flaky(ctx: Context) -> None:
    """One attempt in five fails."""
    if random.random() < 0.2:
        raise ConnectionError("this attempt fails")
