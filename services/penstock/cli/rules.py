"""`penstock action` and `penstock route`: limits, pauses and routes from a shell."""

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
    print_fields,
    print_json,
    print_table,
)

ActionArgument = Annotated[str, typer.Argument(metavar="ACTION", help="The action, exactly.")]
_LIMITS = ("max_in_flight", "rate", "burst", "key_max_in_flight", "key_rate", "key_burst")


class Per(StrEnum):
    second = "second"
    minute = "minute"
    hour = "hour"


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
    action = typer.Typer(
        no_args_is_help=True, epilog=EPILOG, help="Limit and pause actions, for all schedulers and at once."
    )
    action.command("set")(set_limits)
    action.command("get")(get)
    action.command("list")(list_actions)
    action.command("pause")(pause)
    action.command("resume")(resume)
    app.add_typer(action, name="action", rich_help_panel="Tasks")
    route = typer.Typer(
        no_args_is_help=True, epilog=EPILOG, help="Send some tasks to a queue, and so to workers, of their own."
    )
    route.command("set")(set_route)
    route.command("list")(list_routes)
    route.command("delete")(delete_route)
    app.add_typer(route, name="route", rich_help_panel="Tasks")


def set_limits(
    action: ActionArgument,
    max_in_flight: Annotated[
        int | None, typer.Option(min=1, show_default=False, help="Tasks claimed and unsettled at a time.")
    ] = None,
    rate: Annotated[float | None, typer.Option(show_default=False, help="Tasks that go in each --per.")] = None,
    burst: Annotated[
        int | None,
        typer.Option(min=1, show_default=False, help="Tasks that may go at once after a rest; default: a second's."),
    ] = None,
    key_max_in_flight: Annotated[
        int | None, typer.Option(min=1, show_default=False, help="As --max-in-flight, for each limit key by itself.")
    ] = None,
    key_rate: Annotated[
        float | None, typer.Option(show_default=False, help="As --rate, for each limit key by itself.")
    ] = None,
    key_burst: Annotated[
        int | None, typer.Option(min=1, show_default=False, help="As --burst, for each limit key by itself.")
    ] = None,
    per: Annotated[Per, typer.Option(help="What the rates are counted in.")] = Per.second,
    none: Annotated[list[Limit] | None, typer.Option("--none", help="A limit to take away; may be repeated.")] = None,
    as_json: JsonOption = False,
    api_url: ApiUrlOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Limit an action. Limits that are not named stay as they are."""
    given: dict[str, Any] = {
        "max_in_flight": max_in_flight, "rate": rate, "burst": burst, "key_max_in_flight": key_max_in_flight,
        "key_rate": key_rate, "key_burst": key_burst,
    }  # fmt: skip
    change = {name: value for name, value in given.items() if value is not None}
    gone = _LIMITS if Limit.all in (none or ()) else [limit.name for limit in none or ()]
    for name in gone:
        if name in change:
            raise typer.BadParameter(
                f"--none {name.replace('_', '-')} and --{name.replace('_', '-')} exclude each other"
            )
        change[name] = None
    if not change:
        raise typer.BadParameter("name a limit to set, or one to take away with --none")
    answer = connect(api_url, data_dir).call("action.set", {"action": action, "per": per.value, **change})
    _print_action(answer, as_json)


def get(
    action: ActionArgument, as_json: JsonOption = False, api_url: ApiUrlOption = None, data_dir: DataDirOption = None
) -> None:
    """Show the limits of an action."""
    _print_action(connect(api_url, data_dir).call("action.get", {"action": action}), as_json)


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
    print_table(columns, rows, right=columns[2:])


def pause(
    action: ActionArgument, as_json: JsonOption = False, api_url: ApiUrlOption = None, data_dir: DataDirOption = None
) -> None:
    """Send no more tasks of an action; they are taken and wait. What is in flight goes on."""
    _print_action(connect(api_url, data_dir).call("action.pause", {"action": action}), as_json)


def resume(
    action: ActionArgument, as_json: JsonOption = False, api_url: ApiUrlOption = None, data_dir: DataDirOption = None
) -> None:
    """Send tasks of an action again."""
    _print_action(connect(api_url, data_dir).call("action.resume", {"action": action}), as_json)


def set_route(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The route's name.")],
    queue: Annotated[str, typer.Option("--queue", help="Its queue, by name or URL; it has to be there.")],
    action: Annotated[
        list[str] | None,
        typer.Option("--action", metavar="PATTERN", help="Actions that go by it, such as video.*; may be repeated."),
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option("--label", metavar="NAME=VALUE", help="A label that tasks have to have; may be repeated."),
    ] = None,
    position: Annotated[int, typer.Option(help="Of several routes that fit, the lowest counts.")] = 0,
    as_json: JsonOption = False,
    api_url: ApiUrlOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Make or replace a route. Run workers for it with `penstock worker --queue`."""
    labels = {}
    for pair in label or ():
        key, sign, value = pair.partition("=")
        if not sign or not key:
            raise typer.BadParameter(f"--label takes NAME=VALUE, not {pair!r}")
        labels[key] = value
    if not action and not labels:
        raise typer.BadParameter("name what goes by it: --action PATTERN or --label NAME=VALUE")
    params = {"name": name, "queue": queue, "actions": action or ["*"], "labels": labels, "position": position}
    answer = connect(api_url, data_dir).call("route.set", params)
    if as_json:
        print_json(answer)
    else:
        typer.echo(f"{name} set")


def list_routes(as_json: JsonOption = False, api_url: ApiUrlOption = None, data_dir: DataDirOption = None) -> None:
    """List routes in the order in which they are tried."""
    result = connect(api_url, data_dir).call("route.list", {})
    if as_json:
        print_json(result)
        return
    rows = [
        (
            row["name"], row["queue"], " ".join(row["actions"]),
            " ".join(f"{name}={value}" for name, value in row["labels"].items()), row["position"], row["in_flight"],
        )
        for row in result["routes"]
    ]  # fmt: skip
    print_table(("route", "queue", "actions", "labels", "position", "in flight"), rows, right=("position", "in flight"))


def delete_route(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The route's name.")],
    as_json: JsonOption = False,
    api_url: ApiUrlOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Delete a route; what waits for it goes by the other routes, or to the outbound queue."""
    answer = connect(api_url, data_dir).call("route.delete", {"name": name})
    if as_json:
        print_json(answer)
    else:
        typer.echo(f"{name} deleted")


def _print_action(answer: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(answer)
    else:
        print_fields(answer.items())
