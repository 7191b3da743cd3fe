"""How commands are declared: in groups, with options that are fields of a dataclass or parameters of a method."""

import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import is_dataclass
from enum import StrEnum
from functools import partial, wraps
from types import GenericAlias, NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgspec
import typer
from typer.core import TyperGroup
from typer.models import ArgumentInfo, ParameterInfo

from penstock.cli.values import duration, instant, json_value, labels
from penstock.protocol.method import described

Given = dict[str, Any]  # parameters as the api takes them, without those that were not given
EPILOG = (
    "Exit codes: 0 done; 1 the operation failed, the reason is on standard error; "
    "2 wrong usage or settings; 3 the awaited task did not succeed; 4 it did not settle in time; "
    "130 interrupted. Settings come from PENSTOCK_* variables and penstock.toml."
)


class Form(NamedTuple):
    """How people give a parameter, where its type does not say so."""

    kind: Any  # for typer
    option: dict[str, Any]  # without a help text
    convert: Callable[[Any], Any]  # to the value that the api takes


_DURATIONS = (
    "delay", "expires_in", "jitter", "max_lateness", "newer_than", "older_than", "retry_after", "spread", "timeout",
)  # fmt: skip
_FORMS = {
    **dict.fromkeys(_DURATIONS, Form(float, {"parser": duration, "metavar": "DURATION"}, float)),
    **dict.fromkeys(("end_at", "expires_at", "run_at", "since", "start_at", "until"), Form(str, {}, instant)),
    "labels": Form(list[str], {"metavar": "NAME=TEXT"}, labels),
    **{name: Form(str, {"metavar": "JSON"}, partial(json_value, what=name)) for name in ("payload", "result")},
    "unique": Form(str, {}, lambda text: duration(text) if text[:1].isdecimal() else text),
}
_NAMES = {"labels": "--label", "ids_from": "--from-id", "ids_to": "--to-id"}
HELP = {
    "cursor": "Continue where the last list ended.",
    "delay": "Run no earlier than this long from now.",
    "priority": "-32768 to 32767, higher first.",
    "run_at": "Run no earlier than this: RFC 3339 with a zone, or epoch milliseconds.",
}
PAYLOAD = typer.Argument(
    metavar="JSON", help="The payload, an object or array; - reads standard input.", show_default="{}"
)


class ParamsOf:
    """The parameters of a method: `given: Annotated[Given, ParamsOf(struct)]` is what the caller of a command gave.
    Required ones are arguments, the others options; their descriptions are the help. without: those that the command
    gives itself. shown: a help text that is better for people, or the whole option or argument."""

    def __init__(self, struct: type[msgspec.Struct], *, without: Collection[str] = (), **shown: Any) -> None:
        self._fields = {field.name: field for field in msgspec.structs.fields(struct) if field.name not in without}
        self._shown = shown

    def read(self, **values: Any) -> Given:
        """The parameters for the api, of the values that typer read. Raises typer.BadParameter."""
        found = {}
        for name, value in values.items():
            if value is not None and value != [] and (value is not False or self._fields[name].default is not False):
                found[name] = _FORMS[name].convert(value) if name in _FORMS else value
        return found

    def parameters(self, help_of: Mapping[str, str]) -> Iterator[inspect.Parameter]:
        """The parameters as typer reads them. help_of: help texts that are better for people."""
        for name, field in self._fields.items():
            declared, description = described(field.type)
            form = _FORMS.get(name) or Form(_kind(declared), {}, str)
            shown = self._shown.get(name) or help_of.get(name) or HELP.get(name) or description
            if isinstance(shown, str):
                shown += " Repeatable." if form.kind == list[str] else ""
                if field.required:
                    shown = typer.Argument(metavar=name.upper(), help=shown)
                elif name == "limit":
                    shown = typer.Option(min=1, max=1000, help=shown)
                else:
                    option = _NAMES.get(name) or "--" + name.replace("_", "-")
                    is_told = isinstance(field.default, int | str) and form.kind is not bool
                    shown = typer.Option(option, show_default=is_told and str(field.default), help=shown, **form.option)
            default: Any = None
            if field.required:
                default = inspect.Parameter.empty
            elif field.default is False or (isinstance(field.default, int | str) and shown.show_default is True):
                default = form.kind(field.default)
            annotation: Any = Annotated[form.kind if default is not None else form.kind | None, shown]
            yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _kind(declared: Any) -> Any:
    """The type of one value that people give: of an id, which is a number or its text, the number."""
    if get_origin(declared) in (Union, UnionType):
        declared = next(kind for kind in get_args(declared) if kind not in (NoneType, msgspec.UnsetType))
    if get_origin(declared) is Literal:
        return StrEnum("Choice", {value: value for value in get_args(declared)})
    if get_origin(declared) is list:
        return GenericAlias(list, _kind(*get_args(declared)))
    return declared


