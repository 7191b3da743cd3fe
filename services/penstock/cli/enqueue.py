"""`penstock enqueue`: add a task."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from penstock.cli.common import Api, DelayOption, RunAtOption
from penstock.cli.options import expanded
from penstock.cli.task import print_result
from penstock.cli.values import duration, duration_option, instant, json_value, labels, state_label


def add_to(app: typer.Typer) -> None:
    app.command(rich_help_panel="Tasks")(expanded(enqueue))


class OnDuplicate(StrEnum):
    RETURN = "return"
    REPLACE = "replace"
    ERROR = "error"


def enqueue(
    *,
    action: Annotated[str, typer.Argument(metavar="ACTION", help="The action, which a handler carries out.")],
    payload: Annotated[
        str, typer.Argument(metavar="JSON", help="The payload, an object or array; - reads standard input.")
    ] = "{}",
    priority: Annotated[
        int | None, typer.Option(show_default=False, help="-32768 to 32767, higher first; default 0.")
    ] = None,
    delay: DelayOption = None,
    run_at: RunAtOption = None,
    unique_key: Annotated[
        str | None,
        typer.Option(
            show_default=False, help="At most one task per action and key; a duplicate returns the first task's id."
        ),
    ] = None,
    ordering_key: Annotated[
        str | None, typer.Option(show_default=False, help="Tasks of one key run one at a time, in order.")
    ] = None,
    max_attempts: Annotated[
        int | None, typer.Option(show_default=False, help="Attempts before the task fails.")
    ] = None,
    timeout: Annotated[float | None, duration_option(help="Time limit of one attempt.")] = None,
    label: Annotated[list[str] | None, typer.Option(metavar="NAME=TEXT", help="A label. Repeatable.")] = None,
    expires_at: Annotated[
        str | None, typer.Option(show_default=False, help="Cancel unless started by then; as --run-at.")
    ] = None,
    expires_in: Annotated[float | None, duration_option(help="Cancel unless started within this time.")] = None,
    limit_key: Annotated[
        str | None, typer.Option(show_default=False, help="The key that per-key limits of the action count it under.")
    ] = None,
    unique: Annotated[
        str | None,
        typer.Option(
            show_default=False,
            help="How long the key stays taken by another task: retained (until its record is deleted, the default), "
            "live (until it settles), or a duration since that task was added.",
        ),
    ] = None,
    on_duplicate: Annotated[
        OnDuplicate | None,
        typer.Option(show_default=False, help="What to do if the key is taken; default return."),
    ] = None,
    tenant: Annotated[
        str | None, typer.Option(show_default=False, help="The task's tenant, which scopes its keys.")
    ] = None,
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
) -> None:
    """Add a task; it is stored when this returns. With --wait the exit codes are those of `penstock task result`."""
    for option, is_given in (("--wait-timeout", wait_timeout is not None), ("--fail-fast", fail_fast)):
        if is_given and not wait:
            raise typer.BadParameter("goes with --wait", param_hint=option)
    result = api.call(
        "enqueue",
        action=action, payload=json_value(payload, "payload"), priority=priority, delay=delay, run_at=instant(run_at),
        unique_key=unique_key, ordering_key=ordering_key, max_attempts=max_attempts, timeout=timeout,
        labels=labels(label), expires_at=instant(expires_at), expires_in=expires_in, limit_key=limit_key,
        unique=_scope(unique), on_duplicate=on_duplicate, tenant=tenant,
    )  # fmt: skip
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


def _scope(text: str | None) -> str | float | None:
    if text is None or not text[:1].isdecimal():
        return text
    return duration(text)
