"""What `penstock actions` and `penstock tenants` share: how limits are set and removed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

import typer

from penstock.cli.common import naming


class Per(StrEnum):
    second = "second"
    minute = "minute"
    hour = "hour"


PerOption = Annotated[Per, typer.Option(help="The unit of rates that are given without one.")]
_ARTICLE = {"action": "an", "tenant": "a"}
_PER_SECONDS = {Per.second: 1, Per.minute: 60, Per.hour: 3600}


@dataclass(frozen=True)
class Rate:
    """A rate as typed; per: None if only a number was given."""

    number: float
    per: Per | None


def parse_rate(text: str) -> Rate:
    """`10` or `10/m`. Raises typer.BadParameter."""
    number, slash, unit = text.partition("/")
    per = next((per for per in Per if unit and per.value.startswith(unit)), None)
    try:
        return Rate(float(number), per if per or not slash else Per(unit))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a rate: give a number, or 10/s, 10/m, 10/h") from None


def rate_option(help: str) -> Any:
    return typer.Option(parser=parse_rate, metavar="N[/s|/m|/h]", show_default=False, help=help)


def in_one_unit(rates: Mapping[str, Rate | None], per: Per) -> dict[str, Any]:
    """The rates as the api takes them, in one unit, ``per``: their own if they share one."""
    given = {name: rate for name, rate in rates.items() if rate is not None}
    units = {rate.per or per for rate in given.values()}
    per = units.pop() if len(units) == 1 else per
    numbers = {name: rate.number * _PER_SECONDS[per] / _PER_SECONDS[rate.per or per] for name, rate in given.items()}
    return {"per": per.value, **dict.fromkeys(rates), **numbers}


ALL = "all"  # of --none


def changes(limits: Mapping[str, Any], none: Sequence[StrEnum] | None) -> dict[str, Any]:
    """The limits that were given, and None for those to remove. Raises typer.BadParameter if there are none.

    limits: all of them, None if not given. none: the values of --none.
    """
    change: dict[str, Any] = {name: value for name, value in limits.items() if value is not None}
    removed = limits if ALL in (none or ()) else [limit.name for limit in none or ()]
    for name in removed:
        if name in change:
            option = name.replace("_", "-")
            raise typer.BadParameter(f"--none {option} and --{option} exclude each other")
        change[name] = None
    if not change:
        raise typer.BadParameter("name a limit to set, or one to remove with --none")
    return change


@dataclass(frozen=True)
class Limits:
    """Options that set the limits of an action or a tenant."""

    max_in_flight: Annotated[
        int | None, typer.Option(min=1, show_default=False, help="Tasks that may be claimed and unsettled at a time.")
    ] = None
    rate: Annotated[
        Rate | None, rate_option("Tasks that may start per unit of time: 10/m; a plain number is per --per.")
    ] = None
    burst: Annotated[
        int | None, typer.Option(min=1, show_default=False, help="Burst size; default: one second's worth of --rate.")
    ] = None
    per: PerOption = Per.second

    def params(self, none: Sequence[StrEnum] | None) -> dict[str, Any]:
        """The parameters of action.set or tenant.set. none: the limits to remove. Raises typer.BadParameter."""
        limits = {name: value for name, value in vars(self).items() if name != "per"}
        rates = in_one_unit({name: value for name, value in limits.items() if name.endswith("rate")}, self.per)
        unit = rates.pop("per")
        return {"per": unit, **changes(limits | rates, none)}


def pausing(kind: str, argument: Any) -> dict[str, Callable[..., None]]:
    """The commands that pause and resume an action or a tenant."""
    return {
        "pause": naming(
            f"{kind}.pause", kind, argument,
            f"Stop sending tasks of {_ARTICLE[kind]} {kind}. New tasks are accepted and wait; tasks in flight go on.",
        ),
        "resume": naming(f"{kind}.resume", kind, argument, f"Send tasks of {_ARTICLE[kind]} {kind} again."),
    }  # fmt: skip
