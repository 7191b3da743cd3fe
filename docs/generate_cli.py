"""Writes the reference of docs/cli.md, and what `penstock --help` prints, from the commands: `make reference`."""

from __future__ import annotations

import enum
import inspect
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from typer.models import ArgumentInfo, OptionInfo
from typer.testing import CliRunner

from docs.generated import row, write
from penstock.cli.app import MODULES, app, load
from penstock.cli.parameters import default_of
from penstock.cli.start import HELP

PAGE = Path(__file__).with_name("cli.md")


@dataclass(frozen=True)
class Parameter:
    """names: of an option, as ``--follow`` and ``-f``; none of an argument. kind: what it takes, empty for a flag."""

    name: str
    names: tuple[str, ...]
    kind: str
    default: str
    is_required: bool
    takes_several: bool
    help: str

    @property
    def is_argument(self) -> bool:
        return not self.names


@dataclass(frozen=True)
class Command:
    """One command. path: its words, as ("schedules", "create")."""

    path: tuple[str, ...]
    panel: str
    help: str
    parameters: tuple[Parameter, ...]

    @property
    def is_default(self) -> bool:
        """Whether its group does this when no command is named."""
        return len(self.path) > 1 and self.path[-1] == default_of(self.path[0])

    def has(self, option: str) -> bool:
        return any(option in parameter.names for parameter in self.parameters)


def commands(of: typer.Typer | None = None, path: tuple[str, ...] = (), panel: str = "") -> Iterator[Command]:
    """Every command that can be called, in the order of --help."""
    if of is None:
        of = typer.Typer()
        for module in MODULES:
            load(module, of)
    for info in of.registered_commands:
        assert info.callback is not None
        name = info.name or info.callback.__name__.replace("_", "-")
        text = inspect.cleandoc(info.help or info.callback.__doc__ or "")
        yield Command((*path, name), panel or _text(info.rich_help_panel), text, tuple(_parameters(info.callback)))
    for group in of.registered_groups:
        assert group.typer_instance is not None
        yield from commands(group.typer_instance, (*path, _text(group.name)), panel or _text(group.rich_help_panel))


def _parameters(callback: Callable[..., Any]) -> Iterator[Parameter]:
    hints = typing.get_type_hints(callback, include_extras=True)
    for name, parameter in inspect.signature(callback).parameters.items():
        kind, *notes = typing.get_args(hints[name])
        info = next(note for note in notes if isinstance(note, OptionInfo | ArgumentInfo))
        is_required = parameter.default is parameter.empty
        inner, takes_several = _inner(kind)
        names: tuple[str, ...] = ()
        if isinstance(info, OptionInfo):
            # Within Annotated the first name stands where a default would.
            declared = (*([info.default] if isinstance(info.default, str) else []), *(info.param_decls or ()))
            names = tuple(part for decl in declared for part in decl.split("/"))
            names = names or ("--" + name.replace("_", "-"),)
        shown = info.metavar or _kind(inner, info)
        yield Parameter(
            name, names, "" if inner is bool else shown, _default(parameter.default, info, inner), is_required,
            takes_several, " ".join((info.help or "").split()),
        )  # fmt: skip


def _inner(kind: Any) -> tuple[Any, bool]:
    """The type within ``X | None`` and ``list[X]``, and whether it was a list."""
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        kind = next(part for part in typing.get_args(kind) if part is not type(None))
    if typing.get_origin(kind) is list:
        return typing.get_args(kind)[0], True
    return kind, False


def _kind(inner: Any, info: Any) -> str:
    if isinstance(inner, type) and issubclass(inner, enum.Enum):
        return "|".join(str(member.value) for member in inner)
    names = {int: "INTEGER", float: "NUMBER", Path: "PATH"}
    shown = names.get(inner, "TEXT")
    least, most = info.min, info.max
    if least is not None or most is not None:
        shown += f" {'' if least is None else f'{least:g}'}..{'' if most is None else f'{most:g}'}"
    return shown


def _default(default: Any, info: Any, inner: Any) -> str:
    if isinstance(info.show_default, str):
        return info.show_default
    if default is inspect.Parameter.empty or default is None or inner is bool or info.show_default is False:
        return ""
    return str(default.value if isinstance(default, enum.Enum) else default)


def reference() -> str:
    """The part of the page below the mark."""
    lines: list[str] = []
    panels: dict[str, list[Command]] = {}
    for command in commands():
        panels.setdefault(command.panel, []).append(command)
    for panel, listed in panels.items():
        lines += [f"\n## {panel}\n"]
        for command in listed:
            lines += _section(command)
    return "\n".join(lines) + "\n"


def help_text() -> str:
    """The command line's own help, in 80 columns."""
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb"}).output
    return "".join(f"{line.rstrip()}\n" for line in shown.splitlines())


def _section(command: Command) -> Iterator[str]:
    yield f"### penstock {' '.join(command.path)}\n"
    arguments = [parameter for parameter in command.parameters if parameter.is_argument]
    # A word behind the group is a command's name, so an argument of `list` needs it.
    words = [*command.path[:-1], f"[{command.path[-1]}]"] if command.is_default and not arguments else command.path
    usage = " ".join(["penstock", *words, "[OPTIONS]", *map(_usage, arguments)])
    yield f"```\n{usage}\n```\n"
    yield command.help + "\n"
    if command.parameters:
        yield "| | | |\n| --- | --- | --- |"
        for parameter in command.parameters:
            yield row(_named(parameter), _cell(parameter), parameter.help)
        yield ""


def _usage(argument: Parameter) -> str:
    shown = _bare(argument) + ("..." if argument.takes_several else "")
    return shown if argument.is_required else f"[{shown}]"


def _bare(argument: Parameter) -> str:
    own = argument.kind.strip("[]")
    return own if own not in ("TEXT", "INTEGER") else argument.name.upper()


def _named(parameter: Parameter) -> str:
    return ", ".join(f"`{name}`" for name in parameter.names) or f"`{_bare(parameter)}`"


def _cell(parameter: Parameter) -> str:
    parts = []
    if parameter.kind and not parameter.is_argument:
        parts.append(f"{parameter.kind}{', repeatable' if parameter.takes_several else ''}")
    if parameter.is_required:
        parts.append("required")
    elif parameter.default:
        parts.append(f"default {parameter.default}")
    return "; ".join(parts)


def _text(value: Any) -> str:
    """A name that typer wraps in a placeholder where it was not given."""
    return value if isinstance(value, str) else ""


if __name__ == "__main__":
    write(PAGE, reference)
    HELP.write_text(help_text(), "utf-8")
