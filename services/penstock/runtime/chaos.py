"""Fault injection: ``PENSTOCK_CHAOS_*`` make edges fail by chance. At 0, the default, no edge is wrapped."""

import asyncio
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, get_args

from penstock.protocol.errors import InjectedFault, Unavailable
from penstock.runtime import metrics
from penstock.runtime.logs import log
from penstock.settings.model import Settings

Edge = Literal["postgres", "commit", "send", "receive", "delete", "extend", "duplicate", "handler"]
EDGES: tuple[Edge, ...] = get_args(Edge)


class Faults:
    """Draws faults by chances of edges, and delays up to delay_seconds. seed: for the same series in this process."""

    def __init__(
        self, process: str, chances: Mapping[Edge, float], *, delay_seconds: float = 0, seed: int | None = None
    ) -> None:
        self._chances = chances
        self._delay_seconds = delay_seconds
        self._random = random.Random() if seed is None else random.Random(f"{seed} {process}")

    def strikes(self, edge: Edge) -> bool:
        """Whether the edge fails this time; then it is counted."""
        if self._random.random() >= self._chances.get(edge, 0.0):
            return False
        metrics.INJECTED_FAULTS.labels(edge).inc()
        return True

    def is_even(self) -> bool:
        return self._random.random() < 0.5

    def victims(self, count: int) -> list[int]:
        """Which of so many entries of a call fail: all, or each by chance."""
        return list(range(count)) if self.is_even() else [n for n in range(count) if self.is_even()]

    def fail(self, edge: Edge, what: str) -> None:
        """Raises Unavailable when the edge fails this time."""
        if self.strikes(edge):
            raise Unavailable(f"{what} (injected by PENSTOCK_CHAOS_{edge.upper()})")

    @contextmanager
    def around(self, *_: Any, **__: Any) -> Iterator[None]:
        """Have a call of a handler raise InjectedFault, before or after its work, when the edge fails this time."""
        fails, is_late = self.strikes("handler"), self.is_even()
        if fails and not is_late:
            raise InjectedFault("injected by PENSTOCK_CHAOS_HANDLER, before the work")
        yield
        if fails:
            raise InjectedFault("injected by PENSTOCK_CHAOS_HANDLER, after the work")

    async def delay(self) -> None:
        if self._delay_seconds:
            await asyncio.sleep(self._random.uniform(0, self._delay_seconds))


def faults_of(settings: Settings, process: str) -> Faults | None:
    """The faults that the settings ask for, with a warning in the log; None when they ask for none."""
    active: dict[Edge, float] = {edge: chance for edge in EDGES if (chance := getattr(settings, f"chaos_{edge}"))}
    if not active and not settings.chaos_delay_seconds:
        return None
    log.warning(
        "chaos_is_on", hint="calls fail on purpose: unset PENSTOCK_CHAOS_* where work matters",
        delay_seconds=settings.chaos_delay_seconds, seed=settings.chaos_seed, **active,
    )  # fmt: skip
    return Faults(process, active, delay_seconds=settings.chaos_delay_seconds, seed=settings.chaos_seed)
