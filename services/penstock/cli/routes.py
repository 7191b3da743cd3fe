"""`penstock routes`: queues, and so workers, of their own for some tasks."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.common import ApiUrlOption, DataDirOption, JsonOption, connect, print_json, print_page
from penstock.cli.groups import Commands, add_group
from penstock.cli.values import labels

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The route's name.")]


def add_to(app: typer.Typer) -> None:
    commands: Commands = {"list": list_routes, "set": set_route, "delete": delete}
    add_group(
        app, "routes", commands, panel="Tasks", help="Send some tasks to a queue, and so to workers, of their own."
    )


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
    print_page(("route", "queue", "actions", "labels", "position", "in flight"), rows, right=("position", "in flight"))


def set_route(
    name: NameArgument,
    queue: Annotated[str, typer.Option("--queue", help="Its queue, by name or URL; it has to be there.")],
    action: Annotated[
        list[str] | None,
        typer.Option("--action", metavar="PATTERN", help="Actions that go by it, such as video.*; may be repeated."),
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option("--label", metavar="NAME=TEXT", help="A label that tasks have to have; may be repeated."),
    ] = None,
    position: Annotated[int, typer.Option(help="Of several routes that fit, the lowest counts.")] = 0,
    as_json: JsonOption = False,
    api_url: ApiUrlOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Make or replace a route. Run workers for it with `penstock worker --queue`."""
    required = labels(label) or {}
    if not action and not required:
        raise typer.BadParameter("name what goes by it: --action PATTERN or --label NAME=TEXT")
    params = {"name": name, "queue": queue, "actions": action or ["*"], "labels": required, "position": position}
    answer = connect(api_url, data_dir).call("route.set", params)
    if as_json:
        print_json(answer)
    else:
        typer.echo(f"{name} set")


def delete(
    name: NameArgument,
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
