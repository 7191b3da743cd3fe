"""The methods about limits and pauses of actions and tenants, and about routes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from penstock.db.context import Context
from penstock.db.session import Session
from penstock.limits import model, store
from penstock.protocol.api_key import Permission
from penstock.protocol.caller import own_tenant
from penstock.protocol.checks import read_action, read_limit
from penstock.protocol.errors import InvalidParams, RouteNotFound
from penstock.protocol.method import NoParams, Scope, method
from penstock.protocol.tenant import EVERY_TENANT, read_tenant

Shown = TypeVar("Shown")
NewLimits = tuple[str, dict[str, Any]]
"""The name of an action or tenant, and its changed limits as of ``token_bucket.Limits``; rates per second."""

# Actions


async def _change(
    context: Context,
    name: str,
    show: Callable[[Session, str], Awaitable[Shown]],
    change: Callable[..., Awaitable[None]],
    *given: Any,
) -> Shown:
    """Change what an action or tenant is held to, in a transaction, and show what it is held to now."""
    async with context.transaction() as session:
        await change(session, name, *given)
    context.wake()
    async with context.session() as session:
        return await show(session, name)


def _read_set_action(given: model.ActionSetParams) -> NewLimits:
    return read_action(given.action), model.read_change(given)


@method("action.set", permission=Permission.ADMIN, scope=Scope.CLOSED, read=_read_set_action, by_queue=True)
async def set_action(context: Context, command: NewLimits) -> model.Action:
    """Limit an action; an omitted member stays unchanged, null removes a limit."""
    action, change = command
    return await _change(context, action, store.read_action, store.set_limits, change)


def _read_action(given: model.ActionName) -> str:
    return read_action(given.action)


@method("action.get", permission=Permission.READ, scope=Scope.CLOSED, read=_read_action)
async def get_action(context: Context, action: str) -> model.Action:
    """Show what limits an action has."""
    async with context.session() as session:
        return await store.read_action(session, action)


@method("action.list", permission=Permission.READ, scope=Scope.CLOSED)
async def list_actions(context: Context, _given: NoParams) -> model.Actions:
    """List the actions that are limited or paused."""
    async with context.session() as session:
        return model.Actions(await store.list_actions(session))


@method("action.pause", permission=Permission.ADMIN, scope=Scope.CLOSED, read=_read_action, by_queue=True)
async def pause_action(context: Context, action: str) -> model.Action:
    """Send no more tasks of an action, and go on taking them."""
    return await _change(context, action, store.read_action, store.set_limits, {"paused": True})


@method("action.resume", permission=Permission.ADMIN, scope=Scope.CLOSED, read=_read_action, by_queue=True)
async def resume_action(context: Context, action: str) -> model.Action:
    """Send them again."""
    return await _change(context, action, store.read_action, store.set_limits, {"paused": False})


# Routes


@method("route.set", permission=Permission.ADMIN, scope=Scope.CLOSED, read=model.check_route, by_queue=True)
async def set_route(context: Context, route: model.RouteSetParams) -> model.RouteChanged:
    """Make or replace a route: which tasks go to a queue of their own."""
    async with context.transaction() as session:
        await store.set_route(session, route)
    context.wake()
    return model.RouteChanged(route.name, deleted=False)


@method("route.list", permission=Permission.READ, scope=Scope.CLOSED)
async def list_routes(context: Context, _given: NoParams) -> model.Routes:
    """List routes in the order in which they are tried."""
    async with context.session() as session:
        return model.Routes(await store.list_routes(session))


def _read_route(given: model.RouteName) -> str:
    return model.read_route_name(given.name)


@method(
    "route.delete", permission=Permission.ADMIN, scope=Scope.CLOSED, errors=(RouteNotFound,), read=_read_route,
    by_queue=True,
)  # fmt: skip
async def delete_route(context: Context, name: str) -> model.RouteChanged:
    """Delete a route; its waiting tasks take the other routes."""
    async with context.transaction() as session:
        if not await store.delete_route(session, name):
            raise RouteNotFound(name)
    context.wake()
    return model.RouteChanged(name, deleted=True)


# Tenants


def _tenant_or_all(tenant: str, name: str = "tenant") -> str:
    return tenant if tenant == EVERY_TENANT else (read_tenant(tenant, name) or "")


def _read_set_tenant(given: model.TenantSetParams) -> NewLimits:
    return _tenant_or_all(given.tenant), model.read_change(given)


@method("tenant.set", permission=Permission.ADMIN, scope=Scope.CLOSED, read=_read_set_tenant, by_queue=True)
async def set_tenant(context: Context, command: NewLimits) -> model.TenantDetail:
    """Give a tenant limits of its own, or * all that have none; a member left out stays, null takes a limit away."""
    tenant, change = command
    return await _change(context, tenant, store.read_tenant_limits, store.set_tenant, change)


def _read_tenant_or_all(given: model.TenantOrAll) -> str:
    return _tenant_or_all(given.tenant)


@method("tenant.get", permission=Permission.READ, scope=Scope.OWN, read=_read_tenant_or_all, narrow=own_tenant)
async def get_tenant(context: Context, tenant: str) -> model.TenantDetail:
    """Show what a tenant is held to, and how many of its tasks are held."""
    async with context.session() as session:
        return await store.read_tenant_limits(session, tenant)


def _check_list_tenants(given: model.TenantListParams) -> model.TenantListParams:
    read_limit(given.limit)
    if given.cursor is not None:
        _tenant_or_all(given.cursor, "cursor")
    return given


@method("tenant.list", permission=Permission.READ, scope=Scope.CLOSED, read=_check_list_tenants)
async def list_tenants(context: Context, given: model.TenantListParams) -> model.TenantPage:
    """List the tenants that have a rule of their own, the default * first."""
    async with context.session() as session:
        found = await store.list_tenants(session, given)
    return model.TenantPage(found, found[-1].tenant if len(found) == given.limit else None)


@method("tenant.delete", permission=Permission.ADMIN, scope=Scope.CLOSED, read=_read_tenant_or_all, by_queue=True)
async def delete_tenant(context: Context, tenant: str) -> model.TenantDetail:
    """Have a tenant go by the default again, its pause being over."""
    return await _change(context, tenant, store.read_tenant_limits, store.delete_tenant)


def _read_tenant(given: model.TenantName) -> str:
    if given.tenant == EVERY_TENANT:
        raise InvalidParams("tenant", "must be one tenant's name: to send nothing at all, pause actions")
    return read_tenant(given.tenant) or ""


@method("tenant.pause", permission=Permission.ADMIN, scope=Scope.CLOSED, read=_read_tenant, by_queue=True)
async def pause_tenant(context: Context, tenant: str) -> model.TenantDetail:
    """Take tasks of a tenant, but send none to workers."""
    return await _change(context, tenant, store.read_tenant_limits, store.set_tenant, {"paused": True})


@method("tenant.resume", permission=Permission.ADMIN, scope=Scope.CLOSED, read=_read_tenant, by_queue=True)
async def resume_tenant(context: Context, tenant: str) -> model.TenantDetail:
    """Send tasks of a tenant again."""
    return await _change(context, tenant, store.read_tenant_limits, store.set_tenant, {"paused": False})
