"""drain, batched and scale: a backlog of no-op tasks, enqueued before; the time until the last one has settled."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

from benchmarks.harness.actions import NOOP_BATCHED
from benchmarks.harness.producers import insert_noops, plain_noop
from benchmarks.harness.rig import Bench, Rig, rig_up
from penstock.protocol.task import NewTask

FROM_FIRST_CALL = "tasks_per_second_from_first_call"  # the clock of other queues in `make peers`


async def drain(bench: Bench) -> dict[str, Any]:
    """A backlog of no-op tasks on the processes asked for."""
    return await _drain(bench, plain_noop)


async def batched(bench: Bench) -> dict[str, Any]:
    """The same for a batched handler, which takes up to 2,000 tasks in a call."""
    return await _drain(bench, lambda number: NewTask(NOOP_BATCHED, f'{{"n":{number}}}'))


async def _drain(bench: Bench, task: Callable[[int], NewTask]) -> dict[str, Any]:
    options = bench.options
    async with rig_up(bench) as rig:
        figures = await drain_once(rig, options.tasks, task=task)
    return {"workers": options.workers, "schedulers": options.schedulers} | figures


async def scale(bench: Bench) -> dict[str, Any]:
    """The same drain with 1, 2, 4 ... workers and schedulers up to those asked for, each on a stack of its own."""
    options = bench.options
    table: list[dict[str, Any]] = []
    for schedulers, workers in product(_doubling(options.schedulers), _doubling(options.workers)):
        async with rig_up(bench, workers=workers, schedulers=schedulers) as rig:
            figures = await drain_once(rig, options.tasks, f"{workers} workers, {schedulers} schedulers")
        table.append(
            {
                "workers": workers,
                "schedulers": schedulers,
                "tasks_per_second": figures["tasks_per_second"],
                "ratio": round(figures["tasks_per_second"] / table[0]["tasks_per_second"], 2) if table else 1.0,
                "cpu_us_per_task": figures["cost"]["cpu_us_per_task"]["total"],
                "sqs_calls_per_task": figures["cost"]["sqs_calls_per_task"],
                "attempts": figures["attempts"],
                "cost": figures["cost"],
            }
        )
    best = max(table, key=lambda row: float(row["tasks_per_second"]))
    return {
        "tasks": options.tasks,
        "best": f"{best['workers']} workers, {best['schedulers']} schedulers",
        "tasks_per_second": best["tasks_per_second"],
        "table": table,
    }


def _doubling(most: int) -> list[int]:
    """1, 2, 4 and so on up to ``most``."""
    return [2**power for power in range(most.bit_length())]


async def drain_once(
    rig: Rig, tasks: int, text: str = "settling", task: Callable[[int], NewTask] = plain_noop
) -> dict[str, Any]:
    """Fill while nothing may start, then start; neither the fill nor what it writes is in the cost."""
    before, last_id = await rig.settled(), await rig.last_id()
    async with rig.schedulers_paused():
        await insert_noops(rig.store, tasks, rig.bench.bar("enqueueing", tasks), task)
        await rig.database.execute("checkpoint")
        await rig.begin()
    await rig.wait_settled(before + tasks, text)
    seconds = rig.seconds()
    before_call = rig.seconds_to_first_call()
    used = await rig.end(tasks)
    attempts = await rig.database.fetchval(
        "select sum(attempts)::bigint from penstock.task_history where id > $1 and id <= $1 + $2", last_id, tasks
    )
    return {
        "tasks": tasks,
        "seconds": round(seconds, 2),
        "tasks_per_second": round(tasks / seconds),
        **({} if before_call is None else {FROM_FIRST_CALL: round(tasks / (seconds - before_call))}),
        "attempts": attempts,
        "cost": used,
    }
