"""`python -m benchmarks SCENARIO`: measure the whole pipeline on this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.harness import report
from benchmarks.harness.profile import Profiler
from benchmarks.harness.rig import Options
from benchmarks.harness.run import Given, chosen, run
from penstock.cli.common import print_table
from penstock.protocol.errors import PenstockError, SettingsError
from penstock.runtime.logs import setup_logging
from tests import postgres_versions


def bench(
    scenario: Annotated[
        str,
        typer.Argument(
            help="drain, batched, live, latency, trickle, enqueue, mixed, urgent, future, features, history, "
            "held-xmin, schedules, scale, or all of them."
        ),
    ],
    tasks: Annotated[
        int | None, typer.Option(min=1, show_default="the scenario's own", help="How many tasks; for latency, a rate.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, max=64, show_default="1, scale 4", help="Worker processes; for scale, at most.")
    ] = None,
    schedulers: Annotated[
        int | None,
        typer.Option(min=1, max=16, show_default="1, scale 2", help="Scheduler processes; for scale, at most."),
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, max=99, help="Run it so often and report the medians.")] = 1,
    rate: Annotated[
        list[float] | None,
        typer.Option(
            min=0.1,
            show_default="50 and 500; 1 to 500",
            help="Enqueues a second, for latency and trickle; may be repeated.",
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            show_default="10, 30, 60",
            help="How long: a rate of latency or trickle, the open transaction of held-xmin.",
        ),
    ] = None,
    rows: Annotated[
        int | None,
        typer.Option(min=1, show_default="1000000, 5000000", help="Rows in the way, for future and history."),
    ] = None,
    sqs_endpoint_url: Annotated[
        str | None, typer.Option(show_default=False, help="Use this SQS instead of the embedded one.")
    ] = None,
    pooler: Annotated[
        bool, typer.Option("--pooler", help="Reach Postgres through PgBouncer, of Debian or named by PGBOUNCER.")
    ] = False,
    peers: Annotated[
        bool, typer.Option(help="In trickle, measure PgQueuer too; its environment is made at the first run.")
    ] = True,
    one_stack: Annotated[
        bool,
        typer.Option(
            "--one-stack",
            help="Share stacks between scenarios and repeats: quicker, for a look; "
            "later ones find what earlier ones have left.",
        ),
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file as well.")] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            show_default=False,
            help="Record every process by py-spy, which must be installed, into files in this folder; "
            "the rates of such a run are not to be quoted.",
        ),
    ] = None,
) -> None:
    """Measure: real processes, an embedded Postgres with fsync on, the embedded SQS, all made for the run.

    Other load on the machine shows in the figures; use --repeat. PENSTOCK_* settings apply; PG names the version
    of Postgres.
    """
    scenarios = chosen(scenario)
    setup_logging("bench", level="warning")
    if profile is not None:
        Profiler(profile, "check")  # better now than after the fill
    pgbouncer = None
    if pooler:
        from tests.pgbouncer import WHY_NOT, version

        if WHY_NOT is not None:
            raise SettingsError(WHY_NOT)
        pgbouncer = ".".join(map(str, version()))
    options = Options(
        tasks=0,
        sqs_endpoint_url=sqs_endpoint_url,
        pooler=pooler,
        profile=profile,
        peers=peers,
    )
    given = Given(tasks, rows, seconds, workers, schedulers, tuple(rate or ()), repeat, one_stack)
    columns = (TextColumn("{task.description:<32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=4) as progress:
        ran = run(scenarios, given, options, progress)
    asked: dict[str, Any] = {"scenario": scenario, "tasks": tasks, "workers": workers, "schedulers": schedulers}
    asked |= {
        "repeat": repeat,
        "rates": rate,
        "seconds": seconds,
        "rows": rows,
        "sqs_endpoint_url": sqs_endpoint_url,
        "postgres": postgres_versions.VERSION,
        "pgbouncer": pgbouncer,
    }
    made = report.make_report(ran.runs, asked, ran.settings)
    for name, part in made["scenarios"].items():
        if len(scenarios) > 1:
            typer.echo(f"\n{name}")
        print_table(("figure", "value"), report.flat_rows(part["figures"]))
        table = report.table_of(part["figures"])
        if table is not None:
            typer.echo()
            print_table(*table)
    if json_file is not None:
        report.write_report(made, json_file)
        typer.echo(f"written to {json_file}")


if __name__ == "__main__":
    try:
        typer.run(bench)
    except PenstockError as exc:
        typer.echo(f"benchmarks: {exc}", err=True)
        sys.exit(2 if isinstance(exc, SettingsError) else 1)
