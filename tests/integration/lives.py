"""Workflows lived through by hand: what a scheduler, a worker, a resulter and a supervisor would do, without queues."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from penstock.db.context import within
from penstock.db.pool import Store
from penstock.db.session import Session
from penstock.methods.table import METHODS, read_command
from penstock.protocol.answers import Step, WorkflowDetail
from penstock.protocol.reports import NO_HINTS, Failed, Hints, Report, Succeeded
from penstock.protocol.task import Claimed, State
from penstock.results.apply import apply_reports
from penstock.settings.model import Settings
from penstock.tasks import claim as claims
from penstock.workflows.advance import AdvanceSummary
from penstock.workflows.advancer import advance_workflows


class Spawned(Exception):
    """Raised by a handler of these tests: its result, and tasks that come with it."""

    def __init__(self, result: Any, children: Sequence[dict[str, Any]]) -> None:
        super().__init__()
        self.result = result
        self.children = children


class Broken(Exception):
    """Raised by a handler of these tests: it has failed permanently."""


Work = Callable[[str, Any], Any]


async def carry_out(session: Session, settings: Settings, method: str, **params: Any) -> Any:
    """Carry out a method in a session of the caller's."""
    command = read_command(method, msgspec.json.encode(params), settings)
    return await METHODS[method].carry_out(within(session, settings), command)


class Lives:
    def __init__(self, store: Store, settings: Settings) -> None:
        self.store = store
        self.settings = settings
        self.ran: list[tuple[str, Any]] = []

    async def ask(self, method: str, **params: Any) -> Any:
        """Carry out a change, as the api would."""
        async with self.store.transaction() as session:
            return await carry_out(session, self.settings, method, **params)

    async def create(self, **params: Any) -> int:
        return (await self.ask("workflow.create", **params)).id

    async def advance(self, limit: int = 100) -> int:
        """Until no workflow has events; returns how many rounds it took."""
        rounds = 0
        while await self.advance_once(limit):
            rounds += 1
        return rounds

    async def advance_once(self, limit: int = 100) -> AdvanceSummary | None:
        async with self.store.transaction() as session:
            return await self.advance_in(session, limit)

    async def advance_in(self, session: Session, limit: int) -> AdvanceSummary | None:
        """Inside a transaction of the caller's; None when no workflow has events."""
        told = [row["workflow_id"] for row in await session.fetch("find_told_workflows", 0, limit)]
        return await advance_workflows(session, told, self.settings) if told else None

    async def claim(self, limit: int = 1000) -> list[Claimed]:
        async with self.store.session() as session:
            batch = await claims.claim(session, limit)
            if batch is None:
                return []
            await claims.confirm(session, batch.id)
            return batch.tasks

    async def report(self, *reports: Report) -> None:
        async with self.store.transaction() as session:
            await apply_reports(session, reports, self.settings)

    async def work(self, tasks: Sequence[Claimed], handler: Work) -> None:
        """Run tasks and report the outcomes, all in one transaction."""
        reports: list[Report] = []
        for task in tasks:
            payload = json.loads(task.payload)
            self.ran.append((task.action, payload))
            try:
                result = handler(task.action, payload)
            except Spawned as told:
                text = json.dumps(list(told.children))
                reports.append(Succeeded(task.id, task.claim, None, json.dumps(told.result), text))
            except Broken as exc:
                error = json.dumps({"code": -32000, "message": str(exc)})
                reports.append(Failed(task.id, task.claim, None, error, Hints(final=True)))
            except ArithmeticError as exc:  # tried again
                error = json.dumps({"code": -32000, "message": str(exc)})
                reports.append(Failed(task.id, task.claim, None, error, NO_HINTS))
            else:
                reports.append(Succeeded(task.id, task.claim, None, json.dumps(result)))
        await self.report(*reports)

    async def live(self, handler: Work = lambda action, payload: None) -> None:
        """Run until there is nothing left to run."""
        while True:
            await self.advance()
            tasks = await self.claim()
            if not tasks:
                return
            await self.work(tasks, handler)

    async def look(self, workflow_id: int, cursor: str | None = None) -> WorkflowDetail:
        params = {"id": workflow_id, "limit": 1000, "cursor": cursor}
        async with self.store.session() as session:
            found: WorkflowDetail = await carry_out(session, self.settings, "workflow.status", **params)
            return found

    async def steps(self, workflow_id: int) -> dict[str, Step]:
        page = await self.look(workflow_id)
        steps = page.tree
        while page.cursor is not None:
            page = await self.look(workflow_id, page.cursor)
            steps += page.tree
        return {step.name: step for step in steps}

    async def counts(self, workflow_id: int) -> dict[str, int]:
        async with self.store.session() as session:
            return {State(row["state"]): row["count"] for row in await session.fetch("count_steps", workflow_id)}
