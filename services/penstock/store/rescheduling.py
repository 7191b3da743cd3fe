"""Tasks moved because somebody asks: to another time or priority, or from their end into a new life."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from penstock import metrics
from penstock.store.statements import Statements
from penstock.tasks import State


class Rescheduling(Statements):
    """Moving tasks that wait, restarting those that ended, and what stands in the way of it."""

    async def reschedule(
        self,
        ids: Sequence[int],
        *,
        run_at: datetime | None = None,
        delay_seconds: float | None = None,
        priority: int | None = None,
    ) -> dict[int, State]:
        """Move tasks that wait (WAITING, SCHEDULED, ERROR), what is None staying; returns the state of each moved."""
        rows = await self.fetch("reschedule_tasks", list(ids), run_at, delay_seconds, priority)
        return {row["id"]: State(row["state"]) for row in rows}

    async def restart(self, ids: Sequence[int]) -> dict[int, State]:
        """CRITICAL_ERROR or CANCELLED to a new life; returns the state of each that restarted.

        One whose unique key another task has by now stays as it is: see ``find_key_holder``.
        """
        rows = await self.fetch("restart_tasks", list(ids))
        for row in rows:
            metrics.TRANSITIONS.labels(row["action"], row["state"]).inc()
        return {row["id"]: State(row["state"]) for row in rows}

    async def find_workflow_of(self, task_id: int) -> int | None:
        """The workflow that a settled task is a step of."""
        workflow: int | None = await self.value("find_workflow_of", task_id)
        return workflow

    async def find_key_holder(self, task_id: int) -> int | None:
        """The task that has the unique key of a settled one in its place."""
        holder: int | None = await self.value("find_key_holder", task_id)
        return holder
