"""`penstock ordering`: ordering keys that a failed task holds."""

from __future__ import annotations

from typing import Any

import typer

from penstock.cli.common import calling, listing
from penstock.cli.groups import Commands, add_group
from penstock.cli.parameters import ParamsOf
from penstock.tasks.params import OrderingListParams, OrderingReleaseParams

_print_keys = listing(
    "held ordering keys",
    ("key", "tenant", "task_id", "action", "since", "waiting"),
    member="keys",
    right=("task_id", "waiting"),
)


def add_to(app: typer.Typer) -> None:
    key = ParamsOf(OrderingReleaseParams, key="From `penstock ordering`.", tenant="The key's tenant.")
    commands: Commands = {
        "list": calling(
            "ordering.list", ParamsOf(OrderingListParams),
            "List ordering keys that a failed task (CRITICAL_ERROR) holds.", _print_keys,
        ),
        "release": calling(
            "ordering.release", key, "Release a held ordering key: the next task of the key may run.", _print_released
        ),
    }  # fmt: skip
    add_group(app, "ordering", commands, panel="Tasks", help="Ordering keys that a failed task holds.")


def _print_released(answer: dict[str, Any]) -> None:
    if not answer["released"]:
        typer.echo("the key is not held")
    else:
        typer.echo("released" + (f"; task {answer['next']} may run" if answer["next"] is not None else ""))
