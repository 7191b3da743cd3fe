"""Advance workflows as their steps settle.

A resulter that settles a few steps starts what follows them itself. A supervisor is woken where many have settled or
the resulter could not, and looks once a second in case that was lost. One process at a time has a workflow.
"""

import asyncio
import random
from collections.abc import Sequence
from time import monotonic

from penstock.db.notify import WORKFLOWS, Listener, Notifier
from penstock.db.pool import Store
from penstock.db.session import Session
from penstock.protocol.errors import PayloadUnavailable, PenstockError, Unavailable
from penstock.runtime import metrics
from penstock.runtime.halving import in_halves
from penstock.runtime.logs import log
from penstock.runtime.periodic import is_set_within
from penstock.settings.model import Settings
from penstock.workflows.advance import AdvanceSummary, WorkflowRun

LOOK_SECONDS = 1.0
_WORKFLOWS_AT_ONCE = 100
_HELD_PAUSE_SECONDS = 0.02
_PUT_OFF_SECONDS = 5.0  # each look at one behind a lock costs the others its wait
_FAILED_SECONDS = 30.0  # at one whose payloads cannot be read now, up to the time that S3 is given to answer


async def advance_workflows(session: Session, ids: Sequence[int], settings: Settings) -> AdvanceSummary:
    """Apply the events of these workflows, inside a transaction, except of those that another process has locked."""
    held = await session.fetch("hold_workflows", list(ids))
    return await WorkflowRun(session, held, settings).advance() if held else AdvanceSummary()


class WorkflowAdvancer:
    """Advances workflows; ``run_once`` is one transaction over some of those with events."""

    def __init__(self, *, store: Store, notifier: Notifier, settings: Settings) -> None:
        self._store = store
        self._notifier = notifier
        self._settings = settings
        self._after = 0
        self._at_once = _WORKFLOWS_AT_ONCE
        self._put_off: dict[int, float] = {}  # until when, by workflow
        self.listener = Listener(store, WORKFLOWS)

    async def advance_or_wait(self) -> float:
        self.listener.event.clear()
        advanced = await self.run_once()
        if advanced is None:
            await is_set_within(self.listener.event, LOOK_SECONDS * random.uniform(0.8, 1.2))
            return 0
        return 0 if advanced else _HELD_PAUSE_SECONDS  # another supervisor holds them

    async def run_once(self) -> int | None:
        """Returns how many events were applied; None when no workflow has any that can be taken. Raises Unavailable."""
        told = await self._store.fetch("find_told_workflows", self._after, self._at_once)
        pending: list[int] = [row["workflow_id"] for row in told]
        if not pending:
            after, self._after = self._after, 0
            return await self.run_once() if after else None  # from the front again
        now = monotonic()
        self._put_off = {workflow: until for workflow, until in self._put_off.items() if until > now}
        able = [workflow for workflow in pending if workflow not in self._put_off]
        try:
            parts = await in_halves(able, self._advance, self._pass_over)
        except Exception as exc:
            if isinstance(exc, Unavailable) and not isinstance(exc, PayloadUnavailable):
                raise
            # One that fails must not stop the others: each alone, and then past the failing one, for a while.
            if len(pending) == 1:
                self._after = pending[0]
                self._put_off[pending[0]] = monotonic() + _FAILED_SECONDS
            self._at_once = 1
            raise
        self._after = pending[-1] if len(pending) == self._at_once else 0
        self._at_once = min(_WORKFLOWS_AT_ONCE, self._at_once * 2)
        return sum(parts) if able else None

    async def _advance(self, workflows: Sequence[int], hurried: bool = False) -> int:
        """One transaction; returns how many events were applied."""
        began = monotonic()
        async with self._store.transaction(hurried=hurried) as session:
            advanced = await advance_workflows(session, workflows, self._settings)
        if session.wakes:  # a cancelled step let the next task of its ordering key go
            self._notifier.wake()
        if advanced.started:
            self._notifier.wake(due=not advanced.delayed)
        for state, count in advanced.ended.items():
            metrics.WORKFLOWS_ENDED.labels(state).inc(count)
        metrics.WORKFLOW_EVENTS.inc(advanced.events)
        if advanced.events:
            log.debug(
                "workflows_advanced", events=advanced.events, started=advanced.started,
                ended=advanced.ended.total(), seconds=round(monotonic() - began, 4),
            )  # fmt: skip
        return advanced.events

    async def _pass_over(self, workflow: int, error: PenstockError) -> int:
        """Leave a workflow that another transaction blocks or Postgres refuses."""
        self._put_off[workflow] = monotonic() + _PUT_OFF_SECONDS
        log.warning("workflow_put_off", workflow=workflow, reason=str(error))
        return 0


class Successors(WorkflowAdvancer):
    """Starts what follows the steps that this process has settled, right after its commit; ``run`` is a side task."""

    def __init__(self, *, store: Store, notifier: Notifier, settings: Settings) -> None:
        super().__init__(store=store, notifier=notifier, settings=settings)
        self._workflows: list[int] = []
        self._settled = asyncio.Event()

    def settled(self, workflows: Sequence[int]) -> None:
        """Steps were settled, one of each of these workflows."""
        if workflows:
            self._workflows += workflows
            self._settled.set()

    async def run(self) -> None:
        while True:
            await self._settled.wait()
            self._settled.clear()
            workflows, self._workflows = self._workflows, []
            try:
                is_done = await self._advance(sorted(set(workflows))) >= len(workflows)
            except Exception as exc:  # the supervisor reports it, if it fails there too
                log.info("steps_left_to_supervisor", steps=len(workflows), reason=str(exc) or repr(exc))
                is_done = False
            if not is_done:
                self._store.settled_steps = True
                self._notifier.wake()
