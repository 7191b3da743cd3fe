"""`penstock routes`: separate queues and workers for some tasks; `penstock ordering`: keys that a failed task holds."""

from typing import Annotated, Any

import typer

from penstock.cli.common import Api, calling, listing
from penstock.cli.groups import Commands, add_group
from penstock.cli.parameters import Given, ParamsOf
from penstock.limits.model import RouteName, RouteSetParams
from penstock.protocol.method import NoParams
from penstock.tasks.params import OrderingListParams, OrderingReleaseParams

_print_routes = listing(
    "routes",
    (
        ("route", "name"), "queue", ("actions", lambda row: " ".join(row["actions"])),
        ("labels", lambda row: " ".join(f"{name}={value}" for name, value in row["labels"].items())),
        "position", ("in flight", "in_flight"),
    ),
    right=("position", "in flight"),
)  # fmt: skip
_print_keys = listing(
    "held ordering keys",
    ("key", "tenant", "task_id", "action", "since", "waiting"),
    member="keys",
    right=("task_id", "waiting"),
)


def add_to(app: typer.Typer) -> None:
    routes: Commands = {
        "list": calling("route.list", NoParams, _print_routes),
        "set": set_route,
        "delete": calling("route.delete", RouteName, lambda _: typer.echo("deleted")),
    }
    add_group(app, "routes", routes, panel="Tasks", help="Send some tasks to a queue and workers of their own.")
    ordering: Commands = {
        "list": calling("ordering.list", OrderingListParams, _print_keys),
        "release": calling("ordering.release", OrderingReleaseParams, _print_released),
    }
    add_group(app, "ordering", ordering, panel="Tasks", help="Ordering keys that a failed task holds.")


def set_route(
    *,
    route: Annotated[
        Given,
        ParamsOf(
            RouteSetParams,
            queue=typer.Option("--queue", help="Its queue, by name or URL; the queue must exist."),
            actions=typer.Option(
                "--action", metavar="PATTERN", help="Actions that take this route, such as video.*. Repeatable."
            ),
        ),
    ],
    api: Api,
) -> None:
    """Create or replace a route. Run workers for it with `penstock worker --queue`."""
    if "actions" not in route and "labels" not in route:
        raise typer.BadParameter("name the tasks of the route: --action PATTERN or --label NAME=TEXT")
    api.show(api.client.call("route.set", route), lambda _: typer.echo(f"{route['name']} set"))


def _print_released(answer: dict[str, Any]) -> None:
    if not answer["released"]:
        typer.echo("the key is not held")
    else:
        typer.echo("released" + (f"; task {answer['next']} may run" if answer["next"] is not None else ""))
