"""Repair claims whose scheduler or worker stopped responding.

Three cases:
- claimed, sending never confirmed: released after ``unsent_after_seconds``, attempt included, unless a worker has sent
  a heartbeat;
- reported by a worker, then silent for ``stale_after_seconds``: a failed attempt, retried after its delay;
- sent, never reported: while the queue holds anything, the message may be in it, and waiting costs no attempt; after
  ``untaken_after_seconds`` the claim is released and the task sent again. When the queue was seen empty for half of
  ``stale_after_seconds``, the message is gone without an answer: a failed attempt. Of a queue that does not count what
  receivers hold (RabbitMQ) that is believed once no receiver can hold it any longer.

A task may crash its worker, and all tasks of its message are then silent too. So a task that was silent once is a
suspect and sent alone from then on. Only a suspect fails permanently at its last attempt; another task at its last
attempt has it refunded, with the failure recorded, and is tried once more, alone.

The answer or heartbeat may be in the results queue. So silence counts only beyond ``stale_after_seconds`` plus the lag
of the resulters and the time for which one that died keeps its messages; and not until they have read without
interruption for that long (:mod:`penstock.results.watermark`). An outage of the resulters or of Postgres thus costs no
attempt.

A killed process exports no span, so a span made here stands for the lost attempt, and the next one links to it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from time import monotonic
from typing import TYPE_CHECKING

from penstock.brokers.base import Queue
from penstock.db.pool import Store
from penstock.protocol.errors import HANDLER_ERROR, PenstockError
from penstock.protocol.message_attributes import read_carried
from penstock.protocol.reports import NO_HINTS
from penstock.protocol.task import Failure
from penstock.results.apply import delay_after
from penstock.results.watermark import read_watermark
from penstock.runtime import metrics
from penstock.runtime.halving import in_halves
from penstock.runtime.logs import get_logger
from penstock.runtime.tracing import active
from penstock.settings.model import Settings
from penstock.tasks import claim, settle
from penstock.tasks import stale as stale_tasks
from penstock.tasks.records import StaleTask

if TYPE_CHECKING:
    from penstock.runtime.tracing.spans import AttemptSpan

_BATCH = 500
_UNSENT_DISPATCHES = 20
_LATE_SECONDS = 60.0  # claims that become visible later than that after their instant wait for a sweep
_SWEEP_SECONDS = 600.0
_ERROR = "StaleTask"  # its type

log = get_logger()


class Repair:
    """One round looks at every stale claim once, in bounded batches.

    queue_of: the queue of a route, None for a deleted one. empty_seconds: for how long a queue must look empty; None
    for half of ``stale_after_seconds``.
    """

    def __init__(
        self,
        *,
        store: Store,
        queue_of: Callable[[str | None], Queue | None],
        results: Queue,
        settings: Settings,
        empty_seconds: float | None = None,
    ) -> None:
        self._store = store
        self._queue_of = queue_of
        self._results = results
        self._settings = settings
        self._empty_seconds = settings.stale_after_seconds / 2 if empty_seconds is None else empty_seconds
        self._since: datetime | None = None  # the oldest claim that holds, but for those that a sweep finds
        self._sweep_at = float("-inf")
        self._empty_since: dict[str | None, float] = {}  # by route, since the first of the last looks

    async def run_once(self) -> int:
        """Returns how many tasks were released or failed. Raises Unavailable."""
        changed = await self._release_unsent()
        errors: list[PenstockError] = []

        async def leave(_task: object, error: PenstockError) -> None:
            errors.append(error)

        on_the_way: float | None = None
        empty_for: dict[str | None, float] = {}  # the queue of each route
        after, since = None, await self._oldest_claim()
        while True:
            async with self._store.session() as session:
                stale = await stale_tasks.find_stale(
                    session, self._settings.stale_after_seconds, limit=_BATCH, after=after, since=since
                )
            if not stale:
                break
            if on_the_way is None:
                on_the_way = await self._seconds_on_the_way()
            for route in {task.route for task in stale if not task.taken} - empty_for.keys():
                empty_for[route] = await self._queue_is_empty_for(route)
            silent: list[StaleTask] = []
            waiting: list[StaleTask] = []
            for task in stale:
                is_silent = task.silent_seconds > self._settings.stale_after_seconds + on_the_way and (
                    task.taken
                    or (self._is_gone(task) and empty_for[task.route] >= max(self._empty_seconds, on_the_way))
                )
                (silent if is_silent else waiting).append(task)
            lost = [_lost_attempt(task) for task in silent]
            failed = set[int]()
            for part in await in_halves(lost, self._fail, leave):
                failed |= part or set()
            for one in lost:
                if one.span is not None and one.task.id in failed:  # the others were answered meanwhile
                    one.span.end(_ERROR, one.why)
            overdue = [task for task in waiting if task.silent_seconds > self._settings.untaken_after_seconds]
            released = await in_halves(overdue, self._release, leave)
            changed += len(failed) + sum(part or 0 for part in released)
            if len(stale) < _BATCH:
                break
            after = stale[-1]
        for route in self._empty_since.keys() - empty_for.keys():
            del self._empty_since[route]
        if errors:
            log.warning("stale_tasks_left", tasks=len(errors), reason=str(errors[-1]))
            if not changed:
                raise errors[-1]
        return changed

    async def _oldest_claim(self) -> datetime | None:
        """Where to begin, so that dead entries of claims are read once and not in each round."""
        if monotonic() >= self._sweep_at:
            self._sweep_at = monotonic() + _SWEEP_SECONDS
            self._since = None
        self._since = await self._store.value(
            "find_oldest_claim", self._settings.stale_after_seconds + _LATE_SECONDS, self._since
        )
        return self._since

    async def _release_unsent(self) -> int:
        total = 0
        while True:
            async with self._store.session() as session:
                released = await stale_tasks.release_unsent(
                    session, self._settings.unsent_after_seconds, limit=_UNSENT_DISPATCHES
                )
            if not released:
                return total
            total += released
            metrics.RELEASED.labels("unsent").inc(released)
            log.warning("unsent_claims_released", tasks=released)

    async def _seconds_on_the_way(self) -> float:
        """How long an answer may take to be recorded; infinite while unknown."""
        hold_seconds = self._settings.visibility_timeout_seconds
        async with self._store.session() as session:
            mark = await read_watermark(session, hold_seconds)
        if mark.known and not mark.is_established:
            return math.inf
        if not (mark.known and mark.has_times) and (await self._results.depth()).total:
            return math.inf
        return mark.lag_seconds + hold_seconds if mark.known else 0.0

    async def _queue_is_empty_for(self, route: str | None) -> float:
        """For how long every look has found a route's queue empty, in seconds; negative before the second look.

        Counts of SQS are approximate, and exact a minute after the last change.
        """
        queue = self._queue_of(route)
        if queue is None:
            return -1
        if (await queue.depth()).total:
            self._empty_since.pop(route, None)
            return -1
        now = monotonic()
        if route not in self._empty_since:
            self._empty_since[route] = now
            return -1
        return now - self._empty_since[route]

    def _is_gone(self, task: StaleTask) -> bool:
        """Whether no receiver can hold the message of a task whose queue looks empty."""
        queue = self._queue_of(task.route)
        if queue is None or queue.limits.counts_held:
            return True
        return task.held_seconds > queue.limits.max_extend_seconds

    async def _fail(self, lost: Sequence[_LostAttempt], hurried: bool) -> set[int]:
        """Returns the ids of those that still held their claim."""
        refunds: list[Failure] = []
        failures: list[Failure] = []
        for one in lost:
            task = one.task
            if task.attempts >= task.max_attempts and not task.suspect:
                refunds.append(Failure(task.id, task.claim, one.error, None))
            else:
                delay = delay_after(task.attempts, task.max_attempts, NO_HINTS, self._settings.backoff)
                failures.append(Failure(task.id, task.claim, one.error, delay, suspect=True))
        async with self._store.transaction(hurried=hurried) as session:
            refunded = await settle.refund(session, refunds)
            settled = await settle.fail(session, failures, hold_keys=self._settings.holds_ordering_keys)
        if refunded:
            metrics.RELEASED.labels("suspect").inc(len(refunded))
            log.warning("suspects_tried_alone", tasks=len(refunded))
        failed = {task.id for task in settled}
        if failed:
            metrics.REPAIRED.inc(len(failed))
            log.warning("stale_tasks_failed", tasks=len(failed))
        return refunded | failed

    async def _release(self, overdue: Sequence[StaleTask], hurried: bool) -> int:
        async with self._store.transaction(hurried=hurried) as session:
            released = await claim.release(session, ((task.id, task.claim) for task in overdue))
        if released:
            metrics.RELEASED.labels("untaken").inc(released)
            log.warning("untaken_tasks_released", tasks=released)
        return released


@dataclass(frozen=True, slots=True, eq=False)
class _LostAttempt:
    """An attempt without heartbeat, why it counts as lost, and its error as JSON text. span: where it is traced."""

    task: StaleTask
    why: str
    error: str
    span: AttemptSpan | None = None


def _lost_attempt(task: StaleTask) -> _LostAttempt:
    why = "its worker stopped sending heartbeats" if task.taken else "its message is gone and no worker answered"
    if task.suspect:
        why += "; it was sent alone, so it may be this task that workers do not survive"
    message = f"no result {task.held_seconds:.0f} s after the claim: {why}"
    error = {"code": HANDLER_ERROR, "message": message, "data": {"type": _ERROR, "message": why}}
    spans, carried = active.active(), read_carried(task.trace)
    if spans is None or carried is None:
        return _LostAttempt(task, why, json.dumps(error))
    span = spans.lost(task.action, task.id, task.claim, carried, worker=task.worker, held_seconds=task.held_seconds)
    if span.context is not None and span.context.is_sampled:
        error["traceparent"] = span.context.traceparent
    return _LostAttempt(task, why, json.dumps(error), span)
