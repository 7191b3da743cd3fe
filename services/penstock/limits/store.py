"""Limits of actions and tenants, and routes, in Postgres: changed and read.

A change locks both tables, so no task passes a limit or a pause after its commit. Tasks that are in flight by then, or
in a claim that began before, count and are not recalled.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from penstock.db.session import Session
from penstock.limits.model import Action, Route, RouteSetParams, TenantDetail
from penstock.limits.token_bucket import Limits
from penstock.protocol.checks import like_pattern
from penstock.protocol.errors import InvalidParams
from penstock.protocol.tenant import EVERY_TENANT
from penstock.protocol.views import view_of

_NAMES = Limits.__slots__
_OF_TENANT = ("max_in_flight", "rate", "burst")


async def set_limits(session: Session, action: str, change: Mapping[str, Any]) -> Action:
    """Change the given limits of an action, inside a transaction; returns all of them."""
    await lock_rules(session)
    before = await read_action(session, action)
    limits = {name: change.get(name, getattr(before, name)) for name in _NAMES}
    if limits == asdict(Limits()):
        await session.fetch("forget_action", action)
    else:
        await session.fetch("set_action", action, *limits.values())
        await session.fetch("adopt_in_flight", action)
    await session.fetch("open_gates", action)
    return await read_action(session, action)


async def read_action(session: Session, action: str) -> Action:
    """The limits of an action, which may be unlimited."""
    rows = await session.fetch("read_actions", [action])
    return view_of(Action, rows[0]) if rows else Action(action, **asdict(Limits()), in_flight=0, updated_at=None)


async def list_actions(session: Session) -> list[Action]:
    return [view_of(Action, row) for row in await session.fetch("read_actions", None)]


async def set_route(session: Session, route: RouteSetParams) -> None:
    """Create or replace a route, inside a transaction; tasks that wait for it still take it."""
    await lock_rules(session)
    patterns = [like_pattern(pattern) for pattern in route.actions]
    await session.fetch("set_route", route.name, route.queue, patterns, json.dumps(route.labels), route.position)


async def delete_route(session: Session, name: str) -> bool:
    """Delete a route, inside a transaction; its waiting tasks take the others. False: unknown."""
    await lock_rules(session)
    return await session.value("delete_route", name) is not None


async def list_routes(session: Session) -> list[Route]:
    """Every route, in the order in which they are tried."""
    return [
        view_of(Route, row, actions=[_glob(pattern) for pattern in row["actions"]], labels=json.loads(row["labels"]))
        for row in await session.fetch("read_routes")
    ]


async def set_tenant(session: Session, tenant: str, change: Mapping[str, Any]) -> TenantDetail:
    """Change the given limits of a tenant, or of ``*``, or pause or resume it, inside a transaction."""
    await lock_rules(session)
    before = await read_tenant_limits(session, tenant)
    # A tenant under the default has no limits of its own, and a pause gives it none.
    limits = [change.get(name, getattr(before, name) if before.own else None) for name in _OF_TENANT]
    paused = change.get("paused", before.paused)
    own = before.own or "paused" not in change
    if own or paused:
        await session.fetch("set_tenant", tenant, paused, own, *limits)
    else:
        await session.fetch("forget_tenant", tenant)
    return await _open_tenant(session, tenant)


async def delete_tenant(session: Session, tenant: str) -> TenantDetail:
    """Remove a tenant's own limits and its pause, inside a transaction. Raises InvalidParams if it has none."""
    await lock_rules(session)
    if await session.value("forget_tenant", tenant) is None:
        raise InvalidParams("tenant", f"has no rule of its own: {tenant!r}")
    return await _open_tenant(session, tenant)


async def _open_tenant(session: Session, tenant: str) -> TenantDetail:
    every = None if tenant == EVERY_TENANT else tenant
    await session.fetch("adopt_in_flight_of_tenants", every)
    await session.fetch("open_gates_of_tenant", every)
    return await read_tenant_limits(session, tenant)


async def read_tenant_limits(session: Session, tenant: str) -> TenantDetail:
    """The limits in effect for a tenant, its own or the default."""
    (row,) = await session.fetch("read_tenant", tenant)
    return view_of(TenantDetail, row)


async def lock_rules(session: Session) -> None:
    """Lock limits and routes against other changes and against claims, inside a transaction."""
    await session.fetch("limit_lock_wait")
    await session.fetch("lock_rules")


def _glob(pattern: str) -> str:
    return pattern.replace("%", "*").replace("\\*", "%").replace("\\_", "_").replace("\\\\", "\\")
