"""`penstock actions`, `tenants`, `routes`, `ordering`: limits, pauses, queues of their own, and keys that are held."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from functools import partial
from types import GenericAlias
from typing import Annotated, Any

import msgspec
import typer

from penstock.cli.common import SUMMARIES, Api, Column, Printer, calling, listing
from penstock.cli.parameters import Commands, Given, ParamsOf
from penstock.limits import model
from penstock.protocol.method import NoParams
from penstock.tasks.params import OrderingListParams, OrderingReleaseParams


def parse_rate(text: str) -> tuple[float, str | None]:
    """`10` or `10/m`: the number, and the unit if there is one. Raises typer.BadParameter."""
    number, slash, unit = text.partition("/")
    per = next((per for per in model.SECONDS_OF if unit and per.startswith(unit)), None)
    with suppress(ValueError):
        if math.isfinite(value := float(number)) and (per or not slash):
            return value, per
    raise typer.BadParameter(f"{text!r} is not a rate: give a number, or 10/s, 10/m, 10/h")


_rate = partial(typer.Option, parser=parse_rate, metavar="N[/s|/m|/h]")
# Options of the parameters that set limits, and the names of these limits.
_TENANT_OPTIONS = {
    "max_in_flight": typer.Option(min=1, help="Tasks that may be claimed and unsettled at a time."),
    "rate": _rate(help="Tasks that may start per unit of time: 10/m; a plain number is per --per."),
    "burst": typer.Option(min=1, help="Burst size; default: one second's worth of --rate."),
}
_ACTION_OPTIONS = {
    **_TENANT_OPTIONS,
    "key_max_in_flight": typer.Option(min=1, help="As --max-in-flight, for each limit key."),
    "key_rate": _rate(help="As --rate, for each limit key."),
    "key_burst": typer.Option(min=1, help="As --burst, for each limit key."),
}
_PER = typer.Option(help="The unit of rates that are given without one.")
_ROUTE = ParamsOf(
    model.RouteSetParams,
    queue=typer.Option("--queue", help="Its queue, by name or URL; the queue must exist."),
    actions=typer.Option(
        "--action", metavar="PATTERN", help="Actions that take this route, such as video.*. Repeatable."
    ),
)


def _listing(kind: str, limits: Collection[str], *more: Column) -> Printer:
    numbers = {name.replace("_", " "): name for name in limits}
    columns = (kind, ("paused", lambda row: "paused" if row["paused"] else ""), *more, *numbers.items())
    return listing(f"limited or paused {kind}s", columns, member=f"{kind}s", right=numbers)


_print_actions = _listing("action", [*_ACTION_OPTIONS, "in_flight"], ("held until", lambda row: row.get("held_until")))
_print_announced = listing(
    "announced actions",
    (
        "action", "workers", ("versions", lambda row: ", ".join(row["versions"])), "waiting",
        ("last seen", lambda row: row["seen_at"] or "never"),
    ),
    member="actions", right=("workers", "waiting"),
)  # fmt: skip
_print_tenants = _listing("tenant", _TENANT_OPTIONS, ("limits", lambda row: "own" if row["own"] else "default"))
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


def _setting(method: str, params: type[msgspec.Struct], options: Mapping[str, Any]) -> Callable[..., None]:
    """A command that sets limits, and removes those that --none names."""

    def command(*, given: Given, none: Sequence[StrEnum] | None = None, api: Api) -> None:
        removed = [limit.name for limit in none or ()]
        if "all" in removed:
            removed = [*options]
        for name in removed:
            if name in given:
                option = name.replace("_", "-")
                raise typer.BadParameter(f"--none {option} and --{option} exclude each other")
        if not removed and not given.keys() & options.keys():
            raise typer.BadParameter("name a limit to set, or one to remove with --none")
        api.show(api.client.call(method, in_one_unit(given) | dict.fromkeys(removed)))

    removable = GenericAlias(list, StrEnum("Limit", {name: name.replace("_", "-") for name in [*options, "all"]}))
    command.__doc__ = SUMMARIES[method]
    command.__annotations__ |= {
        "given": Annotated[Given, ParamsOf(params, per=_PER, **options)],
        "none": Annotated[removable | None, typer.Option(help="A limit to remove. Repeatable.")],
    }
    return command


def in_one_unit(given: Given) -> Given:
    """The parameters with rates as numbers, in the unit ``per``: their own if they share one."""
    rates = {name: (rate[0], rate[1] or given["per"]) for name, rate in given.items() if isinstance(rate, tuple)}
    units = {unit for _, unit in rates.values()}
    per = units.pop() if len(units) == 1 else given["per"]
    numbers = {name: rate * model.SECONDS_OF[per] / model.SECONDS_OF[unit] for name, (rate, unit) in rates.items()}
    return given | numbers | {"per": per}


def set_route(*, route: Annotated[Given, _ROUTE], api: Api) -> None:
    """Create or replace a route. Run workers for it with `penstock worker --queue`."""
    if "actions" not in route and "labels" not in route:
        raise typer.BadParameter("name the tasks of the route: --action PATTERN or --label NAME=TEXT")
    api.show(api.client.call("route.set", route), lambda _: typer.echo(f"{route['name']} set"))


def _print_released(answer: dict[str, Any]) -> None:
    if not answer["released"]:
        typer.echo("the key is not held")
    else:
        typer.echo("released" + (f"; task {answer['next']} may run" if answer["next"] is not None else ""))


actions = Commands(
    "Limit and pause actions, across all schedulers.",
    list=calling("action.list", NoParams, _print_actions),
    announced=calling("action.announced", NoParams, _print_announced),
    show=calling("action.get", model.ActionName),
    set=_setting("action.set", model.ActionSetParams, _ACTION_OPTIONS),
    pause=calling("action.pause", model.ActionName),
    resume=calling("action.resume", model.ActionName),
)
tenants = Commands(
    "Limit and pause tenants, across all schedulers.",
    list=calling("tenant.list", model.TenantListParams, _print_tenants),
    show=calling("tenant.get", model.TenantOrAll),
    set=_setting("tenant.set", model.TenantSetParams, _TENANT_OPTIONS),
    delete=calling("tenant.delete", model.TenantOrAll),
    pause=calling("tenant.pause", model.TenantName),
    resume=calling("tenant.resume", model.TenantName),
)
routes = Commands(
    "Send some tasks to a queue and workers of their own.",
    list=calling("route.list", NoParams, _print_routes),
    set=set_route,
    delete=calling("route.delete", model.RouteName, lambda _: typer.echo("deleted")),
)
ordering = Commands(
    "Ordering keys that a failed task holds.",
    list=calling("ordering.list", OrderingListParams, _print_keys),
    release=calling("ordering.release", OrderingReleaseParams, _print_released),
)
