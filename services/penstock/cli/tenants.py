"""`penstock tenants`: limits and pauses of tenants."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from penstock.cli.common import Api, calling, listing
from penstock.cli.groups import Commands, add_group
from penstock.cli.limits import OPTIONS, params_to_set, pausing
from penstock.cli.parameters import Given, ParamsOf
from penstock.limits.model import TenantListParams, TenantName, TenantOrAll, TenantSetParams

_TENANT = "The tenant's exact name."
_TENANT_OR_ALL = "The tenant's exact name; '*' for all tenants without limits of their own."
_LIMITS = {name.replace("_", " "): name for name in ("max_in_flight", "rate", "burst")}
_print_tenants = listing(
    "limited or paused tenants",
    "tenants",
    {
        "tenant": "tenant",
        "paused": lambda row: "paused" if row["paused"] else "",
        "limits": lambda row: "own" if row["own"] else "default",
        **_LIMITS,
    },
    right=_LIMITS,
)


class Limit(StrEnum):
    """Values of --none."""

    max_in_flight = "max-in-flight"
    rate = "rate"
    burst = "burst"
    all = "all"


def add_to(app: typer.Typer) -> None:
    page = ParamsOf(TenantListParams, limit="Maximum number of tenants.")
    one_or_all = ParamsOf(TenantOrAll, tenant=_TENANT_OR_ALL)
    commands: Commands = {
        "list": calling(
            "tenant.list", page, "List the tenants that have limits of their own or are paused, the default first.",
            _print_tenants,
        ),
        "show": calling(
            "tenant.get", one_or_all,
            "Show the limits that apply to a tenant, its own or the default ones, and how many of its tasks are held "
            "back.",
        ),
        "set": set_limits,
        "delete": calling("tenant.delete", one_or_all, "Remove a tenant's own limits and unpause it."),
        **pausing("tenant", ParamsOf(TenantName, tenant=_TENANT)),
    }  # fmt: skip
    add_group(app, "tenants", commands, panel="Tasks", help="Limit and pause tenants, across all schedulers.")


def set_limits(
    *,
    limits: Annotated[Given, ParamsOf(TenantSetParams, tenant=_TENANT_OR_ALL, **OPTIONS)],
    none: Annotated[list[Limit] | None, typer.Option(help="A limit to remove. Repeatable.")] = None,
    api: Api,
) -> None:
    """Give a tenant limits of its own instead of the default ones. Limits that are not named stay unchanged."""
    api.show(api.client.call("tenant.set", params_to_set(limits, none, _LIMITS.values())))
