"""Options that several commands share, declared once as the fields of a dataclass."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from dataclasses import is_dataclass
from functools import wraps
from typing import Any


def expanded(function: Callable[..., None]) -> Callable[..., None]:
    """The function as typer reads it: a parameter whose type is a dataclass is replaced by the dataclass's fields."""
    hints = typing.get_type_hints(function, include_extras=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, tuple[type, list[str]]] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        kind = hints[name]
        members = [parameter.replace(annotation=kind)]
        if isinstance(kind, type) and is_dataclass(kind):
            types = typing.get_type_hints(kind, include_extras=True)
            members = [
                field.replace(annotation=types[field.name]) for field in inspect.signature(kind).parameters.values()
            ]
            groups[name] = kind, [field.name for field in members]
        parameters += [member.replace(kind=inspect.Parameter.KEYWORD_ONLY) for member in members]

    @wraps(function)
    def command(**given: Any) -> None:
        for name, (kind, fields) in groups.items():
            given[name] = kind(**{field: given.pop(field) for field in fields})
        function(**given)

    described: Any = command
    described.__signature__ = inspect.Signature(parameters)
    described.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command
