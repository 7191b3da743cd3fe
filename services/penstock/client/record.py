"""Answers of the api as records: dicts that are what they were on the wire, with their members as attributes."""

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, get_args, get_type_hints


class Record(dict[str, Any]):
    """An answer, or a part of one. A member that the api left out has the default of its class."""

    _defaults: ClassVar[Mapping[str, Any]] = {}

    def __init_subclass__(cls) -> None:
        own = {name: cls.__dict__[name] for name in cls.__annotations__ if name in cls.__dict__}
        for name in own:
            delattr(cls, name)  # it would hide the member
        cls._defaults = {**cls._defaults, **own}

    if not TYPE_CHECKING:  # a type checker that sees it believes every name

        def __getattr__(self, name: str) -> Any:
            for members in (self, self._defaults):
                if name in members:
                    return members[name]
            raise AttributeError(f"this {type(self).__name__} has no {name!r}; it has {', '.join(self)}")


def read(kind: type[Record] | None, answer: Any) -> Any:
    """An answer as a record, its parts too; of an array, each item. kind: None to leave it unchanged."""
    if isinstance(answer, list):
        return answer if kind is None else [read(kind, one) for one in answer]
    if kind is None or not isinstance(answer, dict):
        return answer
    record = kind(answer)
    for name, part in _parts(kind).items():
        if name in record:
            record[name] = read(part, record[name])
    return record


def record_in(hint: Any) -> type[Record] | None:
    """The record that a type is, or consists of."""
    parts = (part for part in (hint, *get_args(hint)) if isinstance(part, type) and issubclass(part, Record))
    return next(parts, None)


@cache
def _parts(kind: type[Record]) -> Mapping[str, type[Record]]:
    """The members of a record that are records, or arrays of them."""
    found = {name: record_in(hint) for name, hint in get_type_hints(kind).items()}
    return {name: part for name, part in found.items() if part is not None}
