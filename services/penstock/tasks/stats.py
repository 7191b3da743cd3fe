"""The method `stats` without a tenant: counts, rates and lag."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from time import monotonic

import msgspec

from penstock.db.session import Session
from penstock.protocol.task import OTHER_ACTIONS, State
from penstock.tasks import views

KEPT_SECONDS = 1.0
RATES_OVER_SECONDS = 60.0


class TaskCounts:
    """Counts all tasks, once a second at the most. session: opens one."""

    def __init__(self, session: Callable[[], AbstractAsyncContextManager[Session]]) -> None:
        self._session = session
        self._counting = asyncio.Lock()
        self._kept: msgspec.Raw | None = None
        self._kept_at = 0.0

    async def count(self) -> msgspec.Raw:
        """At most a second old, however many ask."""
        async with self._counting:
            if self._kept is None or monotonic() - self._kept_at >= KEPT_SECONDS:
                self._kept = msgspec.Raw(msgspec.json.encode(await self._count()))
                self._kept_at = monotonic()
            return self._kept

    async def _count(self) -> views.Statistics:
        async with self._session() as session:
            counts = await session.fetch("count_live") + await session.fetch("count_settled", OTHER_ACTIONS)
            counted: dict[str, int] = dict(map(tuple, await session.fetch("read_rates", RATES_OVER_SECONDS)))
            lag = (await session.fetch("read_lag"))[0]
        actions: dict[str, Counter[State]] = defaultdict(Counter)
        for row in counts:
            actions[row["action"]][State(row["state"])] += row["count"]

        return views.Statistics(
            {state: sum(of_action[state] for of_action in actions.values()) for state in State},
            views.by_action(actions),
            views.rates(counted, RATES_OVER_SECONDS),
            views.Lag(lag["due"], round(max(0.0, lag["oldest_seconds"]), 3)),
        )
