"""Reschedule waiting tasks, and restart failed or cancelled ones."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from penstock.db.session import Session
from penstock.protocol.errors import PartOfWorkflow, PayloadGone, StateConflict, UniqueKeyTaken
from penstock.protocol.task import State
from penstock.runtime import metrics


async def reschedule(
    session: Session,
    ids: Sequence[int],
    *,
    run_at: datetime | None = None,
    delay_seconds: float | None = None,
    priority: int | None = None,
) -> dict[int, State]:
    """Change the time or priority of waiting tasks, None keeping it; returns the state of each changed task."""
    rows = await session.fetch("reschedule_tasks", list(ids), run_at, delay_seconds, priority)
    return {row["id"]: State(row["state"]) for row in rows}


async def restart(session: Session, ids: Sequence[int]) -> dict[int, State]:
    """Restart CRITICAL_ERROR or CANCELLED tasks; returns the state of each that restarted.

    A task whose unique key another task has by now is left unchanged: see ``why_not_restarted``.
    """
    rows = await session.fetch("restart_tasks", list(ids))
    for row in rows:
        metrics.TRANSITIONS.labels(row["action"], row["state"]).inc()
    return {row["id"]: State(row["state"]) for row in rows}


async def why_not_restarted(session: Session, task_id: int, state: State, *, payload_gone: bool) -> StateConflict:
    """Why ``restart`` leaves a task unchanged, by its state and whether its payload was removed."""
    if state in (State.CRITICAL_ERROR, State.CANCELLED):
        if payload_gone:
            return PayloadGone(task_id, state)
        workflow = await session.value("find_workflow_of", task_id)
        if workflow is not None:
            return PartOfWorkflow(task_id, state, workflow)
        holder = await session.value("find_key_holder", task_id)
        if holder is not None:
            return UniqueKeyTaken(task_id, state, holder)
    return StateConflict(task_id, state, "retried")
