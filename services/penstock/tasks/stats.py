"""The method `stats`: counts, rates and lag of all tasks; counts of one tenant's tasks.

Neither an index nor a tally goes by tenant, so a bounded number of the newest records of each kind is looked at.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

from penstock.db.context import Context
from penstock.protocol.task import FINAL_STATES, OTHER_ACTIONS, State
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
    async with context.session() as session:
        live = [state for state in State if not state.final]
        parts = [(live, await session.fetch("count_live_of_tenant", tenant, views.TENANT_LOOKED_AT))]
        for state in FINAL_STATES:
            rows = await session.fetch("count_settled_of_tenant", tenant, views.TENANT_LOOKED_AT, state)
            parts.append(([state], rows))
    actions: dict[str, Counter[State]] = defaultdict(Counter)
    more: set[State] = set()
    for states, rows in parts:
        for row in rows:
            if row["action"] is not None:
                actions[row["action"]][State(row.get("state", states[0]))] = row["count"]
        if sum(row["count"] for row in rows) >= views.TENANT_LOOKED_AT:
            more.update(states)
    at_least = [state for state in State if state in more]
    return views.TenantStatistics(tenant, _by_state(actions), views.by_action(actions), at_least)


def _by_state(actions: Mapping[str, Counter[State]]) -> dict[State, int]:
    return {state: sum(of_action[state] for of_action in actions.values()) for state in State}
