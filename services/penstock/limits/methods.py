"""The methods about limits and pauses of actions and tenants, about routes, and why a task does not run.

A change locks limits and routes, so no task passes a limit or a pause after its commit. Tasks that are in flight by
then, or in a claim that began before, count and are not recalled.
"""

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from penstock.db.session import Session
from penstock.limits import model, reported
from penstock.limits.explain import explain
from penstock.protocol import answers
from penstock.protocol.answers import Explanation
from penstock.protocol.api_key import Permission, narrow_tenant
from penstock.protocol.checks import like_pattern
from penstock.protocol.errors import InvalidParams, RouteNotFound, TaskNotFound
from penstock.protocol.method import NoParams, Scope, method
from penstock.protocol.record import view_of
from penstock.protocol.tenant import EVERY_TENANT

_OF_TENANT = ("max_in_flight", "rate", "burst")
_look = partial(method, permission=Permission.READ, scope=Scope.CLOSED)
_change = partial(method, permission=Permission.ADMIN, scope=Scope.CLOSED, by_queue=True, wakes=True)


async def lock_rules(session: Session) -> None:
    """Lock limits and routes against other changes and against claims, inside a transaction."""
    await session.fetch("limit_lock_wait")
    await session.fetch("lock_rules")


# Actions


async def set_limits(session: Session, action: str, change: Mapping[str, Any]) -> answers.Action:
    """Change the given limits of an action, inside a transaction; returns all of them."""
    await lock_rules(session)
    before = await read_action(session, action)
    limits = {name: change.get(name, getattr(before, name)) for name in model.UNLIMITED}
    if limits == model.UNLIMITED:
        await session.fetch("forget_action", action)
    else:
        await session.fetch("set_action", action, *limits.values())
        await session.fetch("adopt_in_flight", action)
    await session.fetch("open_gates", action)
    return await read_action(session, action)


async def read_action(session: Session, action: str) -> answers.Action:
    """The limits of an action, which may be unlimited."""
    (row,) = await session.fetch("read_actions", action)
    return view_of(answers.Action, row)


@_change("action.set")
async def set_action(session: Session, given: model.ActionSetParams) -> answers.Action:
    """Limit an action. Limits that are not named stay unchanged."""
    return await set_limits(session, given.action, model.limits_of(given))


@_look("action.get")
async def get_action(session: Session, given: model.ActionName) -> answers.Action:
    """Show the limits of an action."""
    return await read_action(session, given.action)


@_look("action.list")
async def list_actions(session: Session, _given: NoParams) -> answers.Actions:
    """List the actions that are limited or paused."""
    return answers.Actions(actions=[view_of(answers.Action, row) for row in await session.fetch("read_actions", None)])


@_look("action.announced")
async def list_announced(session: Session, _given: NoParams) -> answers.AnnouncedActions:
    """List the actions that workers run, how many of them, their parameters, and the tasks that wait for one."""
    return answers.AnnouncedActions(actions=await reported.list_announced(session))


@_change("action.pause")
async def pause_action(session: Session, given: model.ActionName) -> answers.Action:
    """Stop sending tasks of an action. New tasks are accepted and wait; tasks in flight go on."""
    return await set_limits(session, given.action, {"paused": True})


@_change("action.resume")
async def resume_action(session: Session, given: model.ActionName) -> answers.Action:
    """Send tasks of an action again."""
    return await set_limits(session, given.action, {"paused": False})


# Routes


@_change("route.set")
async def set_route(session: Session, route: model.RouteSetParams) -> answers.RouteChanged:
    """Make or replace a route: which tasks go to a queue of their own."""
    await lock_rules(session)
    patterns = [like_pattern(pattern) for pattern in route.actions]
    await session.fetch("set_route", route.name, route.queue, patterns, json.dumps(route.labels), route.position)
    return answers.RouteChanged(name=route.name, deleted=False)


