"""What the OpenRPC document says about the methods of workflows."""

from __future__ import annotations

from typing import Any

from penstock.protocol.task import KEY_MAX_CHARS, REASON_MAX_CHARS
from penstock.workflows import views
from penstock.workflows.params import MAX_STEPS, NAME_MAX_CHARS

# Summary, result, errors beyond those of every method
WORKFLOW_SUMMARIES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "workflow.create": (
        "Make tasks that wait for each other; all of them are stored when the answer comes.", "WorkflowAccepted",
        ("WorkflowConflict", "TooLarge"),
    ),
    "workflow.status": ("Show a workflow with a page of its steps.", "WorkflowDetail", ("WorkflowNotFound",)),
    "workflow.list": ("List workflows, newest first, without their steps.", "WorkflowPage", ()),
    "workflow.cancel": (
        "Cancel all steps of a workflow that have not ended.", "WorkflowChanged",
        ("WorkflowNotFound", "WorkflowConflict"),
    ),
    "workflow.retry": (
        "Begin a failed or cancelled workflow again, with the steps that have not succeeded.", "WorkflowChanged",
        ("WorkflowNotFound", "WorkflowConflict"),
    ),
}  # fmt: skip

_WHICH = {
    "id": "The workflow.",
    "key": "In place of id: the key that it was created with.",
    "tenant": "With key: whose key it is; null for nobody's.",
}
WORKFLOW_PARAMETERS: dict[str, dict[str, str]] = {
    "workflow.create": {
        "steps": f"Objects, each a step with the names of those that it comes after; 1 to {MAX_STEPS}.",
        "chain": "In place of steps: steps one after the other, an array standing for a group side by side.",
        "name": f"Shown with it; up to {NAME_MAX_CHARS} characters.",
        "key": "The same key and definition again get the first workflow; another definition is an error. "
        f"1 to {KEY_MAX_CHARS} characters.",
        "tenant": "For whom all its steps are, and whose the key is; null for nobody.",
    },
    "workflow.status": _WHICH | {"limit": "Steps at the most; 1 to 1000.", "cursor": "The cursor of the page before."},
    "workflow.list": {
        "state": "Only workflows in this state.",
        "limit": "Workflows at the most; 1 to 1000.",
        "tenant": "Only workflows of this tenant.",
        "cursor": "The cursor of the page before.",
    },
    "workflow.cancel": _WHICH | {"reason": f"Shown with it and its steps; 1 to {REASON_MAX_CHARS} characters."},
    "workflow.retry": _WHICH,
}

WORKFLOW_RESULTS: tuple[Any, ...] = (
    views.WorkflowAccepted, views.WorkflowChanged, views.WorkflowDetail, views.WorkflowPage,
)  # fmt: skip
