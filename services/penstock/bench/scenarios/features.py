"""features: what rules, keys and limits cost, each against the plain drain before it, on one stack."""

from __future__ import annotations

from typing import Any

from penstock.bench.actions import NOOP
from penstock.bench.producers import plain_noop
from penstock.bench.rig import Bench, Rig, rig_up
from penstock.bench.scenarios.backlog import drain_once
from penstock.rules import Route
from penstock.rulestore import delete_route, set_limits, set_route
from penstock.tasks import NewTask

_KEYS = 10_000
_WIDE = 1_000_000  # a limit that is never reached


async def features(bench: Bench) -> dict[str, Any]:
    """A drain of plain tasks, then one with each feature; a row tells its ratio to the plain one right before it."""
    tasks = bench.options.tasks
    table: list[dict[str, Any]] = []
    async with rig_up(bench) as rig:
        await drain_once(rig, tasks, "warming up")
        for name, with_it, task in (
            ("rules for other actions", True, plain_noop),
            ("10,000 ordering keys", False, lambda n: NewTask(NOOP, f'{{"n":{n}}}', ordering_key=f"key {n % _KEYS}")),
            ("a unique key each", False, lambda n: NewTask(NOOP, f'{{"n":{n}}}', unique_key=f"key {n}", unique="live")),
            ("labels", False, lambda n: NewTask(NOOP, f'{{"n":{n}}}', labels='{"team":"a"}')),
            ("a limit of its action", True, plain_noop),
        ):
            plain = await drain_once(rig, tasks, f"plain, before {name}")
            limited = NOOP if name.startswith("a limit") else "another"
            if with_it:
                await _set_rules(rig, limited)
            found = await drain_once(rig, tasks, name, task)
            if with_it:
                await _forget_rules(rig, limited)
            table.append(
                {
                    "feature": name,
                    "plain_per_second": plain["tasks_per_second"],
                    "tasks_per_second": found["tasks_per_second"],
                    "ratio": round(found["tasks_per_second"] / plain["tasks_per_second"], 3),
                    "cpu_us_per_task": found["cost"]["cpu_us_per_task"]["total"],
                    "attempts": found["attempts"],
                    "cost": found["cost"],
                }
            )
    return {"tasks": tasks, "table": table}


async def _set_rules(rig: Rig, limited: str) -> None:
    async with rig.store.transaction() as session:
        await set_limits(session, limited, {"max_in_flight": _WIDE})
        await set_route(session, Route("bench", "no-such-queue", ["another.*"], {}))


async def _forget_rules(rig: Rig, limited: str) -> None:
    async with rig.store.transaction() as session:
        await set_limits(session, limited, {"max_in_flight": None})
        await delete_route(session, "bench")
