"""Parameters: a task's JSON fitted to the signature of its handler.

Everything that can be found out beforehand is, when the handler is registered; a call costs a comparison of names.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from penstock.errors import InvalidParams, SettingsError
from penstock.spelling import did_you_mean

Arguments = tuple[Sequence[Any], Mapping[str, Any]]

_decode = msgspec.json.Decoder().decode


class Parameters:
    """The parameters of a handler, the context not among them.

    Raises SettingsError for a function that does not take a context first.
    """

    def __init__(self, action: str, function: Callable[..., Any]) -> None:
        self._action = action
        parameters = list(inspect.signature(function).parameters.values())
        if not parameters or parameters[0].kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD):
            raise SettingsError(f"action {action!r}: {place(function)} must take the Context as its first parameter")
        context = parameters[0]
        rest = parameters if context.kind is context.VAR_POSITIONAL else parameters[1:]
        by_position = [p for p in rest if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        by_name = [p for p in rest if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self._positions = tuple(p.name for p in by_position)
        self._required_positions = sum(p.default is p.empty for p in by_position)
        self._any_position = any(p.kind is p.VAR_POSITIONAL for p in rest)
        self._required_alone = tuple(p.name for p in rest if p.kind is p.KEYWORD_ONLY and p.default is p.empty)
        self._known = frozenset(p.name for p in by_name)
        self._any_name = any(p.kind is p.VAR_KEYWORD for p in rest)
        # A payload's member of the context's own name would be its second value.
        self._reserved = context.name if context.kind is context.POSITIONAL_OR_KEYWORD else None
        # One without a name to be given by can never come from an object: it is always missing there.
        self._required = frozenset(p.name for p in (*by_position, *by_name) if p.default is p.empty)
        self._only_position = frozenset(p.name for p in by_position if p.kind is p.POSITIONAL_ONLY)
        self._conversions = dict(_conversions(function, (*by_position, *by_name)))

    def fit(self, params: msgspec.Raw | bytes) -> Arguments:
        """Fit a task's parameters, raw JSON, to the function; the context is not among the arguments returned.

        Annotated parameters are checked and converted. Raises InvalidParams, naming the parameter at fault.
        """
        try:
            value = _decode(params) if params else {}
        except (ValueError, RecursionError) as exc:
            raise InvalidParams("params", f"cannot be read: {exc}") from None
        if type(value) is dict:
            keys = value.keys()
            if (
                not self._required <= keys
                or not (self._any_name or keys <= self._known)
                or self._reserved in value
                or self._only_position
            ):
                self._check_names(value)
            for name, convert in self._conversions.items():
                if name in value:
                    value[name] = convert(value[name])
            return (), value
        if type(value) is not list:
            raise InvalidParams("params", "must be an object or an array")
        self._check_positions(value)
        if self._conversions:
            for position, name in enumerate(self._positions[: len(value)]):
                if name in self._conversions:
                    value[position] = self._conversions[name](value[position])
        return value, {}

    def _check_names(self, given: Mapping[str, Any]) -> None:
        for name in self._positions + self._required_alone:
            if name in self._required and (name not in given or name in self._only_position):
                how = "; it is taken by position only: send an array" if name in self._only_position else ""
                raise InvalidParams(name, f"is missing{how}")
        for name in given:
            if name == self._reserved or not (self._any_name or name in self._known):
                near = did_you_mean(name, self._known)
                raise InvalidParams(name[:100], f"is no parameter of {self._action}{near}")

    def _check_positions(self, given: Sequence[Any]) -> None:
        if self._required_alone:
            raise InvalidParams(self._required_alone[0], "is missing; it is taken by name only: send an object")
        if len(given) < self._required_positions:
            raise InvalidParams(self._positions[len(given)], "is missing")
        if len(given) > len(self._positions) and not self._any_position:
            raise InvalidParams("params", f"has {len(given)} items; {self._action} takes {len(self._positions)}")


def _conversions(
    function: Callable[..., Any], parameters: Sequence[inspect.Parameter]
) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """What to do with each parameter whose annotation msgspec can check; the others are left alone."""
    for parameter in parameters:
        wanted = resolve(parameter.annotation, function)
        if wanted is not None and is_checkable(wanted):
            yield parameter.name, _converter(parameter.name, wanted)


def resolve(annotation: Any, function: Callable[..., Any]) -> Any:
    """An annotation as a type; None when there is none, or it cannot be resolved: it may exist for type checkers only.

    One at a time, so that one that cannot be resolved takes no other with it.
    """
    if annotation is inspect.Parameter.empty:
        return None
    holder = types.SimpleNamespace(__annotations__={"it": annotation})
    inner = inspect.unwrap(function)
    names = getattr(inner, "__globals__", None) or getattr(type(inner).__call__, "__globals__", {})
    try:
        return typing.get_type_hints(holder, globalns=names, include_extras=True)["it"]
    except Exception:
        return None


def is_checkable(wanted: Any) -> bool:
    """Whether msgspec can check values against a type."""
    if wanted is Any or wanted is object:
        return False
    try:
        return not _holds_custom(msgspec.inspect.type_info(wanted), set())
    except Exception:  # msgspec raises several kinds for what it cannot check
        return False


def _holds_custom(info: Any, seen: set[int]) -> bool:
    """Whether a type has a class in it that msgspec does not know: it would refuse every value."""
    if isinstance(info, msgspec.inspect.CustomType):
        return True
    if id(info) in seen:
        return False  # a type that holds itself
    seen.add(id(info))
    if isinstance(info, tuple):
        return any(_holds_custom(item, seen) for item in info)
    if isinstance(info, msgspec.inspect.Type | msgspec.inspect.Field):
        return any(_holds_custom(getattr(info, name), seen) for name in info.__struct_fields__)
    return False


def _converter(name: str, wanted: Any) -> Callable[[Any], Any]:
    convert = msgspec.convert

    def checked(value: Any) -> Any:
        try:
            return convert(value, wanted)
        except msgspec.ValidationError as exc:
            raise InvalidParams(name, f"is wrong: {exc}") from None

    return checked


def place(function: Callable[..., Any]) -> str:
    """Where a function is defined, for messages."""
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"
