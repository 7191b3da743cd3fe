"""Workflows in Postgres: created, cancelled, retried, read, inside the caller's transaction."""

from typing import Any

from penstock.db.session import Session
from penstock.protocol.caller import seen
from penstock.protocol.checks import read_cursor
from penstock.protocol.errors import WorkflowConflict, WorkflowNotFound
from penstock.protocol.task import State
from penstock.protocol.tenant import own_key
from penstock.protocol.views import view_of
from penstock.runtime.logs import log
from penstock.settings.model import Settings
from penstock.workflows import model
from penstock.workflows.advance import WorkflowRun, insert_steps


async def create_workflow(
    session: Session, command: model.CreateWorkflow, settings: Settings
) -> model.WorkflowAccepted:
    """Create a workflow, or find the one of its key. Raises WorkflowConflict if that has another definition."""
    row = command.key, command.name, command.definition, len(command.steps), command.tenant
    workflow_id: int | None = await session.value("create_workflow", *row)
    if workflow_id is None:
        assert command.key is not None
        rows = await session.fetch("find_workflow", command.key, command.tenant)
        if rows:
            found, definition, state = rows[0]["id"], rows[0]["definition"], model.WorkflowState(rows[0]["state"])
            if definition != command.definition:
                why = f"has the key {command.key!r} and another definition: give this one a key of its own"
                raise WorkflowConflict(found, state, why)
            return model.WorkflowAccepted(found, state, duplicate=True)
        workflow_id = await session.value("create_workflow", *row)  # retention has just removed it
        if workflow_id is None:
            raise WorkflowConflict(
                0, model.WorkflowState.RUNNING, f"with the key {command.key!r} was just made: try again"
            )
    steps = [(workflow_id, number, None, step) for number, step in enumerate(command.steps)]
    started = await insert_steps(session, steps, start={workflow_id})
    if started < sum(not step.after for step in command.steps):
        run = WorkflowRun(session, await session.fetch("hold_workflow", workflow_id), settings)
        await run.start(await session.fetch("find_ready", workflow_id, 0))
        await run.advance()
    return model.WorkflowAccepted(workflow_id, model.WorkflowState.RUNNING, duplicate=False)


async def cancel_workflow(
    session: Session, given: model.WorkflowCancelParams, settings: Settings
) -> model.WorkflowChanged:
    """Cancel all steps that have not ended; if cancelled, do nothing. Raises WorkflowNotFound, WorkflowConflict."""
    run = await _hold(session, given, settings)
    (workflow,) = run.held.values()
    if not workflow.state.final:
        # Locked tasks cannot settle. Those that settled before are recorded first: a workflow that they end is not
        # cancelled.
        await session.fetch("hold_unstarted_steps", workflow.id, True)
        await run.advance()
    if workflow.state in (model.WorkflowState.SUCCESS, model.WorkflowState.FAILED):
        raise WorkflowConflict(workflow.id, workflow.state, f"is {workflow.state}; it cannot be cancelled")
    if workflow.state != model.WorkflowState.CANCELLED:
        workflow.state, workflow.reason, workflow.to_stop = model.WorkflowState.CANCELLED, given.reason, True
        # Written before its steps are cancelled, so that they do not count as failures.
        await run.write()
        await run.advance()
        log.info("workflow_cancelled", workflow=workflow.id, reason=given.reason)
    return model.WorkflowChanged(workflow.id, workflow.state, restarted=0)


async def retry_workflow(
    session: Session, which: model.WorkflowRetryParams, settings: Settings
) -> model.WorkflowChanged:
    """Restart the steps that have not succeeded; if running, do nothing. Raises WorkflowNotFound, WorkflowConflict."""
    run = await _hold(session, which, settings)
    (workflow,) = run.held.values()
    if workflow.state == model.WorkflowState.RUNNING:
        return model.WorkflowChanged(workflow.id, workflow.state, restarted=0)
    if workflow.state not in (model.WorkflowState.FAILED, model.WorkflowState.CANCELLED):
        why = (
            "steps of it still run" if workflow.state == model.WorkflowState.FAILING else "there is nothing left to do"
        )
        raise WorkflowConflict(workflow.id, workflow.state, f"is {workflow.state}; it cannot be retried, for {why}")
    steps = await session.fetch("reopen_steps", workflow.id, workflow.compensated)
    again = [step for step in steps if step["again"]]
    if not again and workflow.compensated:
        why = f"is {workflow.state} and what had succeeded was undone: create a new one"
        raise WorkflowConflict(workflow.id, workflow.state, why)
    childless = run.childless(again)
    kept = {step["number"] for step in childless}
    again = [step for step in again if step["number"] not in kept]
    tasks = [step["task_id"] for step in again if step["task_id"] is not None]
    await session.plan_for(len(tasks))
    restarted = await session.fetch("restart_steps", tasks)
    if lost := len(tasks) - len(restarted):
        why = f"cannot be retried: the records of {lost} of its tasks are no longer kept"
        raise WorkflowConflict(workflow.id, workflow.state, why)
    workflow.open = len(steps)
    workflow.state = model.WorkflowState.FAILING if workflow.compensated else model.WorkflowState.RUNNING
    if not workflow.compensated:
        workflow.reason, workflow.undo = None, None
    await run.write()
    await run.spawn_again(childless)
    await run.start([step for step in again if not step["pending"]])
    await run.advance()
    restarting = len(again) + len(childless)
    log.info("workflow_retried", workflow=workflow.id, steps=restarting)
    return model.WorkflowChanged(workflow.id, workflow.state, restarted=restarting)


async def _hold(session: Session, which: model.Which, settings: Settings) -> WorkflowRun:
    """Lock a workflow and apply its events. Raises WorkflowNotFound."""
    held = await session.fetch("hold_workflow", (await read_workflow(session, which)).id)
    if not held:
        raise _unknown(which)
    run = WorkflowRun(session, held, settings)
    await run.advance()
    return run


async def read_workflow(session: Session, which: model.Which) -> model.Workflow:
    """Raises WorkflowNotFound, also for a workflow of a tenant that the caller may not see."""
    rows = seen(await session.fetch("read_workflow", which.id, which.key, which.tenant))
    if not rows:
        raise _unknown(which)
    return _workflow(rows[0])


def _unknown(which: model.Which) -> WorkflowNotFound:
    return WorkflowNotFound(which.key or "" if which.id is None else which.id)


async def read_steps(session: Session, workflow_id: int, *, after: int, limit: int) -> list[model.Step]:
    """A page of its steps, by number. after: number of the step before the page."""
    rows = await session.fetch("page_steps", workflow_id, after, limit, model.STEP_NAMES_SHOWN)
    return [view_of(model.Step, row, kind=model.StepKind(row["kind"]), state=State(row["state"])) for row in rows]


async def list_workflows(session: Session, wanted: model.WorkflowListParams) -> list[model.Workflow]:
    before = read_cursor(wanted.cursor)
    rows = await session.fetch("list_workflows", before, wanted.limit, wanted.state, wanted.tenant)
    return [_workflow(row) for row in rows]


def _workflow(row: Any) -> model.Workflow:
    return view_of(model.Workflow, row, key=own_key(row["key"]), state=model.WorkflowState(row["state"]))
