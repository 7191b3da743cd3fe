"""The command line. Commands load what they need when they run, so that `penstock worker` loads no database driver."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from penstock import __version__
from penstock.cli import (
    actions,
    claim_key,
    config,
    credentials,
    dlq,
    doctor,
    enqueue,
    jobs,
    keys,
    local,
    ordering,
    payload_key,
    processes,
    rejected,
    routes,
    schedules,
    sources,
    stats,
    task,
    tasks,
    tenants,
    top,
    workflows,
)
from penstock.cli.common import EPILOG, error_text
from penstock.errors import PenstockError, SettingsError

app = typer.Typer(
    name="penstock",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="A durable task pipeline: Postgres holds every task, SQS carries the work, JSON-RPC is the only protocol.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"penstock {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


for part in (
    local, enqueue, stats, top, task, tasks, jobs, workflows, schedules, actions, routes, tenants, ordering,
    rejected, dlq, processes, sources, payload_key, claim_key, doctor, config, keys, credentials,
):  # fmt: skip
    part.add_to(app)


def main() -> None:
    """Entry point of the command; see the epilog of --help for the exit codes."""
    try:
        app(prog_name="penstock")
    except SettingsError as exc:
        typer.echo(f"penstock: {exc}", err=True)
        sys.exit(2)
    except PenstockError as exc:
        typer.echo(f"penstock: {error_text(exc)}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
