"""The actions of the suite, for Penstock's own worker: `penstock worker --app examples.conformance.penstock_worker`."""

from __future__ import annotations

import asyncio
from typing import Any

from penstock import Context, Fail, action


@action("conformance.echo")
async def echo(ctx: Context, value: Any) -> Any:
    return value


@action("conformance.fail")
async def fail(ctx: Context, message: str, final: bool = False) -> None:
    raise Fail(message) if final else RuntimeError(message)


@action("conformance.sleep")
async def sleep(ctx: Context, seconds: float) -> None:
    await asyncio.sleep(seconds)


@action("conformance.steps")
async def steps(ctx: Context, seconds: float) -> list[str]:
    async def step(name: str) -> str:
        await asyncio.sleep(seconds)
        return name

    return [await ctx.step(name, step, name) for name in ("one", "two", "three")]


@action("conformance.tenant")
async def tenant(ctx: Context) -> str | None:
    return ctx.tenant
