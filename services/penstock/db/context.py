"""What a method is carried out with."""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from time import monotonic
from typing import Any

from penstock.db.session import OpenSession, Session
from penstock.protocol.task import NewTask
from penstock.runtime.budget import in_hand
from penstock.settings.model import Settings

KEPT_SECONDS = 1.0
_KEPT = 1000  # of one kind


@dataclass(frozen=True, slots=True)
class Context:
    """session, transaction: open one. wake: wakes schedulers, after tasks were added or settled, or limits changed."""

    settings: Settings
    session: OpenSession
    transaction: OpenSession
    wake: Callable[[], None]


class Recent:
    """Expensive answers by kind and key, each kept a while for all who ask. Of one kind, one at a time is made."""

    def __init__(self) -> None:
        self._making: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._kept: defaultdict[str, dict[str, tuple[float, Any, float | None]]] = defaultdict(dict)

    async def get(self, kind: str, key: str, make: Callable[[], Awaitable[Any]], seconds: float = KEPT_SECONDS) -> Any:
        """The kept answer, or a new one if that is so many seconds old; notes how old what a replica gave is."""
        async with self._making[kind]:
            kept = self._kept[kind]
            at, answer, age = kept.get(key, (float("-inf"), None, None))
            if monotonic() - at >= seconds:
                answer = await make()
                kept.pop(key, None)
                kept[key] = monotonic(), answer, in_hand().age_seconds
                if len(kept) > _KEPT:
                    del kept[next(iter(kept))]
            elif age is not None:
                in_hand().aged(age + monotonic() - at)
            return answer


@dataclass(frozen=True, slots=True)
class ServingContext(Context):
    """What methods that only the api carries out are given besides."""

    enqueue: Callable[[Sequence[NewTask]], Awaitable[Sequence[Any]]]  # stores tasks with those of other callers
    await_results: Callable[[Sequence[Any]], Awaitable[Sequence[Any]]]  # waits for tasks to settle
    recent: Recent  # answers that many callers share


def within(session: Session, settings: Settings) -> Context:
    """A context of the transaction that is open, whose owner wakes schedulers."""
    return Context(settings, lambda: nullcontext(session), lambda: nullcontext(session), lambda: None)
