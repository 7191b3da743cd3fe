"""The handler that benchmarks run: it does nothing, so that what is measured is the pipeline."""

from __future__ import annotations

from typing import Any

from penstock.handlers import Context, action


@action("bench.noop")
async def noop(ctx: Context, **payload: Any) -> None:
    return None
