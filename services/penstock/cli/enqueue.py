"""`penstock enqueue`: add a task."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from penstock.cli.common import Api
from penstock.cli.parameters import Given, ParamsOf, expanded
from penstock.cli.task import print_result
from penstock.cli.values import duration_option, state_label
from penstock.tasks.params import EnqueueParams


def add_to(app: typer.Typer) -> None:
    app.command(rich_help_panel="Tasks")(expanded(enqueue))


def enqueue(
    *,
    task: Annotated[
        Given,
        ParamsOf(
            EnqueueParams, without=["sealed_payload"],
            action="The action, which a handler carries out.",
            payload=typer.Argument(
                metavar="JSON", help="The payload, an object or array; - reads standard input.", show_default="{}"
            ),
            priority="-32768 to 32767, higher first; default 0.",
            unique_key="At most one task per action and key; a duplicate returns the first task's id.",
            max_attempts="Attempts before the task fails.",
            timeout="Time limit of one attempt.",
            labels="A label. Repeatable.",
            expires_at="Cancel unless started by then; as --run-at.",
            expires_in="Cancel unless started within this time.",
            limit_key="The key that per-key limits of the action count it under.",
            unique="How long the key stays taken by another task: retained (until its record is deleted, the default), "
            "live (until it settles), or a duration since that task was added.",
            on_duplicate="What to do if the key is taken; default return.",
            tenant="The task's tenant, which scopes its keys.",
        ),
    ],
    wait: Annotated[
        bool,
        typer.Option(
            "--wait",
            help="Wait until it has settled and print its result, as `penstock task result`, and each failed attempt.",
        ),
    ] = False,
    wait_timeout: Annotated[
        float | None, duration_option(help="With --wait: how long to wait; default forever.")
    ] = None,
    fail_fast: Annotated[
        bool, typer.Option("--fail-fast", help="With --wait: stop after the first failed attempt, with exit code 3.")
    ] = False,
    api: Api,
) -> None:  # fmt: skip
    """Add a task; it is stored when this returns. With --wait the exit codes are those of `penstock task result`."""
    for option, is_given in (("--wait-timeout", wait_timeout is not None), ("--fail-fast", fail_fast)):
        if is_given and not wait:
            raise typer.BadParameter("goes with --wait", param_hint=option)
    result = api.client.call("enqueue", task)
    if wait:
        typer.echo(f"task {result['id']}", err=True)
        print_result(api.client, result["id"], wait_timeout, show_failures=True, fail_fast=fail_fast)
    else:
        api.show(result, _print_enqueued)


def _print_enqueued(result: dict[str, Any]) -> None:
    note = " (already existed)" if result["duplicate"] else ""
    typer.echo(
        f"task {result['id']} {state_label(result['state'])}" + (" (replaced)" if result.get("replaced") else note)
    )
