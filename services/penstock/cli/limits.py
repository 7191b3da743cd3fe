"""What `penstock actions` and `penstock tenants` share: how limits are set and removed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import typer

from penstock.cli.common import calling
from penstock.cli.parameters import Given, ParamsOf
from penstock.limits.model import SECONDS_OF

_ARTICLE = {"action": "an", "tenant": "a"}


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
    return typer.Option(parser=parse_rate, metavar="N[/s|/m|/h]", show_default=False, help=help)


def _count(help: str) -> Any:
    return typer.Option(min=1, show_default=False, help=help)


# Options of the parameters that set limits.
OPTIONS = {
    "max_in_flight": _count("Tasks that may be claimed and unsettled at a time."),
    "rate": _rate("Tasks that may start per unit of time: 10/m; a plain number is per --per."),
    "burst": _count("Burst size; default: one second's worth of --rate."),
    "per": typer.Option(help="The unit of rates that are given without one."),
}
KEY_OPTIONS = {
    "key_max_in_flight": _count("As --max-in-flight, for each limit key."),
    "key_rate": _rate("As --rate, for each limit key."),
    "key_burst": _count("As --burst, for each limit key."),
}


def in_one_unit(given: Given) -> Given:
    """The parameters with rates as numbers, in the unit ``per``: their own if they share one."""
    rates = {name: value for name, value in given.items() if isinstance(value, Rate)}
    units = {rate.per or given["per"] for rate in rates.values()}
    per = units.pop() if len(units) == 1 else given["per"]
    numbers = {
        name: rate.number * SECONDS_OF[per] / SECONDS_OF[rate.per or given["per"]] for name, rate in rates.items()
    }
    return given | numbers | {"per": per}


def params_to_set(given: Given, none: Sequence[StrEnum] | None, names: Collection[str]) -> Given:
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


def pausing(kind: str, params: ParamsOf) -> dict[str, Callable[..., None]]:
    """The commands that pause and resume an action or a tenant."""
    return {
        "pause": calling(
            f"{kind}.pause", params,
            f"Stop sending tasks of {_ARTICLE[kind]} {kind}. New tasks are accepted and wait; tasks in flight go on.",
        ),
        "resume": calling(f"{kind}.resume", params, f"Send tasks of {_ARTICLE[kind]} {kind} again."),
    }  # fmt: skip
