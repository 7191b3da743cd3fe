"""The methods about workflows, in Postgres."""

from functools import partial
from typing import Any

from penstock.db.session import Session
from penstock.protocol import answers
from penstock.protocol.answers import StepKind, WorkflowState
from penstock.protocol.api_key import Permission, check_actions, narrow_tenant, seen
from penstock.protocol.checks import read_cursor
from penstock.protocol.errors import TooLarge, WorkflowConflict, WorkflowNotFound
from penstock.protocol.method import Scope, method
from penstock.protocol.record import view_of
from penstock.protocol.task import State
from penstock.protocol.tenant import own_key
from penstock.runtime.logs import log
from penstock.settings.model import Settings
from penstock.workflows import definition, model
from penstock.workflows.advance import WorkflowRun, insert_steps


def _narrow_create(command: model.CreateWorkflow) -> Any:
    actions = set()
    for step in command.steps:
        actions |= {step.action, step.undo, definition.fallback_of(step.on_failure)}
    check_actions({action for action in actions if action})
    return narrow_tenant(command)


def _narrow_which(given: Any) -> Any:
    return given if given.key is None else narrow_tenant(given)


_look = partial(method, permission=Permission.READ, scope=Scope.OWN)
_change = partial(
    method, permission=Permission.ADMIN, scope=Scope.OWN, errors=(WorkflowNotFound, WorkflowConflict),
    narrow=_narrow_which, by_queue=True, savepoint=True, wakes=True,
)  # fmt: skip


@_change(
    "workflow.create", permission=Permission.ENQUEUE, errors=(WorkflowConflict, TooLarge), read=definition.read_create,
    narrow=_narrow_create,
)  # fmt: skip
async def create(session: Session, command: model.CreateWorkflow, settings: Settings) -> answers.WorkflowAccepted:
    """Make tasks that wait for each other; all of them are stored when the answer comes."""
    row = command.key, command.name, command.definition, len(command.steps), command.tenant
    workflow_id: int | None = await session.value("create_workflow", *row)
    if workflow_id is None:
        assert command.key is not None
        rows = await session.fetch("find_workflow", command.key, command.tenant)
        if rows:
            found, definition, state = rows[0]["id"], rows[0]["definition"], WorkflowState(rows[0]["state"])
            if definition != command.definition:
                why = f"has the key {command.key!r} and another definition: give this one a key of its own"
                raise WorkflowConflict(found, state, why)
            return answers.WorkflowAccepted(id=found, state=state, duplicate=True)
        workflow_id = await session.value("create_workflow", *row)  # retention has just removed it
        if workflow_id is None:
            raise WorkflowConflict(0, WorkflowState.RUNNING, f"with the key {command.key!r} was just made: try again")
    steps = [(workflow_id, number, None, step) for number, step in enumerate(command.steps)]
    ends_as = WorkflowState.RUNNING
    started = await insert_steps(session, steps, tenants={workflow_id: command.tenant}, start={workflow_id})
    if started < sum(not step.after for step in command.steps):
        run = WorkflowRun(session, await session.fetch("hold_workflow", workflow_id, None, None), settings)
        await run.start(await session.fetch("find_ready", workflow_id, 0))
        await run.advance()
        ends_as = run.held[workflow_id].state  # it has nothing to do, such as a list without an item
    return answers.WorkflowAccepted(id=workflow_id, state=ends_as, duplicate=False)


@_look("workflow.status", errors=(WorkflowNotFound,), narrow=_narrow_which)
async def status(session: Session, given: model.WorkflowStatusParams) -> answers.WorkflowDetail:
    """Show a workflow with a page of its steps."""
    after = read_cursor(given.cursor)
    workflow = _workflow(*await _find(session, "read_workflow", given))
    counts = {row["state"]: row["count"] for row in await session.fetch("count_steps", workflow.id)}
    page = workflow.id, -1 if after is None else after, given.limit, model.STEP_NAMES_SHOWN
    steps = [
        view_of(answers.Step, row, kind=StepKind(row["kind"]), state=State(row["state"]))
        for row in await session.fetch("page_steps", *page)
    ]
    cursor = str(steps[-1].number) if len(steps) == given.limit else None
    return answers.WorkflowDetail(**workflow, counts=counts, tree=steps, cursor=cursor)


