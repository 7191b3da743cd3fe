"""features: what rules, keys and limits cost, each in turn with plain drains, on one stack."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

from benchmarks.harness.actions import NOOP
from benchmarks.harness.producers import plain_noop
from benchmarks.harness.rig import Bench, Rig, rig_up
from benchmarks.harness.scenarios.backlog import drain_once
from penstock.db.context import within
from penstock.limits.methods import delete_route, set_limits, set_route
from penstock.limits.model import RouteName, RouteSetParams
from penstock.protocol.task import NewTask

_KEYS = 10_000
_WIDE = 1_000_000  # a limit that is never reached
_PAIRS = 4
_TASKS_A_PAIR = 10_000  # with fewer tasks there are fewer pairs

Make = Callable[[int], NewTask]

# What is measured, the action that is limited meanwhile, the tasks. The first shows how far two plain drains differ.
_FEATURES: tuple[tuple[str, str | None, Make], ...] = (
    ("nothing, for comparison", None, plain_noop),
    ("rules for other actions", "another", plain_noop),
    ("10,000 ordering keys", None, lambda n: _noop(n, ordering_key=f"key {n % _KEYS}")),
    ("a unique key each", None, lambda n: _noop(n, unique_key=f"key {n}", unique="live")),
    ("labels", None, lambda n: _noop(n, labels='{"team":"a"}')),
    ("a limit of its action", NOOP, plain_noop),
)


async def features(bench: Bench) -> dict[str, Any]:
    """Each feature drained in turn with plain tasks, either first in every other pair.

    ratio: of the rates, the median of the pairs; cpu_ratio: likewise of CPU a task, which other load moves less.
    """
    tasks = bench.options.tasks
    pairs = max(1, min(_PAIRS, tasks // _TASKS_A_PAIR))
    table: list[dict[str, Any]] = []
    async with rig_up(bench) as rig:
        await drain_once(rig, tasks, "warming up")
        for name, limited, make in _FEATURES:
            plains, founds = [], []
            for pair in range(pairs):
                for is_feature in (pair % 2 == 1, pair % 2 == 0):
                    if is_feature:
                        founds.append(await _drain(rig, tasks, name, limited, make))
                    else:
                        plains.append(await drain_once(rig, tasks, f"plain, beside {name}"))
            rates = [_rate(found) / _rate(plain) for plain, found in zip(plains, founds, strict=True)]
            cpu = [_cpu(found) / _cpu(plain) for plain, found in zip(plains, founds, strict=True)]
            table.append(
                {
                    "feature": name,
                    "plain_per_second": round(median(map(_rate, plains)), 1),
                    "tasks_per_second": round(median(map(_rate, founds)), 1),
                    "ratio": round(median(rates), 3),
                    "ratio_lowest": round(min(rates), 3),
                    "ratio_highest": round(max(rates), 3),
                    "cpu_ratio": round(median(cpu), 3),
                    "cpu_us_per_task": round(median(map(_cpu, founds)), 1),
                    "attempts": sum(found["attempts"] for found in founds),
                    "cost": founds[-1]["cost"],
                }
            )
    return {"tasks": tasks, "pairs": pairs, "table": table}


def _noop(number: int, **more: Any) -> NewTask:
    return NewTask(NOOP, f'{{"n":{number}}}', **more)


def _rate(drain: dict[str, Any]) -> float:
    return float(drain["tasks_per_second"])


def _cpu(drain: dict[str, Any]) -> float:
    return float(drain["cost"]["cpu_us_per_task"]["total"])


async def _drain(rig: Rig, tasks: int, name: str, limited: str | None, make: Make) -> dict[str, Any]:
    if limited is None:
        return await drain_once(rig, tasks, name, make)
    await _set_rules(rig, limited)
    try:
        return await drain_once(rig, tasks, name, make)
    finally:
        await _forget_rules(rig, limited)


async def _set_rules(rig: Rig, limited: str) -> None:
    async with rig.store.transaction() as session:
        await set_limits(session, limited, {"max_in_flight": _WIDE})
        route = RouteSetParams("bench", "no-such-queue", ["another.*"], {})
        await set_route.carry_out(within(session, rig.settings), route)


async def _forget_rules(rig: Rig, limited: str) -> None:
    async with rig.store.transaction() as session:
        await set_limits(session, limited, {"max_in_flight": None})
        await delete_route.carry_out(within(session, rig.settings), RouteName("bench"))
