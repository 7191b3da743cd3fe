"""`penstock tenants`: limits and pauses of tenants."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from penstock.cli.common import Api, CursorOption, limit_option, listing, naming
from penstock.cli.groups import Commands, add_group
from penstock.cli.limits import Limits, pausing

TenantArgument = Annotated[str, typer.Argument(metavar="TENANT", help="The tenant's exact name.")]
TenantOrAll = Annotated[
    str,
    typer.Argument(metavar="TENANT", help="The tenant's exact name; '*' for all tenants without limits of their own."),
]
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
    show = (
        "Show the limits that apply to a tenant, its own or the default ones, and how many of its tasks are held back."
    )
    delete = "Remove a tenant's own limits and unpause it."
    commands: Commands = {
        "list": list_tenants,
        "show": naming("tenant.get", "tenant", TenantOrAll, show),
        "set": set_limits,
        "delete": naming("tenant.delete", "tenant", TenantOrAll, delete),
        **pausing("tenant", TenantArgument),
    }
    add_group(app, "tenants", commands, panel="Tasks", help="Limit and pause tenants, across all schedulers.")


def list_tenants(*, limit: Annotated[int, limit_option("tenants")] = 50, cursor: CursorOption = None, api: Api) -> None:
    """List the tenants that have limits of their own or are paused, the default first."""
    api.show(api.call("tenant.list", limit=limit, cursor=cursor), _print_tenants)


def set_limits(
    *,
    tenant: TenantOrAll,
    limits: Limits,
    none: Annotated[list[Limit] | None, typer.Option(help="A limit to remove. Repeatable.")] = None,
    api: Api,
) -> None:
    """Give a tenant limits of its own instead of the default ones. Limits that are not named stay unchanged."""
    api.show(api.client.call("tenant.set", {"tenant": tenant, **limits.params(none)}))