@_look("route.list")
async def list_routes(session: Session, _given: NoParams) -> answers.Routes:
    """List routes in the order in which they are tried."""
    routes = [
        view_of(answers.Route, row, actions=list(map(_glob, row["actions"])), labels=json.loads(row["labels"]))
        for row in await session.fetch("read_routes")
    ]
    return answers.Routes(routes=routes)


def _glob(pattern: str) -> str:
    return pattern.replace("%", "*").replace("\\*", "%").replace("\\_", "_").replace("\\\\", "\\")


@_change("route.delete", errors=(RouteNotFound,))
async def delete_route(session: Session, route: model.RouteName) -> answers.RouteChanged:
    """Delete a route; its waiting tasks take the other routes, or go to the outbound queue."""
    await lock_rules(session)
    if await session.value("delete_route", route.name) is None:
        raise RouteNotFound(route.name)
    return answers.RouteChanged(name=route.name, deleted=True)


# Tenants


async def set_tenant_limits(session: Session, tenant: str, change: Mapping[str, Any]) -> answers.TenantDetail:
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


async def _open_tenant(session: Session, tenant: str) -> answers.TenantDetail:
    every = None if tenant == EVERY_TENANT else tenant
    await session.fetch("adopt_in_flight_of_tenants", every)
    await session.fetch("open_gates_of_tenant", every)
    return await read_tenant_limits(session, tenant)


async def read_tenant_limits(session: Session, tenant: str) -> answers.TenantDetail:
    """The limits in effect for a tenant, its own or the default."""
    (row,) = await session.fetch("read_tenant", tenant)
    return view_of(answers.TenantDetail, row)


@_change("tenant.set")
async def set_tenant(session: Session, given: model.TenantSetParams) -> answers.TenantDetail:
    """Give a tenant limits of its own instead of the default ones. Limits that are not named stay unchanged."""
    return await set_tenant_limits(session, given.tenant, model.limits_of(given))


@method("tenant.get", permission=Permission.READ, scope=Scope.OWN, narrow=narrow_tenant)
async def get_tenant(session: Session, given: model.TenantOrAll) -> answers.TenantDetail:
    """Show the limits that apply to a tenant, its own or the default ones, and how many of its tasks are held back."""
    return await read_tenant_limits(session, given.tenant)


@_look("tenant.list")
async def list_tenants(session: Session, given: model.TenantListParams) -> answers.TenantPage:
    """List the tenants that have limits of their own or are paused, the default first."""
    found = [view_of(answers.Tenant, row) for row in await session.fetch("list_tenants", given.cursor, given.limit)]
    return answers.TenantPage(tenants=found, cursor=found[-1].tenant if len(found) == given.limit else None)


@_change("tenant.delete")
async def delete_tenant(session: Session, given: model.TenantOrAll) -> answers.TenantDetail:
    """Remove a tenant's own limits and unpause it."""
    await lock_rules(session)
    if await session.value("forget_tenant", given.tenant) is None:
        raise InvalidParams("tenant", f"has no rule of its own: {given.tenant!r}")
    return await _open_tenant(session, given.tenant)


@_change("tenant.pause")
async def pause_tenant(session: Session, given: model.TenantName) -> answers.TenantDetail:
    """Stop sending tasks of a tenant. New tasks are accepted and wait; tasks in flight go on."""
    return await set_tenant_limits(session, given.tenant, {"paused": True})


@_change("tenant.resume")
async def resume_tenant(session: Session, given: model.TenantName) -> answers.TenantDetail:
    """Send tasks of a tenant again."""
    return await set_tenant_limits(session, given.tenant, {"paused": False})


# Tasks


@method("task.explain", permission=Permission.READ, scope=Scope.OWN, errors=(TaskNotFound,))
async def explain_task(session: Session, given: model.TaskExplainParams) -> Explanation:
    """Say in one sentence why a task does not run, or where it is."""
    return await explain(session, int(given.id))
