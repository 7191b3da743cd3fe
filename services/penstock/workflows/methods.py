"""The methods about workflows."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from penstock.db.session import Session
from penstock.protocol.caller import bound_to, sees
from penstock.protocol.errors import WorkflowNotFound
from penstock.settings.model import Settings
from penstock.workflows import views
from penstock.workflows.commands import (
    CancelWorkflow,
    CreateWorkflow,
    GetWorkflow,
    ListWorkflows,
    RetryWorkflow,
    WhichWorkflow,
)
from penstock.workflows.store import change_workflow, count_steps, list_workflows, read_steps, read_workflow


class Workflows:
    """Carries out commands about workflows; ``commands`` is what a table of commands takes.

    transaction: opens one. wake: called when tasks were added or settled.
    """

    def __init__(
        self,
        transaction: Callable[[], AbstractAsyncContextManager[Session]],
        wake: Callable[[], None],
        settings: Settings,
    ) -> None:
        self._transaction = transaction
        self._wake = wake
        self._settings = settings

    @property
    def commands(self) -> dict[type, Callable[[Any], Awaitable[Any]]]:
        return {
            CreateWorkflow: self._create,
            CancelWorkflow: self._change,
            RetryWorkflow: self._change,
            GetWorkflow: self._get,
            ListWorkflows: self._list,
        }

    async def _create(self, command: CreateWorkflow) -> views.WorkflowAccepted:
        """Raises WorkflowConflict."""
        async with self._transaction() as session:
            changed = await change_workflow(session, command, self._settings)
        self._wake()
        return views.accepted(changed)

    async def _change(self, command: CancelWorkflow | RetryWorkflow) -> views.WorkflowChanged:
        """Raises WorkflowNotFound, WorkflowConflict."""
        async with self._transaction() as session:
            await _check_seen(session, command.which)
            changed = await change_workflow(session, command, self._settings)
        self._wake()
        return views.changed(changed)

    async def _get(self, command: GetWorkflow) -> views.WorkflowDetail:
        """Raises WorkflowNotFound."""
        async with self._transaction() as session:
            await _check_seen(session, command.which)
            record = await read_workflow(session, command.which)
            counts = await count_steps(session, record.id)
            steps = await read_steps(session, record.id, command)
        cursor = str(steps[-1].number) if len(steps) == command.limit else None
        return views.detail(record, counts, steps, cursor)

    async def _list(self, command: ListWorkflows) -> views.WorkflowPage:
        async with self._transaction() as session:
            records = await list_workflows(session, command)
        cursor = str(records[-1].id) if len(records) == command.limit else None
        return views.WorkflowPage([views.workflow(record) for record in records], cursor)


async def _check_seen(session: Session, which: WhichWorkflow) -> None:
    """Raises WorkflowNotFound for another tenant's workflow."""
    if bound_to() is not None and not sees((await read_workflow(session, which)).tenant):
        raise WorkflowNotFound(which.id if which.key is None else which.key)  # type: ignore[arg-type]
