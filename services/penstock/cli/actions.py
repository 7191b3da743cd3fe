"""`penstock actions`: limits and pauses of actions."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from penstock.cli.common import Api, calling, listing
from penstock.cli.groups import Commands, add_group
from penstock.cli.limits import KEY_OPTIONS, OPTIONS, params_to_set, pausing
from penstock.cli.parameters import Given, ParamsOf
from penstock.limits.model import ActionName, ActionSetParams
from penstock.protocol.method import NoParams

_ACTION = "The action's exact name."
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


def add_to(app: typer.Typer) -> None:
    one = ParamsOf(ActionName, action=_ACTION)
    commands: Commands = {
        "list": calling(
            "action.list", ParamsOf(NoParams), "List the actions that are limited or paused.", _print_actions
        ),
        "show": calling("action.get", one, "Show the limits of an action."),
        "set": set_limits,
        **pausing("action", one),
    }
    add_group(app, "actions", commands, panel="Tasks", help="Limit and pause actions, across all schedulers.")


def set_limits(
    *,
    limits: Annotated[Given, ParamsOf(ActionSetParams, action=_ACTION, **OPTIONS, **KEY_OPTIONS)],
    none: Annotated[list[Limit] | None, typer.Option(help="A limit to remove. Repeatable.")] = None,
    api: Api,
) -> None:
    """Limit an action. Limits that are not named stay unchanged."""
    api.show(api.client.call("action.set", params_to_set(limits, none, _LIMITS)))
