"""The method `stats`: counts, rates and lag of all tasks; counts of one tenant's tasks.

No index goes by tenant, as every task would have to enter it, and no tally is kept by tenant, as there may be
thousands. So the newest records are looked at, a bounded number of each kind, one tenant at a time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from penstock.db.context import Context
from penstock.protocol.task import OTHER_ACTIONS, State
from penstock.tasks import views

RATES_OVER_SECONDS = 60.0


async def count_tasks(context: Context) -> views.Statistics:
    async with context.session() as session:
        counts = await session.fetch("count_live") + await session.fetch("count_settled", OTHER_ACTIONS)
        counted: dict[str, int] = dict(map(tuple, await session.fetch("read_rates", RATES_OVER_SECONDS)))
        lag = (await session.fetch("read_lag"))[0]
    actions: dict[str, Counter[State]] = defaultdict(Counter)
    for row in counts:
        actions[row["action"]][State(row["state"])] += row["count"]
    return views.Statistics(
        _by_state(actions),
        views.by_action(actions),
        views.rates(counted, RATES_OVER_SECONDS),
        views.Lag(lag["due"], round(max(0.0, lag["oldest_seconds"]), 3)),
    )


async def count_tasks_of(context: Context, tenant: str) -> views.TenantStatistics:
    actions: dict[str, Counter[State]] = defaultdict(Counter)
    more: set[State] = set()
    async with context.session() as session:
        live = await session.fetch("count_live_of_tenant", tenant, views.TENANT_LOOKED_AT)
        settled = {
            state: await session.fetch("count_settled_of_tenant", tenant, views.TENANT_LOOKED_AT, state)
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
    return views.TenantStatistics(
        tenant, _by_state(actions), views.by_action(actions), [state for state in State if state in more]
    )


def _by_state(actions: Mapping[str, Counter[State]]) -> dict[State, int]:
    return {state: sum(of_action[state] for of_action in actions.values()) for state in State}


def _own(rows: Sequence[Any]) -> Iterable[Any]:
    return (row for row in rows if row["action"] is not None)


def _is_part(rows: Sequence[Any]) -> bool:
    """Whether there may be more than was looked at."""
    looked_at: int = sum(row["count"] for row in rows)
    return looked_at >= views.TENANT_LOOKED_AT
