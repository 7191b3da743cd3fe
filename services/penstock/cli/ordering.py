"""`penstock ordering`: keys that a failed task holds."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.common import ApiUrlOption, DataDirOption, JsonOption, connect, given, print_json, print_page
from penstock.cli.groups import Commands, add_group


def add_to(app: typer.Typer) -> None:
    commands: Commands = {"list": list_keys, "release": release}
    add_group(app, "ordering", commands, panel="Tasks", help="Ordering keys that a failed task holds.")


def list_keys(
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Keys at the most.")] = 50,
    cursor: Annotated[str | None, typer.Option(show_default=False, help="Go on where the last list ended.")] = None,
    as_json: JsonOption = False,
    api_url: ApiUrlOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """List ordering keys that a task in CRITICAL_ERROR holds."""
    result = connect(api_url, data_dir).call("ordering.list", given({"limit": limit, "cursor": cursor}))
    if as_json:
        print_json(result)
        return
    columns = ("key", "tenant", "task_id", "action", "since", "waiting")
    rows = [[row[c] for c in columns] for row in result["keys"]]
    print_page(columns, rows, result["cursor"], right=("task_id", "waiting"))


def release(
    key: Annotated[str, typer.Argument(help="From `penstock ordering`.")],
    tenant: Annotated[str | None, typer.Option(show_default=False, help="Whose key it is.")] = None,
    as_json: JsonOption = False,
    api_url: ApiUrlOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Let a held ordering key go: the next task of the key may run."""
    result = connect(api_url, data_dir).call("ordering.release", given({"key": key, "tenant": tenant}))
    if as_json:
        print_json(result)
    elif not result["released"]:
        typer.echo("it is not held")
    else:
        typer.echo("released" + (f"; task {result['next']} may run" if result["next"] is not None else ""))
