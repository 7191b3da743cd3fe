"""`penstock tenants`: limits and pauses of tenants from a shell."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from penstock.cli.common import (
    ApiUrlOption,
    DataDirOption,
    JsonOption,
    connect,
    given,
    print_answer,
    print_json,
    print_page,
)
from penstock.cli.groups import Commands, add_group
from penstock.cli.limits import NONE_HELP, BurstOption, Per, PerOption, RateOption, changes, in_one_unit

TenantArgument = Annotated[str, typer.Argument(metavar="TENANT", help="The tenant, exactly.")]
TenantOrAll = Annotated[
    str, typer.Argument(metavar="TENANT", help="The tenant, exactly; '*' for all that have no limits of their own.")
]
_LIMITS = ("max_in_flight", "rate", "burst")


class Limit(StrEnum):
    """What --none takes."""

    max_in_flight = "max-in-flight"
    rate = "rate"
    burst = "burst"
    all = "all"


def add_to(app: typer.Typer) -> None:
    commands: Commands = {
        "list": list_tenants, "show": show, "set": set_limits, "delete": delete, "pause": pause, "resume": resume,
    }  # fmt: skip
    add_group(app, "tenants", commands, panel="Tasks", help="Limit and pause tenants, for all schedulers and at once.")


def list_tenants(
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Tenants at the most.")] = 50,
    cursor: Annotated[str | None, typer.Option(show_default=False, help="Go on where the last list ended.")] = None,
    as_json: JsonOption = False,
    api_url: ApiUrlOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """List the tenants that are limited or paused by a rule of their own, the default first."""
    result = connect(api_url, data_dir).call("tenant.list", given({"limit": limit, "cursor": cursor}))
    if as_json:
        print_json(result)
        return
    columns = ("tenant", "paused", "limits", *(name.replace("_", " ") for name in _LIMITS))
    rows = [
        (
            row["tenant"], "paused" if row["paused"] else "", "its own" if row["own"] else "the default's",
            *(row[name] for name in _LIMITS),
        )
        for row in result["tenants"]
    ]  # fmt: skip
    print_page(columns, rows, result["cursor"], right=columns[3:])


def show(
    tenant: TenantOrAll, as_json: JsonOption = False, api_url: ApiUrlOption = None, data_dir: DataDirOption = None
) -> None:
    """Show what a tenant is held to, by its own limits or the default's, and how many of its tasks are held."""
    print_answer(connect(api_url, data_dir).call("tenant.get", {"tenant": tenant}), as_json)


def set_limits(
    tenant: TenantOrAll,
    max_in_flight: Annotated[
        int | None,
        typer.Option(min=1, show_default=False, help="Tasks claimed and unsettled at a time, of all actions."),
    ] = None,
    rate: RateOption = None,
    burst: BurstOption = None,
    per: PerOption = Per.second,
    none: Annotated[list[Limit] | None, typer.Option("--none", help=NONE_HELP)] = None,
    as_json: JsonOption = False,
    api_url: ApiUrlOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Give a tenant limits of its own, in place of the default's. Limits that are not named stay as they are."""
    rates = in_one_unit({"rate": rate}, per)
    unit = rates.pop("per")
    params = {"tenant": tenant, "per": unit, **changes({"max_in_flight": max_in_flight, "burst": burst, **rates}, none)}
    print_answer(connect(api_url, data_dir).call("tenant.set", params), as_json)


def delete(
    tenant: TenantOrAll, as_json: JsonOption = False, api_url: ApiUrlOption = None, data_dir: DataDirOption = None
) -> None:
    """Have a tenant go by the default again; a pause is over."""
    print_answer(connect(api_url, data_dir).call("tenant.delete", {"tenant": tenant}), as_json)


def pause(
    tenant: TenantArgument, as_json: JsonOption = False, api_url: ApiUrlOption = None, data_dir: DataDirOption = None
) -> None:
    """Send no more tasks of a tenant; they are taken and wait. What is in flight goes on."""
    print_answer(connect(api_url, data_dir).call("tenant.pause", {"tenant": tenant}), as_json)


def resume(
    tenant: TenantArgument, as_json: JsonOption = False, api_url: ApiUrlOption = None, data_dir: DataDirOption = None
) -> None:
    """Send tasks of a tenant again."""
    print_answer(connect(api_url, data_dir).call("tenant.resume", {"tenant": tenant}), as_json)
