"""Parameters: a task's JSON fitted to the signature of its handler.

Signatures are analysed when the handler is registered; a call costs a comparison of names.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from penstock.protocol.errors import InvalidParams, SettingsError
from penstock.protocol.json_text import decode_any
from penstock.protocol.spelling import did_you_mean

Arguments = tuple[Sequence[Any], Mapping[str, Any]]

_PYDANTIC = frozenset(("pydantic", "pydantic_core", "annotated_types"))


class Parameters:
    """The parameters of a handler after the context.

    Raises SettingsError for a function that does not take the context first, and for an annotation that no value can
    be checked against.
    """

    def __init__(self, action: str, function: Callable[..., Any], context_type: type) -> None:
        self._action = action
        parameters = list(inspect.signature(function).parameters.values())
        if not parameters or not _takes_context(parameters[0], function, context_type):
            names = ["ctx: Context", *(str(p) for p in parameters)]
            start = f"async def {function.__name__}" if inspect.iscoroutinefunction(function) else "def handler"
            raise SettingsError(
                f"action {action!r}: {place(function)} must take the Context as its first parameter"
                + (f", not {parameters[0]}" if parameters else "") + f": write {start}({', '.join(names)})"
            )  # fmt: skip
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
        # A payload's member with the context's name would be its second value.
        self._reserved = context.name if context.kind is context.POSITIONAL_OR_KEYWORD else None
        # A parameter by position only cannot come from an object: it is always missing there.
        self._required = frozenset(p.name for p in (*by_position, *by_name) if p.default is p.empty)
        self._only_position = frozenset(p.name for p in by_position if p.kind is p.POSITIONAL_ONLY)
        self._conversions = dict(_conversions(action, function, {p.name: p for p in (*by_position, *by_name)}.values()))

    def fit(self, params: msgspec.Raw | bytes) -> Arguments:
        """Fit a task's parameters, raw JSON, to the function; returns the arguments after the context.

        Annotated parameters are checked and converted. Raises InvalidParams, naming the invalid parameter.
        """
        value = read_params(params)
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


def read_params(params: msgspec.Raw | bytes) -> Any:
    """A task's parameters, decoded. Raises InvalidParams."""
    try:
        return decode_any(params) if params else {}
    except (ValueError, RecursionError) as exc:
        raise InvalidParams("params", f"cannot be read: {exc}") from None


def _takes_context(parameter: inspect.Parameter, function: Callable[..., Any], context_type: type) -> bool:
    """Whether a function's first parameter may be the context; without an annotation it may be anything."""
    if parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_KEYWORD):
        return False
    if parameter.annotation is parameter.empty or parameter.kind is parameter.VAR_POSITIONAL:
        return True
    try:
        wanted = resolve(parameter.annotation, function)
    except Exception:  # its name may be imported for type checkers only
        return str(parameter.annotation).rpartition(".")[2] == context_type.__name__
    kinds = typing.get_args(wanted) or (wanted,)  # of an Optional, of an Annotated
    return any(
        kind in (Any, object)
        or isinstance(kind, typing.TypeVar)
        or getattr(kind, "_is_protocol", False)
        or (isinstance(kind, type) and (issubclass(context_type, kind) or issubclass(kind, context_type)))
        for kind in kinds
    )


def _conversions(
    action: str, function: Callable[..., Any], parameters: Iterable[inspect.Parameter]
) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    for parameter in parameters:
        if parameter.annotation is parameter.empty:
            continue
        try:
            convert = converter(resolve(parameter.annotation, function))
        except Exception as exc:
            raise uncheckable(action, function, str(parameter), exc) from None
        if convert is not None:
            yield parameter.name, _named(parameter.name, convert)


def uncheckable(action: str, function: Callable[..., Any], shown: str, exc: Exception) -> SettingsError:
    """The error for an unusable annotation, with the next step."""
    reason = str(exc).partition("\n")[0].partition(". ")[0].rstrip(".")
    if isinstance(exc, NameError):
        why = f"{reason}: import its names outside of TYPE_CHECKING and functions"
    else:
        why = (
            f"{reason or type(exc).__name__}. Take a pydantic model, a dataclass, a msgspec.Struct, a "
            "TypedDict, dict[str, Any] or the like, or leave the annotation out"
        )
    return SettingsError(f"action {action!r}: {shown} of {place(function)} cannot be checked: {why}")


