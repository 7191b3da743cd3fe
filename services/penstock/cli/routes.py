"""`penstock routes`: separate queues, and so separate workers, for some tasks."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.common import Api, listing, naming
from penstock.cli.groups import Commands, add_group
from penstock.cli.values import labels

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The route's name.")]
_print_routes = listing(
    "routes",
    "routes",
    {
        "route": "name",
        "queue": "queue",
        "actions": lambda row: " ".join(row["actions"]),
        "labels": lambda row: " ".join(f"{name}={value}" for name, value in row["labels"].items()),
        "position": "position",
        "in flight": "in_flight",
    },
    right=("position", "in flight"),
)


def add_to(app: typer.Typer) -> None:
    delete = naming(
        "route.delete", "name", NameArgument,
        "Delete a route; its waiting tasks take the other routes, or go to the outbound queue.",
        lambda answer: typer.echo("deleted"),
    )  # fmt: skip
    commands: Commands = {"list": list_routes, "set": set_route, "delete": delete}
    add_group(app, "routes", commands, panel="Tasks", help="Send some tasks to a queue and workers of their own.")


def list_routes(api: Api) -> None:
    """List routes in the order in which they are tried."""
    api.show(api.call("route.list"), _print_routes)


def set_route(
    *,
    name: NameArgument,
    queue: Annotated[str, typer.Option("--queue", help="Its queue, by name or URL; the queue must exist.")],
    action: Annotated[
        list[str] | None,
        typer.Option("--action", metavar="PATTERN", help="Actions that take this route, such as video.*. Repeatable."),
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option("--label", metavar="NAME=TEXT", help="A label that a task must have. Repeatable."),
    ] = None,
    position: Annotated[int, typer.Option(help="If several routes match a task, the lowest position wins.")] = 0,
    api: Api,
) -> None:
    """Create or replace a route. Run workers for it with `penstock worker --queue`."""
    required = labels(label) or {}
    if not action and not required:
        raise typer.BadParameter("name the tasks of the route: --action PATTERN or --label NAME=TEXT")
    answer = api.call("route.set", name=name, queue=queue, actions=action or ["*"], labels=required, position=position)
    api.show(answer, lambda _: typer.echo(f"{name} set"))
