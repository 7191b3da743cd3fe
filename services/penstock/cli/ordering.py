"""`penstock ordering`: ordering keys that a failed task holds."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from penstock.cli.common import Api, CursorOption, limit_option, listing
from penstock.cli.groups import Commands, add_group

_print_keys = listing(
    "held ordering keys",
    "keys",
    ("key", "tenant", "task_id", "action", "since", "waiting"),
    right=("task_id", "waiting"),
)


def add_to(app: typer.Typer) -> None:
    commands: Commands = {"list": list_keys, "release": release}
    add_group(app, "ordering", commands, panel="Tasks", help="Ordering keys that a failed task holds.")


def list_keys(*, limit: Annotated[int, limit_option("keys")] = 50, cursor: CursorOption = None, api: Api) -> None:
    """List ordering keys that a failed task (CRITICAL_ERROR) holds."""
    api.show(api.call("ordering.list", limit=limit, cursor=cursor), _print_keys)


def release(
    *,
    key: Annotated[str, typer.Argument(help="From `penstock ordering`.")],
    tenant: Annotated[str | None, typer.Option(show_default=False, help="The key's tenant.")] = None,
    api: Api,
) -> None:
    """Release a held ordering key: the next task of the key may run."""
    api.show(api.call("ordering.release", key=key, tenant=tenant), _print_released)


def _print_released(answer: dict[str, Any]) -> None:
    if not answer["released"]:
        typer.echo("the key is not held")
    else:
        typer.echo("released" + (f"; task {answer['next']} may run" if answer["next"] is not None else ""))
