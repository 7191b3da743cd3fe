"""`penstock enqueue`: a task from a shell."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from penstock.cli.common import (
    ApiUrlOption,
    DataDirOption,
    DelayOption,
    JsonOption,
    RunAtOption,
    connect,
    given,
    print_json,
)
from penstock.cli.task import print_result
from penstock.cli.values import duration, duration_option, instant, json_value, labels


def add_to(app: typer.Typer) -> None:
    app.command(rich_help_panel="Tasks")(enqueue)


class OnDuplicate(StrEnum):
    RETURN = "return"
    REPLACE = "replace"
    ERROR = "error"


def enqueue(
    action: Annotated[str, typer.Argument(metavar="ACTION", help="What a worker's handler is registered for.")],
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
        typer.Option(show_default=False, help="One task per action and key; a second one gets the first's id."),
    ] = None,
    ordering_key: Annotated[
        str | None, typer.Option(show_default=False, help="Tasks of one key run one at a time, in order.")
    ] = None,
    max_attempts: Annotated[
        int | None, typer.Option(show_default=False, help="Attempts before CRITICAL_ERROR.")
    ] = None,
    timeout: Annotated[float | None, duration_option(help="How long one attempt may take.")] = None,
    label: Annotated[
        list[str] | None, typer.Option(metavar="NAME=TEXT", help="A label; may be given several times.")
    ] = None,
    expires_at: Annotated[
        str | None, typer.Option(show_default=False, help="Cancelled unless started before; as --run-at.")
    ] = None,
    expires_in: Annotated[float | None, duration_option(help="Cancelled unless started within so long.")] = None,
    limit_key: Annotated[
        str | None, typer.Option(show_default=False, help="Which of its action's limits by key it counts against.")
    ] = None,
    unique: Annotated[
        str | None,
        typer.Option(
            show_default=False,
            help="Until when another task keeps the unique key: retained (until its record is cleaned, the default), "
            "live (until it settles), or a duration from when it took it.",
        ),
    ] = None,
    on_duplicate: Annotated[
        OnDuplicate | None,
        typer.Option(show_default=False, help="When another task has the unique key; default return."),
    ] = None,
    tenant: Annotated[
        str | None, typer.Option(show_default=False, help="For whom it is; its keys are that tenant's own.")
    ] = None,
    wait: Annotated[
        bool,
        typer.Option(
            "--wait",
            help="Wait until it has settled and print its result, as `penstock task result`; tells of each failed "
            "attempt.",
        ),
    ] = False,
    wait_timeout: Annotated[
        float | None, duration_option(help="With --wait: how long to wait; default for ever.")
    ] = None,
    fail_fast: Annotated[
        bool, typer.Option("--fail-fast", help="With --wait: stop after the first failed attempt, with exit code 3.")
    ] = False,
    as_json: JsonOption = False,
    api_url: ApiUrlOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Add a task; it is stored when this returns. With --wait the exit codes are those of `penstock task result`."""
    for option, is_given in (("--wait-timeout", wait_timeout is not None), ("--fail-fast", fail_fast)):
        if is_given and not wait:
            raise typer.BadParameter("goes with --wait", param_hint=option)
    options = {
        "priority": priority, "delay": delay, "run_at": instant(run_at), "unique_key": unique_key,
        "ordering_key": ordering_key, "max_attempts": max_attempts, "timeout": timeout, "labels": labels(label),
        "expires_at": instant(expires_at), "expires_in": expires_in, "limit_key": limit_key,
        "unique": _scope(unique), "on_duplicate": on_duplicate, "tenant": tenant,
    }  # fmt: skip
    params = {"action": action, "payload": json_value(payload, "payload")} | given(options)
    client = connect(api_url, data_dir)
    result = client.call("enqueue", params)
    if wait:
        typer.echo(f"task {result['id']}", err=True)
        print_result(client, result["id"], wait_timeout, tell_failures=True, fail_fast=fail_fast)
        return
    if as_json:
        print_json(result)
        return
    note = " (it was there already)" if result["duplicate"] else ""
    typer.echo(f"task {result['id']} {result['state']}" + (" (replaced)" if result.get("replaced") else note))


def _scope(text: str | None) -> str | float | None:
    if text is None or not text[:1].isdecimal():
        return text
    return duration(text)
