"""Repair: claims whose scheduler or worker fell silent.

Three cases, told apart:
- claimed, sending never confirmed (the scheduler died): given back after ``unsent_after_seconds``, attempt included;
- taken by a worker (it sent a heartbeat) and silent for ``stale_after_seconds``: a failed attempt, retried with its
  delay. The attempt was counted at the claim and is not counted again;
- sent, never reported: while the outbound queue holds anything, the message may be in it, and waiting costs no
  attempt; after ``untaken_after_seconds`` it is given back and sent anew. When the queue was seen empty twice, the
  message is gone without an answer (a worker that reports nothing died with it): a failed attempt.

One task may kill its worker, and all that travelled with it fall silent too. So a task that was silent once is a
suspect: from then on it is sent alone. Only a suspect whose worker fell silent again, at the cap of its attempts, is
given up (CRITICAL_ERROR); one that reached the cap in company has that attempt given back and is tried once more,
alone.

No attempt is called failed while messages wait unread in the results queue: the answer, or the sign of life, may be
among them. So an outage of the resulters or of Postgres costs no attempt.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from penstock import metrics
from penstock.errors import HANDLER_ERROR
from penstock.logs import get_logger
from penstock.outcomes import delay_after
from penstock.settings import Settings
from penstock.store import Session, Stale, Store
from penstock.tasks import Failure
from penstock.transports import Queue
from penstock.wire import NO_HINTS

_BATCH = 500
_UNSENT_DISPATCHES = 20

log = get_logger()


class Repair:
    """One round looks at every stale claim once, in bounded batches."""

    def __init__(self, *, store: Store, outbound: Queue, results: Queue, settings: Settings) -> None:
        self._store = store
        self._outbound = outbound
        self._results = results
        self._settings = settings
        self._empty_looks = 0

    async def run_once(self) -> int:
        """Returns how many tasks were given back or failed."""
        changed = await self._release_unsent()
        results_are_read: bool | None = None
        queue_is_empty: bool | None = None
        after = None
        while True:
            async with self._store.session() as session:
                stale = await session.find_stale(self._settings.stale_after_seconds, limit=_BATCH, after=after)
            if not stale:
                break
            if results_are_read is None:
                results_are_read = not (await self._results.depth()).visible
            if queue_is_empty is None and not all(task.taken for task in stale):
                queue_is_empty = await self._queue_is_empty()
            silent: list[Stale] = []
            waiting: list[Stale] = []
            for task in stale:
                is_silent = results_are_read and (task.taken or queue_is_empty)
                (silent if is_silent else waiting).append(task)
            async with self._store.transaction() as session:
                changed += await self._settle(session, silent, waiting)
            if len(stale) < _BATCH:
                break
            after = stale[-1]
        if queue_is_empty is None:
            self._empty_looks = 0
        return changed

    async def _release_unsent(self) -> int:
        total = 0
        while True:
            async with self._store.session() as session:
                released = await session.release_unsent(self._settings.unsent_after_seconds, limit=_UNSENT_DISPATCHES)
            if not released:
                return total
            total += released
            metrics.RELEASED.labels("unsent").inc(released)
            log.warning("unsent_claims_released", tasks=released)

    async def _queue_is_empty(self) -> bool:
        """Whether the outbound queue was empty at this look and the one before; SQS counts are approximate."""
        depth = await self._outbound.depth()
        self._empty_looks = 0 if depth.total else self._empty_looks + 1
        return self._empty_looks >= 2

    async def _settle(self, session: Session, silent: Sequence[Stale], waiting: Sequence[Stale]) -> int:
        in_company = [task for task in silent if task.attempts >= task.max_attempts and not task.suspect]
        cleared = await session.release([(task.id, task.claim) for task in in_company], suspect=True)
        if cleared:
            metrics.RELEASED.labels("suspect").inc(cleared)
            log.warning("suspects_tried_alone", tasks=cleared)
        failures = [self._failure(task) for task in silent if task not in in_company]
        failed = len(await session.fail(failures, hold_keys=self._settings.holds_ordering_keys))
        if failed:
            metrics.REPAIRED.inc(failed)
            log.warning("stale_tasks_failed", tasks=failed)
        overdue = [task for task in waiting if task.held_seconds > self._settings.untaken_after_seconds]
        released = await session.release((task.id, task.claim) for task in overdue)
        if released:
            metrics.RELEASED.labels("untaken").inc(released)
            log.warning("untaken_tasks_released", tasks=released)
        return cleared + failed + released

    def _failure(self, task: Stale) -> Failure:
        why = "its worker fell silent" if task.taken else "its message is gone and no worker answered"
        if task.suspect:
            why += "; it was sent alone, so it may be this task that workers do not survive"
        error = {
            "code": HANDLER_ERROR,
            "message": f"no result {task.held_seconds:.0f} s after the claim: {why}",
            "data": {"type": "StaleTask", "message": why},
        }
        delay = delay_after(task.attempts, task.max_attempts, NO_HINTS, self._settings.backoff)
        return Failure(task.id, task.claim, json.dumps(error), delay, suspect=True)