@_look("workflow.list", narrow=narrow_tenant)
async def list_workflows(session: Session, given: model.WorkflowListParams) -> answers.WorkflowPage:
    """List workflows, newest first, without their steps."""
    before = read_cursor(given.cursor)
    rows = await session.fetch("list_workflows", before, given.limit, given.state, given.tenant)
    cursor = str(rows[-1]["id"]) if len(rows) == given.limit else None
    return answers.WorkflowPage(workflows=[_workflow(row) for row in rows], cursor=cursor)


@_change("workflow.cancel")
async def cancel(session: Session, given: model.WorkflowCancelParams, settings: Settings) -> answers.WorkflowChanged:
    """Cancel all steps of a workflow that have not ended."""
    run = await _hold(session, given, settings, starts=False)
    (workflow,) = run.held.values()
    if not workflow.state.final:
        # Locked tasks cannot settle. Those that settled before are recorded first: a workflow that they end is not
        # cancelled.
        await session.fetch("hold_unstarted_steps", workflow.id, True)
        await run.advance()
    if workflow.state in (WorkflowState.SUCCESS, WorkflowState.FAILED):
        raise WorkflowConflict(workflow.id, workflow.state, f"is {workflow.state}; it cannot be cancelled")
    if workflow.state != WorkflowState.CANCELLED:
        workflow.state, workflow.reason, workflow.to_stop = WorkflowState.CANCELLED, given.reason, True
        # Written before its steps are cancelled, so that they do not count as failures.
        await run.write()
        await run.advance()
        log.info("workflow_cancelled", workflow=workflow.id, reason=given.reason)
    return answers.WorkflowChanged(id=workflow.id, state=workflow.state, restarted=0)


@_change("workflow.retry")
async def retry(session: Session, given: model.WorkflowRetryParams, settings: Settings) -> answers.WorkflowChanged:
    """Run the steps of a failed or cancelled workflow that have not succeeded again."""
    run = await _hold(session, given, settings)
    (workflow,) = run.held.values()
    if workflow.state == WorkflowState.RUNNING:
        return answers.WorkflowChanged(id=workflow.id, state=workflow.state, restarted=0)
    if workflow.state not in (WorkflowState.FAILED, WorkflowState.CANCELLED):
        why = "steps of it still run" if workflow.state == WorkflowState.FAILING else "there is nothing left to do"
        raise WorkflowConflict(workflow.id, workflow.state, f"is {workflow.state}; it cannot be retried, for {why}")
    await session.plan_for(workflow.steps)
    steps = await session.fetch("reopen_steps", workflow.id, workflow.compensated)
    again = [step for step in steps if step["again"]]
    if not again and workflow.compensated:
        why = f"is {workflow.state} and what had succeeded was undone: create a new one"
        raise WorkflowConflict(workflow.id, workflow.state, why)
    childless = [step for step in again if step["refused"] is not None]
    again = [step for step in again if step["refused"] is None]
    tasks = [step["task_id"] for step in again if step["task_id"] is not None]
    restarted = await session.fetch("restart_steps", tasks, workflow.compensated)
    if lost := len(tasks) - len(restarted):
        why = f"cannot be retried: the records or payloads of {lost} of its tasks are no longer kept"
        raise WorkflowConflict(workflow.id, workflow.state, why)
    workflow.open = len(steps)
    workflow.state = WorkflowState.FAILING if workflow.compensated else WorkflowState.RUNNING
    if not workflow.compensated:
        workflow.reason, workflow.undo = None, None
    await run.write()
    await run.spawn_again(childless)
    await run.start([step for step in again if not step["pending"]])
    await run.advance()
    restarting = len(again) + len(childless)
    log.info("workflow_retried", workflow=workflow.id, steps=restarting)
    return answers.WorkflowChanged(id=workflow.id, state=workflow.state, restarted=restarting)


async def _hold(session: Session, which: model.Which, settings: Settings, *, starts: bool = True) -> WorkflowRun:
    """Lock a workflow and apply its events. starts: also what follows. Raises WorkflowNotFound."""
    run = WorkflowRun(session, await _find(session, "hold_workflow", which), settings)
    run.starts = starts
    await run.advance()
    return run


async def _find(session: Session, statement: str, which: model.Which) -> list[Any]:
    """The row of a workflow. Raises WorkflowNotFound, also for a workflow of a tenant that the caller may not see."""
    rows = seen(await session.fetch(statement, which.id, which.key, which.tenant))
    if not rows:
        raise WorkflowNotFound(which.key or "" if which.id is None else which.id)
    return rows


def _workflow(row: Any) -> answers.Workflow:
    return view_of(answers.Workflow, row, key=own_key(row["key"]), state=WorkflowState(row["state"]))
