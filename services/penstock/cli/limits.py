"""`penstock actions` and `penstock tenants`: limits and pauses of actions and of tenants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

import typer

from penstock.cli.common import Api, calling, listing
from penstock.cli.groups import Commands, add_group
from penstock.cli.parameters import Given, ParamsOf
from penstock.limits.model import (
    SECONDS_OF,
    ActionName,
    ActionSetParams,
    TenantListParams,
    TenantName,
    TenantOrAll,
    TenantSetParams,
)
from penstock.protocol.method import NoParams


@dataclass(frozen=True)
class Rate:
    """A rate as typed; per: None if only a number was given."""

    number: float
    per: str | None


def parse_rate(text: str) -> Rate:
    """`10` or `10/m`. Raises typer.BadParameter."""
    number, slash, unit = text.partition("/")
    per = next((per for per in SECONDS_OF if unit and per.startswith(unit)), None)
    try:
        if slash and per is None:
            raise ValueError
        return Rate(float(number), per)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a rate: give a number, or 10/s, 10/m, 10/h") from None


def _rate(help: str) -> Any:
    return typer.Option(parser=parse_rate, metavar="N[/s|/m|/h]", help=help)


def _count(help: str) -> Any:
    return typer.Option(min=1, help=help)


# Options of the parameters that set limits, and the names of these limits.
_TENANT_OPTIONS = {
    "max_in_flight": _count("Tasks that may be claimed and unsettled at a time."),
    "rate": _rate("Tasks that may start per unit of time: 10/m; a plain number is per --per."),
    "burst": _count("Burst size; default: one second's worth of --rate."),
}
_ACTION_OPTIONS = {
    **_TENANT_OPTIONS,
    "key_max_in_flight": _count("As --max-in-flight, for each limit key."),
    "key_rate": _rate("As --rate, for each limit key."),
    "key_burst": _count("As --burst, for each limit key."),
}
_PER = typer.Option(help="The unit of rates that are given without one.")


class TenantLimit(StrEnum):
    """Values of --none."""

    max_in_flight = "max-in-flight"
    rate = "rate"
    burst = "burst"
    all = "all"


class ActionLimit(StrEnum):
    """Values of --none."""

    max_in_flight = "max-in-flight"
    rate = "rate"
    burst = "burst"
    key_max_in_flight = "key-max-in-flight"
    key_rate = "key-rate"
    key_burst = "key-burst"
    all = "all"


def _columns(limits: Sequence[str]) -> dict[str, str]:
    return {name.replace("_", " "): name for name in limits}


def _paused(row: dict[str, Any]) -> str:
    return "paused" if row["paused"] else ""


_print_actions = listing(
    "limited or paused actions",
    "actions",
    {"action": "action", "paused": _paused, **_columns([*_ACTION_OPTIONS, "in_flight"])},
    right=_columns([*_ACTION_OPTIONS, "in_flight"]),
)
_print_tenants = listing(
    "limited or paused tenants",
    "tenants",
    {
        "tenant": "tenant",
        "paused": _paused,
        "limits": lambda row: "own" if row["own"] else "default",
        **_columns([*_TENANT_OPTIONS]),
    },
    right=_columns([*_TENANT_OPTIONS]),
)


def add_to(app: typer.Typer) -> None:
    action = ParamsOf(ActionName)
    actions: Commands = {
        "list": calling(
            "action.list", ParamsOf(NoParams), "List the actions that are limited or paused.", _print_actions
        ),
        "show": calling("action.get", action, "Show the limits of an action."),
        "set": set_action,
        **_pausing("action", "an action", action),
    }
    add_group(app, "actions", actions, panel="Tasks", help="Limit and pause actions, across all schedulers.")
    page = ParamsOf(TenantListParams)
    tenant_or_all = ParamsOf(TenantOrAll)
    tenants: Commands = {
        "list": calling(
            "tenant.list", page, "List the tenants that have limits of their own or are paused, the default first.",
            _print_tenants,
        ),
        "show": calling(
            "tenant.get", tenant_or_all,
            "Show the limits that apply to a tenant, its own or the default ones, and how many of its tasks are held "
            "back.",
        ),
        "set": set_tenant,
        "delete": calling("tenant.delete", tenant_or_all, "Remove a tenant's own limits and unpause it."),
        **_pausing("tenant", "a tenant", ParamsOf(TenantName)),
    }  # fmt: skip
    add_group(app, "tenants", tenants, panel="Tasks", help="Limit and pause tenants, across all schedulers.")


def _pausing(kind: str, one: str, params: ParamsOf) -> dict[str, Callable[..., None]]:
    pause = f"Stop sending tasks of {one}. New tasks are accepted and wait; tasks in flight go on."
    return {
        "pause": calling(f"{kind}.pause", params, pause),
        "resume": calling(f"{kind}.resume", params, f"Send tasks of {one} again."),
    }


def set_action(
    *,
    limits: Annotated[Given, ParamsOf(ActionSetParams, per=_PER, **_ACTION_OPTIONS)],
    none: Annotated[list[ActionLimit] | None, typer.Option(help="A limit to remove. Repeatable.")] = None,
    api: Api,
) -> None:
    """Limit an action. Limits that are not named stay unchanged."""
    api.show(api.client.call("action.set", _changed(limits, none, [*_ACTION_OPTIONS])))


def set_tenant(
    *,
    limits: Annotated[Given, ParamsOf(TenantSetParams, per=_PER, **_TENANT_OPTIONS)],
    none: Annotated[list[TenantLimit] | None, typer.Option(help="A limit to remove. Repeatable.")] = None,
    api: Api,
) -> None:
    """Give a tenant limits of its own instead of the default ones. Limits that are not named stay unchanged."""
    api.show(api.client.call("tenant.set", _changed(limits, none, [*_TENANT_OPTIONS])))


def in_one_unit(given: Given) -> Given:
    """The parameters with rates as numbers, in the unit ``per``: their own if they share one."""
    rates = {name: value for name, value in given.items() if isinstance(value, Rate)}
    units = {rate.per or given["per"] for rate in rates.values()}
    per = units.pop() if len(units) == 1 else given["per"]
    numbers = {
        name: rate.number * SECONDS_OF[per] / SECONDS_OF[rate.per or given["per"]] for name, rate in rates.items()
    }
    return given | numbers | {"per": per}


def _changed(given: Given, none: Sequence[StrEnum] | None, names: Sequence[str]) -> Given:
    """The parameters of action.set or tenant.set. Raises typer.BadParameter if there is no change.

    none: the limits to remove, `all` for all of ``names``.
    """
    removed = [limit.name for limit in none or ()]
    if "all" in removed:
        removed = [*names]
    for name in removed:
        if name in given:
            option = name.replace("_", "-")
            raise typer.BadParameter(f"--none {option} and --{option} exclude each other")
    if not removed and not given.keys() & set(names):
        raise typer.BadParameter("name a limit to set, or one to remove with --none")
    return in_one_unit(given) | dict.fromkeys(removed)
