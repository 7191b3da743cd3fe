"""workflows: chains, groups with a fan-in and random graphs, small and ten times as large, each until it has ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from random import Random
from typing import Any

from benchmarks.harness.actions import NOOP
from benchmarks.harness.rig import STUCK_SECONDS, Bench, Rig, rig_up
from penstock.client.client import Client
from penstock.protocol.errors import StackError

_LOOK_SECONDS = 0.02
_SEED = 7
_HOPS = 50  # a chain has so many times fewer steps: it can only go one by one


async def workflows(bench: Bench) -> dict[str, Any]:
    """Random graphs and groups of a tenth of ``tasks`` steps and of all; a row has the time of each step."""
    tasks = bench.options.tasks
    small = max(2, tasks // 10)
    async with rig_up(bench) as rig:
        await _run(rig, "warming up", _random(small))
        table = [
            await _run(rig, "chain", {"chain": [{"action": NOOP} for _ in range(max(2, tasks // _HOPS))]}),
            await _run(rig, "group and fan-in", _group(small)),
            await _run(rig, "group and fan-in", _group(tasks)),
            await _run(rig, "random", _random(small)),
            await _run(rig, "random", _random(tasks)),
        ]
    return {
        "tasks": tasks,
        "hop_ms": table[0]["ms_per_step"],
        "group_ratio": _ratio(table[1], table[2]),
        "random_ratio": _ratio(table[3], table[4]),
        "table": table,
    }


def _ratio(small: dict[str, Any], large: dict[str, Any]) -> float:
    """CPU of a step of the large one to that of the small one; near one where the cost is linear."""
    ratio: float = large["cpu_us_per_step"] / max(1e-9, small["cpu_us_per_step"])
    return round(ratio, 2)


def _group(width: int) -> dict[str, Any]:
    return {"chain": [[{"action": NOOP, "payload": {"n": n}} for n in range(width)], {"action": NOOP}]}


def _random(count: int) -> dict[str, Any]:
    """Each step after up to three of those made before it; always the same graph for a count."""
    random = Random(_SEED)
    steps = []
    for number in range(count):
        near = range(max(0, number - count // 5 - 1), number)
        before = random.sample(near, min(len(near), random.randint(0, 3)))
        steps.append({"name": f"s{number}", "action": NOOP, "after": [f"s{n}" for n in before]})
    return {"steps": steps}


async def run_workflow(rig: Rig, definition: dict[str, Any]) -> tuple[Mapping[str, Any], float]:
    """Make one and wait for its end; returns its row, and the seconds after ``begin`` at which it was made.

    Raises StackError when nothing moves for a minute.
    """
    with Client(rig.api, timeout=120) as client:
        made = await asyncio.to_thread(client.workflows.create, **definition)
    created = rig.seconds()
    open_, moved = -1, time.monotonic()
    while True:
        row = await rig.database.fetchrow(
            "select id, state, steps, open from penstock.workflow where id = $1", made["id"]
        )
        assert row is not None
        if row["open"] == 0:
            return row, created
        if row["open"] != open_:
            open_, moved = row["open"], time.monotonic()
        elif time.monotonic() - moved > STUCK_SECONDS:
            raise StackError(f"{open_} of {row['steps']} steps are open and nothing moves:\n{rig.last_words()}")
        await asyncio.sleep(_LOOK_SECONDS)


async def _run(rig: Rig, kind: str, definition: dict[str, Any]) -> dict[str, Any]:
    await rig.begin()
    row, created = await run_workflow(rig, definition)
    seconds = rig.seconds()
    cost = await rig.end(row["steps"])
    return {
        "kind": kind,
        "steps": row["steps"],
        "state": row["state"],
        "create_seconds": round(created, 3),
        "seconds": round(seconds, 3),
        "ms_per_step": round((seconds - created) / row["steps"] * 1000, 3),
        "cpu_us_per_step": cost["cpu_us_per_task"]["total"],
        "cost": cost,
    }
