"""Workflows in Postgres: made, cancelled, begun again, looked at, inside the caller's transaction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from penstock.db.session import Session
from penstock.protocol.errors import WorkflowConflict, WorkflowNotFound
from penstock.protocol.task import State
from penstock.protocol.tenant import own_key
from penstock.runtime.logs import get_logger
from penstock.settings.model import Settings
from penstock.workflows.advance import Advanced, Mover, insert_steps
from penstock.workflows.commands import (
    CancelWorkflow,
    CreateWorkflow,
    GetWorkflow,
    ListWorkflows,
    WhichWorkflow,
)
from penstock.workflows.params import STEP_NAMES_SHOWN, WorkflowState

log = get_logger()


@dataclass(frozen=True, slots=True)
class WorkflowRecord:
    """A workflow as it stands. steps: those made so far; open: those not done. compensated: undoing has begun."""

    id: int
    key: str | None
    name: str
    state: WorkflowState
    steps: int
    open: int
    reason: str | None
    compensated: bool
    created_at: datetime
    updated_at: datetime
    finished_at: datetime | None
    tenant: str | None


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step. after: names of predecessors, the first of ``after_count``. parent: the step that made it."""

    number: int
    name: str
    kind: str
    action: str | None
    task_id: int | None
    state: State
    reason: str | None
    parent: str | None
    children: int
    open_children: int
    after: Sequence[str]
    after_count: int


@dataclass(frozen=True, slots=True)
class Changed:
    """What became of a request. duplicate: the workflow was there. restarted: steps that begin again."""

    id: int
    state: WorkflowState
    duplicate: bool = False
    restarted: int = 0


async def create_workflow(session: Session, command: CreateWorkflow, settings: Settings) -> Changed:
    """Make a workflow, or find the one of its key. Raises WorkflowConflict where that has another definition."""
    workflow_id = await _insert(session, command)
    if workflow_id is None:
        assert command.key is not None
        rows = await session.fetch("find_workflow", command.key, command.tenant)
        if rows:
            found, definition, state = rows[0]["id"], rows[0]["definition"], WorkflowState(rows[0]["state"])
            if definition != command.definition:
                raise WorkflowConflict(
                    found, state,
                    f"has the key {command.key!r} and another definition: give this one a key of its own",
                )  # fmt: skip
            return Changed(found, state, duplicate=True)
        workflow_id = await _insert(session, command)  # retention has just removed it
        if workflow_id is None:
            raise WorkflowConflict(0, WorkflowState.RUNNING, f"with the key {command.key!r} was just made: try again")
    steps = [(workflow_id, number, None, step) for number, step in enumerate(command.steps)]
    started = await insert_steps(session, steps, start={workflow_id})
    if started < sum(not step.after for step in command.steps):
        mover = Mover(session, await session.fetch("hold_workflow", workflow_id), settings)
        await mover.start(await session.fetch("find_ready", workflow_id, 0))
        await mover.advance()
    return Changed(workflow_id, WorkflowState.RUNNING)


async def _insert(session: Session, command: CreateWorkflow) -> int | None:
    made: int | None = await session.value(
        "create_workflow", command.key, command.name, command.definition, len(command.steps), command.tenant
    )
    return made


async def cancel_workflow(session: Session, command: CancelWorkflow, settings: Settings) -> Changed:
    """Cancel all that has not ended; a workflow that is cancelled already stays so.

    Raises WorkflowNotFound, WorkflowConflict.
    """
    mover = await _hold(session, command.which, settings)
    (flow,) = mover.flows.values()
    if not flow.state.final:
        # Once its tasks are locked none of them can settle, and what has settled until then is noted before anything is
        # cancelled: a workflow with nothing left to cancel has ended, and is not cancelled.
        await session.fetch("hold_unstarted_steps", flow.id, True)
        await mover.advance()
    if flow.state in (WorkflowState.SUCCESS, WorkflowState.FAILED):
        raise WorkflowConflict(flow.id, flow.state, f"is {flow.state}; it cannot be cancelled")
    if flow.state != WorkflowState.CANCELLED:
        flow.state, flow.reason, flow.to_stop = WorkflowState.CANCELLED, command.reason, True
        # Before its steps are: what is cancelled with it must not count as a failure of its own.
        await mover.write()
        await mover.advance()
        log.info("workflow_cancelled", workflow=flow.id, reason=command.reason)
    return Changed(flow.id, flow.state)