def expanded(function: Callable[..., None]) -> Callable[..., None]:
    """The function as typer reads it. A parameter whose type is a dataclass is replaced by the dataclass's fields, one
    with ``ParamsOf`` by the parameters of that method. Their help may stand at the end of the docstring, as ``name:
    text``. Arguments come first."""
    hints = get_type_hints(function, include_extras=True)
    text, *helps = re.split(r"^([a-z_]+): ", inspect.getdoc(function) or "", flags=re.MULTILINE)
    help_of = {name: " ".join(one.split()) for name, one in zip(helps[::2], helps[1::2], strict=True)}
    parameters: list[inspect.Parameter] = []
    groups: dict[str, tuple[Callable[..., Any], list[str]]] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        kind = hints[name]
        if name in help_of:
            info = next((note for note in get_args(kind)[1:] if isinstance(note, ParameterInfo)), None)
            if info is None:  # an option of its name
                info = typer.Option("--" + name.replace("_", "-"))
                kind = Annotated[kind, info]
            info.help = help_of[name]
        members = [parameter.replace(annotation=kind)]
        if isinstance(kind, type) and is_dataclass(kind):
            types = get_type_hints(kind, include_extras=True)
            fields = inspect.signature(kind).parameters.values()
            members = [field.replace(annotation=types[field.name]) for field in fields]
            groups[name] = kind, [*types]
        elif params := next((note for note in get_args(kind)[1:] if isinstance(note, ParamsOf)), None):
            members = [*params.parameters(help_of)]
            groups[name] = params.read, [member.name for member in members]
        parameters += [member.replace(kind=inspect.Parameter.KEYWORD_ONLY) for member in members]
    parameters.sort(key=lambda member: not any(isinstance(note, ArgumentInfo) for note in get_args(member.annotation)))

    @wraps(function)
    def command(**given: Any) -> None:
        for name, (read, members) in groups.items():
            given[name] = read(**{member: given.pop(member) for member in members})
        function(**given)

    described: Any = command
    described.__doc__ = text.strip()
    described.__signature__ = inspect.Signature(parameters)
    described.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def default_of(group: str) -> str:
    """The command that a group runs when none is named, if the group has it."""
    return "show" if group == "config" else "list"


class Group(TyperGroup):
    """Runs its default command when none is named: `penstock tasks --json` is `penstock tasks list --json`. A number is
    an id to show: `penstock task 7` is `penstock task show 7`. Any other first word without dashes is read as a
    command, so that a misspelt one is reported as such."""

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


class Commands:
    """A group of commands. A name has - where Python has _, and not the _ at the end of one such as ``import_``."""

    def __init__(self, help: str, **commands: Callable[..., None]) -> None:
        self.help = help
        self.by_name = {name.strip("_").replace("_", "-"): command for name, command in commands.items()}


def add(app: typer.Typer, panel: str, name: str, new: Callable[..., None] | Commands) -> None:
    """Add a command, or a group, which runs its default command, if it has one, when none is named."""
    if not isinstance(new, Commands):
        app.command(name, rich_help_panel=panel)(expanded(new))
        return
    group = typer.Typer(cls=Group, no_args_is_help=True, epilog=EPILOG, help=new.help)
    default = default_of(name)
    if default in new.by_name:
        group.info.cls = type("Group", (Group,), {"default": default})
        group.info.no_args_is_help = False
        group.info.subcommand_metavar = "[COMMAND] [ARGS]..."
        group.info.help = f"{new.help}\n\n`penstock {name}` alone is `penstock {name} {default}` and takes its options."
    for command_name, command in new.by_name.items():
        group.command(command_name)(expanded(command))
    app.add_typer(group, name=name, rich_help_panel=panel)
