"""Repair: claims whose scheduler or worker fell silent.

Three cases, told apart:
- claimed, sending never confirmed (the scheduler died): given back after ``unsent_after_seconds``, attempt included,
  unless a worker has told a sign of life of it;
- taken by a worker (it sent a heartbeat) and silent for ``stale_after_seconds``: a failed attempt, retried with its
  delay. The attempt was counted at the claim and is not counted again;
- sent, never reported: while the outbound queue, or that of its route, holds anything, the message may be in it, and
  waiting costs no attempt; after ``untaken_after_seconds`` it is given back and sent again. When the queue was seen
  empty for half of ``stale_after_seconds``, the message is gone without an answer (a worker that reports nothing died
  with it): a failed attempt. Of a queue that does not count what receivers hold (RabbitMQ) that is believed once
  nobody can hold it any longer.

One task may kill its worker, and all that travelled with it fall silent too. So a task that was silent once is a
suspect: from then on it is sent alone. Only a suspect whose worker fell silent again, at the cap of its attempts, is
given up (CRITICAL_ERROR); one that reached the cap in company has that attempt given back, which stands among its
failures all the same, and is tried once more, alone.

The answer, or the sign of life, may be on its way through the results queue. So silence counts only where it is longer
than ``stale_after_seconds``, by how far the resulters are behind and by how long one that died keeps its messages from
the others; and not at all until they have read without interruption for that long (:mod:`penstock.results.watermark`).
So an outage of the resulters or of Postgres costs no attempt, and a task that kills its workers fails however many
results there are.

A process that was killed exports no span of what it was at. So where the task is traced, a span made here stands for
the lost attempt, and the next one links to it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from time import monotonic
from typing import TYPE_CHECKING, Any

from penstock.brokers.base import Queue
from penstock.db.pool import Store
from penstock.protocol.errors import HANDLER_ERROR, PenstockError
from penstock.protocol.reports import NO_HINTS
from penstock.protocol.task import Failure
from penstock.protocol.task_traces import read_carried
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

    queue_of: the queue by which tasks of a route go, None for a deleted route. empty_seconds: for how long a
    queue has to look empty, None for half of ``stale_after_seconds``.
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
        self._since: datetime | None = None  # no claim before this holds, but for those that a sweep finds
        self._sweep_at = float("-inf")
        self._empty_since: dict[str | None, float] = {}  # the first of the looks in a row that found nothing, by route

    async def run_once(self) -> int:
        """Returns how many tasks were given back or failed. Raises Unavailable."""
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
            lost = [_lost(task) for task in silent]
            failed = set[int]()
            for part in await in_halves(lost, self._fail, leave):
                failed |= part or set()
            for one in lost:
                if one.attempt is not None and one.task.id in failed:  # the others were answered meanwhile
                    one.attempt.end(_ERROR, one.why)
            released = await in_halves(self._overdue(waiting), self._release, leave)
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
        """Where to begin, so that dead entries of claims are passed once and not in each round."""
        if monotonic() >= self._sweep_at:
            self._sweep_at = monotonic() + _SWEEP_SECONDS
            self._since = None
        async with self._store.session() as session:
            self._since = await session.value(
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
        """For how long an answer may be on its way before it is recorded; infinite while unknown."""
        hold_seconds = self._settings.visibility_timeout_seconds
        async with self._store.session() as session:
            mark = await read_watermark(session, hold_seconds)
        if mark.known and not mark.is_established:
            return math.inf
        if not (mark.known and mark.tells) and (await self._results.depth()).total:
            return math.inf
        return mark.lag_seconds + hold_seconds if mark.known else 0.0

    async def _queue_is_empty_for(self, route: str | None) -> float:
        """Since which look of ours a route's queue has been empty at each, in seconds; negative before the second.

        Counts of SQS are approximate, and right a minute after the queue has come to rest.
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
        """Of a task whose queue looks empty: whether nobody can hold its message either."""
        queue = self._queue_of(task.route)
        if queue is None or queue.limits.counts_held:
            return True
        return task.held_seconds > queue.limits.max_extend_seconds

    async def _fail(self, lost: Sequence[_Lost], hurried: bool) -> set[int]:
        """Returns which of them still held their claim."""
        in_company = [one for one in lost if one.task.attempts >= one.task.max_attempts and not one.task.suspect]
        failures = [self._failure(one) for one in lost if one not in in_company]
        async with self._store.transaction(hurried=hurried) as session:
            spared = await settle.refund(
                session, [Failure(one.task.id, one.task.claim, one.error, None) for one in in_company]
            )
            settled = await settle.fail(session, failures, hold_keys=self._settings.holds_ordering_keys)
        if spared:
            metrics.RELEASED.labels("suspect").inc(len(spared))
            log.warning("suspects_tried_alone", tasks=len(spared))
        failed = {task.id for task in settled}
        if failed:
            metrics.REPAIRED.inc(len(failed))
            log.warning("stale_tasks_failed", tasks=len(failed))
        return spared | failed

    def _overdue(self, waiting: Sequence[StaleTask]) -> list[StaleTask]:
        return [task for task in waiting if task.silent_seconds > self._settings.untaken_after_seconds]

    async def _release(self, overdue: Sequence[StaleTask], hurried: bool) -> int:
        async with self._store.transaction(hurried=hurried) as session:
            released = await claim.release(session, ((task.id, task.claim) for task in overdue))
        if released:
            metrics.RELEASED.labels("untaken").inc(released)
            log.warning("untaken_tasks_released", tasks=released)
        return released

    def _failure(self, lost: _Lost) -> Failure:
        task = lost.task
        delay = delay_after(task.attempts, task.max_attempts, NO_HINTS, self._settings.backoff)
        return Failure(task.id, task.claim, lost.error, delay, suspect=True)


@dataclass(frozen=True, slots=True, eq=False)
class _Lost:
    """A task without a sign of life, and why its attempt is taken for lost. attempt: its span, where it is traced."""

    task: StaleTask
    why: str
    attempt: AttemptSpan | None

    @property
    def error(self) -> str:
        """As JSON text, by which the next attempt knows this one."""
        error: dict[str, Any] = {
            "code": HANDLER_ERROR,
            "message": f"no result {self.task.held_seconds:.0f} s after the claim: {self.why}",
            "data": {"type": _ERROR, "message": self.why},
        }
        trace = None if self.attempt is None else self.attempt.context
        if trace is not None and trace.is_sampled:
            error["traceparent"] = trace.traceparent
        return json.dumps(error)


def _lost(task: StaleTask) -> _Lost:
    why = "its worker fell silent" if task.taken else "its message is gone and no worker answered"
    if task.suspect:
        why += "; it was sent alone, so it may be this task that workers do not survive"
    spans, carried = active.active(), read_carried(task.trace)
    if spans is None or carried is None:
        return _Lost(task, why, None)
    attempt = spans.lost(
        task.action, task.id, task.claim, carried, worker=task.worker, held_seconds=task.held_seconds
    )  # fmt: skip
    return _Lost(task, why, attempt)
