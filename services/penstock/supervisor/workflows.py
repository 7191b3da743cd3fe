"""Advance workflows as their steps settle.

Woken as soon as a step has settled, and once a second in case that was lost. One supervisor at a time has a workflow.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from time import monotonic

from penstock.db.notify import WORKFLOWS, Listener, Notifier
from penstock.db.pool import Store
from penstock.protocol.errors import PayloadUnavailable, PenstockError, Unavailable
from penstock.runtime import metrics
from penstock.runtime.halving import in_halves
from penstock.runtime.logs import get_logger
from penstock.runtime.periodic import is_set_within
from penstock.settings.model import Settings
from penstock.workflows.advance import AdvanceSummary
from penstock.workflows.store import advance_workflows, find_pending

LOOK_SECONDS = 1.0
_WORKFLOWS_AT_ONCE = 100
_HELD_PAUSE_SECONDS = 0.02
_PUT_OFF_SECONDS = 5.0  # each look at one behind a lock costs the others its wait

log = get_logger()


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
        return 0 if advanced.events else _HELD_PAUSE_SECONDS  # another supervisor holds them

    async def run_once(self) -> AdvanceSummary | None:
        """One round; None when no workflow has events that can be taken. Raises Unavailable."""
        started = monotonic()
        async with self._store.session() as session:
            pending = await find_pending(session, after=self._after, limit=self._at_once)
            if not pending and self._after:
                self._after = 0  # from the front again
                pending = await find_pending(session, after=0, limit=self._at_once)
        if not pending:
            return None
        self._put_off = {workflow: until for workflow, until in self._put_off.items() if until > started}
        able = [workflow for workflow in pending if workflow not in self._put_off]
        try:
            parts = await in_halves(able, self._advance, self._pass_over)
        except Exception as exc:
            if isinstance(exc, Unavailable) and not isinstance(exc, PayloadUnavailable):
                raise
            # One that fails must not stop the others: each alone, and then past the failing one.
            self._after = pending[0] if len(pending) == 1 else self._after
            self._at_once = 1
            raise
        self._after = pending[-1] if len(pending) == self._at_once else 0
        self._at_once = min(_WORKFLOWS_AT_ONCE, self._at_once * 2)
        if not able:
            return None
        advanced = AdvanceSummary(
            sum(part.events for part in parts),
            sum(part.started for part in parts),
            sum((part.ended for part in parts), Counter()),
        )
        if advanced.started:
            self._notifier.wake()
        for state, count in advanced.ended.items():
            metrics.WORKFLOWS_ENDED.labels(state).inc(count)
        metrics.WORKFLOW_EVENTS.inc(advanced.events)
        if advanced.events:
            log.debug(
                "workflows_advanced", events=advanced.events, started=advanced.started,
                ended=advanced.ended.total(), seconds=round(monotonic() - started, 4),
            )  # fmt: skip
        return advanced

    async def _advance(self, workflows: Sequence[int], hurried: bool) -> AdvanceSummary:
        async with self._store.transaction(hurried=hurried) as session:
            return await advance_workflows(session, workflows, self._settings)

    async def _pass_over(self, workflow: int, error: PenstockError) -> AdvanceSummary:
        """Leave a workflow that another transaction blocks or Postgres refuses."""
        self._put_off[workflow] = monotonic() + _PUT_OFF_SECONDS
        log.warning("workflow_put_off", workflow=workflow, reason=str(error))
        return AdvanceSummary()
