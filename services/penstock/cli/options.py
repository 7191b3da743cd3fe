"""Options that several commands share, declared once: as fields of a dataclass, or as parameters of a method."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from dataclasses import is_dataclass
from functools import partial, wraps
from typing import Any

from typer.models import ArgumentInfo

from penstock.cli.parameters import ParamsOf


def expanded(function: Callable[..., None]) -> Callable[..., None]:
    """The function as typer reads it.

    A parameter whose type is a dataclass is replaced by the dataclass's fields, one with ``ParamsOf`` by the parameters
    of that method. Arguments come first.
    """
    hints = typing.get_type_hints(function, include_extras=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, tuple[Callable[[dict[str, Any]], Any], list[str]]] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        kind = hints[name]
        members = [parameter.replace(annotation=kind)]
        if isinstance(kind, type) and is_dataclass(kind):
            members = _fields(kind)
            groups[name] = partial(_instance, kind), [member.name for member in members]
        elif params := next((note for note in typing.get_args(kind)[1:] if isinstance(note, ParamsOf)), None):
            members = params.parameters()
            groups[name] = params.read, [member.name for member in members]
        parameters += [member.replace(kind=inspect.Parameter.KEYWORD_ONLY) for member in members]
    parameters.sort(key=lambda member: not _is_argument(member))

    @wraps(function)
    def command(**given: Any) -> None:
        for name, (read, members) in groups.items():
            given[name] = read({member: given.pop(member) for member in members})
        function(**given)

    described: Any = command
    described.__signature__ = inspect.Signature(parameters)
    described.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _instance(kind: Callable[..., Any], values: dict[str, Any]) -> Any:
    return kind(**values)


def _fields(kind: type) -> list[inspect.Parameter]:
    types = typing.get_type_hints(kind, include_extras=True)
    return [field.replace(annotation=types[field.name]) for field in inspect.signature(kind).parameters.values()]


def _is_argument(member: inspect.Parameter) -> bool:
    return any(isinstance(note, ArgumentInfo) for note in typing.get_args(member.annotation))
