"""`penstock doctor`: problems of the settings, Postgres and the queues, and their fixes."""

import asyncio
from dataclasses import asdict
from typing import Annotated

import typer

from penstock.cli.common import DataDirOption, print_json, say, settings_here
from penstock.cli.doctor.findings import Finding, Level, Report
from penstock.runtime.logs import printable

_COLOURS: dict[Level, str] = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "red"}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    invariants: bool = False,
    strict: bool = False,
    data_dir: DataDirOption = None,
) -> None:
    """Check settings, Postgres, queues and api, and suggest a fix for each problem. Changes nothing.

    Checks the stack running in --data-dir, else what the settings name. Exits with 1 if it finds an error.

    invariants: Also check that the stored tasks contradict no guarantee.
    strict: Exit with 1 for warnings too.
    """
    from penstock.cli.doctor.checks import examine

    report = Report(None if as_json else _show)
    asyncio.run(examine(settings_here(data_dir), report, invariants=invariants))
    if as_json:
        print_json([asdict(finding) for finding in report.findings])
    bad = {"error", "warning"} if strict else {"error"}
    if any(finding.level in bad for finding in report.findings):
        raise typer.Exit(1)


def _show(finding: Finding) -> None:
    level = typer.style(f"{finding.level:<8}", fg=_COLOURS[finding.level])
    typer.echo(f"{level} {finding.what}: {printable(finding.seen)}")
    if finding.fix:
        say(f"         -> {finding.fix}")