async def retry_workflow(session: Session, which: WhichWorkflow, settings: Settings) -> Changed:
    """Begin again with what has not succeeded; a running workflow is left unchanged.

    Raises WorkflowNotFound, WorkflowConflict.
    """
    mover = await _hold(session, which, settings)
    (flow,) = mover.flows.values()
    if flow.state == WorkflowState.RUNNING:
        return Changed(flow.id, flow.state)
    if flow.state not in (WorkflowState.FAILED, WorkflowState.CANCELLED):
        why = "steps of it still run" if flow.state == WorkflowState.FAILING else "there is nothing left to do"
        raise WorkflowConflict(flow.id, flow.state, f"is {flow.state}; it cannot be retried, for {why}")
    steps = await session.fetch("reopen_steps", flow.id, flow.compensated)
    again = [step for step in steps if step["again"]]
    if not again and flow.compensated:
        raise WorkflowConflict(
            flow.id, flow.state, f"is {flow.state} and what had succeeded was undone: create a new one"
        )
    childless, again = mover.split_childless(again)
    tasks = [step["task_id"] for step in again if step["task_id"] is not None]
    await session.plan_for(len(tasks))
    restarted = await session.fetch("restart_steps", tasks)
    if len(restarted) != len(tasks):
        raise WorkflowConflict(
            flow.id, flow.state,
            f"cannot be retried: the records of {len(tasks) - len(restarted)} of its tasks are no longer kept",
        )  # fmt: skip
    flow.open = len(steps)
    flow.state = WorkflowState.FAILING if flow.compensated else WorkflowState.RUNNING
    if not flow.compensated:
        flow.reason, flow.undo = None, None
    await mover.write()
    await mover.spawn_again(childless)
    await mover.start([step for step in again if not step["pending"]])
    await mover.advance()
    restarting = len(again) + len(childless)
    log.info("workflow_retried", workflow=flow.id, steps=restarting)
    return Changed(flow.id, flow.state, restarted=restarting)


async def _hold(session: Session, which: WhichWorkflow, settings: Settings) -> Mover:
    """Lock a workflow and take note of all that has happened to it. Raises WorkflowNotFound."""
    workflow_id = which.id
    if workflow_id is None:
        rows = await session.fetch("find_workflow", which.key, which.tenant)
        workflow_id = rows[0]["id"] if rows else None
    held = await session.fetch("hold_workflow", workflow_id) if workflow_id is not None else []
    if not held:
        raise WorkflowNotFound(which.id if which.key is None else which.key)  # type: ignore[arg-type]
    mover = Mover(session, held, settings)
    await mover.advance()
    return mover


async def find_told(session: Session, *, after: int, limit: int) -> list[int]:
    """Workflows that have events, by id, from behind ``after``."""
    return [row["workflow_id"] for row in await session.fetch("find_told_workflows", after, limit)]


async def advance_workflows(session: Session, ids: Sequence[int], settings: Settings) -> Advanced:
    """Move these workflows on, inside a transaction, as far as nobody else is at them."""
    held = await session.fetch("hold_workflows", list(ids))
    return await Mover(session, held, settings).advance() if held else Advanced()


async def read_workflow(session: Session, which: WhichWorkflow) -> WorkflowRecord:
    """Raises WorkflowNotFound."""
    rows = await session.fetch("read_workflow", which.id, which.key, which.tenant)
    if not rows:
        raise WorkflowNotFound(which.id if which.key is None else which.key)  # type: ignore[arg-type]
    return _record(rows[0])


async def read_steps(session: Session, workflow_id: int, command: GetWorkflow) -> list[StepRecord]:
    """A page of its steps, by number."""
    rows = await session.fetch("page_steps", workflow_id, command.after, command.limit, STEP_NAMES_SHOWN)
    return [
        StepRecord(**{name: row[name] for name in StepRecord.__slots__} | {"state": State(row["state"])})
        for row in rows
    ]


async def count_steps(session: Session, workflow_id: int) -> dict[str, int]:
    """How many steps there are by state, as last seen."""
    return {row["state"]: row["count"] for row in await session.fetch("count_steps", workflow_id)}


async def list_workflows(session: Session, command: ListWorkflows) -> list[WorkflowRecord]:
    """Newest first."""
    rows = await session.fetch("list_workflows", command.before, command.limit, command.state, command.tenant)
    return [_record(row) for row in rows]


def _record(row: Any) -> WorkflowRecord:
    values = {name: row[name] for name in WorkflowRecord.__slots__}
    return WorkflowRecord(**values | {"state": WorkflowState(row["state"]), "key": own_key(row["key"])})
