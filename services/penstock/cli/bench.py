"""`penstock bench`: measure the whole pipeline on this machine."""

from __future__ import annotations

import asyncio
import json
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.common import print_table
from penstock.errors import SettingsError


def add_to(app: typer.Typer) -> None:
    app.command(rich_help_panel="On this machine")(bench)


def bench(
    scenario: Annotated[
        str, typer.Argument(help="drain: a backlog settled; latency: single tasks on an idle pipeline.")
    ],
    tasks: Annotated[
        int | None, typer.Option(min=1, show_default="200000 for drain, 500 for latency", help="How many tasks.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Worker processes.")] = 1,
    rate: Annotated[float, typer.Option(min=0.1, help="Enqueues a second, for latency.")] = 50.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file as well.")] = None,
) -> None:
    """Measure: real processes, an embedded Postgres with fsync on, the embedded SQS, all made for the run.

    Other load on the machine shows in the figures; run several times and take the median. PENSTOCK_* settings apply.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from penstock.bench.measure import describe_machine
    from penstock.bench.scenarios import SCENARIOS, Options

    run = SCENARIOS.get(scenario)
    if run is None:
        raise SettingsError(f"there is no scenario {scenario!r}: choose one of {', '.join(SCENARIOS)}")
    columns = (TextColumn("{task.description:<11}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder,
        Progress(*columns, console=Console(stderr=True)) as progress,
    ):
        count = tasks or (200_000 if scenario == "drain" else 500)
        options = Options(tasks=count, workers=workers, rate=rate, data_dir=Path(folder))
        figures = asyncio.run(run(options, progress))
    report = {
        "scenario": scenario,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "figures": figures,
    }
    print_table(("figure", "value"), ((name, _shown(value)) for name, value in figures.items()))
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(report, indent=2) + "\n", "utf-8")
        typer.echo(f"written to {json_file}")


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {part}" for name, part in value.items())
    return str(value)
