"""The methods about workflows."""

from __future__ import annotations

from dataclasses import replace

from penstock.db.context import Context
from penstock.db.session import Session
from penstock.protocol.api_key import Permission
from penstock.protocol.caller import bound_to, check_actions, narrow_tenant, own_tenant, sees
from penstock.protocol.checks import read_cursor, read_id, read_limit, read_reason
from penstock.protocol.errors import InvalidParams, TooLarge, WorkflowConflict, WorkflowNotFound
from penstock.protocol.method import Scope, method
from penstock.protocol.tenant import read_tenant
from penstock.settings.model import Settings
from penstock.workflows import definition, store, views
from penstock.workflows.commands import CancelWorkflow, CreateWorkflow, GetWorkflow, ListWorkflows, WhichWorkflow
from penstock.workflows.params import (
    WorkflowCancelParams,
    WorkflowCreateParams,
    WorkflowListParams,
    WorkflowRetryParams,
    WorkflowStatusParams,
)

_INT4_MAX = 2**31 - 1


def _read_create(given: WorkflowCreateParams, settings: Settings) -> CreateWorkflow:
    return definition.read_create(given, lambda step: definition.step_task(step, settings))


def _narrow_create(command: CreateWorkflow) -> CreateWorkflow:
    actions = set()
    for step in command.steps:
        template = step.options.template  # of a map step's children
        actions |= {step.action, step.undo, None if template is None else template.action}
    check_actions({action for action in actions if action})
    return replace(command, tenant=own_tenant(command.tenant))


@method(
    "workflow.create", permission=Permission.ENQUEUE, scope=Scope.OWN, errors=(WorkflowConflict, TooLarge),
    read=_read_create, narrow=_narrow_create, by_queue=True, savepoint=True,
)  # fmt: skip
async def create(context: Context, command: CreateWorkflow) -> views.WorkflowAccepted:
    """Make tasks that wait for each other; all of them are stored when the answer comes."""
    async with context.transaction() as session:
        created = await store.create_workflow(session, command, context.settings)
    context.wake()
    return views.accepted(created)


def _read_which(given: WorkflowStatusParams | WorkflowCancelParams | WorkflowRetryParams) -> WhichWorkflow:
    workflow_id = None if given.id is None else read_id(given.id, "id")
    return definition.read_which(workflow_id, given.key, given.tenant)


def _narrow_which(which: WhichWorkflow) -> WhichWorkflow:
    return which if which.key is None else replace(which, tenant=own_tenant(which.tenant))


async def _check_seen(session: Session, which: WhichWorkflow) -> None:
    """Raises WorkflowNotFound for another tenant's workflow."""
    if bound_to() is not None and not sees((await store.read_workflow(session, which)).tenant):
        raise WorkflowNotFound(which.id if which.key is None else which.key)  # type: ignore[arg-type]


def _read_status(given: WorkflowStatusParams, _settings: Settings) -> GetWorkflow:
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
async def status(context: Context, command: GetWorkflow) -> views.WorkflowDetail:
    """Show a workflow with a page of its steps."""
    async with context.transaction() as session:
        await _check_seen(session, command.which)
        record = await store.read_workflow(session, command.which)
        counts = await store.count_steps(session, record.id)
        steps = await store.read_steps(session, record.id, command)
    cursor = str(steps[-1].number) if len(steps) == command.limit else None
    return views.detail(record, counts, steps, cursor)


def _read_list(given: WorkflowListParams, _settings: Settings) -> ListWorkflows:
    return ListWorkflows(given.state, read_limit(given.limit), read_cursor(given.cursor), read_tenant(given.tenant))


@method("workflow.list", permission=Permission.READ, scope=Scope.OWN, read=_read_list, narrow=narrow_tenant)
async def list_workflows(context: Context, command: ListWorkflows) -> views.WorkflowPage:
    """List workflows, newest first, without their steps."""
    async with context.transaction() as session:
        records = await store.list_workflows(session, command)
    cursor = str(records[-1].id) if len(records) == command.limit else None
    return views.WorkflowPage([views.workflow(record) for record in records], cursor)


def _read_cancel(given: WorkflowCancelParams, _settings: Settings) -> CancelWorkflow:
    return CancelWorkflow(_read_which(given), read_reason(given.reason))


@method(
    "workflow.cancel", permission=Permission.ADMIN, scope=Scope.OWN, errors=(WorkflowNotFound, WorkflowConflict),
    read=_read_cancel, narrow=_narrow_of_which, by_queue=True, savepoint=True,
)  # fmt: skip
async def cancel(context: Context, command: CancelWorkflow) -> views.WorkflowChanged:
    """Cancel all steps of a workflow that have not ended."""
    async with context.transaction() as session:
        await _check_seen(session, command.which)
        cancelled = await store.cancel_workflow(session, command, context.settings)
    context.wake()
    return views.changed(cancelled)


def _read_retry(given: WorkflowRetryParams, _settings: Settings) -> WhichWorkflow:
    return _read_which(given)


@method(
    "workflow.retry", permission=Permission.ADMIN, scope=Scope.OWN, errors=(WorkflowNotFound, WorkflowConflict),
    read=_read_retry, narrow=_narrow_which, by_queue=True, savepoint=True,
)  # fmt: skip
async def retry(context: Context, which: WhichWorkflow) -> views.WorkflowChanged:
    """Begin a failed or cancelled workflow again, with the steps that have not succeeded."""
    async with context.transaction() as session:
        await _check_seen(session, which)
        retried = await store.retry_workflow(session, which, context.settings)
    context.wake()
    return views.changed(retried)
