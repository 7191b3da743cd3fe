"""Limits of actions and tenants, and routes, in Postgres: set, read, taken back.

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
from penstock.limits.model import ListTenants, Route
from penstock.limits.token_bucket import Limits
from penstock.protocol.checks import like_pattern
from penstock.protocol.errors import InvalidParams
from penstock.protocol.tenant import EVERY_TENANT


@dataclass(frozen=True, slots=True)
class ActionRecord:
    """An action and its limits. in_flight: its tasks that are claimed and unsettled, since it was limited."""

    name: str
    limits: Limits
    in_flight: int
    updated_at: datetime | None


@dataclass(frozen=True, slots=True)
class TenantRecord:
    """A tenant and what holds for it. own: its limits are its own, not those of ``*``. in_flight, waiting: of its tasks
    that came to a gate, counted up to 100000."""

    name: str
    limits: Limits
    own: bool
    in_flight: int
    waiting: int
    updated_at: datetime | None


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


async def set_tenant(session: Session, tenant: str, change: Mapping[str, Any]) -> None:
    """Give a tenant, or ``*``, limits of its own, inside a transaction; what ``change`` does not name stays."""
    before = await _hold_tenant(session, tenant)
    # What a tenant was held to by the default is not its own: it begins with no limits.
    limits = {**_limits_of(before), **change}
    await session.fetch("set_tenant", tenant, before.limits.paused, True, *limits.values())
    await _open_tenant(session, tenant)


async def pause_tenant(session: Session, tenant: str, *, paused: bool) -> None:
    """Pause or resume a tenant, inside a transaction."""
    before = await _hold_tenant(session, tenant)
    if not paused and not before.own:
        await session.fetch("forget_tenant", tenant)
    else:
        await session.fetch("set_tenant", tenant, paused, before.own, *_limits_of(before).values())
    await _open_tenant(session, tenant)


async def delete_tenant(session: Session, tenant: str) -> None:
    """Remove a tenant's own limits and its pause, inside a transaction. Raises InvalidParams where it has none."""
    await lock_rules(session)
    if await session.value("forget_tenant", tenant) is None:
        raise InvalidParams("tenant", f"has no rule of its own: {tenant!r}")
    await _open_tenant(session, tenant)


async def _hold_tenant(session: Session, tenant: str) -> TenantRecord:
    await lock_rules(session)
    return await read_tenant_record(session, tenant)


def _limits_of(tenant: TenantRecord) -> dict[str, Any]:
    """The limits that are the tenant's own."""
    own = tenant.limits if tenant.own else Limits()
    return {name: getattr(own, name) for name in ("max_in_flight", "rate", "burst")}


async def _open_tenant(session: Session, tenant: str) -> None:
    every = None if tenant == EVERY_TENANT else tenant
    await session.fetch("adopt_in_flight_of_tenants", every)
    await session.fetch("open_gates_of_tenant", every)


async def read_tenant_record(session: Session, tenant: str) -> TenantRecord:
    """What holds for a tenant, be it by a rule of its own or by the default."""
    return _tenant((await session.fetch("read_tenant", tenant))[0])


async def list_tenants(session: Session, command: ListTenants) -> list[TenantRecord]:
    """Every tenant that has a rule of its own, by name, the default first; without counts."""
    return [_tenant(row) for row in await session.fetch("list_tenants", command.after, command.limit)]


async def lock_rules(session: Session) -> None:
    """Be the only one who changes rules, and let no task through a gate meanwhile, inside a transaction."""
    await session.fetch("limit_lock_wait")
    await session.fetch("lock_rules")


def _record(row: Any) -> ActionRecord:
    limits = Limits(**{name: row[name] for name in Limits.__dataclass_fields__})
    return ActionRecord(row["name"], limits, row["in_flight"], row["updated_at"])


def _tenant(row: Any) -> TenantRecord:
    limits = Limits(paused=row["paused"], max_in_flight=row["max_in_flight"], rate=row["rate"], burst=row["burst"])
    return TenantRecord(row["name"], limits, row["own"], row["in_flight"], row["waiting"], row["updated_at"])


def _glob(pattern: str) -> str:
    return pattern.replace("%", "*").replace("\\*", "%").replace("\\_", "_").replace("\\\\", "\\")
