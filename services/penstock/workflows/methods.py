"""The methods about workflows."""

from dataclasses import replace
from typing import TypeVar

import msgspec

from penstock.db.session import Session
from penstock.protocol.api_key import Permission
from penstock.protocol.caller import check_actions, narrow_tenant, own_tenant
from penstock.protocol.checks import read_cursor
from penstock.protocol.errors import TooLarge, WorkflowConflict, WorkflowNotFound
from penstock.protocol.method import Scope, method
from penstock.protocol.task import State
from penstock.settings.model import Settings
from penstock.workflows import definition, model, store

Which = TypeVar("Which", model.WorkflowStatusParams, model.WorkflowCancelParams, model.WorkflowRetryParams)


def _narrow_create(command: model.CreateWorkflow) -> model.CreateWorkflow:
    actions = set()
    for step in command.steps:
        template = step.options.template  # of a map step's children
        actions |= {step.action, step.undo, None if template is None else template.action}
    check_actions({action for action in actions if action})
    return replace(command, tenant=own_tenant(command.tenant))


@method(
    "workflow.create", permission=Permission.ENQUEUE, scope=Scope.OWN, errors=(WorkflowConflict, TooLarge),
    read=definition.read_create, narrow=_narrow_create, by_queue=True, savepoint=True, wakes=True,
)  # fmt: skip
async def create(session: Session, command: model.CreateWorkflow, settings: Settings) -> model.WorkflowAccepted:
    """Make tasks that wait for each other; all of them are stored when the answer comes."""
    return await store.create_workflow(session, command, settings)


def _narrow_which(given: Which) -> Which:
    return given if given.key is None else narrow_tenant(given)


@method(
    "workflow.status", permission=Permission.READ, scope=Scope.OWN, errors=(WorkflowNotFound,),
    narrow=_narrow_which,
)  # fmt: skip
async def status(session: Session, given: model.WorkflowStatusParams) -> model.WorkflowDetail:
    """Show a workflow with a page of its steps."""
    after = read_cursor(given.cursor)
    workflow = await store.read_workflow(session, given)
    counts = {State(row["state"]): row["count"] for row in await session.fetch("count_steps", workflow.id)}
    steps = await store.read_steps(session, workflow.id, after=-1 if after is None else after, limit=given.limit)
    cursor = str(steps[-1].number) if len(steps) == given.limit else None
    return model.WorkflowDetail(**msgspec.structs.asdict(workflow), counts=counts, tree=steps, cursor=cursor)


@method("workflow.list", permission=Permission.READ, scope=Scope.OWN, narrow=narrow_tenant)
async def list_workflows(session: Session, given: model.WorkflowListParams) -> model.WorkflowPage:
    """List workflows, newest first, without their steps."""
    found = await store.list_workflows(session, given)
    return model.WorkflowPage(found, str(found[-1].id) if len(found) == given.limit else None)


@method(
    "workflow.cancel", permission=Permission.ADMIN, scope=Scope.OWN, errors=(WorkflowNotFound, WorkflowConflict),
    narrow=_narrow_which, by_queue=True, savepoint=True, wakes=True,
)  # fmt: skip
async def cancel(session: Session, given: model.WorkflowCancelParams, settings: Settings) -> model.WorkflowChanged:
    """Cancel all steps of a workflow that have not ended."""
    return await store.cancel_workflow(session, given, settings)


@method(
    "workflow.retry", permission=Permission.ADMIN, scope=Scope.OWN, errors=(WorkflowNotFound, WorkflowConflict),
    narrow=_narrow_which, by_queue=True, savepoint=True, wakes=True,
)  # fmt: skip
async def retry(session: Session, given: model.WorkflowRetryParams, settings: Settings) -> model.WorkflowChanged:
    """Begin a failed or cancelled workflow again, with the steps that have not succeeded."""
    return await store.retry_workflow(session, given, settings)
