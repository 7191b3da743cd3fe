"""Runs scenarios, one after another, each as often as asked."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.progress import Progress

from benchmarks.harness.rig import Bench, Options, Rigs
from benchmarks.harness.scenarios import SCENARIOS, Scenario
from penstock.protocol.errors import SettingsError
from penstock.settings.model import Settings, load_settings

ALL = "all"


@dataclass(frozen=True)
class Given:
    """What the caller named; None leaves it to each scenario. ``one_stack``: share stacks where that can be."""

    tasks: int | None = None
    rows: int | None = None
    seconds: float | None = None
    workers: int | None = None
    schedulers: int | None = None
    rates: tuple[float, ...] = ()
    repeat: int = 1
    one_stack: bool = False


@dataclass(frozen=True)
class Ran:
    """Figures of every run by scenario, and the settings of the processes."""

    runs: dict[str, list[dict[str, Any]]]
    settings: Settings


def chosen(name: str) -> list[Scenario]:
    """The scenarios that a name means. Raises SettingsError, naming those that there are."""
    if name == ALL:
        return list(SCENARIOS.values())
    if name not in SCENARIOS:
        raise SettingsError(f"there is no scenario {name!r}: choose one of {', '.join(SCENARIOS)}, or {ALL}")
    return [SCENARIOS[name]]


def run(scenarios: Sequence[Scenario], given: Given, base: Options, progress: Progress) -> Ran:
    """Run them. ``base``: the options that are the same for all."""
    work = _run(scenarios, given, base, progress)
    try:
        import uvloop  # the producers' share of the machine is that much smaller
    except ImportError:
        return asyncio.run(work)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


async def _run(scenarios: Sequence[Scenario], given: Given, base: Options, progress: Progress) -> Ran:
    runs: dict[str, list[dict[str, Any]]] = {}
    settings = None
    rigs = Rigs(shared=given.one_stack)
    try:
        for scenario in scenarios:
            options = replace(
                base,
                tasks=given.tasks or scenario.tasks,
                rows=given.rows or scenario.rows,
                seconds=given.seconds or scenario.seconds,
                workers=given.workers or scenario.workers,
                schedulers=given.schedulers or scenario.schedulers,
                rates=given.rates or scenario.rates,
            )
            for number in range(1, given.repeat + 1):
                name = scenario.name if given.repeat == 1 else f"{scenario.name} {number}/{given.repeat}"
                bench = Bench(name, options, progress, rigs)
                runs.setdefault(scenario.name, []).append(await scenario.run(bench))
                settings = bench.settings or settings
                for line in list(progress.task_ids):
                    progress.remove_task(line)
    finally:
        await rigs.close()
    return Ran(runs, settings or load_settings())
