"""Repair claims whose scheduler or worker stopped responding (docs/operations.md, decisions/004).

A queue that does not count what receivers hold (RabbitMQ) counts as empty once no receiver can hold a message any
longer. A killed process exports no span, so one made here stands for the lost attempt, and the next one links to it.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from time import monotonic

import asyncpg

from penstock.brokers.base import Queue
from penstock.db.pool import Store
from penstock.protocol.errors import HANDLER_ERROR, PenstockError, Unavailable
from penstock.protocol.message_attributes import read_carried
from penstock.protocol.reports import NO_HINTS
from penstock.protocol.task import Failure
from penstock.results.apply import delay_after
from penstock.results.watermark import seconds_on_the_way
from penstock.runtime import metrics
from penstock.runtime.halving import in_halves
from penstock.runtime.logs import log
from penstock.runtime.tracing import active
from penstock.settings.model import Settings
from penstock.tasks import claim, settle

_BATCH = 500
_UNSENT_DISPATCHES = 20
_LATE_SECONDS = 60.0  # claims that become visible later than that after their instant wait for a sweep
_SWEEP_SECONDS = 600.0
_ERROR = "StaleTask"  # its type


_LostAttempt = tuple[asyncpg.Record, str, Callable[[], None] | None]
"""A row of ``find_stale``, the error of its attempt as JSON text, and what ends its span if it is traced."""


@dataclass(kw_only=True)
class Repair:
    """One round looks at every stale claim once, in bounded batches."""

    store: Store
    queue_of: Callable[[str | None], Queue | None]  # None for a deleted route
    results: Queue
    settings: Settings
    empty_seconds: float | None = None  # for which a queue must look empty; None: half of stale_after_seconds
    _since: datetime | None = field(init=False, default=None)  # the oldest claim that holds, but for a sweep's
    _sweep_at: float = field(init=False, default=float("-inf"))
    _empty_since: dict[str | None, float] = field(init=False, default_factory=dict)  # by route, of the last looks

    async def run_once(self) -> int:
        """Returns how many tasks were released or failed. Raises Unavailable."""
        settings = self.settings
        after_seconds = settings.stale_after_seconds
        empty_seconds = after_seconds / 2 if self.empty_seconds is None else self.empty_seconds
        changed = await self._release_unsent()
        errors: list[PenstockError] = []

        async def leave(_task: object, error: PenstockError) -> None:
            errors.append(error)

        on_the_way: float | None = None
        away: Unavailable | None = None  # of a queue that could not be looked at
        empty_for: dict[str | None, float] = {}  # the queue of each route
        claimed_at, task_id = await self._oldest_claim(), 0
        while stale := await self.store.fetch("find_stale", after_seconds, _BATCH, None, claimed_at, task_id):
            if on_the_way is None:
                on_the_way = await seconds_on_the_way(self.store, self.results, settings.visibility_timeout_seconds)
            for route in {task["route"] for task in stale if not task["taken"]} - empty_for.keys():
                try:
                    empty_for[route] = await self._queue_is_empty_for(route)
                except Unavailable as exc:  # it may hold its tasks; those of other queues are looked at
                    self._empty_since.pop(route, None)
                    empty_for[route], away = -1, exc
            lost: list[_LostAttempt] = []
            overdue: list[asyncpg.Record] = []
            for task in stale:
                seconds = task["silent_seconds"]
                is_gone = self._is_gone(task) and empty_for.get(task["route"], -1) >= max(empty_seconds, on_the_way)
                if seconds > after_seconds + on_the_way and (task["taken"] or is_gone):
                    lost.append(_lost_attempt(task))
                elif seconds > settings.untaken_after_seconds:
                    overdue.append(task)
            failed = {task_id for part in await in_halves(lost, self._fail, leave) for task_id in part or ()}
            for task, _, end_span in lost:
                if end_span is not None and task["id"] in failed:  # the others were answered meanwhile
                    end_span()
            released = await in_halves(overdue, self._release, leave)
            changed += len(failed) + sum(part or 0 for part in released)
            if len(stale) < _BATCH:
                break
            claimed_at, task_id = stale[-1]["claimed_at"], stale[-1]["id"]
        for route in self._empty_since.keys() - empty_for.keys():
            del self._empty_since[route]
        if errors:
            log.warning("stale_tasks_left", tasks=len(errors), reason=str(errors[-1]))
            if not changed:
                raise errors[-1]
        if away is not None:
            if not changed:
                raise away
            log.warning("queue_unread", reason=str(away))
        return changed

    async def _oldest_claim(self) -> datetime | None:
        """Where to begin, so that dead entries of claims are read once and not in each round."""
        if monotonic() >= self._sweep_at:
            self._sweep_at = monotonic() + _SWEEP_SECONDS
            self._since = None
        after_seconds = self.settings.stale_after_seconds + _LATE_SECONDS
        self._since = await self.store.value("find_oldest_claim", after_seconds, self._since)
        return self._since

    async def _release_unsent(self) -> int:
        total, after_seconds = 0, self.settings.unsent_after_seconds
        while released := len(await self.store.fetch("release_unsent", after_seconds, _UNSENT_DISPATCHES, None)):
            total += released
            metrics.RELEASED.labels("unsent").inc(released)
            log.warning("unsent_claims_released", tasks=released)
        return total

    async def _queue_is_empty_for(self, route: str | None) -> float:
        """For how long every look has found a route's queue empty, in seconds; negative before the second look."""
        queue = self.queue_of(route)
        # Counts of SQS are approximate, and exact a minute after the last change.
        if queue is None or (await queue.depth()).total:
            self._empty_since.pop(route, None)
            return -1
        if route not in self._empty_since:
            self._empty_since[route] = monotonic()
            return -1
        return monotonic() - self._empty_since[route]

    def _is_gone(self, task: asyncpg.Record) -> bool:
        """Whether no receiver can hold the message of a task whose queue looks empty."""
        queue = self.queue_of(task["route"])
        return queue is None or queue.limits.counts_held or task["held_seconds"] > queue.limits.max_extend_seconds

    async def _fail(self, lost: Sequence[_LostAttempt], hurried: bool) -> set[int]:
        """Returns the ids of those that still held their claim."""
        refunds: list[Failure] = []
        failures: list[Failure] = []
        for task, error, _ in lost:
            if task["attempts"] >= task["max_attempts"] and not task["suspect"]:
                refunds.append(Failure(task["id"], task["claim"], error, None))
            else:
                delay = delay_after(task["attempts"], task["max_attempts"], NO_HINTS, self.settings.backoff)
                failures.append(Failure(task["id"], task["claim"], error, delay, suspect=True))
        async with self.store.transaction(hurried=hurried) as session:
            refunded = await settle.refund(session, refunds)
            failed = await settle.fail(session, failures, hold_keys=self.settings.holds_ordering_keys)
        if refunded:
            metrics.RELEASED.labels("suspect").inc(len(refunded))
            log.warning("suspects_tried_alone", tasks=len(refunded))
        if failed:
            metrics.REPAIRED.inc(len(failed))
            log.warning("stale_tasks_failed", tasks=len(failed))
        return refunded | failed

    async def _release(self, overdue: Sequence[asyncpg.Record], hurried: bool) -> int:
        async with self.store.transaction(hurried=hurried) as session:
            seconds = self.settings.untaken_after_seconds
            pairs = [(task["id"], task["claim"]) for task in overdue]
            released = await claim.release(session, pairs, silent_seconds=seconds)
        if released:
            metrics.RELEASED.labels("untaken").inc(released)
            log.warning("untaken_tasks_released", tasks=released)
        return released


def _lost_attempt(task: asyncpg.Record) -> _LostAttempt:
    why = "its worker stopped sending heartbeats" if task["taken"] else "its message is gone and no worker answered"
    if task["suspect"]:
        why += "; it was sent alone, so it may be this task that workers do not survive"
    message = f"no result {task['held_seconds']:.0f} s after the claim: {why}"
    error = {"code": HANDLER_ERROR, "message": message, "data": {"type": _ERROR, "message": why}}
    end_span: Callable[[], None] | None = None
    spans, carried = active.active(), read_carried(task["trace"])
    if spans is not None and carried is not None:
        span = spans.lost(task, carried)
        if span.context is not None and span.context.is_sampled:
            error["traceparent"] = span.context.traceparent
        end_span = partial(span.end, _ERROR, why)
    return task, json.dumps(error), end_span
