"""The command line. Commands load what they need when they run, so that `penstock worker` loads no database driver."""

import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_group

from penstock.cli.common import error_text, say
from penstock.cli.parameters import EPILOG, add
from penstock.protocol.errors import InvalidParams, PenstockError, SettingsError
from penstock.protocol.version import __version__

# Below which title of --help, and in which module, each command or group is, under its own name. Only the module of
# the command that runs is loaded: all of them take longer than a short command, or the start of a process.
MODULES = {
    ("On this machine", "local"): ("up", "down", "ps", "env", "logs"),
    ("Tasks", "task"): ("enqueue", "task"),
    ("Tasks", "top"): ("stats", "top"),
    ("Tasks", "tasks"): ("tasks", "jobs"),
    ("Tasks", "workflows"): ("workflows",),
    ("Tasks", "schedules"): ("schedules",),
    ("Tasks", "limits"): ("actions", "tenants", "routes", "ordering"),
    ("Tasks", "messages"): ("rejected", "dlq"),
    ("Processes", "processes"): (
        "submitter", "scheduler", "resulter", "supervisor", "api", "run", "worker", "kafka-source", "clockwork-source",
    ),
    ("Set-up", "processes"): ("migrate", "partition-tasks", "grants", "create-queues", "payload-key", "claim-key"),
    ("Set-up", "doctor.command"): ("doctor",),
    ("Set-up", "conformance.command"): ("conformance",),
    ("Set-up", "config"): ("config",),
    ("Set-up", "keys"): ("keys", "credential"),
}  # fmt: skip
_MODULE_OF = {command: module for module, commands in MODULES.items() for command in commands}


def load(module: tuple[str, str], into: typer.Typer) -> None:
    """Add the commands of one of the modules."""
    panel, path = module
    found = import_module(f"penstock.cli.{path}")
    for name in MODULES[module]:
        add(into, panel, name, getattr(found, name.replace("-", "_")))


class Root(TyperGroup):
    """All commands. Invalid parameters are reported alike, found by the command line or by the api."""

    def get_command(self, ctx: Any, name: str) -> Any:
        if name not in self.commands:
            part = typer.Typer(rich_markup_mode="markdown")
            # For a misspelt one all, whose names are wanted for the suggestion.
            for module in [_MODULE_OF[name]] if name in _MODULE_OF else MODULES:
                load(module, part)
            self.commands.update(get_group(part).commands)
        return super().get_command(ctx, name)

    def list_commands(self, ctx: Any) -> list[str]:
        return [*_MODULE_OF]

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except InvalidParams as exc:
            raise typer.BadParameter(error_text(exc).removeprefix("Invalid params: ")) from exc


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


def main() -> None:
    """Run the command; see the epilog of --help for the exit codes."""
    try:
        app(prog_name="penstock")
    except PenstockError as exc:
        say(f"penstock: {error_text(exc)}", err=True)
        sys.exit(2 if isinstance(exc, SettingsError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)
