"""What a method is carried out with."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from penstock.db.session import OpenSession, Session
from penstock.protocol.errors import RpcError
from penstock.protocol.task import NewTask
from penstock.runtime.recent import Recent
from penstock.settings.model import Settings


@dataclass(frozen=True, slots=True)
class Context:
    """session, transaction: open one. wake: wakes schedulers, after tasks were added or settled, or limits changed."""

    settings: Settings
    session: OpenSession
    transaction: OpenSession
    wake: Callable[[], None]


@dataclass(frozen=True, slots=True)
class ServingContext(Context):
    """What methods that only the api carries out are given besides.

    enqueue: stores tasks together with those of other callers. await_results: waits for tasks to settle. Each is given
    what ``Method.together`` says. recent: answers that many callers share.
    """

    enqueue: Callable[[Sequence[NewTask | RpcError]], Awaitable[Sequence[Any]]]
    await_results: Callable[[Sequence[Any]], Awaitable[Sequence[Any]]]
    recent: Recent


def within(session: Session, settings: Settings) -> Context:
    """A context of the transaction that is open, whose owner wakes schedulers."""
    return Context(settings, lambda: nullcontext(session), lambda: nullcontext(session), lambda: None)
