"""What a JSON-RPC method is: one decorated function declares it, and all else about it is derived."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from inspect import signature
from types import ModuleType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgspec

from penstock.protocol.api_key import Permission
from penstock.protocol.errors import RpcError
from penstock.protocol.params import decode


class Scope(StrEnum):
    """What a method is to a key that is bound to a tenant."""

    OPEN = "open"  # it shows no tenant's records and changes none
    OWN = "own"  # the records of its tenant, no others
    CLOSED = "closed"  # it concerns the whole installation, or the tenant cannot be determined


class NoParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The parameters of a method that takes none."""


@dataclass(frozen=True, slots=True)
class Method:
    """A declared method.

    result: the return annotation. errors: beyond those of every method. read: parameters and settings to the checked
    command; raises InvalidParams, TooLarge. narrow: limits a command to the tenant and the actions of the caller's
    key; raises InvalidParams, AccessDenied. audited: who called it is recorded. by_queue: a body of the inbound queue
    may ask for it. dry: whether a command of it only looks: it is not audited, and the queue takes none. savepoint: it
    may be refused after it has written something. together: the requests of one body are carried out in one call.
    carry_out: given a context and the command, or with ``together`` a list of commands and of the errors of those that
    could not be read, to which it returns a list of outcomes in this order.
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
    carry_out: Callable[[Any, Any], Awaitable[Any]]

    def command(self, raw: bytes, settings: Any) -> Any:
        """Raw parameters as the checked command. Raises InvalidParams, TooLarge."""
        return self.read(decode(self.params, raw or b"{}"), settings)


def _as_given(given: Any) -> Any:
    return given


def _with_settings(read: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """``read`` as a function of parameters and settings, also if it takes parameters alone."""
    return read if len(signature(read).parameters) == 2 else lambda given, _settings: read(given)


def _never(_command: Any) -> bool:
    return False


def method(
    name: str,
    *,
    permission: Permission,
    scope: Scope,
    errors: tuple[type[RpcError], ...] = (),
    read: Callable[..., Any] | None = None,
    narrow: Callable[[Any], Any] = _as_given,
    audited: bool | None = None,
    by_queue: bool = False,
    dry: Callable[[Any], bool] = _never,
    savepoint: bool = False,
    together: bool = False,
) -> Callable[[Callable[[Any, Any], Awaitable[Any]]], Method]:
    """Declare a method: a function of a context and a command, whose docstring is the summary.

    The parameters are the struct that ``read`` takes first, alone or before the settings; without ``read``, they are
    the command. audited: None for whether the permission is admin. See ``Method`` for the others.
    """

    def declare(function: Callable[[Any, Any], Awaitable[Any]]) -> Method:
        hints = get_type_hints(function)
        (returned,) = get_args(hints["return"]) if together else (hints["return"],)
        taken = list(hints.values())[1] if read is None else next(iter(get_type_hints(read).values()))
        return Method(
            name,
            " ".join((function.__doc__ or "").split()),
            taken,
            _without_errors(returned),
            permission,
            scope,
            errors,
            _with_settings(read or _as_given),
            narrow,
            permission is Permission.ADMIN if audited is None else audited,
            by_queue,
            dry,
            savepoint,
            together,
            function,
        )

    return declare


def _without_errors(kind: Any) -> Any:
    """Of the outcomes of requests that are carried out together, the results."""
    if get_origin(kind) not in (Union, UnionType):
        return kind
    results = tuple(one for one in get_args(kind) if not (isinstance(one, type) and issubclass(one, Exception)))
    return Union[results]  # noqa: UP007 - of types that are known at run time only


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
