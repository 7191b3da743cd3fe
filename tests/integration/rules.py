"""Limits and routes, changed and read by their methods in a session of the test's."""

from __future__ import annotations

from typing import Any, cast

from penstock.db.context import within
from penstock.db.session import Session
from penstock.limits import methods
from penstock.limits.methods import read_action as read_action
from penstock.limits.methods import read_tenant_limits as read_tenant_limits
from penstock.limits.methods import set_limits as set_limits
from penstock.limits.model import RouteName, RouteSetParams, TenantOrAll
from penstock.protocol.answers import Action, Route, TenantDetail
from penstock.protocol.errors import RouteNotFound
from penstock.protocol.method import Method, NoParams

set_tenant = methods.set_tenant_limits


async def _carry_out(session: Session, method: Method, given: Any) -> Any:
    return await method.carry_out(within(session, cast(Any, None)), given)


async def list_actions(session: Session) -> list[Action]:
    found: list[Action] = (await _carry_out(session, methods.list_actions, NoParams())).actions
    return found


async def list_routes(session: Session) -> list[Route]:
    found: list[Route] = (await _carry_out(session, methods.list_routes, NoParams())).routes
    return found


async def set_route(session: Session, route: RouteSetParams) -> None:
    await _carry_out(session, methods.set_route, route)


async def delete_route(session: Session, name: str) -> bool:
    """Whether there was one."""
    try:
        await _carry_out(session, methods.delete_route, RouteName(name))
    except RouteNotFound:
        return False
    return True


async def delete_tenant(session: Session, tenant: str) -> TenantDetail:
    found: TenantDetail = await _carry_out(session, methods.delete_tenant, TenantOrAll(tenant))
    return found
