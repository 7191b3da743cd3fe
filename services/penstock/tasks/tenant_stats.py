"""The method ``stats`` for one tenant: what is kept of its tasks, counted at a cost that has a bound.

No index goes by tenant, for every task would have to enter it, and no tally is kept by tenant, for they come by the
thousand. So the newest records are looked at, a bounded number of each kind, one tenant at a time.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from time import monotonic
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from penstock.db.session import Session
from penstock.protocol.task import State
from penstock.tasks import views

LOOKED_AT = 50_000  # of live tasks, and of the records of each final state
KEPT_SECONDS = 1.0
_KEPT = 1000


class TenantStatistics(msgspec.Struct, frozen=True):
    tenant: str
    states: Annotated[dict[State, int], Meta(description="Its tasks kept, by state; every state is there.")]
    actions: views.CountsByAction
    at_least: Annotated[
        list[State],
        Meta(description=f"States whose counts are of the newest {LOOKED_AT} records, of all tenants: there are more."),
    ]


class TenantCounts:
    """Counts what is a tenant's, once a second at the most. session: opens one."""

    def __init__(self, session: Callable[[], AbstractAsyncContextManager[Session]]) -> None:
        self._session = session
        self._counting = asyncio.Lock()  # whoever asks for many tenants waits, and nobody else does
        self._kept: dict[str, tuple[float, TenantStatistics]] = {}

    async def count(self, tenant: str) -> TenantStatistics:
        """At most a second old."""
        async with self._counting:
            at, found = self._kept.get(tenant, (0.0, None))
            if found is None or monotonic() - at >= KEPT_SECONDS:
                found = await self._count(tenant)
                self._kept.pop(tenant, None)
                self._kept[tenant] = monotonic(), found
                if len(self._kept) > _KEPT:
                    del self._kept[next(iter(self._kept))]
            return found

    async def _count(self, tenant: str) -> TenantStatistics:
        actions: dict[str, Counter[State]] = defaultdict(Counter)
        more: set[State] = set()
        async with self._session() as session:
            live = await session.fetch("count_live_of_tenant", tenant, LOOKED_AT)
            settled = {
                state: await session.fetch("count_settled_of_tenant", tenant, LOOKED_AT, state)
                for state in State
                if state.final
            }
        for state, rows in settled.items():
            for row in _own(rows):
                actions[row["action"]][state] = row["count"]
            if _is_part(rows):
                more.add(state)
        for row in _own(live):
            actions[row["action"]][State(row["state"])] = row["count"]
        if _is_part(live):
            more |= {state for state in State if not state.final}
        return TenantStatistics(
            tenant,
            {state: sum(of_action[state] for of_action in actions.values()) for state in State},
            views.by_action(actions),
            [state for state in State if state in more],
        )


def _own(rows: Sequence[Any]) -> Iterable[Any]:
    return (row for row in rows if row["action"] is not None)


def _is_part(rows: Sequence[Any]) -> bool:
    """Whether there may be more than was looked at."""
    looked_at: int = sum(row["count"] for row in rows)
    return looked_at >= LOOKED_AT
