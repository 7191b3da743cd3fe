"""`penstock workflows`: tasks that wait for each other, by the api's methods."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.common import (
    ApiUrlOption,
    DataDirOption,
    JsonOption,
    connect,
    print_cursor,
    print_fields,
    print_json,
    print_page,
    say,
)
from penstock.cli.groups import Commands, add_group
from penstock.cli.values import json_value
from penstock.runtime.printable import printable
from penstock.workflows.params import WorkflowState

WhichArgument = Annotated[
    str, typer.Argument(metavar="ID", help="The workflow's id; or, with --key, the key that it was created with.")
]
TenantOption = Annotated[str | None, typer.Option("--tenant", show_default=False, help="Whose key it is, with --key.")]
KeyOption = Annotated[bool, typer.Option("--key", help="ID is a key.")]
LimitOption = Annotated[int, typer.Option(help="At the most.")]
CursorOption = Annotated[str | None, typer.Option(show_default=False, help="The cursor of the page before.")]
_DEEPEST = 20  # levels of the tree; what lies deeper begins at the left again
_MARKS = {
    "SUCCESS": "green", "CRITICAL_ERROR": "red", "CANCELLED": "dim", "ACQUIRED": "cyan", "ERROR": "yellow",
}  # fmt: skip


def add_to(app: typer.Typer) -> None:
    commands: Commands = {"list": list_workflows, "show": show, "create": create, "cancel": cancel, "retry": retry}
    add_group(app, "workflows", commands, panel="Tasks", help="Workflows: tasks that wait for each other.")


def create(
    definition: Annotated[
        str,
        typer.Argument(
            metavar="JSON",
            help="An array of steps one after the other, a group being an array in it; or an object as workflow.create "
            "takes; - reads standard input, @FILE a file.",
        ),
    ],
    name: Annotated[str | None, typer.Option(show_default=False, help="Shown with it.")] = None,
    key: Annotated[
        str | None,
        typer.Option(show_default=False, help="The same key and definition again get the first workflow."),
    ] = None,
    tenant: Annotated[str | None, typer.Option(show_default=False, help="For whom all its steps are.")] = None,
    as_json: JsonOption = False,
    api_url: ApiUrlOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Make a workflow."""
    given = _definition(definition)
    params = {"chain": given} if isinstance(given, list) else given
    params |= {
        option: value for option, value in (("name", name), ("key", key), ("tenant", tenant)) if value is not None
    }
    answer = connect(api_url, data_dir).workflows.create(**params)
    if as_json:
        print_json(answer)
        return
    known = " (it was there already)" if answer["duplicate"] else ""
    say(f"workflow {answer['id']} is {answer['state']}{known}")


