"""The methods about workflows."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from penstock.db.context import Context
from penstock.db.session import Session
from penstock.protocol.api_key import Permission
from penstock.protocol.caller import bound_to, check_actions, narrow_tenant, own_tenant, sees
from penstock.protocol.checks import check_page, read_cursor, read_id, read_limit, read_reason
from penstock.protocol.errors import InvalidParams, TooLarge, WorkflowConflict, WorkflowNotFound
from penstock.protocol.method import Scope, method
from penstock.protocol.tenant import read_tenant
from penstock.workflows import definition, model, store
from penstock.workflows.model import CancelWorkflow, CreateWorkflow, GetWorkflow, WhichWorkflow

_INT4_MAX = 2**31 - 1


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


def _read_which(
    given: model.WorkflowStatusParams | model.WorkflowCancelParams | model.WorkflowRetryParams,
) -> WhichWorkflow:
    workflow_id = None if given.id is None else read_id(given.id, "id")
    return definition.read_which(workflow_id, given.key, given.tenant)


def _narrow_which(which: WhichWorkflow) -> WhichWorkflow:
    return which if which.key is None else replace(which, tenant=own_tenant(which.tenant))


async def _check_seen(session: Session, which: WhichWorkflow) -> None:
    """Raises WorkflowNotFound for another tenant's workflow."""
    if bound_to() is not None and not sees((await store.read_workflow(session, which)).tenant):
        raise WorkflowNotFound(which.given)


def _read_status(given: model.WorkflowStatusParams) -> GetWorkflow:
    which, after = _read_which(given), read_cursor(given.cursor)
    if after is not None and after > _INT4_MAX:
        raise InvalidParams("cursor", f"must be that of a page before, not {given.cursor!r}")
    return GetWorkflow(which, read_limit(given.limit), -1 if after is None else after)


def _narrow_of_which(command: GetWorkflow | CancelWorkflow) -> GetWorkflow | CancelWorkflow:
    return replace(command, which=_narrow_which(command.which))


@method(
    "workflow.status", permission=Permission.READ, scope=Scope.OWN, errors=(WorkflowNotFound,), read=_read_status,
    narrow=_narrow_of_which,
)  # fmt: skip
async def status(context: Context, command: GetWorkflow) -> model.WorkflowDetail:
    """Show a workflow with a page of its steps."""
    async with context.transaction() as session:
        await _check_seen(session, command.which)
        workflow = await store.read_workflow(session, command.which)
        counts = await store.count_steps(session, workflow.id)
        steps = await store.read_steps(session, workflow.id, command)
    cursor = str(steps[-1].number) if len(steps) == command.limit else None
    return model.WorkflowDetail(**msgspec.structs.asdict(workflow), counts=counts, tree=steps, cursor=cursor)


def _check_list(given: model.WorkflowListParams) -> model.WorkflowListParams:
    check_page(given.limit, given.cursor)
    read_tenant(given.tenant)
    return given


@method("workflow.list", permission=Permission.READ, scope=Scope.OWN, read=_check_list, narrow=narrow_tenant)
async def list_workflows(context: Context, given: model.WorkflowListParams) -> model.WorkflowPage:
    """List workflows, newest first, without their steps."""
    async with context.transaction() as session:
        found = await store.list_workflows(session, given)
    return model.WorkflowPage(found, str(found[-1].id) if len(found) == given.limit else None)


def _read_cancel(given: model.WorkflowCancelParams) -> CancelWorkflow:
    return CancelWorkflow(_read_which(given), read_reason(given.reason))


@method(
    "workflow.cancel", permission=Permission.ADMIN, scope=Scope.OWN, errors=(WorkflowNotFound, WorkflowConflict),
    read=_read_cancel, narrow=_narrow_of_which, by_queue=True, savepoint=True,
)  # fmt: skip
async def cancel(context: Context, command: CancelWorkflow) -> model.WorkflowChanged:
    """Cancel all steps of a workflow that have not ended."""
    async with context.transaction() as session:
        await _check_seen(session, command.which)
        cancelled = await store.cancel_workflow(session, command, context.settings)
    context.wake()
    return cancelled


def _read_retry(given: model.WorkflowRetryParams) -> WhichWorkflow:
    return _read_which(given)


@method(
    "workflow.retry", permission=Permission.ADMIN, scope=Scope.OWN, errors=(WorkflowNotFound, WorkflowConflict),
    read=_read_retry, narrow=_narrow_which, by_queue=True, savepoint=True,
)  # fmt: skip
async def retry(context: Context, which: WhichWorkflow) -> model.WorkflowChanged:
    """Begin a failed or cancelled workflow again, with the steps that have not succeeded."""
    async with context.transaction() as session:
        await _check_seen(session, which)
        retried = await store.retry_workflow(session, which, context.settings)
    context.wake()
    return retried
