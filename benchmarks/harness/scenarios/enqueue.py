"""enqueue: what the HTTP api takes, single and batched, over 1 and 100 connections, while nothing is claimed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from benchmarks.harness.connections import Connections
from benchmarks.harness.measure import percentiles_ms
from benchmarks.harness.producers import HTTP_BATCH, post_batches, post_singles
from benchmarks.harness.rig import Bench, Rig, rig_up
from penstock.protocol.errors import StackError

_Producer = Callable[[Connections, int, int, Callable[[int], None]], Awaitable[list[float]]]
_WARM_UP_TASKS = 50


async def enqueue(bench: Bench) -> dict[str, Any]:
    """Four figures; the single calls on one connection get a fifth of the tasks, batches get ten times as many."""
    tasks = bench.options.tasks
    legs: list[tuple[str, int, int, _Producer]] = [
        ("single", 1, max(1, tasks // 5), post_singles),
        ("single", 100, tasks, post_singles),
        ("batched", 1, tasks * 10, post_batches),
        ("batched", 100, tasks * 10, post_batches),
    ]
    async with rig_up(bench) as rig:
        before = await rig.settled()
        async with rig.schedulers_paused():
            async with Connections(rig.api, 1) as connections:
                await post_singles(connections, _WARM_UP_TASKS, 1, lambda count: None)
            table = [await _leg(rig, *leg) for leg in legs]
        await rig.wait_settled(before + _WARM_UP_TASKS + sum(leg["tasks"] for leg in table))
    return {
        "tasks_in_a_batch": HTTP_BATCH,
        **{f"{leg['kind']}_{leg['connections']}_per_second": leg["tasks_per_second"] for leg in table},
        "table": table,
    }


async def _leg(rig: Rig, kind: str, count: int, tasks: int, produce: _Producer) -> dict[str, Any]:
    advance = rig.bench.bar(f"{kind}, {count} connections", tasks)
    before = await rig.count("ENQUEUED")
    await rig.database.execute("checkpoint")
    async with Connections(rig.api, count) as connections:
        await rig.begin()
        calls = await produce(connections, tasks, count, advance)
        seconds = rig.seconds()
    used = await rig.end(tasks)
    stored = await rig.count("ENQUEUED") - before
    if stored != tasks:
        raise StackError(f"the api has accepted {tasks} tasks and stored {stored}")
    return {
        "kind": kind,
        "connections": count,
        "tasks": tasks,
        "tasks_per_second": round(tasks / seconds),
        "call_ms": percentiles_ms(calls),
        "cpu_us_per_task": used["cpu_us_per_task"]["total"],
        "cost": used,
    }
