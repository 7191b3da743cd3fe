"""Limits and routes in Postgres: set, read, taken back.

Whoever changes them holds both tables while doing so, so nothing comes through a gate past a limit or a pause once it
is committed. What is in flight by then, or in a claim that began before, counts and is not called back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from datetime import datetime
from typing import Any

from penstock.db.session import Session
from penstock.limits.model import DeleteRoute, Route, RuleChange, SetLimits, SetRoute
from penstock.limits.token_bucket import Limits
from penstock.protocol.checks import like_pattern
from penstock.protocol.errors import RouteNotFound


@dataclass(frozen=True, slots=True)
class ActionRecord:
    """An action and its limits. in_flight: its tasks that are claimed and unsettled, since it was limited."""

    name: str
    limits: Limits
    in_flight: int
    updated_at: datetime | None


async def change_rule(session: Session, command: RuleChange) -> None:
    """Carry out a change, inside a transaction. Raises RouteNotFound."""
    match command:
        case SetLimits():
            await set_limits(session, command.action, command.change)
        case SetRoute():
            await set_route(session, command.route)
        case DeleteRoute():
            if not await delete_route(session, command.name):
                raise RouteNotFound(command.name)


async def set_limits(session: Session, action: str, change: Mapping[str, Any]) -> None:
    """Change some limits of an action, inside a transaction; what ``change`` does not name stays as it is."""
    await lock_rules(session)
    before = await read_action(session, action)
    limits = Limits(**{name: change.get(name, getattr(before.limits, name)) for name in Limits.__dataclass_fields__})
    if limits.is_free:
        await session.fetch("forget_action", action)
    else:
        await session.fetch("set_action", action, *astuple(limits))
        await session.fetch("adopt_in_flight", action)
    await session.fetch("open_gates", action)


async def read_action(session: Session, action: str) -> ActionRecord:
    """The limits of an action, free ones for one that nothing was ever asked of."""
    rows = await session.fetch("read_actions", [action])
    return _record(rows[0]) if rows else ActionRecord(action, Limits(), 0, None)


async def list_actions(session: Session) -> list[ActionRecord]:
    """Every action that is limited or paused, by name."""
    return [_record(row) for row in await session.fetch("read_actions", None)]


async def set_route(session: Session, route: Route) -> None:
    """Make or replace a route, inside a transaction; tasks put aside for it before still go by it."""
    await lock_rules(session)
    patterns = [like_pattern(pattern) for pattern in route.actions]
    await session.fetch("set_route", route.name, route.queue, patterns, json.dumps(dict(route.labels)), route.position)


async def delete_route(session: Session, name: str) -> bool:
    """Delete a route, inside a transaction; what waits for it goes by the other rules again. False for an unknown."""
    await lock_rules(session)
    return await session.value("delete_route", name) is not None


async def list_routes(session: Session) -> list[tuple[Route, int]]:
    """Every route in the order in which they are tried, and how many tasks are in flight by it."""
    return [
        (
            Route(row["name"], row["queue"], [_glob(pattern) for pattern in row["actions"]], json.loads(row["labels"]),
                  row["position"]),
            row["in_flight"],
        )
        for row in await session.fetch("read_routes")
    ]  # fmt: skip


async def lock_rules(session: Session) -> None:
    """Be the only one who changes rules, and let no task through a gate meanwhile, inside a transaction."""
    await session.fetch("limit_lock_wait")
    await session.fetch("lock_rules")


def _record(row: Any) -> ActionRecord:
    limits = Limits(**{name: row[name] for name in Limits.__dataclass_fields__})
    return ActionRecord(row["name"], limits, row["in_flight"], row["updated_at"])


def _glob(pattern: str) -> str:
    return pattern.replace("%", "*").replace("\\*", "%").replace("\\_", "_").replace("\\\\", "\\")
