"""Answers as records: dicts that are what they are on the wire, with their members as attributes."""

from collections.abc import Mapping
from datetime import datetime
from functools import cache
from inspect import get_annotations
from operator import itemgetter
from types import UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    TypeVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec

from penstock.protocol.views import timestamp

Kind = TypeVar("Kind", bound="Record")


@dataclass_transform(kw_only_default=True)
class Record(dict[str, Any]):
    """An answer, or a part of one. A member that is left out has the default of its class.

    omits: whether the api leaves out members that have their default.
    """

    _members: ClassVar[tuple[str, ...]] = ()
    _defaults: ClassVar[Mapping[str, Any]] = {}
    _omits: ClassVar[bool]

    def __init_subclass__(cls, omits: bool = True) -> None:
        names = get_annotations(cls)
        own = {name: cls.__dict__[name] for name in names if name in cls.__dict__}
        for name in own:
            delattr(cls, name)  # it would hide the member
        for name in names:
            if hasattr(dict, name):  # such as "keys"
                setattr(cls, name, property(itemgetter(name)))
        cls._members, cls._defaults, cls._omits = (*cls._members, *names), {**cls._defaults, **own}, omits

    if not TYPE_CHECKING:  # a type checker that sees it believes every name

        def __getattr__(self, name: str) -> Any:
            if name in self:
                return self[name]
            if name in self._defaults:
                return self._defaults[name]
            raise AttributeError(f"this {type(self).__name__} has no {name!r}; it has {', '.join(self)}")


def view_of(kind: type[Kind], row: Any, /, **others: Any) -> Kind:
    """An answer made of a row or a mapping, with instants as text.

    others: members that do not come from the row.
    """
    answer = kind()
    for name in kind._members:
        value = others[name] if name in others else row[name]
        if not kind._omits or name not in kind._defaults or value != kind._defaults[name]:
            answer[name] = timestamp(value) if isinstance(value, datetime) else value
    return answer


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


def struct_of(kind: Any) -> Any:
    """A type of which each record is a struct, as msgspec describes it."""
    origin, parts = get_origin(kind), get_args(kind)
    if isinstance(kind, type) and issubclass(kind, Record):
        return _struct(kind)
    if origin is Annotated:
        return Annotated[struct_of(parts[0]), *parts[1:]]
    if origin in (Union, UnionType):
        return Union[tuple(map(struct_of, parts))]  # noqa: UP007 - of types that are known at run time only
    return kind if origin in (None, Literal) else origin[tuple(map(struct_of, parts))]


@cache  # a type is described once, under its name
def _struct(kind: type[Record]) -> type[msgspec.Struct]:
    hints = get_type_hints(kind, include_extras=True)
    members = [(name, struct_of(hints[name]), kind._defaults.get(name, msgspec.NODEFAULT)) for name in kind._members]
    return msgspec.defstruct(kind.__name__, members, kw_only=True, namespace={"__doc__": kind.__doc__})


@cache
def _parts(kind: type[Record]) -> Mapping[str, type[Record]]:
    """The members of a record that are records, or arrays of them."""
    found = {name: record_in(hint) for name, hint in get_type_hints(kind).items()}
    return {name: part for name, part in found.items() if part is not None}
