"""Groups of commands, and the command that a group runs when none is named."""

from collections.abc import Callable, Mapping
from typing import Any

import typer
from typer.core import TyperGroup

from penstock.cli.common import EPILOG
from penstock.cli.parameters import expanded

Commands = Mapping[str, Callable[..., None]]


def default_of(group: str) -> str:
    """The command that a group runs when none is named, if the group has it."""
    return "show" if group == "config" else "list"


class Group(TyperGroup):
    """Runs its default command when none is named: `penstock tasks --json` is `penstock tasks list --json`.

    A number is an id to show: `penstock task 7` is `penstock task show 7`. Any other first word without dashes is read
    as a command, so that a misspelt one is reported as such.
    """

    default: str | None = None

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # ctx: of click, or of the click within typer
        if args and args[0].isdecimal() and "show" in self.commands:
            args = ["show", *args]
        elif self.default is not None:
            if args:
                is_meant = args[0].startswith("-") and args[0] not in self.get_help_option_names(ctx)
            else:
                is_meant = not ctx.resilient_parsing  # while the shell completes, a command may follow
            args = [self.default, *args] if is_meant else args
        return super().parse_args(ctx, args)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        found = list(super().shell_complete(ctx, incomplete))
        if self.default is not None and incomplete.startswith("-"):
            command = self.commands[self.default]
            known = {item.value for item in found}
            with command.make_context(self.default, [], parent=ctx, resilient_parsing=True) as inner:
                found += [item for item in command.shell_complete(inner, incomplete) if item.value not in known]
        return found


def add_group(app: typer.Typer, name: str, commands: Commands, *, panel: str, help: str) -> None:
    """Add a group, which runs its default command, if it has one, when none is named."""
    group = typer.Typer(cls=Group, no_args_is_help=True, epilog=EPILOG, help=help)
    default = default_of(name)
    if default in commands:
        group.info.cls = type("Group", (Group,), {"default": default})
        group.info.no_args_is_help = False
        group.info.subcommand_metavar = "[COMMAND] [ARGS]..."
        group.info.help = f"{help}\n\n`penstock {name}` alone is `penstock {name} {default}` and takes its options."
    for command_name, command in commands.items():
        group.command(command_name)(expanded(command))
    app.add_typer(group, name=name, rich_help_panel=panel)
