"""Parameters of `workflow.*`, whose form :mod:`penstock.workflows` has, with the tasks of steps."""

from __future__ import annotations

from typing import Any

from penstock.protocol.checks import read_cursor, read_id, read_limit, read_reason
from penstock.protocol.errors import InvalidParams
from penstock.protocol.tenant import read_tenant
from penstock.settings.model import Settings
from penstock.workflows.commands import CancelWorkflow, GetWorkflow, ListWorkflows, RetryWorkflow, WorkflowCommand
from penstock.workflows.definition import read_create, read_which, step_task
from penstock.workflows.params import (
    WorkflowCancelParams,
    WorkflowCreateParams,
    WorkflowListParams,
    WorkflowStatusParams,
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
