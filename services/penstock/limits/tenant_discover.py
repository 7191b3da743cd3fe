"""What the OpenRPC document says about the methods of tenants."""

from __future__ import annotations

from penstock.limits.model import MOST_IN_FLIGHT
from penstock.protocol.tenant import TENANT_MAX_CHARS

# Summary, result, errors beyond those of every method
TENANT_SUMMARIES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "tenant.set": (
        "Give a tenant limits of its own, or * all that have none; a member left out stays, null takes a limit away.",
        "TenantDetail", (),
    ),
    "tenant.get": ("Show what a tenant is held to, and how many of its tasks are held.", "TenantDetail", ()),
    "tenant.list": ("List the tenants that have a rule of their own, the default * first.", "TenantPage", ()),
    "tenant.delete": ("Have a tenant go by the default again, its pause being over.", "TenantDetail", ()),
    "tenant.pause": ("Take tasks of a tenant, but send none to workers.", "TenantDetail", ()),
    "tenant.resume": ("Send tasks of a tenant again.", "TenantDetail", ()),
}  # fmt: skip

_TENANT = f"The tenant; 1 to {TENANT_MAX_CHARS} characters."
_OR_ALL = f"{_TENANT} Or *, for every tenant that has no limits of its own."
TENANT_PARAMETERS: dict[str, dict[str, str]] = {
    "tenant.set": {
        "tenant": _OR_ALL,
        "max_in_flight": f"Tasks claimed and not settled at the most, of all its actions; 1 to {MOST_IN_FLIGHT}.",
        "rate": "Tasks that may go in each `per`.",
        "burst": "Tasks that may go at once after a rest; null: what the rate gives in a second, at least one.",
        "per": "What the rate counts by.",
    },
    "tenant.get": {"tenant": _OR_ALL},
    "tenant.list": {"limit": "Tenants at the most; 1 to 1000.", "cursor": "The cursor of the page before."},
    "tenant.delete": {"tenant": _OR_ALL},
    "tenant.pause": {"tenant": _TENANT},
    "tenant.resume": {"tenant": _TENANT},
}
