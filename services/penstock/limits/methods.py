"""The methods about limits and pauses of actions and tenants, about routes, and why a task does not run."""

from functools import partial

from penstock.db.session import Session
from penstock.limits import announced, model, store
from penstock.limits.explain import Explanation, explain
from penstock.protocol.api_key import Permission
from penstock.protocol.caller import narrow_tenant
from penstock.protocol.errors import RouteNotFound, TaskNotFound
from penstock.protocol.method import NoParams, Scope, method
from penstock.protocol.views import view_of

_look = partial(method, permission=Permission.READ, scope=Scope.CLOSED)
_change = partial(method, permission=Permission.ADMIN, scope=Scope.CLOSED, by_queue=True, wakes=True)

# Actions


@_change("action.set")
async def set_action(session: Session, given: model.ActionSetParams) -> model.Action:
    """Limit an action; an omitted member stays unchanged, null removes a limit."""
    return await store.set_limits(session, given.action, model.limits_of(given))


@_look("action.get")
async def get_action(session: Session, given: model.ActionName) -> model.Action:
    """Show what limits an action has."""
    return await store.read_action(session, given.action)


@_look("action.list")
async def list_actions(session: Session, _given: NoParams) -> model.Actions:
    """List the actions that are limited or paused."""
    return model.Actions(await store.list_actions(session))


@_look("action.announced")
async def list_announced(session: Session, _given: NoParams) -> model.AnnouncedActions:
    """List the actions that workers run, by how many and with which parameters, and those that tasks wait for."""
    return model.AnnouncedActions(await announced.list_announced(session))


@_change("action.pause")
async def pause_action(session: Session, given: model.ActionName) -> model.Action:
    """Send no more tasks of an action, and go on taking them."""
    return await store.set_limits(session, given.action, {"paused": True})


@_change("action.resume")
async def resume_action(session: Session, given: model.ActionName) -> model.Action:
    """Send them again."""
    return await store.set_limits(session, given.action, {"paused": False})


# Routes


@_change("route.set")
async def set_route(session: Session, route: model.RouteSetParams) -> model.RouteChanged:
    """Make or replace a route: which tasks go to a queue of their own."""
    await store.set_route(session, route)
    return model.RouteChanged(route.name, deleted=False)


@_look("route.list")
async def list_routes(session: Session, _given: NoParams) -> model.Routes:
    """List routes in the order in which they are tried."""
    return model.Routes(await store.list_routes(session))


@_change("route.delete", errors=(RouteNotFound,))
async def delete_route(session: Session, route: model.RouteName) -> model.RouteChanged:
    """Delete a route; its waiting tasks take the other routes."""
    if not await store.delete_route(session, route.name):
        raise RouteNotFound(route.name)
    return model.RouteChanged(route.name, deleted=True)


# Tenants


@_change("tenant.set")
async def set_tenant(session: Session, given: model.TenantSetParams) -> model.TenantDetail:
    """Give a tenant limits of its own, or * all that have none; a member left out stays, null takes a limit away."""
    return await store.set_tenant(session, given.tenant, model.limits_of(given))


@method("tenant.get", permission=Permission.READ, scope=Scope.OWN, narrow=narrow_tenant)
async def get_tenant(session: Session, given: model.TenantOrAll) -> model.TenantDetail:
    """Show what a tenant is held to, and how many of its tasks are held."""
    return await store.read_tenant_limits(session, given.tenant)


@_look("tenant.list")
async def list_tenants(session: Session, given: model.TenantListParams) -> model.TenantPage:
    """List the tenants that have a rule of their own, the default * first."""
    found = [view_of(model.Tenant, row) for row in await session.fetch("list_tenants", given.cursor, given.limit)]
    return model.TenantPage(found, found[-1].tenant if len(found) == given.limit else None)


@_change("tenant.delete")
async def delete_tenant(session: Session, given: model.TenantOrAll) -> model.TenantDetail:
    """Have a tenant go by the default again, its pause being over."""
    return await store.delete_tenant(session, given.tenant)


@_change("tenant.pause")
async def pause_tenant(session: Session, given: model.TenantName) -> model.TenantDetail:
    """Take tasks of a tenant, but send none to workers."""
    return await store.set_tenant(session, given.tenant, {"paused": True})


@_change("tenant.resume")
async def resume_tenant(session: Session, given: model.TenantName) -> model.TenantDetail:
    """Send tasks of a tenant again."""
    return await store.set_tenant(session, given.tenant, {"paused": False})


# Tasks


@method("task.explain", permission=Permission.READ, scope=Scope.OWN, errors=(TaskNotFound,))
async def explain_task(session: Session, given: model.TaskExplainParams) -> Explanation:
    """Say in one sentence why a task does not run, or where it is."""
    return await explain(session, int(given.id))
