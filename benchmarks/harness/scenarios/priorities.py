"""urgent and mixed: how soon an urgent task starts while the pipeline is busy with others."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import msgspec

from benchmarks.harness.actions import CLOCK, FAILING, NOOP, SLOW, now_us
from benchmarks.harness.connections import Connections
from benchmarks.harness.measure import percentiles_ms
from benchmarks.harness.producers import cuts, enqueue_request, insert_noops, together
from benchmarks.harness.rig import Bench, Rig, rig_up

URGENT_PRIORITY = 1000
URGENT_TASKS = 20  # over one drain
_LOOK_SECONDS = 0.02

_MIXED_PER_SECOND = 1000
_MIXED_BATCH = 50
_SLOW_SECONDS = 2.0
_AGAIN_AFTER_SECONDS = 1.0

_STARTS = """
    select (result::text)::bigint - (payload ->> 'at')::bigint as wait_us, priority from penstock.task_history
    where state = 'SUCCESS' and action = $1 and id > $2
"""


async def urgent(bench: Bench) -> dict[str, Any]:
    """A backlog being drained; urgent tasks are enqueued over HTTP, evenly over the drain, one at a time."""
    tasks = bench.options.tasks
    async with rig_up(bench) as rig, Connections(rig.api, 1) as connections:
        before, last_id = await rig.settled(), await rig.last_id()
        async with rig.schedulers_paused():
            await insert_noops(rig.store, tasks, bench.bar("enqueueing", tasks))
            await rig.database.execute("checkpoint")
            await rig.begin()
        settling = asyncio.create_task(rig.wait_settled(before + tasks + URGENT_TASKS), name="settled")
        try:
            backlogs = []
            for number in range(URGENT_TASKS):
                done = await rig.settled() - before
                while done < tasks * number // URGENT_TASKS and not settling.done():
                    await asyncio.sleep(_LOOK_SECONDS)
                    done = await rig.settled() - before
                backlogs.append(max(0, tasks + number - done))
                params = {"action": CLOCK, "payload": {"at": now_us()}, "priority": URGENT_PRIORITY}
                await connections.call("enqueue", params)
            await settling
        finally:
            settling.cancel()
        seconds = rig.seconds()
        used = await rig.end(tasks + URGENT_TASKS)
        rows = await rig.database.fetch(_STARTS, CLOCK, last_id)
    return {
        "tasks": tasks,
        "urgent_tasks": len(rows),
        "backlog_when_enqueued": {"most": max(backlogs), "least": min(backlogs)},
        "urgent_call_to_start_ms": percentiles_ms([row["wait_us"] / 1e6 for row in rows]),
        "seconds": round(seconds, 2),
        "tasks_per_second": round((tasks + URGENT_TASKS) / seconds),
        "cost": used,
    }


async def mixed(bench: Bench) -> dict[str, Any]:
    """A steady feed of mixed tasks, a tenth of which fail twice and a hundredth take 2 s; urgent ones in between."""
    tasks = bench.options.tasks
    urgent_tasks = max(5, tasks // 50)
    async with rig_up(bench) as rig, Connections(rig.api, 8) as connections:
        before, last_id = await rig.settled(), await rig.last_id()
        await rig.begin()
        async with together() as group:
            group.create_task(_feed(rig, connections, tasks))
            group.create_task(_feed_urgent(connections, urgent_tasks, tasks / _MIXED_PER_SECOND))
            group.create_task(rig.wait_settled(before + tasks + urgent_tasks))
        seconds = rig.seconds()
        used = await rig.end(tasks + urgent_tasks)
        rows = await rig.database.fetch(_STARTS, CLOCK, last_id)
        ends = await rig.database.fetch(
            "select state::text as state, count(*) as count, sum(attempts)::bigint as attempts"
            " from penstock.task_history where id > $1 group by state",
            last_id,
        )
    waits = {"urgent": [r["wait_us"] / 1e6 for r in rows if r["priority"] == URGENT_PRIORITY]}
    waits["ordinary"] = [r["wait_us"] / 1e6 for r in rows if r["priority"] != URGENT_PRIORITY]
    return {
        "tasks": tasks,
        "urgent_tasks": urgent_tasks,
        "settled": {row["state"]: row["count"] for row in ends},
        "attempts": sum(row["attempts"] for row in ends),
        "urgent_call_to_start_ms": percentiles_ms(waits["urgent"]),
        "ordinary_call_to_start_ms": percentiles_ms(waits["ordinary"]),
        "seconds": round(seconds, 2),
        "fed_per_second": _MIXED_PER_SECOND,
        "cost": used,
    }


def mixed_task(number: int, priority: int) -> dict[str, Any]:
    """One of the mixture, as a request: of a hundred one is slow, ten fail, half report when they started."""
    if number % 100 == 0:
        return enqueue_request(SLOW, {"seconds": _SLOW_SECONDS}, number=number, priority=priority)
    if number % 10 == 5:
        payload = {"again_after_seconds": _AGAIN_AFTER_SECONDS}
        return enqueue_request(FAILING, payload, number=number, priority=priority, max_attempts=2)
    if number % 2 == 0:
        return enqueue_request(CLOCK, {"at": now_us()}, number=number, priority=priority)
    return enqueue_request(NOOP, {"n": number}, number=number, priority=priority)


async def _feed(rig: Rig, connections: Connections, tasks: int) -> None:
    advance = rig.bench.bar("enqueueing", tasks)
    chosen = random.Random(0)  # the same priorities in every run
    start = time.perf_counter()
    async with together() as group:
        for first, end in cuts(tasks, _MIXED_BATCH):
            await asyncio.sleep(max(0.0, start + first / _MIXED_PER_SECOND - time.perf_counter()))
            requests = [mixed_task(number, chosen.randrange(10)) for number in range(first, end)]
            group.create_task(connections.enqueue_batch(msgspec.json.encode(requests), end - first))
            advance(end - first)


async def _feed_urgent(connections: Connections, tasks: int, seconds: float) -> None:
    start = time.perf_counter()
    async with together() as group:
        for number in range(tasks):
            await asyncio.sleep(max(0.0, start + seconds * number / tasks - time.perf_counter()))
            params = {"action": CLOCK, "payload": {"at": now_us()}, "priority": URGENT_PRIORITY}
            group.create_task(connections.call("enqueue", params))
