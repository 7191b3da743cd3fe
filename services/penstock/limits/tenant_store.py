"""Limits and pauses of tenants in Postgres: set, read, taken back. As :mod:`penstock.limits.store` does for actions."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from penstock.db.session import Session
from penstock.limits.store import lock_rules
from penstock.limits.tenant_model import DeleteTenant, ListTenants, PauseTenant, SetTenant, TenantChange
from penstock.limits.token_bucket import Limits
from penstock.protocol.errors import InvalidParams
from penstock.protocol.tenant import EVERY_TENANT


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


async def change_tenant(session: Session, command: TenantChange) -> None:
    """Carry out a change, inside a transaction. Raises InvalidParams: there is no rule to delete."""
    await lock_rules(session)
    before = await read_tenant_record(session, command.tenant)
    match command:
        case SetTenant(tenant, change):
            # What a tenant was held to by the default is not its own: it begins with no limits.
            of_its_own = before.limits if before.own else Limits()
            limits = {name: change.get(name, getattr(of_its_own, name)) for name in ("max_in_flight", "rate", "burst")}
            await session.fetch("set_tenant", tenant, before.limits.paused, True, *limits.values())
        case PauseTenant(tenant, paused):
            if not paused and not before.own:
                await session.fetch("forget_tenant", tenant)
            else:
                limits = {name: getattr(before.limits, name) for name in ("max_in_flight", "rate", "burst")}
                own = limits if before.own else dict.fromkeys(limits)
                await session.fetch("set_tenant", tenant, paused, before.own, *own.values())
        case DeleteTenant(tenant):
            if await session.value("forget_tenant", tenant) is None:
                raise InvalidParams("tenant", f"has no rule of its own: {tenant!r}")
    every = None if command.tenant == EVERY_TENANT else command.tenant
    await session.fetch("adopt_in_flight_of_tenants", every)
    await session.fetch("open_gates_of_tenant", every)


async def read_tenant_record(session: Session, tenant: str) -> TenantRecord:
    """What holds for a tenant, be it by a rule of its own or by the default."""
    return _record((await session.fetch("read_tenant", tenant))[0])


async def list_tenants(session: Session, command: ListTenants) -> list[TenantRecord]:
    """Every tenant that has a rule of its own, by name, the default first; without counts."""
    return [_record(row) for row in await session.fetch("list_tenants", command.after, command.limit)]


def _record(row: Any) -> TenantRecord:
    limits = Limits(paused=row["paused"], max_in_flight=row["max_in_flight"], rate=row["rate"], burst=row["burst"])
    return TenantRecord(row["name"], limits, row["own"], row["in_flight"], row["waiting"], row["updated_at"])
