"""The tenant and the actions that the caller of the request in hand is limited to."""

from collections.abc import Collection, Iterable
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import msgspec

from penstock.protocol.api_key import may_enqueue
from penstock.protocol.errors import AccessDenied, InvalidParams

_bound: ContextVar[tuple[str | None, tuple[str, ...] | None]] = ContextVar("bound", default=(None, None))


def bind(tenant: str | None, actions: tuple[str, ...] | None = None) -> None:
    """Remember what the key of the request in hand is limited to: a tenant, and patterns of actions to enqueue."""
    _bound.set((tenant, actions))


def bound_to() -> str | None:
    """The tenant that the caller is bound to; None: to no tenant."""
    return _bound.get()[0]


def actions_of_caller() -> tuple[str, ...] | None:
    """Patterns of the actions that the caller may enqueue; None: all."""
    return _bound.get()[1]


def check_actions(actions: Collection[str]) -> None:
    bound, patterns = _bound.get()
    if bound is None and patterns is None:
        return
    refused = sorted(action for action in actions if not may_enqueue(action, patterns, bound))
    if refused:
        may = "no built-in action" if patterns is None else ", ".join(patterns) + " alone"
        message = f"Not permitted: this API key may not enqueue {refused[0]!r}; it may enqueue {may}"
        raise AccessDenied(403, message, {"actions": refused[:10]})


def own_tenant(given: str | None) -> str | None:
    """The tenant that the caller means: the one that it is bound to, or any. Raises InvalidParams for another one."""
    bound = bound_to()
    if bound is None:
        return given
    if given is not None and given != bound:
        raise InvalidParams("tenant", f"must be {bound!r}, to which this API key is bound, not {given!r}")
    return bound


def narrow_tenant(command: Any) -> Any:
    """A command with a ``tenant``, limited to the caller's. Raises InvalidParams."""
    change = msgspec.structs.replace if isinstance(command, msgspec.Struct) else replace
    return change(command, tenant=own_tenant(command.tenant))


def sees(tenant: str | None) -> bool:
    bound = bound_to()
    return bound is None or tenant == bound


def seen(rows: Iterable[Any]) -> list[Any]:
    return [row for row in rows if sees(row["tenant"])]
