"""What `penstock actions` and `penstock tenants` share: how limits are given and taken away."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

import typer

BurstOption = Annotated[
    int | None,
    typer.Option(min=1, show_default=False, help="Tasks that may go at once after a rest; default: a second's."),
]


class Per(StrEnum):
    second = "second"
    minute = "minute"
    hour = "hour"


PerOption = Annotated[Per, typer.Option(help="What rates without a unit are counted in.")]
_PER_SECONDS = {Per.second: 1, Per.minute: 60, Per.hour: 3600}


@dataclass(frozen=True)
class Rate:
    """A rate as it was typed; per: None where only a number was."""

    number: float
    per: Per | None


def parse_rate(text: str) -> Rate:
    """`10` or `10/m`. Raises typer.BadParameter."""
    number, slash, unit = text.partition("/")
    per = next((per for per in Per if unit and per.value.startswith(unit)), None)
    try:
        return Rate(float(number), per if per or not slash else Per(unit))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no rate: give a number, or 10/s, 10/m, 10/h") from None


def rate_option(help: str) -> Any:
    return typer.Option(parser=parse_rate, metavar="N[/s|/m|/h]", show_default=False, help=help)


RateOption = Annotated[Rate | None, rate_option("Tasks that may start in each --per, or by the unit given: 10/m.")]


def in_one_unit(rates: Mapping[str, Rate | None], per: Per) -> dict[str, Any]:
    """The rates as the api takes them, with the unit of them all, ``per``: theirs where they agree."""
    given = {name: rate for name, rate in rates.items() if rate is not None}
    units = {rate.per or per for rate in given.values()}
    per = units.pop() if len(units) == 1 else per
    numbers = {name: rate.number * _PER_SECONDS[per] / _PER_SECONDS[rate.per or per] for name, rate in given.items()}
    return {"per": per.value, **dict.fromkeys(rates), **numbers}


NONE_HELP = "A limit to take away; may be repeated."
ALL = "all"  # of --none


def changes(limits: Mapping[str, float | None], none: Sequence[StrEnum] | None) -> dict[str, Any]:
    """The limits that were given, and None for those to take away. Raises typer.BadParameter when that is nothing.

    limits: every one there is, None where it was not given. none: what --none was given.
    """
    change: dict[str, Any] = {name: value for name, value in limits.items() if value is not None}
    gone = limits if ALL in (none or ()) else [limit.name for limit in none or ()]
    for name in gone:
        if name in change:
            option = name.replace("_", "-")
            raise typer.BadParameter(f"--none {option} and --{option} exclude each other")
        change[name] = None
    if not change:
        raise typer.BadParameter("name a limit to set, or one to take away with --none")
    return change
