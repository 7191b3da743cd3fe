"""The tenant and the actions that the caller of the request in hand is limited to."""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any

_tenant: ContextVar[str | None] = ContextVar("tenant", default=None)
_patterns: ContextVar[tuple[str, ...] | None] = ContextVar("patterns", default=None)


def bind(tenant: str | None, actions: tuple[str, ...] | None = None) -> None:
    """Remember what the key of the request in hand is limited to, for all that is done for it.

    tenant: to which it is bound. actions: patterns of those that it may enqueue.
    """
    _tenant.set(tenant)
    _patterns.set(actions)


def bound_to() -> str | None:
    """The tenant that whoever sent the request in hand is bound to; None for one who is bound to none."""
    return _tenant.get()


def actions_of_caller() -> tuple[str, ...] | None:
    """Patterns of the actions that the caller may enqueue; None: all."""
    return _patterns.get()


def sees(tenant: str | None) -> bool:
    """Whether whoever sent the request in hand may see what is of this tenant."""
    bound = _tenant.get()
    return bound is None or tenant == bound


def seen(rows: Iterable[Any]) -> list[Any]:
    """Of rows with a tenant, those that whoever sent the request in hand may see."""
    return [row for row in rows if sees(row["tenant"])]
