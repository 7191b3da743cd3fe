"""The methods about tenants: limits and pauses, changed and shown."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from penstock.db.session import Session
from penstock.limits.tenant_model import DeleteTenant, GetTenant, ListTenants, PauseTenant, SetTenant, TenantChange
from penstock.limits.tenant_store import TenantRecord, change_tenant, list_tenants, read_tenant_record
from penstock.protocol.views import timestamp
from penstock.tasks.tenant_stats import TenantStatistics


class Tenant(msgspec.Struct, frozen=True):
    tenant: str
    paused: Annotated[bool, Meta(description="Its tasks are taken and none is sent.")]
    own: Annotated[bool, Meta(description="Its limits are its own; false: those of *, the default.")]
    max_in_flight: int | None
    rate: Annotated[float | None, Meta(description="Tasks a second.")]
    burst: int | None
    updated_at: Annotated[str | None, Meta(description="When its own rule was last changed; null when it has none.")]


class TenantDetail(Tenant, frozen=True):
    in_flight: Annotated[int, Meta(description="Claimed and not settled; counted while it is limited.")]
    waiting: Annotated[int, Meta(description="Of its tasks, those that a limit or a pause keeps waiting.")]


class TenantPage(msgspec.Struct, frozen=True):
    tenants: list[Tenant]
    cursor: Annotated[str | None, Meta(description="Pass it on for the next page; null at the end.")]


TENANT_RESULTS = (Tenant, TenantDetail, TenantPage, TenantStatistics)


class Tenants:
    """Changes and shows rules of tenants. session, transaction: open one. changed: called after a change, to wake
    schedulers."""

    def __init__(
        self,
        session: Callable[[], AbstractAsyncContextManager[Session]],
        transaction: Callable[[], AbstractAsyncContextManager[Session]],
        changed: Callable[[], None],
    ) -> None:
        self._session = session
        self._transaction = transaction
        self._changed = changed

    @property
    def commands(self) -> Mapping[type, Callable[[Any], Awaitable[Any]]]:
        """What carries out each command."""
        return {
            SetTenant: self.change, PauseTenant: self.change, DeleteTenant: self.change, GetTenant: self.get,
            ListTenants: self.list,
        }  # fmt: skip

    async def change(self, command: TenantChange) -> TenantDetail:
        """Raises InvalidParams: there is no rule to delete."""
        async with self._transaction() as session:
            await change_tenant(session, command)
        self._changed()
        return await self.get(GetTenant(command.tenant))

    async def get(self, command: GetTenant) -> TenantDetail:
        """What holds for a tenant now, by a rule of its own or by the default."""
        async with self._session() as session:
            record = await read_tenant_record(session, command.tenant)
        return TenantDetail(**_members(record), in_flight=record.in_flight, waiting=record.waiting)

    async def list(self, command: ListTenants) -> TenantPage:
        """Those with a rule of their own, by name."""
        async with self._session() as session:
            records = await list_tenants(session, command)
        cursor = records[-1].name if len(records) == command.limit else None
        return TenantPage([Tenant(**_members(record)) for record in records], cursor)


def _members(record: TenantRecord) -> dict[str, Any]:
    limits = record.limits
    return {
        "tenant": record.name, "paused": limits.paused, "own": record.own, "max_in_flight": limits.max_in_flight,
        "rate": limits.rate, "burst": limits.burst,
        "updated_at": None if record.updated_at is None else timestamp(record.updated_at),
    }  # fmt: skip
