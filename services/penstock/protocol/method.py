"""What a JSON-RPC method is: one decorated function declares it, and all else is derived; how parameters are read."""

import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from inspect import signature
from types import ModuleType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgspec

from penstock.protocol.api_key import Permission
from penstock.protocol.checks import Checked
from penstock.protocol.errors import InvalidParams, RpcError
from penstock.protocol.spelling import did_you_mean

_decoder = cache(msgspec.json.Decoder)
_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
_PLACE = " - at `$"
_SHOWN_CHARS = 200  # of a message of msgspec, which quotes the caller's text
_QUOTED = re.compile(r"`([^`]*)`")


class Scope(StrEnum):
    OPEN = "open"  # it shows no tenant's records and changes none
    OWN = "own"  # the records of its tenant, no others
    CLOSED = "closed"  # it concerns the whole installation, or the tenant cannot be determined


class NoParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The parameters of a method that takes none."""


@dataclass(frozen=True, slots=True)
class Method:
    """result: the return annotation. errors: beyond those of every method.

    read: parameters and settings to the checked command; raises InvalidParams, TooLarge. narrow: limits a command to
    the tenant and the actions of the caller's key; raises InvalidParams, AccessDenied. audited: who called it is
    recorded. by_queue: the inbound queue takes it. dry: whether a command only looks: it is not audited, and the queue
    takes none. savepoint: it may be refused after it has written something. together: the requests of one body are
    carried out in one call. by_replica: it only reads, and its answer may be as old as a replica is. carry_out: given a
    context and the command, or with ``together`` a list of commands and of the errors of those that could not be read,
    to which it returns a list of outcomes in this order.
    """

    name: str
    summary: str
    params: type[msgspec.Struct]
    result: Any
    permission: Permission
    scope: Scope
    errors: tuple[type[RpcError], ...]
    read: Callable[[Any, Any], Any]
    narrow: Callable[[Any], Any]
    audited: bool
    by_queue: bool
    dry: Callable[[Any], bool]
    savepoint: bool
    together: bool
    by_replica: bool
    carry_out: Callable[[Any, Any], Awaitable[Any]]

    def command(self, raw: bytes, settings: Any) -> Any:
        """Raw parameters as the checked command. Raises InvalidParams, TooLarge."""
        return self.read(decode(self.params, raw or b"{}"), settings)


def decode(kind: type[msgspec.Struct], raw: bytes) -> Any:
    names = kind.__struct_fields__
    try:
        if raw.startswith(b"["):
            given = _decode_list(raw)
            if len(given) > len(names):
                raise InvalidParams("params", f"has {len(given)} positions; at most {len(names)}: {', '.join(names)}")
            pairs = (b'"%s":%s' % (n.encode(), bytes(v)) for n, v in zip(names, given, strict=False))
            raw = b"{" + b",".join(pairs) + b"}"
        params = _decoder(kind).decode(raw)
        for name, check in _checks(kind):
            check(getattr(params, name))
        return params
    except msgspec.ValidationError as exc:
        raise _mistake(str(exc), names) from None
    except (ValueError, RecursionError) as exc:
        raise InvalidParams("params", f"cannot be read: {str(exc)[:_SHOWN_CHARS]}") from None


@cache
def _checks(kind: type[msgspec.Struct]) -> list[tuple[str, Callable[[Any], object]]]:
    """The checks that stand on the fields of parameters, in their order."""
    notes = [(field.name, note) for field in msgspec.structs.fields(kind) for note in get_args(field.type)[1:]]
    return [(name, note.check) for name, note in notes if isinstance(note, Checked)]


def _mistake(text: str, names: Iterable[str]) -> InvalidParams:
    quoted = _QUOTED.findall(text)
    if "unknown field" in text and quoted:
        return InvalidParams(quoted[0][:100], f"is unknown{did_you_mean(quoted[0], names)}")
    if "missing required field" in text and quoted:
        return InvalidParams(quoted[0], "is missing")
    said, _, at = text.rpartition(_PLACE) if _PLACE in text else (text, "", "")
    return InvalidParams(at.removeprefix(".").removesuffix("`") or "params", f"is wrong: {said[:_SHOWN_CHARS]}")


def method(
    name: str,
    *,
    permission: Permission,
    scope: Scope,
    errors: tuple[type[RpcError], ...] = (),
    read: Callable[..., Any] | None = None,
    narrow: Callable[[Any], Any] = lambda command: command,
    audited: bool | None = None,
    by_queue: bool = False,
    dry: Callable[[Any], bool] = lambda _command: False,
    savepoint: bool = False,
    together: bool = False,
    by_replica: bool = False,
) -> Callable[[Callable[[Any, Any], Awaitable[Any]]], Method]:
    """Declare a method: a function of a context and a command, whose docstring is the summary.

    The parameters are the struct that ``read`` takes first, alone or before the settings; without ``read``, they are
    the command. What one parameter must be stands on its field, as ``Checked``. audited: None for whether the
    permission is admin. See ``Method`` for the others.
    """

    def declare(function: Callable[[Any, Any], Awaitable[Any]]) -> Method:
        hints = get_type_hints(function)
        (returned,) = get_args(hints["return"]) if together else (hints["return"],)
        outcomes = get_args(returned) if get_origin(returned) in (Union, UnionType) else (returned,)
        results = tuple(one for one in outcomes if not (isinstance(one, type) and issubclass(one, Exception)))
        taken = list(hints.values())[1]
        if read is not None:  # settings are imported for type checkers alone where a program enqueues
            taken = next(iter(get_type_hints(read, localns={"Settings": Any}).values()))
        elif together:
            taken, *_ = get_args(*get_args(taken))  # of a sequence of them and of errors
        checked: Callable[..., Any] = read or (lambda given: given)
        takes_settings = len(signature(checked).parameters) > 1
        is_audited = permission is Permission.ADMIN if audited is None else audited
        return Method(
            name, " ".join((function.__doc__ or "").split()), taken,
            Union[results],  # noqa: UP007 - of types that are known at run time only
            permission, scope, errors, checked if takes_settings else lambda given, _settings: checked(given),
            narrow, is_audited, by_queue, dry, savepoint, together, by_replica, function,
        )  # fmt: skip

    return declare


def by_name(*modules: ModuleType) -> dict[str, Method]:
    """The methods that modules declare, in their order."""
    return {method.name: method for module in modules for method in vars(module).values() if isinstance(method, Method)}


def described(kind: Any) -> tuple[Any, str]:
    """The annotation of a parameter as its plain type, and its description."""
    found: list[str] = []

    def plain(kind: Any) -> Any:
        if get_origin(kind) is Annotated:
            kind, *notes = get_args(kind)
            found.extend(note.description for note in notes if isinstance(note, msgspec.Meta) and note.description)
            return plain(kind)
        if get_origin(kind) in (Union, UnionType):
            return Union[tuple(map(plain, get_args(kind)))]  # noqa: UP007 - of types that are known at run time only
        return kind

    return plain(kind), " ".join(found)
