"""`penstock workflows`: tasks that wait for each other."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli import common
from penstock.cli.groups import Commands, add_group
from penstock.cli.parameters import Given, ParamsOf
from penstock.cli.values import STATE_STYLES, json_value, state_label
from penstock.runtime.logs import printable
from penstock.workflows.model import WorkflowCreateParams, WorkflowListParams


@dataclass(frozen=True)
class Which:
    """The workflow that a command is about."""

    which: Annotated[
        str, typer.Argument(metavar="ID", help="The workflow's id; with --key, the key it was created with.")
    ]
    key: Annotated[bool, typer.Option("--key", help="ID is a key.")] = False
    tenant: Annotated[str | None, typer.Option(help="The key's tenant; only with --key.")] = None

    @property
    def params(self) -> dict[str, Any]:
        if self.key:
            return {"key": self.which, "tenant": self.tenant}
        if self.tenant is not None:
            raise typer.BadParameter("goes with --key; an id is unique across tenants", param_hint="--tenant")
        if not re.fullmatch(r"\d{1,19}", self.which):
            raise typer.BadParameter(f"{self.which!r} is not an id; pass --key for a key", param_hint="ID")
        return {"id": int(self.which)}


_DEEPEST = 20  # levels of the tree; deeper steps begin at the left again


def add_to(app: typer.Typer) -> None:
    commands: Commands = {
        "list": common.calling("workflow.list", WorkflowListParams, _print_workflows),
        "show": show,
        "create": create,
        "cancel": cancel,
        "retry": retry,
    }
    add_group(app, "workflows", commands, panel="Tasks", help="Workflows: tasks that wait for each other.")


def create(
    *,
    definition: Annotated[str, typer.Argument(metavar="JSON")],
    options: Annotated[Given, ParamsOf(WorkflowCreateParams, without=["steps", "chain"])],
    api: common.Api,
) -> None:
    """Create a workflow.

    definition: An array of consecutive steps, in which an array is a group of parallel steps; or an object of
        parameters of workflow.create. - reads standard input, @FILE a file.
    """
    if definition.startswith("@"):
        try:
            definition = Path(definition[1:]).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as exc:
            raise typer.BadParameter(f"{definition[1:]} cannot be read: {exc}", param_hint="JSON") from None
    found = json_value(definition, "definition")
    if not isinstance(found, dict | list):
        raise typer.BadParameter("must be an array of steps, or an object", param_hint="JSON")
    params = {"chain": found} if isinstance(found, list) else found
    api.show(api.client.call("workflow.create", params | options), _print_state)


def show(
    *,
    which: Which,
    limit: Annotated[int, common.limit_option("steps")] = 200,
    cursor: common.CursorOption = None,
    api: common.Api,
) -> None:
    """Show a workflow and its steps as a tree; a step stands below the last step that it follows."""
    api.show(api.call("workflow.status", **which.params, limit=limit, cursor=cursor), _print_workflow)


def cancel(*, which: Which, reason: str | None = None, api: common.Api) -> None:
    """Cancel all steps that have not ended.

    reason: Shown with the workflow and its steps.
    """
    api.show(api.call("workflow.cancel", **which.params, reason=reason), _print_state)


def retry(*, which: Which, api: common.Api) -> None:
    """Run the steps that have not succeeded again."""
    api.show(api.call("workflow.retry", **which.params), _print_state)


_print_workflows = common.listing(
    "workflows",
    ("id", "name", "state", "steps", "open", "key", ("created", "created_at")),
    right=("id", "steps", "open"),
)


def _print_state(answer: dict[str, Any]) -> None:
    note = " (already existed)" if answer.get("duplicate") else ""
    if answer.get("restarted"):
        note = f", {answer['restarted']} steps run again"
    common.say(f"workflow {answer['id']} is {answer['state']}{note}")


def _print_workflow(found: dict[str, Any]) -> None:
    counts = ", ".join(f"{count} {state_label(state)}" for state, count in sorted(found["counts"].items()))
    fields = {name: found[name] or None for name in ("id", "name", "key", "tenant", "state", "reason")}
    fields["steps"] = f"{found['steps']}, {found['open']} open: {counts}"
    fields |= {"created": found["created_at"], "finished": found["finished_at"]}
    common.print_fields(fields.items())
    _print_tree(found["tree"])
    common.print_cursor(found["cursor"])


def _print_tree(steps: list[dict[str, Any]]) -> None:
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
        text.append(f"  {state_label(step['state'])}", style=STATE_STYLES.get(step["state"], ""))
        if step.get("task_id") is not None:
            text.append(f"  task {step['task_id']}", style="dim")
        if others or hidden:
            shown = ", ".join(others[:5]) + (" ..." if len(others) > 5 or hidden else "")
            text.append(printable(f"  also after {shown}"), style="dim")
        if step.get("reason"):
            text.append(printable(f"  {step['reason']}"))
        # Its predecessor is on another page, or it is deeper than a terminal is wide: drawn at the left.
        node, depth = drawn.get(above or "", (roots, 0))
        if above is not None and (above not in drawn or depth >= _DEEPEST):
            node, depth = roots, 0
            text.append(printable(f"  after {above}"), style="dim")
        drawn[step["name"]] = node.add(text), depth + 1
    common.wide_console(400).print(roots)
