"""The scenarios: each brings up a stack of its own, works it, and returns figures."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.rig import Bench
from benchmarks.harness.scenarios import (
    backlog,
    crowded,
    enqueue,
    features,
    held_xmin,
    latency,
    live,
    priorities,
    schedules,
    trickle,
    workflows,
)


@dataclass(frozen=True)
class Scenario:
    """A scenario by name, what it measures, and its default sizes.

    tasks: 0 where the time decides. rates: enqueues a second.
    """

    name: str
    summary: str
    run: Callable[[Bench], Coroutine[Any, Any, dict[str, Any]]]
    tasks: int
    rows: int = 0
    workers: int = 1
    schedulers: int = 1
    seconds: float = 10.0
    rates: tuple[float, ...] = ()


SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        Scenario("drain", "a backlog of no-op tasks, until settled", backlog.drain, 200_000),
        Scenario("batched", "the same for a batched handler", backlog.batched, 200_000),
        Scenario("live", "producers and pipeline at once, half by HTTP, half through SQS", live.live, 200_000),
        Scenario("latency", "single enqueues on an idle pipeline", latency.latency, 0, rates=(50.0, 500.0)),
        Scenario(
            "trickle",
            "single enqueues at low rates: CPU, calls and latency of one task",
            trickle.trickle,
            0,
            seconds=30,
            rates=trickle.RATES,
        ),
        Scenario("enqueue", "the HTTP api, single and batched, 1 and 100 connections", enqueue.enqueue, 10_000),
        Scenario("mixed", "priorities, failing and slow tasks, urgent ones in between", priorities.mixed, 10_000),
        Scenario("urgent", "urgent tasks behind a backlog that is being drained", priorities.urgent, 100_000),
        Scenario("future", "a drain with and without rows due tomorrow", crowded.future, 200_000, rows=1_000_000),
        Scenario(
            "features", "a drain with rules, keys and limits, each beside a plain one", features.features, 100_000
        ),
        Scenario("history", "a drain with and without finished rows", crowded.history, 200_000, rows=5_000_000),
        Scenario(
            "held-xmin", "the rate while a transaction is held open", held_xmin.held_xmin, held_xmin.BACKLOG, seconds=60
        ),
        Scenario(
            "schedules", "cron schedules that all fire at once, three times", schedules.schedules, 100_000, seconds=60
        ),
        Scenario("workflows", "chains, groups and random graphs of steps, until ended", workflows.workflows, 10_000),
        Scenario(
            "scale", "a drain with 1, 2, 4 workers, 1, 2 schedulers", backlog.scale, 200_000, workers=4, schedulers=2
        ),
    )
}
