"""The methods about workflows."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from penstock.api import workflow_views as views
from penstock.api.tenancy import check_workflow
from penstock.settings import Settings
from penstock.store import Session
from penstock.workflows import CancelWorkflow, CreateWorkflow, GetWorkflow, ListWorkflows, RetryWorkflow
from penstock.workflowstore import change_workflow, count_steps, list_workflows, read_steps, read_workflow


class Workflows:
    """Carries out commands about workflows; ``commands`` is what a table of commands takes.

    transaction: opens one. poke: called when tasks were added or settled.
    """

    def __init__(
        self,
        transaction: Callable[[], AbstractAsyncContextManager[Session]],
        poke: Callable[[], None],
        settings: Settings,
    ) -> None:
        self._transaction = transaction
        self._poke = poke
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
        self._poke()
        return views.accepted(changed)

    async def _change(self, command: CancelWorkflow | RetryWorkflow) -> views.WorkflowChanged:
        """Raises WorkflowNotFound, WorkflowConflict."""
        async with self._transaction() as session:
            await check_workflow(session, command.which)
            changed = await change_workflow(session, command, self._settings)
        self._poke()
        return views.changed(changed)

    async def _get(self, command: GetWorkflow) -> views.WorkflowDetail:
        """Raises WorkflowNotFound."""
        async with self._transaction() as session:
            await check_workflow(session, command.which)
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
