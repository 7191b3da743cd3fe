"""The methods about workflows."""

from dataclasses import replace
from typing import TypeVar

import msgspec

from penstock.db.context import Context
from penstock.db.session import Session
from penstock.protocol.api_key import Permission
from penstock.protocol.caller import bound_to, check_actions, narrow_tenant, own_tenant, sees
from penstock.protocol.checks import read_cursor
from penstock.protocol.errors import TooLarge, WorkflowConflict, WorkflowNotFound
from penstock.protocol.method import Scope, method
from penstock.workflows import definition, model, store
from penstock.workflows.model import CreateWorkflow

Which = TypeVar("Which", model.WorkflowStatusParams, model.WorkflowCancelParams, model.WorkflowRetryParams)


def _narrow_create(command: CreateWorkflow) -> CreateWorkflow:
    actions = set()
    for step in command.steps:
        template = step.options.template  # of a map step's children
        actions |= {step.action, step.undo, None if template is None else template.action}
    check_actions({action for action in actions if action})
    return replace(command, tenant=own_tenant(command.tenant))


@method(
    "workflow.create", permission=Permission.ENQUEUE, scope=Scope.OWN, errors=(WorkflowConflict, TooLarge),
    read=definition.read_create, narrow=_narrow_create, by_queue=True, savepoint=True,
)  # fmt: skip
async def create(context: Context, command: CreateWorkflow) -> model.WorkflowAccepted:
    """Make tasks that wait for each other; all of them are stored when the answer comes."""
    async with context.transaction() as session:
        created = await store.create_workflow(session, command, context.settings)
    context.wake()
    return created


def _narrow_which(given: Which) -> Which:
    return given if given.key is None else narrow_tenant(given)


async def _check_seen(session: Session, which: model.Which) -> None:
    """Raises WorkflowNotFound for another tenant's workflow."""
    if bound_to() is not None and not sees((await store.read_workflow(session, which)).tenant):
        raise WorkflowNotFound(which.key or "" if which.id is None else which.id)


@method(
    "workflow.status", permission=Permission.READ, scope=Scope.OWN, errors=(WorkflowNotFound,),
    narrow=_narrow_which,
)  # fmt: skip
async def status(context: Context, given: model.WorkflowStatusParams) -> model.WorkflowDetail:
    """Show a workflow with a page of its steps."""
    after = read_cursor(given.cursor)
    async with context.transaction() as session:
        await _check_seen(session, given)
        workflow = await store.read_workflow(session, given)
        counts = await store.count_steps(session, workflow.id)
        steps = await store.read_steps(session, workflow.id, after=-1 if after is None else after, limit=given.limit)
    cursor = str(steps[-1].number) if len(steps) == given.limit else None
    return model.WorkflowDetail(**msgspec.structs.asdict(workflow), counts=counts, tree=steps, cursor=cursor)


@method("workflow.list", permission=Permission.READ, scope=Scope.OWN, narrow=narrow_tenant)
async def list_workflows(context: Context, given: model.WorkflowListParams) -> model.WorkflowPage:
    """List workflows, newest first, without their steps."""
    async with context.transaction() as session:
        found = await store.list_workflows(session, given)
    return model.WorkflowPage(found, str(found[-1].id) if len(found) == given.limit else None)


@method(
    "workflow.cancel", permission=Permission.ADMIN, scope=Scope.OWN, errors=(WorkflowNotFound, WorkflowConflict),
    narrow=_narrow_which, by_queue=True, savepoint=True,
)  # fmt: skip
async def cancel(context: Context, given: model.WorkflowCancelParams) -> model.WorkflowChanged:
    """Cancel all steps of a workflow that have not ended."""
    async with context.transaction() as session:
        await _check_seen(session, given)
        cancelled = await store.cancel_workflow(session, given, context.settings)
    context.wake()
    return cancelled


@method(
    "workflow.retry", permission=Permission.ADMIN, scope=Scope.OWN, errors=(WorkflowNotFound, WorkflowConflict),
    narrow=_narrow_which, by_queue=True, savepoint=True,
)  # fmt: skip
async def retry(context: Context, given: model.WorkflowRetryParams) -> model.WorkflowChanged:
    """Begin a failed or cancelled workflow again, with the steps that have not succeeded."""
    async with context.transaction() as session:
        await _check_seen(session, given)
        retried = await store.retry_workflow(session, given, context.settings)
    context.wake()
    return retried
