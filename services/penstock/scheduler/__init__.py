"""Scheduler: claims due tasks by priority and sends them, no more than the window allows.

SQS has no priority, so what is not yet needed stays in Postgres. Where to look is the business of
:mod:`~penstock.scheduler.bounds`, how much to claim of :mod:`~penstock.scheduler.window`, what travels together of
:mod:`~penstock.scheduler.parcels`.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic

from penstock import metrics
from penstock.errors import HANDLER_ERROR, Unavailable
from penstock.logs import get_logger
from penstock.loop import Service, SideTask
from penstock.notify import Listener
from penstock.scheduler.bounds import LEVELS, Bounds
from penstock.scheduler.parcels import Parcel, RunTimes, pack_parcels, parcel_of
from penstock.scheduler.window import Window
from penstock.settings import Settings
from penstock.store import Dispatch, Store
from penstock.tasks import Claimed, Failure, Position
from penstock.transports import Queue

_PACE_SECONDS = 10.0  # run times are the means over so long
_PACE_EVERY_SECONDS = 0.5

log = get_logger()


@dataclass(slots=True)
class Sending:
    """What did not go: tasks to try again, tasks whose message the queue will never take, and why."""

    reason: str | None
    unsent: list[Claimed] = field(default_factory=list)
    refused: list[Claimed] = field(default_factory=list)


class Scheduler(Service):
    """One scheduler process; ``run_once`` is one claim, sent and confirmed."""

    name = "scheduler"

    def __init__(self, *, store: Store, outbound: Queue, settings: Settings) -> None:
        self._store = store
        self._outbound = outbound
        self._settings = settings
        self._listener = Listener(store)
        self._bounds = Bounds()
        self._times = RunTimes()
        self._times_read_at = float("-inf")
        self._window = Window(
            floor=settings.in_flight_floor, limit=settings.in_flight_limit, seconds=settings.in_flight_seconds
        )
        self._reserving = asyncio.Lock()
        self._waiting = asyncio.Lock()

    async def open(self) -> None:
        await self._store.open()
        await self._outbound.depth()

    def side_tasks(self) -> Mapping[str, SideTask]:
        return {"listen": self._listener.run}

    async def wait_for_work(self) -> None:
        """Until a nudge or the poll interval, whichever comes first; while the window is full, nudges wait together."""
        async with self._waiting:  # a nudge is for one pass: two that look at once find no more than one
            await asyncio.sleep(self._window.full_for_seconds(monotonic()))
            try:
                await asyncio.wait_for(self._listener.event.wait(), self._settings.poll_seconds)
            except TimeoutError:
                pass
            self._listener.event.clear()

    async def run_once(self) -> int:
        """Claim what is due and fits the window, send it, release what could not be sent; returns how many went."""
        # Cleared before looking: a nudge that comes during the claim then leads to another look, not to a wait.
        self._listener.event.clear()
        dispatch = await self._claim()
        if dispatch is None:
            return 0
        try:
            sending = await self._send(self._pack(dispatch.tasks))
        except Exception as exc:
            # Released at once rather than found by the supervisor later; of what did go, the claim is now an old one.
            await self._conclude(dispatch, Sending(reason=type(exc).__name__, unsent=dispatch.tasks))
            raise
        await self._conclude(dispatch, sending)
        self._count(dispatch.tasks, len(sending.unsent))
        if len(sending.unsent) == len(dispatch.tasks):
            # Without a pause the same tasks would be claimed and released in a tight circle.
            raise Unavailable(f"nothing could be sent: {sending.reason}")
        return len(dispatch.tasks) - len(sending.unsent)

    async def _claim(self) -> Dispatch | None:
        """Claim what fits the window, behind the bounds or, when it is time, from the front."""
        bounds, window = self._bounds, self._window
        async with self._reserving:  # one at a time: room is counted, then set aside
            limit = min(self._settings.claim_batch_size, await self._room())
            if not limit:
                return None
            window.reserved += limit
            sweeps = bounds.sweep_is_due(monotonic())
            if sweeps:
                bounds.sweep_begins(monotonic())
        dispatch = None
        try:
            dispatch = await (self._sweep(limit) if sweeps else self._claim_behind_bounds(limit))
        finally:
            window.reserved -= limit
            window.claimed(0 if dispatch is None else len(dispatch.tasks))
        return dispatch

    async def _claim_behind_bounds(self, limit: int) -> Dispatch | None:
        bounds = self._bounds
        async with self._store.session() as session:
            dispatch = await session.claim(limit, stretches=bounds.from_bounds())
        bounds.claimed(*_outcome(dispatch, limit))
        if dispatch is None and bounds.sweep_is_due(monotonic()):
            bounds.sweep_begins(monotonic())
            return await self._sweep(limit)
        return dispatch

    async def _sweep(self, limit: int) -> Dispatch | None:
        """Claim from the front. It may take long; other passes claim behind the bounds meanwhile."""
        bounds = self._bounds
        dispatch = None
        try:
            async with self._store.session() as session:
                if bounds.levels_are_old(monotonic()):
                    bounds.set_levels(await session.read_priorities(LEVELS), monotonic())
                dispatch = await session.claim(limit, stretches=bounds.from_front())
        finally:
            bounds.swept(*_outcome(dispatch, limit), monotonic())
        return dispatch

    async def _room(self) -> int:
        """How many tasks may be claimed now; counts what is in flight when it is time to."""
        now = monotonic()
        window = self._window
        if window.full_for_seconds(now):
            return 0
        if now - self._times_read_at >= _PACE_EVERY_SECONDS:
            self._times_read_at = now
            async with self._store.session() as session:
                paces = await session.read_pace(_PACE_SECONDS)
            self._times.learn(paces)
            window.learn_pace(sum(pace.ended for pace in paces) / _PACE_SECONDS, self._times.mean)
        if window.wants_count(now):
            async with self._store.session() as session:
                started = monotonic()
                found = await session.count_in_flight(self._settings.in_flight_limit, since=window.count_since(started))
                window.counted(found, started, monotonic())
            metrics.IN_FLIGHT.set(window.in_flight)
            metrics.WINDOW.set(window.size)
        return window.room

    def _pack(self, tasks: Sequence[Claimed]) -> list[Parcel]:
        return pack_parcels(
            tasks,
            self._times,
            max_tasks=self._settings.pack_max_tasks,
            max_bytes=self._outbound.limits.max_message_bytes,
            max_seconds=self._settings.pack_seconds,
        )

    async def _send(self, parcels: Sequence[Parcel]) -> Sending:
        """Send; of a message that the queue refuses for good, each task is tried in one of its own.

        Cut off in the middle, it is unknown which messages went: the dispatch stays unconfirmed, the supervisor
        gives its claims back, and a message that did go carries an old claim.
        """
        report = await self._outbound.send([parcel.message for parcel in parcels])
        sending = Sending(reason=report.reason)
        alone: list[Parcel] = []
        for position in report.failed:
            tasks = parcels[position].tasks
            if position not in report.refused:
                sending.unsent += tasks
            elif len(tasks) == 1:
                sending.refused += tasks
            else:
                alone += [parcel_of([task]) for task in tasks]
        if report.failed:
            log.warning("send_failed", messages=len(report.failed), of=len(parcels), reason=report.reason)
        if alone:
            rest = await self._send(alone)
            sending.unsent += rest.unsent
            sending.refused += rest.refused
        return sending

    async def _conclude(self, dispatch: Dispatch, sending: Sending) -> None:
        """Release what could not be sent, give up what never can be, confirm the rest."""
        if not sending.unsent and not sending.refused:
            async with self._store.session() as session:
                await session.confirm(dispatch.id)
            return
        async with self._store.transaction() as session:
            released = await session.release((task.id, task.claim) for task in sending.unsent)
            # Released, it would be claimed again at once, before all others of its priority, for ever.
            error = {
                "code": HANDLER_ERROR,
                "message": "the outbound queue refuses the task's message",
                "data": {"type": "Unsendable", "message": sending.reason},
            }
            failures = [Failure(task.id, task.claim, json.dumps(error), None) for task in sending.refused]
            await session.fail(failures, hold_keys=self._settings.holds_ordering_keys)
            await session.confirm(dispatch.id)
        self._bounds.look_back()
        metrics.RELEASED.labels("send_failed").inc(released)
        for task in sending.refused:
            log.error("task_unsendable", task_id=task.id, claim=task.claim, action=task.action, reason=sending.reason)

    def _count(self, tasks: Sequence[Claimed], unsent: int) -> None:
        waited: dict[str, list[float]] = defaultdict(list)
        for task in tasks:
            waited[task.action].append(task.waited_seconds)
        for action, seconds in waited.items():
            metrics.TRANSITIONS.labels(action, "ACQUIRED").inc(len(seconds))
            metrics.QUEUE_WAIT_SECONDS.labels(action).observe_many(seconds)
        log.debug("dispatched", tasks=len(tasks), unsent=unsent)


def _outcome(dispatch: Dispatch | None, limit: int) -> tuple[Mapping[int, Position], bool]:
    """How far a claim reached, and whether it found less than it had room for."""
    return ({}, True) if dispatch is None else (dispatch.reached, len(dispatch.tasks) < limit)
