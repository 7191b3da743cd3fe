"""The command line. Commands load what they need when they run, so that `penstock worker` loads no database driver."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from penstock.cli import (
    config,
    dlq,
    keys,
    limits,
    local,
    processes,
    rejected,
    routes,
    schedules,
    sources,
    task,
    tasks,
    top,
    workflows,
)
from penstock.cli.common import EPILOG, error_text, say
from penstock.cli.doctor import command
from penstock.protocol.errors import INVALID_PARAMS, PenstockError, RpcError, SettingsError
from penstock.protocol.version import __version__


class Root(TyperGroup):
    """All commands. Invalid parameters are reported alike, found by the command line or by the api."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except RpcError as exc:
            if exc.code != INVALID_PARAMS:
                raise
            raise typer.BadParameter(error_text(exc).removeprefix("Invalid params: ")) from exc

    def list_commands(self, ctx: Any) -> list[str]:
        """The commands to show; `credential` only if scheduler0's API is served."""
        return [name for name in super().list_commands(ctx) if name != "credential" or _serves_scheduler0()]


def _serves_scheduler0() -> bool:
    if not (os.environ.keys() & {"PENSTOCK_SCHEDULER0", "PENSTOCK_CONFIG"} or Path("penstock.toml").exists()):
        return False  # without the half second that reading settings takes
    from penstock.settings.model import load_settings

    try:
        return load_settings().scheduler0
    except SettingsError:
        return True


app = typer.Typer(
    name="penstock",
    cls=Root,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="A durable task pipeline: Postgres holds every task, SQS carries the work, JSON-RPC is the only protocol.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        say(f"penstock {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


for part in (
    local, task, top, tasks, workflows, schedules, limits, routes, rejected, dlq, processes, sources, command, config,
    keys,
):  # fmt: skip
    part.add_to(app)


def main() -> None:
    """Entry point of the command; see the epilog of --help for the exit codes."""
    try:
        app(prog_name="penstock")
    except SettingsError as exc:
        say(f"penstock: {exc}", err=True)
        sys.exit(2)
    except PenstockError as exc:
        say(f"penstock: {error_text(exc)}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
