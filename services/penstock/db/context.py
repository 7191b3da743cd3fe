"""What a method is carried out with."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass

from penstock.db.session import Session
from penstock.settings.model import Settings


@dataclass(frozen=True, slots=True)
class Context:
    """session, transaction: open one. wake: wakes schedulers, after tasks were added or settled, or limits changed."""

    settings: Settings
    session: Callable[[], AbstractAsyncContextManager[Session]]
    transaction: Callable[[], AbstractAsyncContextManager[Session]]
    wake: Callable[[], None]


def within(session: Session, settings: Settings) -> Context:
    """A context of the transaction that is open, whose owner wakes schedulers."""
    return Context(settings, lambda: nullcontext(session), lambda: nullcontext(session), lambda: None)
