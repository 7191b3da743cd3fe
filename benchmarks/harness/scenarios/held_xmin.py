"""held-xmin: the rate while a transaction is held open, so that no dead row can be removed."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg

from benchmarks.harness.producers import INSERT_BATCH, insert_noops
from benchmarks.harness.rig import Bench, Rig, rig_up

BACKLOG = 50_000  # kept topped up, so that the pipeline never waits for tasks
_LOOK_SECONDS = 0.05


async def held_xmin(bench: Bench) -> dict[str, Any]:
    """A backlog kept full; the rate for so long without and then for so long with a transaction held open.

    The first phase lasts a third of the second, and is preceded by some seconds that do not count.
    """
    held_seconds = bench.options.seconds
    free_seconds = max(0.5, held_seconds / 3)
    async with rig_up(bench) as rig:
        feeder = _Feeder(rig, bench.options.tasks)
        feeding = asyncio.create_task(feeder.run(), name="feed")
        try:
            await _run_for(rig, min(5.0, free_seconds), "warming up", feeding)
            await rig.begin()
            first = await rig.settled()
            free = await _run_for(rig, free_seconds, "running free", feeding)
            holder = await asyncpg.connect(rig.settings.require_database_url)
            try:
                await holder.execute("begin isolation level repeatable read")
                await holder.fetchval("select pg_current_xact_id()")  # an id and a snapshot, as a forgotten writer has
                held = [await _run_for(rig, held_seconds / 3, f"held, part {part} of 3", feeding) for part in (1, 2, 3)]
                used = await rig.end(max(1, await rig.settled() - first))
            finally:
                await holder.close()
        finally:
            feeder.stopping = True
            await feeding
        await rig.wait_settled(feeder.total)
    during = sum(held) / len(held)
    return {
        "held_seconds": held_seconds,
        "before_per_second": round(free),
        "during_per_second": round(during),
        "during_by_thirds_per_second": {f"part_{number}": round(rate) for number, rate in enumerate(held, start=1)},
        "ratio": round(during / free, 3) if free else None,
        "cost": used,
    }


class _Feeder:
    """Keeps the backlog full until stopped. ``total``: tasks that will have settled once it is drained."""

    def __init__(self, rig: Rig, backlog: int) -> None:
        self.stopping = False
        self.total = 0
        self._rig = rig
        self._backlog = backlog

    async def run(self) -> None:
        self.total = await self._rig.settled()
        least = min(self._backlog, INSERT_BATCH)
        while not self.stopping:
            missing = self._backlog - (self.total - await self._rig.settled())
            if missing > 0:
                count = max(missing, least)
                await insert_noops(self._rig.store, count)
                self.total += count
            else:
                await asyncio.sleep(_LOOK_SECONDS)


async def _run_for(rig: Rig, seconds: float, text: str, feeding: asyncio.Task[None]) -> float:
    """Let it run; returns tasks settled a second."""
    loop = asyncio.get_running_loop()
    start, before = loop.time(), await rig.settled()
    advance = rig.bench.bar(text, round(seconds * 10))
    for _ in range(round(seconds * 10)):
        await asyncio.sleep(0.1)
        advance(1)
        if feeding.done():
            feeding.result()
    settled = await rig.settled() - before
    return settled / (loop.time() - start)
