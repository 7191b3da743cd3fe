"""Groups of commands: how one is made, and what it does when none of its commands is named."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import typer
from typer.core import TyperGroup

from penstock.cli.common import EPILOG

DEFAULT = "list"
Commands = Mapping[str, Callable[..., None]]


class ListGroup(TyperGroup):
    """Lists when it is given no command: `penstock tasks --state ERROR` is `penstock tasks list --state ERROR`.

    A first word without dashes is always meant as a command, so that a misspelt one is told as such.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # ctx: of click, or of the click within typer
        if args:
            means_list = args[0].startswith("-") and args[0] not in self.get_help_option_names(ctx)
        else:
            means_list = not ctx.resilient_parsing  # while the shell completes, any command may yet come
        return super().parse_args(ctx, [DEFAULT, *args] if means_list else args)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        found = list(super().shell_complete(ctx, incomplete))
        if incomplete.startswith("-"):
            command = self.commands[DEFAULT]
            known = {item.value for item in found}
            with command.make_context(DEFAULT, [], parent=ctx, resilient_parsing=True) as inner:
                found += [item for item in command.shell_complete(inner, incomplete) if item.value not in known]
        return found


def add_group(app: typer.Typer, name: str, commands: Commands, *, panel: str, help: str) -> None:
    """Add a group; one that has `list` does that when no command is named."""
    if DEFAULT in commands:
        note = f"`penstock {name}` alone is `penstock {name} {DEFAULT}`, and takes its options."
        group = typer.Typer(
            cls=ListGroup, subcommand_metavar="[COMMAND] [ARGS]...", epilog=EPILOG, help=f"{help}\n\n{note}"
        )
    else:
        group = typer.Typer(no_args_is_help=True, epilog=EPILOG, help=help)
    for command_name, command in commands.items():
        group.command(command_name)(command)
    app.add_typer(group, name=name, rich_help_panel=panel)
