"""`penstock task complete` and `penstock task fail`: answers to tasks that wait for an outside event."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from penstock.cli.common import EPILOG, ApiUrlOption, DataDirOption, JsonOption, connect, print_json

TokenArgument = Annotated[
    str, typer.Argument(help="What the task waits for: `penstock status ID --detail` shows it as waits_for.")
]


def add_to(app: typer.Typer) -> None:
    task = typer.Typer(no_args_is_help=True, epilog=EPILOG, help="Tasks that wait for an outside event.")
    task.command()(complete)
    task.command()(fail)
    app.add_typer(task, name="task", rich_help_panel="Tasks")


def complete(
    token: TokenArgument,
    result: Annotated[str, typer.Argument(metavar="[JSON]", help="The result; - reads standard input.")] = "null",
    as_json: JsonOption = False,
    api_url: ApiUrlOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Give a task the result that it waits for; one that comes before its task waits is kept."""
    text = sys.stdin.read() if result == "-" else result
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise typer.BadParameter(f"the result is not JSON: {exc}", param_hint="JSON") from exc
    _show(connect(api_url, data_dir).call("task.complete", {"token": token, "result": value}), as_json)


def fail(
    token: TokenArgument,
    error: Annotated[str, typer.Argument(metavar="MESSAGE", help="What went wrong.")],
    final: Annotated[bool, typer.Option("--final", help="No more attempts: CRITICAL_ERROR now.")] = False,
    retry_after: Annotated[
        float | None, typer.Option(show_default=False, help="Seconds until the next attempt.")
    ] = None,
    as_json: JsonOption = False,
    api_url: ApiUrlOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Fail the attempt of a task that waits; it is tried again as after any other failure."""
    params: dict[str, Any] = {"token": token, "error": error, "final": final}
    if retry_after is not None:
        params["retry_after"] = retry_after
    _show(connect(api_url, data_dir).call("task.fail", params), as_json)


def _show(answer: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(answer)
    elif answer["id"] is None:
        typer.echo("kept until a task waits for it" + (" (it was there already)" if answer["duplicate"] else ""))
    else:
        note = " (it was answered already)" if answer["duplicate"] else ""
        typer.echo(f"task {answer['id']} {answer['state'] or 'is gone'}{note}")
