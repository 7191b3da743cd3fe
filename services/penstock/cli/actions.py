"""`penstock actions`: limits and pauses of actions from a shell."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from penstock.cli.common import ApiUrlOption, DataDirOption, JsonOption, connect, print_answer, print_json, print_page
from penstock.cli.groups import Commands, add_group
from penstock.cli.limits import (
    NONE_HELP,
    BurstOption,
    Per,
    PerOption,
    Rate,
    RateOption,
    changes,
    in_one_unit,
    rate_option,
)

ActionArgument = Annotated[str, typer.Argument(metavar="ACTION", help="The action, exactly.")]
_LIMITS = ("max_in_flight", "rate", "burst", "key_max_in_flight", "key_rate", "key_burst")


class Limit(StrEnum):
    """What --none takes."""

    max_in_flight = "max-in-flight"
    rate = "rate"
    burst = "burst"
    key_max_in_flight = "key-max-in-flight"
    key_rate = "key-rate"
    key_burst = "key-burst"
    all = "all"


def add_to(app: typer.Typer) -> None:
    commands: Commands = {"list": list_actions, "show": show, "set": set_limits, "pause": pause, "resume": resume}
    add_group(app, "actions", commands, panel="Tasks", help="Limit and pause actions, for all schedulers and at once.")


def list_actions(as_json: JsonOption = False, api_url: ApiUrlOption = None, data_dir: DataDirOption = None) -> None:
    """List the actions that are limited or paused."""
    result = connect(api_url, data_dir).call("action.list", {})
    if as_json:
        print_json(result)
        return
    columns = ("action", "paused", *(name.replace("_", " ") for name in _LIMITS), "in flight")
    rows = [
        (row["action"], "paused" if row["paused"] else "", *(row[name] for name in _LIMITS), row["in_flight"])
        for row in result["actions"]
    ]
    print_page(columns, rows, right=columns[2:])


def show(
    action: ActionArgument, as_json: JsonOption = False, api_url: ApiUrlOption = None, data_dir: DataDirOption = None
) -> None:
    """Show the limits of an action."""
    print_answer(connect(api_url, data_dir).call("action.get", {"action": action}), as_json)


def set_limits(
    action: ActionArgument,
    max_in_flight: Annotated[
        int | None, typer.Option(min=1, show_default=False, help="Tasks claimed and unsettled at a time.")
    ] = None,
    rate: RateOption = None,
    burst: BurstOption = None,
    key_max_in_flight: Annotated[
        int | None, typer.Option(min=1, show_default=False, help="As --max-in-flight, for each limit key by itself.")
    ] = None,
    key_rate: Annotated[Rate | None, rate_option("As --rate, for each limit key.")] = None,
    key_burst: Annotated[
        int | None, typer.Option(min=1, show_default=False, help="As --burst, for each limit key by itself.")
    ] = None,
    per: PerOption = Per.second,
    none: Annotated[list[Limit] | None, typer.Option("--none", help=NONE_HELP)] = None,
    as_json: JsonOption = False,
    api_url: ApiUrlOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Limit an action. Limits that are not named stay as they are."""
    rates = in_one_unit({"rate": rate, "key_rate": key_rate}, per)
    unit = rates.pop("per")
    limits = {
        "max_in_flight": max_in_flight, "burst": burst, "key_max_in_flight": key_max_in_flight, "key_burst": key_burst,
        **rates,
    }  # fmt: skip
    params = {"action": action, "per": unit, **changes(limits, none)}
    print_answer(connect(api_url, data_dir).call("action.set", params), as_json)


def pause(
    action: ActionArgument, as_json: JsonOption = False, api_url: ApiUrlOption = None, data_dir: DataDirOption = None
) -> None:
    """Send no more tasks of an action; they are taken and wait. What is in flight goes on."""
    print_answer(connect(api_url, data_dir).call("action.pause", {"action": action}), as_json)


def resume(
    action: ActionArgument, as_json: JsonOption = False, api_url: ApiUrlOption = None, data_dir: DataDirOption = None
) -> None:
    """Send tasks of an action again."""
    print_answer(connect(api_url, data_dir).call("action.resume", {"action": action}), as_json)
