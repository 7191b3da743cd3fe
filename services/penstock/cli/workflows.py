"""`penstock workflows`: tasks that wait for each other."""

from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli import common
from penstock.cli.parameters import Commands, Given, ParamsOf
from penstock.cli.values import STATE_STYLES, json_value, state_label
from penstock.runtime.logs import printable
from penstock.workflows import model

_ID = typer.Argument(metavar="ID", help="The workflow's id; or give --key.")
_DEEPEST = 20  # levels of the tree; deeper steps begin at the left again


def create(
    *,
    definition: Annotated[str, typer.Argument(metavar="JSON")],
    options: Annotated[Given, ParamsOf(model.WorkflowCreateParams, without=["steps", "chain"])],
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


workflows = Commands(
    "Workflows: tasks that wait for each other.",
    list=common.calling("workflow.list", model.WorkflowListParams, _print_workflows),
    show=common.calling("workflow.status", ParamsOf(model.WorkflowStatusParams, id=_ID), _print_workflow),
    create=create,
    cancel=common.calling("workflow.cancel", ParamsOf(model.WorkflowCancelParams, id=_ID), _print_state),
    retry=common.calling("workflow.retry", ParamsOf(model.WorkflowRetryParams, id=_ID), _print_state),
)
