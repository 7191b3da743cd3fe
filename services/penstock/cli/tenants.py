"""`penstock tenant`: limits and pauses of tenants from a shell."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from penstock.cli.common import (
    EPILOG,
    ApiUrlOption,
    DataDirOption,
    JsonOption,
    connect,
    given,
    print_cursor,
    print_fields,
    print_json,
    print_table,
)
from penstock.cli.rules import Per

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
    tenant = typer.Typer(
        no_args_is_help=True, epilog=EPILOG, help="Limit and pause tenants, for all schedulers and at once."
    )
    tenant.command("set")(set_limits)
    tenant.command("get")(get)
    tenant.command("list")(list_tenants)
    tenant.command("delete")(delete)
    tenant.command("pause")(pause)
    tenant.command("resume")(resume)
    app.add_typer(tenant, name="tenant", rich_help_panel="Tasks")


def set_limits(
    tenant: TenantOrAll,
    max_in_flight: Annotated[
        int | None,
        typer.Option(min=1, show_default=False, help="Tasks claimed and unsettled at a time, of all actions."),
    ] = None,
    rate: Annotated[float | None, typer.Option(show_default=False, help="Tasks that go in each --per.")] = None,
    burst: Annotated[
        int | None,
        typer.Option(min=1, show_default=False, help="Tasks that may go at once after a rest; default: a second's."),
    ] = None,
    per: Annotated[Per, typer.Option(help="What the rate is counted in.")] = Per.second,
    none: Annotated[list[Limit] | None, typer.Option("--none", help="A limit to take away; may be repeated.")] = None,
    as_json: JsonOption = False,
    api_url: ApiUrlOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Give a tenant limits of its own, in place of the default's. Limits that are not named stay as they are."""
    named: dict[str, Any] = {"max_in_flight": max_in_flight, "rate": rate, "burst": burst}
    change = {name: value for name, value in named.items() if value is not None}
    gone = _LIMITS if Limit.all in (none or ()) else [limit.name for limit in none or ()]
    for name in gone:
        if name in change:
            option = name.replace("_", "-")
            raise typer.BadParameter(f"--none {option} and --{option} exclude each other")
        change[name] = None
    if not change:
        raise typer.BadParameter("name a limit to set, or one to take away with --none")
    _print(connect(api_url, data_dir).call("tenant.set", {"tenant": tenant, "per": per.value, **change}), as_json)


def get(
    tenant: TenantOrAll, as_json: JsonOption = False, api_url: ApiUrlOption = None, data_dir: DataDirOption = None
) -> None:
    """Show what a tenant is held to, by its own limits or the default's, and how many of its tasks are held."""
    _print(connect(api_url, data_dir).call("tenant.get", {"tenant": tenant}), as_json)


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
    if not result["tenants"]:
        typer.echo("there is none")
        return
    columns = ("tenant", "paused", "limits", *(name.replace("_", " ") for name in _LIMITS))
    rows = [
        (
            row["tenant"], "paused" if row["paused"] else "", "its own" if row["own"] else "the default's",
            *(row[name] for name in _LIMITS),
        )
        for row in result["tenants"]
    ]  # fmt: skip
    print_table(columns, rows, right=columns[3:])
    print_cursor(result["cursor"])


def delete(
    tenant: TenantOrAll, as_json: JsonOption = False, api_url: ApiUrlOption = None, data_dir: DataDirOption = None
) -> None:
    """Have a tenant go by the default again; a pause is over."""
    _print(connect(api_url, data_dir).call("tenant.delete", {"tenant": tenant}), as_json)


def pause(
    tenant: TenantArgument, as_json: JsonOption = False, api_url: ApiUrlOption = None, data_dir: DataDirOption = None
) -> None:
    """Send no more tasks of a tenant; they are taken and wait. What is in flight goes on."""
    _print(connect(api_url, data_dir).call("tenant.pause", {"tenant": tenant}), as_json)


def resume(
    tenant: TenantArgument, as_json: JsonOption = False, api_url: ApiUrlOption = None, data_dir: DataDirOption = None
) -> None:
    """Send tasks of a tenant again."""
    _print(connect(api_url, data_dir).call("tenant.resume", {"tenant": tenant}), as_json)


def _print(answer: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(answer)
    else:
        print_fields(answer.items())
