"""What may be asked about limits of tenants: parameters of `tenant.*`, and the commands that they become. Pure;
:mod:`penstock.limits.tenant_store` carries them out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from penstock.limits.model import MOST_A_SECOND, MOST_IN_FLIGHT, SECONDS_OF, Per
from penstock.protocol.errors import InvalidParams
from penstock.protocol.tenant import EVERY_TENANT, read_tenant


class TenantSetParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tenant: str
    max_in_flight: int | UnsetType | None = UNSET
    rate: float | UnsetType | None = UNSET
    burst: int | UnsetType | None = UNSET
    per: Per = "second"


class TenantGetParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tenant: str


class TenantListParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    limit: int = 50
    cursor: str | None = None


class TenantDeleteParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tenant: str


class TenantPauseParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tenant: str


class TenantResumeParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tenant: str


TENANT_PARAMS: dict[str, type[msgspec.Struct]] = {
    "tenant.set": TenantSetParams,
    "tenant.get": TenantGetParams,
    "tenant.list": TenantListParams,
    "tenant.delete": TenantDeleteParams,
    "tenant.pause": TenantPauseParams,
    "tenant.resume": TenantResumeParams,
}
READING = ("tenant.get", "tenant.list")


@dataclass(frozen=True, slots=True)
class SetTenant:
    """Give a tenant, or ``*``, limits of its own; what ``change`` does not name stays. Rates are a second's."""

    tenant: str
    change: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PauseTenant:
    """``paused``: False to resume."""

    tenant: str
    paused: bool


@dataclass(frozen=True, slots=True)
class DeleteTenant:
    """Its limits are those of ``*`` again, and a pause is over."""

    tenant: str


@dataclass(frozen=True, slots=True)
class GetTenant:
    tenant: str


@dataclass(frozen=True, slots=True)
class ListTenants:
    """By name; ``after`` is the one that the page begins behind."""

    limit: int
    after: str | None


TenantChange = SetTenant | PauseTenant | DeleteTenant
TenantCommand = TenantChange | GetTenant | ListTenants

_MAX_LIST = 1000


def read_tenant_rule(values: Any) -> TenantCommand:
    """The command that decoded parameters ask for. Raises InvalidParams."""
    match values:
        case TenantSetParams():
            return SetTenant(_ruled(values.tenant), _change(values))
        case TenantPauseParams():
            return PauseTenant(_named(values.tenant), True)
        case TenantResumeParams():
            return PauseTenant(_named(values.tenant), False)
        case TenantDeleteParams():
            return DeleteTenant(_ruled(values.tenant))
        case TenantGetParams():
            return GetTenant(_ruled(values.tenant))
    if not 1 <= values.limit <= _MAX_LIST:
        raise InvalidParams("limit", f"must be between 1 and {_MAX_LIST}, not {values.limit}")
    return ListTenants(values.limit, None if values.cursor is None else _ruled(values.cursor, "cursor"))


def _ruled(tenant: str, name: str = "tenant") -> str:
    return tenant if tenant == EVERY_TENANT else (read_tenant(tenant, name) or "")


def _named(tenant: str) -> str:
    if tenant == EVERY_TENANT:
        raise InvalidParams("tenant", "must be one tenant's name: to send nothing at all, pause actions")
    return read_tenant(tenant) or ""


def _change(given: TenantSetParams) -> dict[str, Any]:
    change: dict[str, Any] = {}
    for name in ("max_in_flight", "burst"):
        value = getattr(given, name)
        if value is UNSET:
            continue
        if value is not None and not 1 <= value <= MOST_IN_FLIGHT:
            hint = "; to send none, use tenant.pause" if value == 0 and name == "max_in_flight" else ""
            raise InvalidParams(
                name, f"must be between 1 and {MOST_IN_FLIGHT}, or null for no limit, not {value}{hint}"
            )
        change[name] = value
    if given.rate is not UNSET:
        rate = given.rate
        if rate is not None:
            rate /= SECONDS_OF[given.per]
            if not 0 < rate <= MOST_A_SECOND:
                raise InvalidParams(
                    "rate", f"must be above 0 and at most {MOST_A_SECOND:.0f} a second, or null for no limit, "
                    f"not {given.rate} a {given.per}",
                )  # fmt: skip
        change["rate"] = rate
    if not change:
        raise InvalidParams("tenant", "alone changes nothing: give any of max_in_flight, rate, burst")
    return change
