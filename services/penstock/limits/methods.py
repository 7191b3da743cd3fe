"""The methods about limits and pauses of actions and tenants, about routes, and why a task does not run."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from penstock.db.context import Context
from penstock.db.session import Session
from penstock.limits import announced, model, store
from penstock.limits.explain import Explanation, explain
from penstock.protocol.api_key import Permission
from penstock.protocol.caller import narrow_tenant
from penstock.protocol.errors import RouteNotFound, TaskNotFound
from penstock.protocol.method import NoParams, Scope, method

Shown = TypeVar("Shown")

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


@method("action.set", permission=Permission.ADMIN, scope=Scope.CLOSED, by_queue=True)
async def set_action(context: Context, given: model.ActionSetParams) -> model.Action:
    """Limit an action; an omitted member stays unchanged, null removes a limit."""
    return await _change(context, given.action, store.read_action, store.set_limits, model.limits_of(given))


@method("action.get", permission=Permission.READ, scope=Scope.CLOSED)
async def get_action(context: Context, given: model.ActionName) -> model.Action:
    """Show what limits an action has."""
    async with context.session() as session:
        return await store.read_action(session, given.action)


@method("action.list", permission=Permission.READ, scope=Scope.CLOSED)
async def list_actions(context: Context, _given: NoParams) -> model.Actions:
    """List the actions that are limited or paused."""
    async with context.session() as session:
        return model.Actions(await store.list_actions(session))


@method("action.announced", permission=Permission.READ, scope=Scope.CLOSED)
async def list_announced(context: Context, _given: NoParams) -> model.AnnouncedActions:
    """List the actions that workers run, by how many and with which parameters, and those that tasks wait for."""
    async with context.session() as session:
        return model.AnnouncedActions(await announced.list_announced(session))


@method("action.pause", permission=Permission.ADMIN, scope=Scope.CLOSED, by_queue=True)
async def pause_action(context: Context, given: model.ActionName) -> model.Action:
    """Send no more tasks of an action, and go on taking them."""
    return await _change(context, given.action, store.read_action, store.set_limits, {"paused": True})


@method("action.resume", permission=Permission.ADMIN, scope=Scope.CLOSED, by_queue=True)
async def resume_action(context: Context, given: model.ActionName) -> model.Action:
    """Send them again."""
    return await _change(context, given.action, store.read_action, store.set_limits, {"paused": False})


# Routes


@method("route.set", permission=Permission.ADMIN, scope=Scope.CLOSED, by_queue=True)
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


@method("route.delete", permission=Permission.ADMIN, scope=Scope.CLOSED, errors=(RouteNotFound,), by_queue=True)
async def delete_route(context: Context, route: model.RouteName) -> model.RouteChanged:
    """Delete a route; its waiting tasks take the other routes."""
    async with context.transaction() as session:
        if not await store.delete_route(session, route.name):
            raise RouteNotFound(route.name)
    context.wake()
    return model.RouteChanged(route.name, deleted=True)


# Tenants


@method("tenant.set", permission=Permission.ADMIN, scope=Scope.CLOSED, by_queue=True)
async def set_tenant(context: Context, given: model.TenantSetParams) -> model.TenantDetail:
    """Give a tenant limits of its own, or * all that have none; a member left out stays, null takes a limit away."""
    return await _change(context, given.tenant, store.read_tenant_limits, store.set_tenant, model.limits_of(given))


@method("tenant.get", permission=Permission.READ, scope=Scope.OWN, narrow=narrow_tenant)
async def get_tenant(context: Context, given: model.TenantOrAll) -> model.TenantDetail:
    """Show what a tenant is held to, and how many of its tasks are held."""
    async with context.session() as session:
        return await store.read_tenant_limits(session, given.tenant)


@method("tenant.list", permission=Permission.READ, scope=Scope.CLOSED)
async def list_tenants(context: Context, given: model.TenantListParams) -> model.TenantPage:
    """List the tenants that have a rule of their own, the default * first."""
    async with context.session() as session:
        found = await store.list_tenants(session, given)
    return model.TenantPage(found, found[-1].tenant if len(found) == given.limit else None)


@method("tenant.delete", permission=Permission.ADMIN, scope=Scope.CLOSED, by_queue=True)
async def delete_tenant(context: Context, given: model.TenantOrAll) -> model.TenantDetail:
    """Have a tenant go by the default again, its pause being over."""
    return await _change(context, given.tenant, store.read_tenant_limits, store.delete_tenant)


@method("tenant.pause", permission=Permission.ADMIN, scope=Scope.CLOSED, by_queue=True)
async def pause_tenant(context: Context, given: model.TenantName) -> model.TenantDetail:
    """Take tasks of a tenant, but send none to workers."""
    return await _change(context, given.tenant, store.read_tenant_limits, store.set_tenant, {"paused": True})


@method("tenant.resume", permission=Permission.ADMIN, scope=Scope.CLOSED, by_queue=True)
async def resume_tenant(context: Context, given: model.TenantName) -> model.TenantDetail:
    """Send tasks of a tenant again."""
    return await _change(context, given.tenant, store.read_tenant_limits, store.set_tenant, {"paused": False})


# Tasks


@method("task.explain", permission=Permission.READ, scope=Scope.OWN, errors=(TaskNotFound,))
async def explain_task(context: Context, given: model.TaskExplainParams) -> Explanation:
    """Say in one sentence why a task does not run, or where it is."""
    async with context.session() as session:
        return await explain(session, int(given.id))
