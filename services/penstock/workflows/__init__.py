"""What a workflow is asked to be: parameters of ``workflow.*``, and the checked steps that they become. Pure.

:mod:`penstock.workflowstore` makes workflows and :mod:`penstock.advance` moves them on.
"""

from __future__ import annotations

from penstock.workflows.commands import (
    CancelWorkflow,
    CreateWorkflow,
    GetWorkflow,
    ListWorkflows,
    NewStep,
    RetryWorkflow,
    StepOptions,
    WhichWorkflow,
    WorkflowChange,
    WorkflowCommand,
)
from penstock.workflows.names import child_names
from penstock.workflows.params import (
    MAX_CHILDREN,
    MAX_STEPS,
    NAME_MAX_CHARS,
    READING,
    STEP_NAMES_SHOWN,
    WORKFLOW_PARAMS,
    ChildParams,
    StepKind,
    WorkflowCancelParams,
    WorkflowCreateParams,
    WorkflowListParams,
    WorkflowState,
    WorkflowStatusParams,
)
from penstock.workflows.reading import read_children, read_create, read_which
from penstock.workflows.steps import fallback_of, policy_of

__all__ = [
    "MAX_CHILDREN",
    "MAX_STEPS",
    "NAME_MAX_CHARS",
    "READING",
    "STEP_NAMES_SHOWN",
    "WORKFLOW_PARAMS",
    "CancelWorkflow",
    "ChildParams",
    "CreateWorkflow",
    "GetWorkflow",
    "ListWorkflows",
    "NewStep",
    "RetryWorkflow",
    "StepKind",
    "StepOptions",
    "WhichWorkflow",
    "WorkflowCancelParams",
    "WorkflowChange",
    "WorkflowCommand",
    "WorkflowCreateParams",
    "WorkflowListParams",
    "WorkflowState",
    "WorkflowStatusParams",
    "child_names",
    "fallback_of",
    "policy_of",
    "read_children",
    "read_create",
    "read_which",
]