def resolve(annotation: Any, function: Callable[..., Any]) -> Any:
    """An annotation as a type. Raises NameError, or another error of its text."""
    holder = types.SimpleNamespace(__annotations__={"it": annotation})
    inner = inspect.unwrap(function)
    names = getattr(inner, "__globals__", None) or getattr(type(inner).__call__, "__globals__", {})
    return typing.get_type_hints(holder, globalns=names, include_extras=True)["it"]


def converter(wanted: Any) -> Callable[[Any], Any] | None:
    """Checks decoded JSON against a type and converts it, raising msgspec.ValidationError; None for any value.

    Raises TypeError, or an error of pydantic, for a type that neither msgspec nor pydantic can check.
    """
    if wanted is Any or wanted is object or isinstance(wanted, typing.TypeVar):
        return None
    if not _is_pydantics(wanted, []) and _is_msgspecs(wanted):
        return partial(msgspec.convert, type=wanted)
    return _by_pydantic(wanted)


def _by_pydantic(wanted: Any) -> Callable[[Any], Any]:
    from pydantic import TypeAdapter, ValidationError  # not before a handler asks for it
    from pydantic_core import to_json

    adapter = TypeAdapter(wanted)
    if not adapter.pydantic_complete:
        adapter.rebuild(raise_errors=True)

    def convert(value: Any) -> Any:
        try:
            # By its rules for JSON: a strict model takes an instant as text there.
            return adapter.validate_json(to_json(value))
        except ValidationError as exc:
            first = exc.errors(include_url=False, include_context=False, include_input=False)[0]
            where = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in first["loc"])
            text = f"{first['msg']} - at `${where}`" if where else first["msg"]
            raise msgspec.ValidationError(text) from None

    return convert


def _is_pydantics(wanted: Any, seen: list[Any]) -> bool:
    """Whether a type is pydantic's, or contains one that is: msgspec would not know it, or not its constraints."""
    if any(wanted is known for known in seen):
        return False
    seen.append(wanted)
    if any(hasattr(wanted, name) for name in ("__pydantic_validator__", "__get_pydantic_core_schema__")):
        return True
    parts = list(typing.get_args(wanted))
    if typing.get_origin(wanted) is typing.Annotated:
        if any(type(mark).__module__.partition(".")[0] in _PYDANTIC for mark in parts[1:]):
            return True
    elif isinstance(wanted, type):
        with suppress(Exception):  # unknown names: msgspec will say so
            parts += typing.get_type_hints(wanted, include_extras=True).values()
    return any(_is_pydantics(part, seen) for part in parts)


def _is_msgspecs(wanted: Any) -> bool:
    try:
        return not _holds_custom(msgspec.inspect.type_info(wanted), set())
    except Exception:  # msgspec raises several kinds for what it cannot check
        return False


def _holds_custom(info: Any, seen: set[int]) -> bool:
    """Whether a type contains a class that msgspec does not know: it would refuse every value."""
    if isinstance(info, msgspec.inspect.CustomType):
        return True
    if id(info) in seen:
        return False  # a recursive type
    seen.add(id(info))
    if isinstance(info, tuple):
        return any(_holds_custom(item, seen) for item in info)
    if isinstance(info, msgspec.inspect.Type | msgspec.inspect.Field):
        return any(_holds_custom(getattr(info, name), seen) for name in info.__struct_fields__)
    return False


def _named(name: str, convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def checked(value: Any) -> Any:
        try:
            return convert(value)
        except msgspec.ValidationError as exc:
            raise InvalidParams(name, f"is wrong: {exc}") from None
        except Exception as exc:  # of a validator, or a __post_init__
            raise InvalidParams(name, f"is wrong: {type(exc).__name__}: {exc}") from exc

    return checked


def place(function: Callable[..., Any]) -> str:
    """Where a function is defined, for messages."""
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
