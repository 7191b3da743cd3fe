"""A task's JSON fitted to the signature of its handler, which is analysed when the handler is registered."""

import collections.abc
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import takewhile
from typing import Any

import msgspec

from penstock.protocol.errors import InvalidParams, SettingsError
from penstock.protocol.json_text import decode_any
from penstock.protocol.spelling import did_you_mean
from penstock.worker.handlers.context import Call, Context, Wait
from penstock.worker.handlers.lifespan import INJECTED, place

_PYDANTIC = frozenset(("pydantic", "pydantic_core", "annotated_types"))


class Parameters:
    """The parameters of a handler after the context. Raises SettingsError for an unusable signature or annotation."""

    def __init__(self, action: str, function: Callable[..., Any]) -> None:
        self._action = action
        declared = inspect.signature(function).parameters.values()
        parameters = [p for p in declared if p.default is not INJECTED]
        self._injected = frozenset(p.name for p in declared if p.default is INJECTED)
        self.takes_context = bool(parameters) and _is_context(parameters[0], function, is_first=True)
        for parameter in parameters[1:] if self.takes_context else parameters:
            if _is_context(parameter, function):
                problem = f"takes the Context as {parameter.name}: make it the first parameter"
                raise SettingsError(f"action {action!r}: {place(function)} {problem}")
        context = parameters[0] if self.takes_context else None
        rest = parameters[1:] if context is not None and context.kind is not context.VAR_POSITIONAL else parameters
        named = {p.name: p for p in rest if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
        self._named = tuple(named)
        self._positions = tuple(p.name for p in named.values() if p.kind is not p.KEYWORD_ONLY)
        # What stands behind an injected parameter is passed by name, as that is.
        before = {p.name for p in takewhile(lambda p: p.default is not INJECTED, declared)}
        self._by_position = sum(name in before for name in self._positions)
        has_injected = any(p.default is INJECTED and p.kind is not p.KEYWORD_ONLY for p in declared)
        self._any_position = any(p.kind is p.VAR_POSITIONAL for p in rest) and not has_injected
        # A parameter by position only cannot come from an object: it is always missing there.
        self._only_position = frozenset(p.name for p in named.values() if p.kind is p.POSITIONAL_ONLY)
        self._known = named.keys() - self._only_position
        self._any_name = any(p.kind is p.VAR_KEYWORD for p in rest)
        self._required = tuple(p.name for p in named.values() if p.default is p.empty)
        # A payload's member with the context's name would be its second value.
        self._reserved = context.name if context and context.kind is context.POSITIONAL_OR_KEYWORD else None
        self._conversions: dict[str, Callable[[Any], Any]] = {}
        for p in named.values():
            if p.annotation is not p.empty:
                convert = converter_of(action, function, str(p), partial(resolve, p.annotation, function))
                if convert is not None:
                    self._conversions[p.name] = checked(convert, p.name)

    def fit(self, params: msgspec.Raw | bytes) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """A task's parameters, raw JSON, as the arguments after the context. Raises InvalidParams."""
        value = read_params(params)
        if type(value) is dict:
            for name in self._required:
                if name not in value or name in self._only_position:
                    how = "; it is taken by position only: send an array" if name in self._only_position else ""
                    raise InvalidParams(name, f"is missing{how}")
            for name in value:
                if name == self._reserved or name in self._injected or not (self._any_name or name in self._known):
                    near = did_you_mean(name, self._known)
                    raise InvalidParams(name[:100], f"is no parameter of {self._action}{near}")
            for name, convert in self._conversions.items():
                if name in value:
                    value[name] = convert(value[name])
            return (), value
        if type(value) is not list:
            raise InvalidParams("params", "must be an object or an array")
        for name in self._named[len(self._positions) :]:
            if name in self._required:
                raise InvalidParams(name, "is missing; it is taken by name only: send an object")
        for name in self._positions[len(value) :]:
            if name in self._required:
                raise InvalidParams(name, "is missing")
        if len(value) > len(self._positions) and not self._any_position:
            raise InvalidParams("params", f"has {len(value)} items; {self._action} takes {len(self._positions)}")
        if self._conversions:
            for position, name in enumerate(self._positions[: len(value)]):
                if name in self._conversions:
                    value[position] = self._conversions[name](value[position])
        first = self._by_position
        if first < len(self._positions):
            return value[:first], dict(zip(self._positions[first:], value[first:], strict=False))
        return value, {}

    def payload(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Arguments as a payload that ``fit`` has yet to check, if possible an object. Raises TypeError: one twice."""
        if args and (self._only_position or len(args) > len(self._positions)):
            if kwargs:
                raise TypeError(f"{self._action} takes these arguments by position alone, or by name alone")
            return list(args)
        named = dict(zip(self._positions, args, strict=False))
        for name in named.keys() & kwargs.keys():
            raise TypeError(f"{self._action} got two values for {name}")
        return {**named, **kwargs}


def injected(action: str, function: Callable[..., Any]) -> dict[str, type]:
    """The parameters that lifespans give, with their types. Raises SettingsError for one without a class."""
    found = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.default is INJECTED:
            wanted = resolve(parameter.annotation, function)
            if not isinstance(wanted, type) or wanted is parameter.empty:
                problem = f"annotate {parameter.name} with the class whose value inject() gives"
                raise SettingsError(f"action {action!r}: {place(function)}: {problem}")
            found[parameter.name] = wanted
    return found


def batch_fit(action: str, function: Callable[..., Any]) -> Callable[[msgspec.Raw | bytes], Any]:
    """Converts a task's parameters to what ``list[Call[...]]`` holds. Raises SettingsError for another signature."""
    parameters = list(inspect.signature(function).parameters.values())
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if not parameters or parameters[0].kind not in by_position or required not in ([], [parameters[0]]):
        raise SettingsError(
            f"action {action!r}: {place(function)} is batched, so it must take one parameter, "
            "such as calls: list[Call[MyParams]]"
        )
    convert = converter_of(action, function, str(parameters[0]), partial(batch_params, action, function))
    if convert is None:
        return read_params
    check = checked(convert)
    return lambda params: check(read_params(params))


def batch_params(action: str, function: Callable[..., Any]) -> Any:
    """The type in ``list[Call[...]]`` of a batched function, or Any. Raises SettingsError."""
    parameter = next(iter(inspect.signature(function).parameters.values()))
    if parameter.annotation is parameter.empty:
        return Any
    wanted = resolve(parameter.annotation, function)
    item: Any = None
    if typing.get_origin(wanted) in (list, collections.abc.Sequence):
        (item,) = typing.get_args(wanted)
    if item is Call or wanted in (list, collections.abc.Sequence):
        return Any
    if typing.get_origin(item) is not Call:
        raise SettingsError(
            f"action {action!r}: {place(function)} is batched, so {parameter.name} must be a list[Call[MyParams]], "
            f"not {wanted!r}"
        )
    return typing.get_args(item)[0]


def result_type(function: Callable[..., Any], *, is_batched: bool) -> Any:
    """The annotated type of a result, without waits and exceptions; Any without one. Raises for an unusable one."""
    annotation = inspect.signature(function).return_annotation
    if annotation is inspect.Signature.empty:
        return Any
    wanted = resolve(annotation, function)
    if typing.get_origin(wanted) in (collections.abc.Awaitable, collections.abc.Coroutine):
        wanted = typing.get_args(wanted)[-1]
    if is_batched:
        wanted = (typing.get_args(wanted) or (Any,))[0]
    kinds = typing.get_args(wanted) if typing.get_origin(wanted) in (typing.Union, types.UnionType) else (wanted,)
    results = [kind for kind in kinds if not (isinstance(kind, type) and issubclass(kind, (Wait, Exception)))]
    return typing.Union[tuple(results)] if results else Any  # noqa: UP007


def read_params(params: msgspec.Raw | bytes) -> Any:
    """A task's parameters, decoded. Raises InvalidParams."""
    try:
        return decode_any(params) if params else {}
    except (ValueError, RecursionError) as exc:
        raise InvalidParams("params", f"cannot be read: {exc}") from None


def _is_context(parameter: inspect.Parameter, function: Callable[..., Any], *, is_first: bool = False) -> bool:
    """Whether a parameter is annotated as Context. is_first: or without an annotation, or with one that it fits too."""
    if is_first and parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_KEYWORD):
        return False
    if is_first and (parameter.annotation is parameter.empty or parameter.kind is parameter.VAR_POSITIONAL):
        return True
    try:
        wanted = resolve(parameter.annotation, function)
    except Exception:  # its name may be imported for type checkers only
        return str(parameter.annotation).rpartition(".")[2] == Context.__name__
    is_several = typing.get_origin(wanted) in (typing.Union, types.UnionType, typing.Annotated)
    kinds = typing.get_args(wanted) if is_several else (wanted,)
    return any(
        kind is Context
        or (is_first and (kind in (Any, *Context.__mro__) or isinstance(kind, typing.TypeVar)))
        or (is_first and getattr(kind, "_is_protocol", False))
        or (is_first and isinstance(kind, type) and issubclass(kind, Context))
        for kind in kinds
    )


def converter_of(
    action: str, function: Callable[..., Any], shown: str, find: Callable[[], Any]
) -> Callable[[Any], Any] | None:
    """Converts decoded JSON to the type that ``find`` gives, or raises ValidationError; None if any value fits.

    Raises SettingsError, with the next step, for an unusable type. shown: where it stands.
    """
    try:
        wanted = find()
        if wanted is Any or wanted is object or isinstance(wanted, typing.TypeVar):
            return None
        return _by_msgspec(wanted) if is_checked_by_msgspec(wanted) else _by_pydantic(wanted)
    except SettingsError:
        raise
    except Exception as exc:
        reason = str(exc).partition("\n")[0].partition(". ")[0].rstrip(".")
        if isinstance(exc, NameError):
            why = f"{reason}: import its names outside of TYPE_CHECKING and functions"
        else:
            why = (
                f"{reason or type(exc).__name__}. Take a pydantic model, a dataclass, a msgspec.Struct, a "
                "TypedDict, dict[str, Any] or the like, or leave the annotation out"
            )
        raise SettingsError(f"action {action!r}: {shown} of {place(function)} cannot be checked: {why}") from None


def resolve(annotation: Any, function: Callable[..., Any]) -> Any:
    """An annotation as a type. Raises NameError, or another error of its text."""
    holder = types.SimpleNamespace(__annotations__={"it": annotation})
    inner = inspect.unwrap(function)
    names = getattr(inner, "__globals__", None) or getattr(type(inner).__call__, "__globals__", {})
    return typing.get_type_hints(holder, globalns=names, include_extras=True)["it"]


def is_checked_by_msgspec(wanted: Any) -> bool:
    """Whether a type is msgspec's to check; else it is pydantic's."""
    if not _is_pydantics(wanted, []):
        with suppress(Exception):  # msgspec raises several kinds for what it cannot check
            return not _holds_custom(msgspec.inspect.type_info(wanted), set())
    return False


def _by_msgspec(wanted: Any) -> Callable[[Any], Any]:
    # Of a struct it keeps what it has found out; any other type it would analyse again for each value.
    holder: Any = msgspec.defstruct("Holder", [("value", wanted)])

    def convert(value: Any) -> Any:
        try:
            return msgspec.convert({"value": value}, holder, str_keys=True).value
        except msgspec.ValidationError:
            return msgspec.convert(value, wanted, str_keys=True)  # says where in the value it does not fit

    return convert


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


def checked(convert: Callable[[Any], Any], name: str | None = None) -> Callable[[Any], Any]:
    """A conversion that raises InvalidParams; without a name, of the whole payload, it names the invalid member."""

    def convert_or_refuse(value: Any) -> Any:
        try:
            return convert(value)
        except msgspec.ValidationError as exc:
            if name is not None:
                raise InvalidParams(name, f"is wrong: {exc}") from None
            problem, _, where = str(exc).partition(" - at `$")
            raise InvalidParams(where.rstrip("`").lstrip(".") or "params", f"is wrong: {problem}") from None
        except Exception as exc:  # of a validator, or a __post_init__
            raise InvalidParams(name or "params", f"is wrong: {type(exc).__name__}: {exc}") from exc

    return convert_or_refuse
