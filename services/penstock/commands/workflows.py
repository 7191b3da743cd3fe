"""Parameters of `workflow.*`, whose form :mod:`penstock.workflows` has, with the tasks of steps."""

from __future__ import annotations

from typing import Any

from penstock.commands.checks import read_cursor, read_id, read_limit, read_reason
from penstock.commands.enqueue import new_task
from penstock.commands.params import EnqueueParams
from penstock.errors import InvalidParams
from penstock.settings import Settings
from penstock.tasks import NewTask
from penstock.tenants import read_tenant
from penstock.workflows import (
    CancelWorkflow,
    ChildParams,
    GetWorkflow,
    ListWorkflows,
    RetryWorkflow,
    WorkflowCancelParams,
    WorkflowCommand,
    WorkflowCreateParams,
    WorkflowListParams,
    WorkflowStatusParams,
    read_create,
    read_which,
)

_INT4_MAX = 2**31 - 1


def read_workflow_command(values: Any, settings: Settings) -> WorkflowCommand:
    if isinstance(values, WorkflowCreateParams):
        return read_create(values, lambda step: step_task(step, settings))
    if isinstance(values, WorkflowListParams):
        return ListWorkflows(
            values.state, read_limit(values.limit), read_cursor(values.cursor), read_tenant(values.tenant)
        )
    which = read_which(None if values.id is None else read_id(values.id, "id"), values.key, values.tenant)
    if isinstance(values, WorkflowStatusParams):
        after = read_cursor(values.cursor)
        if after is not None and after > _INT4_MAX:
            raise InvalidParams("cursor", f"must be that of a page before, not {values.cursor!r}")
        return GetWorkflow(which, read_limit(values.limit), -1 if after is None else after)
    if isinstance(values, WorkflowCancelParams):
        return CancelWorkflow(which, read_reason(values.reason))
    return RetryWorkflow(which)


def step_task(given: ChildParams, settings: Settings) -> NewTask:
    """The task of a step of a workflow, or of a spawned child. Raises InvalidParams, TooLarge."""
    members = {name: getattr(given, name) for name in _OF_A_STEP}
    return new_task(EnqueueParams(**members), settings)


_OF_A_STEP = tuple(name for name in EnqueueParams.__struct_fields__ if name in ChildParams.__struct_fields__)
