"""The methods about limits and pauses of actions and tenants, and about routes."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from penstock.db.context import Context
from penstock.limits import store, views
from penstock.limits.model import (
    ActionName,
    ActionSetParams,
    ListTenants,
    Route,
    RouteName,
    RouteSetParams,
    SetLimits,
    TenantListParams,
    TenantName,
    TenantOrAll,
    TenantSetParams,
    read_change,
    read_route,
    read_route_name,
)
from penstock.protocol.api_key import Permission
from penstock.protocol.caller import own_tenant
from penstock.protocol.checks import read_action, read_limit
from penstock.protocol.errors import InvalidParams, RouteNotFound
from penstock.protocol.method import NoParams, Scope, method
from penstock.protocol.tenant import EVERY_TENANT, read_tenant
from penstock.protocol.views import timestamp
from penstock.settings.model import Settings

# Actions


def _read_set_action(given: ActionSetParams, _settings: Settings) -> SetLimits:
    return SetLimits(read_action(given.action), read_change(given))


@method("action.set", permission=Permission.ADMIN, scope=Scope.CLOSED, read=_read_set_action, by_queue=True)
async def set_action(context: Context, command: SetLimits) -> views.Action:
    """Limit an action; a member left out stays as it is, null takes a limit away."""
    return await _set_action(context, command.name, command.change)


async def _set_action(context: Context, action: str, change: Any) -> views.Action:
    async with context.transaction() as session:
        await store.set_limits(session, action, change)
    context.wake()
    return await _show_action(context, action)


async def _show_action(context: Context, action: str) -> views.Action:
    async with context.session() as session:
        return _action(await store.read_action(session, action))


def _action(record: store.ActionRecord) -> views.Action:
    updated = None if record.updated_at is None else timestamp(record.updated_at)
    return views.Action(record.name, **asdict(record.limits), in_flight=record.in_flight, updated_at=updated)


def _read_action(given: ActionName, _settings: Settings) -> str:
    return read_action(given.action)


@method("action.get", permission=Permission.READ, scope=Scope.CLOSED, read=_read_action)
async def get_action(context: Context, action: str) -> views.Action:
    """Show what limits an action has."""
    return await _show_action(context, action)


@method("action.list", permission=Permission.READ, scope=Scope.CLOSED)
async def list_actions(context: Context, _given: NoParams) -> views.Actions:
    """List the actions that are limited or paused."""
    async with context.session() as session:
        return views.Actions([_action(record) for record in await store.list_actions(session)])


@method("action.pause", permission=Permission.ADMIN, scope=Scope.CLOSED, read=_read_action, by_queue=True)
async def pause_action(context: Context, action: str) -> views.Action:
    """Send no more tasks of an action, and go on taking them."""
    return await _set_action(context, action, {"paused": True})


@method("action.resume", permission=Permission.ADMIN, scope=Scope.CLOSED, read=_read_action, by_queue=True)
async def resume_action(context: Context, action: str) -> views.Action:
    """Send them again."""
    return await _set_action(context, action, {"paused": False})


# Routes


def _read_set_route(given: RouteSetParams, _settings: Settings) -> Route:
    return read_route(given)


@method("route.set", permission=Permission.ADMIN, scope=Scope.CLOSED, read=_read_set_route, by_queue=True)
async def set_route(context: Context, route: Route) -> views.RouteChanged:
    """Make or replace a route: which tasks go to a queue of their own."""
    async with context.transaction() as session:
        await store.set_route(session, route)
    context.wake()
    return views.RouteChanged(route.name, deleted=False)


@method("route.list", permission=Permission.READ, scope=Scope.CLOSED)
async def list_routes(context: Context, _given: NoParams) -> views.Routes:
    """List routes in the order in which they are tried."""
    async with context.session() as session:
        found = await store.list_routes(session)
    return views.Routes(
        [
            views.Route(route.name, route.queue, list(route.actions), dict(route.labels), route.position, count)
            for route, count in found
        ]
    )


def _read_route(given: RouteName, _settings: Settings) -> str:
    return read_route_name(given.name)


@method(
    "route.delete", permission=Permission.ADMIN, scope=Scope.CLOSED, errors=(RouteNotFound,), read=_read_route,
    by_queue=True,
)  # fmt: skip
async def delete_route(context: Context, name: str) -> views.RouteChanged:
    """Delete a route; what waits for it goes by the others."""
    async with context.transaction() as session:
        if not await store.delete_route(session, name):
            raise RouteNotFound(name)
    context.wake()
    return views.RouteChanged(name, deleted=True)


# Tenants


def _tenant_or_all(tenant: str, name: str = "tenant") -> str:
    return tenant if tenant == EVERY_TENANT else (read_tenant(tenant, name) or "")


def _read_set_tenant(given: TenantSetParams, _settings: Settings) -> SetLimits:
    return SetLimits(_tenant_or_all(given.tenant), read_change(given))


@method("tenant.set", permission=Permission.ADMIN, scope=Scope.CLOSED, read=_read_set_tenant, by_queue=True)
async def set_tenant(context: Context, command: SetLimits) -> views.TenantDetail:
    """Give a tenant limits of its own, or * all that have none; a member left out stays, null takes a limit away."""
    async with context.transaction() as session:
        await store.set_tenant(session, command.name, command.change)
    return await _changed_tenant(context, command.name)


async def _changed_tenant(context: Context, tenant: str) -> views.TenantDetail:
    context.wake()
    return await _show_tenant(context, tenant)


async def _show_tenant(context: Context, tenant: str) -> views.TenantDetail:
    """What holds for a tenant now, by a rule of its own or by the default."""
    async with context.session() as session:
        record = await store.read_tenant_record(session, tenant)
    return views.TenantDetail(**_members(record), in_flight=record.in_flight, waiting=record.waiting)


def _members(record: store.TenantRecord) -> dict[str, Any]:
    limits = record.limits
    return {
        "tenant": record.name, "paused": limits.paused, "own": record.own, "max_in_flight": limits.max_in_flight,
        "rate": limits.rate, "burst": limits.burst,
        "updated_at": None if record.updated_at is None else timestamp(record.updated_at),
    }  # fmt: skip


def _read_tenant_or_all(given: TenantOrAll, _settings: Settings) -> str:
    return _tenant_or_all(given.tenant)


@method("tenant.get", permission=Permission.READ, scope=Scope.OWN, read=_read_tenant_or_all, narrow=own_tenant)
async def get_tenant(context: Context, tenant: str) -> views.TenantDetail:
    """Show what a tenant is held to, and how many of its tasks are held."""
    return await _show_tenant(context, tenant)


def _read_list_tenants(given: TenantListParams, _settings: Settings) -> ListTenants:
    limit = read_limit(given.limit)
    return ListTenants(limit, None if given.cursor is None else _tenant_or_all(given.cursor, "cursor"))


@method("tenant.list", permission=Permission.READ, scope=Scope.CLOSED, read=_read_list_tenants)
async def list_tenants(context: Context, command: ListTenants) -> views.TenantPage:
    """List the tenants that have a rule of their own, the default * first."""
    async with context.session() as session:
        records = await store.list_tenants(session, command)
    cursor = records[-1].name if len(records) == command.limit else None
    return views.TenantPage([views.Tenant(**_members(record)) for record in records], cursor)


@method("tenant.delete", permission=Permission.ADMIN, scope=Scope.CLOSED, read=_read_tenant_or_all, by_queue=True)
async def delete_tenant(context: Context, tenant: str) -> views.TenantDetail:
    """Have a tenant go by the default again, its pause being over."""
    async with context.transaction() as session:
        await store.delete_tenant(session, tenant)
    return await _changed_tenant(context, tenant)


def _read_tenant(given: TenantName, _settings: Settings) -> str:
    if given.tenant == EVERY_TENANT:
        raise InvalidParams("tenant", "must be one tenant's name: to send nothing at all, pause actions")
    return read_tenant(given.tenant) or ""


@method("tenant.pause", permission=Permission.ADMIN, scope=Scope.CLOSED, read=_read_tenant, by_queue=True)
async def pause_tenant(context: Context, tenant: str) -> views.TenantDetail:
    """Take tasks of a tenant, but send none to workers."""
    return await _pause_tenant(context, tenant, paused=True)


@method("tenant.resume", permission=Permission.ADMIN, scope=Scope.CLOSED, read=_read_tenant, by_queue=True)
async def resume_tenant(context: Context, tenant: str) -> views.TenantDetail:
    """Send tasks of a tenant again."""
    return await _pause_tenant(context, tenant, paused=False)


async def _pause_tenant(context: Context, tenant: str, *, paused: bool) -> views.TenantDetail:
    async with context.transaction() as session:
        await store.pause_tenant(session, tenant, paused=paused)
    return await _changed_tenant(context, tenant)
