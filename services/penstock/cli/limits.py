"""What `penstock actions` and `penstock tenants` share: how limits are given and taken away."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any

import typer

RateOption = Annotated[float | None, typer.Option(show_default=False, help="Tasks that go in each --per.")]
BurstOption = Annotated[
    int | None,
    typer.Option(min=1, show_default=False, help="Tasks that may go at once after a rest; default: a second's."),
]


class Per(StrEnum):
    second = "second"
    minute = "minute"
    hour = "hour"


PerOption = Annotated[Per, typer.Option(help="What rates are counted in.")]
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
