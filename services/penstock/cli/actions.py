"""`penstock actions`: limits and pauses of actions."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import typer

from penstock.cli.common import Api, listing, naming
from penstock.cli.groups import Commands, add_group
from penstock.cli.limits import Limits, Rate, pausing, rate_option

ActionArgument = Annotated[str, typer.Argument(metavar="ACTION", help="The action's exact name.")]
_LIMITS = ("max_in_flight", "rate", "burst", "key_max_in_flight", "key_rate", "key_burst")
_COLUMNS = {name.replace("_", " "): name for name in (*_LIMITS, "in_flight")}
_print_actions = listing(
    "limited or paused actions",
    "actions",
    {"action": "action", "paused": lambda row: "paused" if row["paused"] else "", **_COLUMNS},
    right=_COLUMNS,
)


class Limit(StrEnum):
    """Values of --none."""

    max_in_flight = "max-in-flight"
    rate = "rate"
    burst = "burst"
    key_max_in_flight = "key-max-in-flight"
    key_rate = "key-rate"
    key_burst = "key-burst"
    all = "all"


@dataclass(frozen=True)
class ActionLimits(Limits):
    """Options that set the limits of an action."""

    key_max_in_flight: Annotated[
        int | None, typer.Option(min=1, show_default=False, help="As --max-in-flight, for each limit key.")
    ] = None
    key_rate: Annotated[Rate | None, rate_option("As --rate, for each limit key.")] = None
    key_burst: Annotated[
        int | None, typer.Option(min=1, show_default=False, help="As --burst, for each limit key.")
    ] = None


def add_to(app: typer.Typer) -> None:
    commands: Commands = {
        "list": list_actions,
        "show": naming("action.get", "action", ActionArgument, "Show the limits of an action."),
        "set": set_limits,
        **pausing("action", ActionArgument),
    }
    add_group(app, "actions", commands, panel="Tasks", help="Limit and pause actions, across all schedulers.")


def list_actions(api: Api) -> None:
    """List the actions that are limited or paused."""
    api.show(api.call("action.list"), _print_actions)


def set_limits(
    *,
    action: ActionArgument,
    limits: ActionLimits,
    none: Annotated[list[Limit] | None, typer.Option(help="A limit to remove. Repeatable.")] = None,
    api: Api,
) -> None:
    """Limit an action. Limits that are not named stay unchanged."""
    api.show(api.client.call("action.set", {"action": action, **limits.params(none)}))
