"""Restart failed or cancelled tasks; why a task could not be changed."""

from collections.abc import Sequence
from typing import Any

from penstock.db.session import Session
from penstock.protocol.errors import StateConflict, TaskNotFound
from penstock.protocol.task import State
from penstock.runtime import metrics


async def restart(session: Session, ids: Sequence[int]) -> dict[int, State]:
    """Restart CRITICAL_ERROR or CANCELLED tasks; returns the state of each that restarted; see ``why_unchanged``."""
    rows = await session.fetch("restart_tasks", list(ids))
    for row in rows:
        metrics.TRANSITIONS.labels(row["action"], row["state"]).inc()
    return {row["id"]: State(row["state"]) for row in rows}


async def why_unchanged(session: Session, task_id: int, verb: str) -> TaskNotFound | StateConflict:
    """Why a task could not be changed. verb: such as cancelled."""
    rows = await session.fetch("read_states", [task_id])
    if not rows:
        return TaskNotFound(task_id)
    state = State(rows[0]["state"])
    reason, more = "", dict[str, Any]()
    if verb != "retried" or state not in (State.CRITICAL_ERROR, State.CANCELLED):
        pass
    elif rows[0]["payload_gone"]:
        reason = ", as its payload is gone (PENSTOCK_PAYLOAD_RETENTION_SECONDS): enqueue it again"
        more = {"payload_gone": True}
    elif (workflow := await session.value("find_workflow_of", task_id)) is not None:
        reason = f" alone, as it is a step of workflow {workflow}: use workflow.retry"
        more = {"workflow": workflow}
    elif (holder := await session.value("find_key_holder", task_id)) is not None:
        reason = f", as task {holder} now has its unique key"
        more = {"holder": holder}
    return StateConflict(task_id, state, verb, reason, **more)
