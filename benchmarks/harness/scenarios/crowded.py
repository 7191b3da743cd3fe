"""future and history: the same drain with and without rows in the way, in one run."""

from __future__ import annotations

from typing import Any

from benchmarks.harness.actions import NOOP
from benchmarks.harness.rig import Bench, Rig, rig_up
from benchmarks.harness.scenarios.backlog import drain_once

_ROWS_A_STATEMENT = 250_000

_FUTURE = """
    insert into penstock.task (id, state, action, payload, run_at, priority, max_attempts, created_at, updated_at)
    select nextval('penstock.task_id_seq'), 'SCHEDULED', $2, json_build_object('n', n),
           now() + interval '1 day' + n * interval '50 milliseconds', 0, 10, now(), now()
    from generate_series(1, $1::bigint) n
"""
# Finished today, since that is the partition which the tasks of the measurement enter too.
_FINISHED = """
    insert into penstock.task_history (id, state, action, payload, priority, run_at, attempts, max_attempts, claim,
        claimed_at, created_at, updated_at, finished_at, result)
    select nextval('penstock.task_id_seq'), 'SUCCESS', $2, json_build_object('n', n), 0, at, 1, 10,
           nextval('penstock.claim_seq'), at, at, at, at, 'null'
    from generate_series(1, $1::bigint) n,
    lateral (select day + (now() - day) * n / $1 as at
             from (select date_trunc('day', now() at time zone 'utc') at time zone 'utc' as day) today) finished
"""
_TALLY = "insert into penstock.tally (action, event, count) values ($1, $2, $3)"


async def future(bench: Bench) -> dict[str, Any]:
    """Rows that are due tomorrow in the live table."""
    return await _with_and_without(bench, "future rows", "task", _FUTURE, "ENQUEUED")


async def history(bench: Bench) -> dict[str, Any]:
    """Rows that are finished, in the partition of today."""
    return await _with_and_without(bench, "finished rows", "task_history", _FINISHED, "SUCCESS")


async def _with_and_without(bench: Bench, what: str, table: str, statement: str, event: str) -> dict[str, Any]:
    tasks, rows = bench.options.tasks, bench.options.rows
    async with rig_up(bench) as rig:
        # As many as measured: the first drain of a new stack costs a tenth less than all that follow.
        await drain_once(rig, tasks, "warming up")
        await rig.settle_disk(table)  # before both, since it also changes what the planner knows
        without = await drain_once(rig, tasks, "settling, without")
        await _load(rig, what, statement, rows)
        await rig.database.execute(_TALLY, NOOP, event, rows)
        await rig.settle_disk(table)
        crowded = await drain_once(rig, tasks, "settling, with")
    return {
        "tasks": tasks,
        "rows": rows,
        "ratio": round(crowded["tasks_per_second"] / without["tasks_per_second"], 3),
        "without": without,
        "with": crowded,
    }


async def _load(rig: Rig, what: str, statement: str, rows: int) -> None:
    advance = rig.bench.bar(f"loading {what}", rows)
    for start in range(0, rows, _ROWS_A_STATEMENT):
        count = min(_ROWS_A_STATEMENT, rows - start)
        await rig.database.execute(statement, count, NOOP, timeout=600)
        advance(count)
