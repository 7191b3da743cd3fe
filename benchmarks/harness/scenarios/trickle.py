"""trickle: single enqueues over HTTP at low rates: what one task costs above the idle stack, and how long it takes.

Of each rate there are two legs. In the first nothing looks at the pipeline, so that its CPU is the pipeline's own; in
the second, a third as long, the table is watched for SUCCESS. A payload carries the beginning of its call, the result
the start of its handler, both by this machine's clock. Deletes may come after a task has settled: they are waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from benchmarks.harness.actions import CLOCK
from benchmarks.harness.connections import Connections
from benchmarks.harness.floor import trickle_floor
from benchmarks.harness.measure import OWN_NAME, USD_PER_MILLION_SQS_REQUESTS, percentiles_ms
from benchmarks.harness.peer_trickle import trickle_pgqueuer
from benchmarks.harness.producers import LATENCY_CONNECTIONS, Call, call_steadily
from benchmarks.harness.rig import Bench, Rig, rig_up
from benchmarks.harness.scenarios.latency import call_watched
from benchmarks.harness.scenarios.workflows import run_workflow

RATES = (1.0, 5.0, 50.0, 200.0, 500.0)
PEER_RATE = 50.0
_FLOOR_RATES = (5.0, 100.0)  # lower ones show little but noise, at higher ones tasks travel together
_WARM_UP_TASKS = 100
_WARM_UP_PER_SECOND = 100.0
_WATCHED_SHARE = 1 / 3  # of the seconds of a rate
_AFTERWARDS_SECONDS = 2.0  # in which what no caller waits for is done, such as deletes
_STEPS_PER_RATE_SECOND = 200 / 30  # of the chain
_SHOWN_CALLS = 0.01  # per task; the rest is the difference between two counts of what goes on idle too
_APART = (OWN_NAME, "sqs")  # the producer, and the substitute for a service of AWS

Usage = Mapping[str, Any]


async def trickle(bench: Bench) -> dict[str, Any]:
    """A row for each rate; a chain, whose steps can only go one by one; PgQueuer at one of the rates; and floors."""
    options = bench.options
    figures: dict[str, Any] = {}
    async with rig_up(bench) as rig, Connections(rig.api, LATENCY_CONNECTIONS) as connections:
        await _settled(rig, connections, _WARM_UP_TASKS, _WARM_UP_PER_SECOND)
        await asyncio.sleep(_AFTERWARDS_SECONDS)
        idle = figures["idle"] = await _idle(rig, options.seconds)
        for rate in options.rates:
            figures[f"at_{rate:g}_per_second"] = await _at_rate(rig, connections, rate, idle)
        chain = figures["chain"] = await _chain(rig, max(2, round(options.seconds * _STEPS_PER_RATE_SECOND)), idle)
    if options.peers:
        figures["pgqueuer"] = await trickle_pgqueuer(bench, PEER_RATE, options.seconds)
    lowest, highest = _FLOOR_RATES
    for rate in options.rates:
        if lowest <= rate <= highest:
            figures[f"floor_at_{rate:g}_per_second"] = await trickle_floor(bench, rate, options.seconds)
    legs = {f"{rate:g}/s": figures[f"at_{rate:g}_per_second"] for rate in options.rates} | {"chain": chain}
    return figures | {"table": [{"tasks": name, **_row(leg)} for name, leg in legs.items()]}


def _row(leg: Usage) -> dict[str, Any]:
    """One line of the table."""
    row = {"cpu_ms": leg["cpu_ms"], "sqs_cpu_ms": leg["sqs_cpu_ms"], "sqs_calls": leg["sqs_calls_per_task"]}
    row["usd_per_million"] = leg["sqs_usd_per_million_tasks"]
    for name in ("call_to_handler_start_ms", "call_to_success_visible_ms", "step_ms"):
        times = [f"{leg[name][part]:.1f}" for part in ("p50", "p95", "p99")] if name in leg else []
        row[name.removeprefix("call_to_")] = " / ".join(times)
    return row


async def _idle(rig: Rig, seconds: float) -> dict[str, Any]:
    """What the stack uses when nothing comes, by second."""
    await rig.begin()
    await asyncio.sleep(seconds)
    seconds = rig.seconds()
    used = await rig.end(1)
    cpu = {name: round(us / 1e4 / seconds, 3) for name, us in used["cpu_us_per_task"].items()}
    return {
        "seconds": round(seconds, 1),
        "cpu_percent_of_a_core": cpu,
        "statements_per_second": {
            name: round(count / seconds, 2) for name, count in rig.work["statements_per_task"].items()
        },
        "sqs_calls_per_second": {
            name: round(calls / seconds, 3) for name, calls in used["sqs_calls_by_operation"].items()
        },
    }


async def _settled(rig: Rig, connections: Connections, tasks: int, rate: float) -> list[Call]:
    total = await rig.settled() + tasks
    advance = rig.bench.bar(f"{rate:g} a second", tasks)
    calls = await call_steadily(connections, tasks=tasks, per_second=rate, on_call=lambda call: advance(1))
    await rig.wait_settled(total)
    return calls


async def _at_rate(rig: Rig, connections: Connections, rate: float, idle: Usage) -> dict[str, Any]:
    tasks = max(1, round(rate * rig.bench.options.seconds))
    await rig.begin()
    calls = await _settled(rig, connections, tasks, rate)
    await asyncio.sleep(_AFTERWARDS_SECONDS)
    used = await _above_idle(rig, tasks, idle)
    started = await rig.database.fetch(
        "select (result::text)::bigint - (payload ->> 'at')::bigint as wait_us from penstock.task_history"
        " where state = 'SUCCESS' and id = any($1::bigint[])",
        [call.task_id for call in calls],
    )
    _, visible = await call_watched(rig, connections, max(1, round(tasks * _WATCHED_SHARE)), rate)
    return {
        "tasks": tasks,
        **used,
        "enqueue_call_ms": percentiles_ms([call.seconds for call in calls]),
        "call_to_handler_start_ms": percentiles_ms([row["wait_us"] / 1e6 for row in started]),
        "call_to_success_visible_ms": percentiles_ms(visible),
    }


async def _above_idle(rig: Rig, tasks: int, idle: Usage) -> dict[str, Any]:
    """The cost of a task since ``begin`` without what the idle stack uses in that time.

    ``cpu_ms``: of Penstock's processes and Postgres; the embedded SQS and the producer are apart.
    """
    used = await rig.end(tasks)
    seconds_per_task = rig.seconds() / tasks
    cpu = {
        name: us / 1e3 - idle["cpu_percent_of_a_core"][name] * 10 * seconds_per_task
        for name, us in used["cpu_us_per_task"].items()
        if name != "total"
    }
    calls = {
        name: round(count - idle["sqs_calls_per_second"].get(name, 0.0) * seconds_per_task, 3)
        for name, count in used["sqs_calls_by_operation"].items()
    }
    statements = {
        name: round(count - idle["statements_per_second"].get(name, 0.0) * seconds_per_task, 2)
        for name, count in rig.work["statements_per_task"].items()
    }
    total = sum(calls.values())
    calls = {name: count for name, count in calls.items() if abs(count) >= _SHOWN_CALLS}
    # Bills of tasks that travel alone are by the call: none of them has 64 KiB.
    return {
        "cpu_ms": round(sum(ms for name, ms in cpu.items() if name not in _APART), 3),
        "sqs_cpu_ms": round(cpu.get("sqs", 0.0), 3),
        "producer_cpu_ms": round(cpu[OWN_NAME], 3),
        "cpu_ms_by_process": {name: round(ms, 3) for name, ms in cpu.items() if name not in _APART},
        "sqs_calls_per_task": round(total, 3),
        "sqs_calls_by_operation": calls,
        "sqs_usd_per_million_tasks": round(total * USD_PER_MILLION_SQS_REQUESTS, 3),
        "passes_per_task": {name: round(count, 2) for name, count in rig.work["passes_per_task"].items()},
        "statements_per_task": {name: count for name, count in statements.items() if abs(count) >= _SHOWN_CALLS},
        "wal_bytes_per_task": used["wal_bytes_per_task"],
        "machine_used_by_others_percent": used["machine_used_by_others_percent"],
    }


async def _chain(rig: Rig, steps: int, idle: Usage) -> dict[str, Any]:
    """A workflow of one step after another; the time of a step is from its handler's start to the next one's."""
    await rig.begin()
    row, _ = await run_workflow(rig, {"chain": [{"action": CLOCK} for _ in range(steps)]})
    await asyncio.sleep(_AFTERWARDS_SECONDS)
    used = await _above_idle(rig, steps, idle)
    found = await rig.database.fetch(
        "select (result::text)::bigint as at_us from penstock.task_history where workflow = $1 order by at_us",
        row["id"],
    )
    starts = [one["at_us"] for one in found]
    seconds = [(after - before) / 1e6 for before, after in pairwise(starts)]
    return {"steps": steps, **used, "step_ms": percentiles_ms(seconds)}
