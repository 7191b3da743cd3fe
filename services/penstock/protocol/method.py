"""What a JSON-RPC method is: one decorated function declares it, and all else is derived; how parameters are read."""

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from inspect import signature
from types import ModuleType, UnionType
from typing import Annotated, Any, Self, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from penstock.protocol.api_key import Permission
from penstock.protocol.checks import Checked
from penstock.protocol.errors import InvalidParams, RpcError
from penstock.protocol.spelling import did_you_mean

Params = TypeVar("Params", bound=msgspec.Struct)
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


def _itself(command: Any) -> Any:
    return command


@dataclass(slots=True, kw_only=True, eq=False)
class Method:
    """Declares a method, as the decorator of a function of a context, or a session, and a command.

    Its docstring is the summary. It is given a session if its first parameter has that name: to read, or a transaction
    if the permission is another one; then the settings, too, if it takes them. wakes: schedulers, after the commit.

    errors: beyond those of every method. read: parameters, and settings if it takes them, to the checked command;
    raises InvalidParams, TooLarge. The struct that it takes first is ``params``; without it they are the command. What
    one parameter must be stands on its field, as ``Checked``. narrow: limits a command to the tenant and the actions of
    the caller's key, or to the room of its body; raises InvalidParams, AccessDenied. audited: who called it is
    recorded, if the permission is admin. by_queue: the inbound queue takes it. dry: whether a command only looks: it is
    not audited, and the queue takes none. savepoint: it may be refused after it has written something. together: the
    requests of one body are carried out in one call. by_replica: it only reads, and its answer may be as old as a
    replica is. result: the return annotation. carry_out: given a context and the command, or with ``together`` a list
    of commands, to which it returns a list of outcomes in this order.
    """

    name: str = field(kw_only=False)
    permission: Permission
    scope: Scope
    errors: tuple[type[RpcError], ...] = ()
    read: Callable[..., Any] = _itself
    narrow: Callable[[Any], Any] = _itself
    audited: bool = True
    by_queue: bool = False
    dry: Callable[[Any], bool] = lambda _command: False
    savepoint: bool = False
    together: bool = False
    by_replica: bool = False
    wakes: bool = False
    summary: str = field(init=False)
    params: type[msgspec.Struct] = field(init=False)
    result: Any = field(init=False)
    carry_out: Callable[[Any, Any], Awaitable[Any]] = field(init=False)

    def __call__(self, function: Callable[..., Awaitable[Any]]) -> Self:
        hints = get_type_hints(function)
        (returned,) = get_args(hints["return"]) if self.together else (hints["return"],)
        outcomes = get_args(returned) if get_origin(returned) in (Union, UnionType) else (returned,)
        results = tuple(one for one in outcomes if not (isinstance(one, type) and issubclass(one, Exception)))
        taken = list(hints.values())[1]
        read = self.read
        if read is not _itself:  # settings are imported for type checkers alone where a program enqueues
            taken = next(iter(get_type_hints(read, localns={"Settings": Any}).values()))
        elif self.together:
            (taken,) = get_args(taken)
        if len(signature(read).parameters) == 1:
            self.read = lambda given, _settings: read(given)
        self.audited = self.audited and self.permission is Permission.ADMIN
        self.summary = " ".join((function.__doc__ or "").split())
        self.params = taken
        self.carry_out = self._in_session(function, hints) if next(iter(hints)) == "session" else function
        self.result = Union[results]  # noqa: UP007 - of types that are known at run time only
        return self

    def _in_session(
        self, function: Callable[..., Awaitable[Any]], hints: Mapping[str, Any]
    ) -> Callable[[Any, Any], Awaitable[Any]]:
        async def carry_out(context: Any, command: Any) -> Any:
            async with context.session() if self.permission is Permission.READ else context.transaction() as session:
                answer = await function(session, command, *([context.settings] if "settings" in hints else []))
            if self.wakes:
                context.wake()
            return answer

        return carry_out

    def command(self, raw: bytes, settings: Any) -> Any:
        """Raw parameters as the checked command. Raises InvalidParams, TooLarge."""
        return self.read(decode(self.params, raw or b"{}"), settings)


method = Method


def decode(kind: type[msgspec.Struct], raw: bytes) -> Any:
    names = kind.__struct_fields__
    try:
        if raw.startswith(b"["):
            given = _decode_list(raw)
            if len(given) > len(names):
                raise InvalidParams("params", f"has {len(given)} positions; at most {len(names)}: {', '.join(names)}")
            pairs = (b'"%s":%s' % (n.encode(), bytes(v)) for n, v in zip(names, given, strict=False))
            raw = b"{" + b",".join(pairs) + b"}"
        return checked(_decoder(kind).decode(raw))
    except msgspec.ValidationError as exc:
        raise _mistake(str(exc), names) from None
    except (ValueError, RecursionError) as exc:
        raise InvalidParams("params", f"cannot be read: {str(exc)[:_SHOWN_CHARS]}") from None


def checked(params: Params) -> Params:
    """The same parameters. Raises InvalidParams for one that does not pass the check on its field."""
    for name, check in _checks(type(params)):
        if (value := getattr(params, name)) is not None:
            check(value, name)
    return params


@cache
def _checks(kind: type[msgspec.Struct]) -> list[tuple[str, Callable[[Any, str], object]]]:
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