def show(
    which: WhichArgument,
    key: KeyOption = False,
    tenant: TenantOption = None,
    limit: LimitOption = 200,
    cursor: CursorOption = None,
    as_json: JsonOption = False,
    api_url: ApiUrlOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Show a workflow and its steps as a tree; a step stands below the last of those that it comes after."""
    found = connect(api_url, data_dir).workflows.status(**_which(which, key, tenant), limit=limit, cursor=cursor)
    if as_json:
        print_json(found)
        return
    counts = ", ".join(f"{count} {state}" for state, count in sorted(found["counts"].items()))
    print_fields(
        [
            ("id", found["id"]), ("name", found["name"] or None), ("key", found["key"]),
            ("tenant", found["tenant"]), ("state", found["state"]),
            ("reason", found["reason"]), ("steps", f"{found['steps']}, {found['open']} open: {counts}"),
            ("created", found["created_at"]), ("finished", found["finished_at"]),
        ]
    )  # fmt: skip
    _print_tree(found["tree"])
    print_cursor(found["cursor"])


def list_workflows(
    state: Annotated[WorkflowState | None, typer.Option(show_default=False, help="Only those in this state.")] = None,
    tenant: Annotated[str | None, typer.Option(show_default=False, help="Only those of this tenant.")] = None,
    limit: LimitOption = 50,
    cursor: CursorOption = None,
    as_json: JsonOption = False,
    api_url: ApiUrlOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """List workflows, newest first."""
    page = connect(api_url, data_dir).workflows.list(
        state=state and state.value, limit=limit, cursor=cursor, tenant=tenant
    )
    if as_json:
        print_json(page)
        return
    rows = [
        (one["id"], one["name"], one["state"], one["steps"], one["open"], one["key"], one["created_at"])
        for one in page["workflows"]
    ]
    columns = ("id", "name", "state", "steps", "open", "key", "created")
    print_page(columns, rows, page["cursor"], right=("id", "steps", "open"))


def cancel(
    which: WhichArgument,
    key: KeyOption = False,
    tenant: TenantOption = None,
    reason: Annotated[str | None, typer.Option(show_default=False, help="Shown with it and its steps.")] = None,
    as_json: JsonOption = False,
    api_url: ApiUrlOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Cancel all steps that have not ended."""
    _print_changed(connect(api_url, data_dir).workflows.cancel(**_which(which, key, tenant), reason=reason), as_json)


def retry(
    which: WhichArgument,
    key: KeyOption = False,
    tenant: TenantOption = None,
    as_json: JsonOption = False,
    api_url: ApiUrlOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Begin again with the steps that have not succeeded."""
    _print_changed(connect(api_url, data_dir).workflows.retry(**_which(which, key, tenant)), as_json)


def _print_changed(answer: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(answer)
        return
    again = f", {answer['restarted']} steps begin again" if answer["restarted"] else ""
    say(f"workflow {answer['id']} is {answer['state']}{again}")


def _print_tree(steps: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.text import Text
    from rich.tree import Tree

    roots = Tree("", hide_root=True)
    drawn: dict[str, tuple[Tree, int]] = {}
    for step in steps:
        after = step.get("after", [])
        above = step.get("parent") or (after[-1] if after else None)
        others = [name for name in after if name != above]
        hidden = step.get("after_count", 0) - len(after)
        text = Text(printable(step["name"]))
        text.append(f"  {step['state']}", style=_MARKS.get(step["state"], ""))
        if step.get("task_id") is not None:
            text.append(f"  task {step['task_id']}", style="dim")
        if others or hidden:
            shown = ", ".join(others[:5]) + (" ..." if len(others) > 5 or hidden else "")
            text.append(printable(f"  also after {shown}"), style="dim")
        if step.get("reason"):
            text.append(printable(f"  {step['reason']}"))
        # Of another page, or deeper than a terminal is wide: drawn at the left, with what it comes after.
        node, depth = drawn.get(above or "", (roots, 0))
        if above is not None and (above not in drawn or depth >= _DEEPEST):
            node, depth = roots, 0
            text.append(printable(f"  after {above}"), style="dim")
        drawn[step["name"]] = node.add(text), depth + 1
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 400)
    console.print(roots)


def _which(which: str, is_key: bool, tenant: str | None) -> dict[str, Any]:
    if is_key:
        return {"key": which, "tenant": tenant}
    if tenant is not None:
        raise typer.BadParameter(
            "goes with --key, which is a tenant's own; an id is nobody else's", param_hint="--tenant"
        )
    if not which.isdigit():
        raise typer.BadParameter(f"{which!r} is no id; with --key it may be a key", param_hint="ID")
    return {"workflow_id": int(which)}


def _definition(text: str) -> Any:
    if text.startswith("@"):
        try:
            text = Path(text[1:]).read_text("utf-8")
        except OSError as exc:
            raise typer.BadParameter(f"{text[1:]} cannot be read: {exc.strerror}", param_hint="JSON") from None
    given = json_value(text, "definition")
    if not isinstance(given, dict | list):
        raise typer.BadParameter("must be an array of steps, or an object", param_hint="JSON")
    return given
