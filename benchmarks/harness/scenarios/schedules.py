"""schedules: cron schedules that all fire at the same instant, several times, on a pipeline that runs the tasks."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta
from typing import Any

from benchmarks.harness.actions import NOOP
from benchmarks.harness.rig import STUCK_SECONDS, Bench, Rig, rig_up
from penstock.client.client import Client
from penstock.protocol.errors import StackError
from penstock.schedules.model import IMPORT_LIMIT

ROUNDS = 3
_LOOK_SECONDS = 0.2
_IMPORTED_PER_SECOND = 800  # at least; the first fire is to come after the last schedule
_FIRES = """
    select count(*) as fires, extract(epoch from max(fired_at) - $1)::float8 as took,
           percentile_cont(array[0.5, 0.99, 1]) within group (order by extract(epoch from fired_at - $1)) as late
    from penstock.schedule_run where scheduled_at = $1 and outcome = 'FIRED'
"""


async def schedules(bench: Bench) -> dict[str, Any]:
    """Loads them by schedule.create_many, then times the fires of each instant. ``seconds``: between two instants."""
    count, period = bench.options.tasks, max(1, round(bench.options.seconds))
    if 60 % period:
        raise StackError(f"{period} s is no part of a minute: name one of 1, 2, 3, 4, 5, 6, 10, 12, 15, 20, 30, 60")
    async with rig_up(bench) as rig:
        before = await rig.settled()
        first = await _begin_at(rig, count, period)
        loaded = await _load(rig, count, period, first)
        left = first - await _now(rig)
        if left < timedelta():
            raise StackError(
                f"loading took {loaded:.1f} s, beyond the first instant: ask for fewer, or a longer period"
            )
        await rig.settle_disk("schedule_clock")
        await rig.begin()
        table = [await _round(rig, count, first + timedelta(seconds=number * period)) for number in range(ROUNDS)]
        await rig.wait_settled(before + count * ROUNDS)
        cost = await rig.end(count * ROUNDS)
    return {
        "schedules": count,
        "period_seconds": period,
        "load_seconds": round(loaded, 2),
        "loaded_per_second": round(count / loaded),
        "slowest_round_seconds": max(row["seconds"] for row in table),
        "fires_per_second": min(row["fires_per_second"] for row in table),
        "table": table,
        "cost": cost,
    }


async def _now(rig: Rig) -> datetime:
    now: datetime = await rig.database.fetchval("select clock_timestamp()")
    return now


async def _begin_at(rig: Rig, count: int, period: int) -> datetime:
    """An instant of the schedules, late enough for all to be there before it."""
    earliest = (await _now(rig)).timestamp() + 3 + count / _IMPORTED_PER_SECOND
    return datetime.fromtimestamp((int(earliest) // period + 1) * period, UTC)


async def _load(rig: Rig, count: int, period: int, first: datetime) -> float:
    """Have them made; returns the seconds until the last one was there."""
    expression = "* * * * *" if period == 60 else f"*/{period} * * * * *"
    entries = [
        {"name": f"bench-{number}", "expression": expression, "action": NOOP, "payload": {"n": number},
         "start_at": first.isoformat(), "end_at": (first + timedelta(seconds=(ROUNDS - 1) * period)).isoformat()}
        for number in range(count)
    ]  # fmt: skip
    advance = rig.bench.bar("loading schedules", count)
    began = time.perf_counter()
    with Client(rig.api, timeout=120) as client:
        for start in range(0, count, IMPORT_LIMIT):
            given = {"schedules": entries[start : start + IMPORT_LIMIT], "replace": True}
            started = await asyncio.to_thread(client.call, "schedule.create_many", given)
            seen = 0
            while seen < started["total"]:
                await asyncio.sleep(_LOOK_SECONDS)
                status = await asyncio.to_thread(client.call, "schedule.import_status", {"id": started["id"]})
                if status["refused"]:
                    raise StackError(f"{status['refused']} schedules were refused: {status['errors'][:1]}")
                advance(status["seen"] - seen)
                seen = status["seen"]
    return time.perf_counter() - began


async def _round(rig: Rig, count: int, instant: datetime) -> dict[str, Any]:
    """Wait until all have fired for an instant. Raises StackError when nothing moves for a minute beyond it."""
    advance = rig.bench.bar(f"firing at {instant:%H:%M:%S}", count)
    await asyncio.sleep(max(0.0, (instant - await _now(rig)).total_seconds()))
    fires, moved = 0, time.monotonic()
    while True:
        (row,) = await rig.database.fetch(_FIRES, instant)
        if row["fires"] > fires:
            advance(row["fires"] - fires)
            fires, moved = row["fires"], time.monotonic()
        if fires == count:
            break
        if time.monotonic() - moved > STUCK_SECONDS:
            raise StackError(f"only {fires} of {count} fired at {instant}; last words:\n{rig.last_words()}")
        await asyncio.sleep(_LOOK_SECONDS)
    p50, p99, most = row["late"]
    return {
        "instant": f"{instant:%H:%M:%S}",
        "fires": fires,
        "seconds": round(row["took"], 3),
        "fires_per_second": round(fires / row["took"]),
        "late_p50_ms": round(p50 * 1000, 1),
        "late_p99_ms": round(p99 * 1000, 1),
        "late_max_ms": round(most * 1000, 1),
    }
