"""Scheduler: claims due tasks by priority and sends them, no more than the window allows.

SQS has no priority, so what is not yet needed stays in Postgres: at most ``in_flight_limit`` tasks are claimed and
unsettled. With several schedulers the bound may be passed by one claim batch each, since each counts for itself.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock import metrics
from penstock.errors import HANDLER_ERROR, Unavailable
from penstock.logs import get_logger
from penstock.loop import Service, SideTask
from penstock.notify import Listener
from penstock.settings import Settings
from penstock.store import Dispatch, Store
from penstock.tasks import Claimed, Failure
from penstock.transports import Outgoing, Queue
from penstock.wire import TIMEOUT_ATTRIBUTE, encode_call, escape_for_sqs, join_batch, pack, utf8_size

_SPREAD = 10  # a claim is cut into at least so many messages before any holds many tasks
_ATTRIBUTES_BYTES = 128

log = get_logger()


@dataclass(frozen=True, slots=True)
class Parcel:
    """A message and the tasks that travel in it."""

    message: Outgoing
    tasks: Sequence[Claimed]


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
        self._window = asyncio.Lock()

    async def open(self) -> None:
        await self._store.open()
        await self._outbound.depth()

    def side_tasks(self) -> Mapping[str, SideTask]:
        return {"listen": self._listener.run}

    async def wait_for_work(self) -> None:
        """Until a nudge or the poll interval, whichever comes first."""
        try:
            await asyncio.wait_for(self._listener.event.wait(), self._settings.poll_seconds)
        except TimeoutError:
            pass

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
        async with self._window, self._store.session() as session:  # one at a time: the room is counted, then taken
            limit = self._settings.in_flight_limit
            in_flight = await session.count_in_flight(limit)
            metrics.IN_FLIGHT.set(in_flight)
            if in_flight >= limit:
                return None
            return await session.claim(min(self._settings.claim_batch_size, limit - in_flight))

    def _pack(self, tasks: Sequence[Claimed]) -> list[Parcel]:
        return pack_parcels(
            tasks,
            max_tasks=self._settings.pack_max_tasks,
            max_bytes=self._outbound.limits.max_message_bytes - _ATTRIBUTES_BYTES,
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
                alone += [_parcel([task], parcels[position].message.attributes) for task in tasks]
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
            await session.fail([Failure(task.id, task.claim, json.dumps(error), None) for task in sending.refused])
            await session.confirm(dispatch.id)
        metrics.RELEASED.labels("send_failed").inc(released)
        for task in sending.refused:
            log.error("task_unsendable", task_id=task.id, claim=task.claim, action=task.action, reason=sending.reason)

    def _count(self, tasks: Sequence[Claimed], unsent: int) -> None:
        waited: dict[str, list[float]] = defaultdict(list)
        for task in tasks:
            waited[task.action].append(task.waited_seconds)
        for action, seconds in waited.items():
            metrics.TRANSITIONS.labels(action, "ACQUIRED").inc(len(seconds))
            histogram = metrics.QUEUE_WAIT_SECONDS.labels(action)
            for value in seconds:
                histogram.observe(value)
        log.debug("dispatched", tasks=len(tasks), unsent=unsent)


def pack_parcels(tasks: Sequence[Claimed], *, max_tasks: int, max_bytes: int) -> list[Parcel]:
    """Pack claimed tasks into messages, in the order of the claim.

    A small claim travels one task a message, so that idle workers share it; a message grows only once there are
    ``_SPREAD`` of them. Tasks with different time limits travel apart, for the limit is the message's attribute.
    """
    groups: dict[float | None, list[Claimed]] = defaultdict(list)
    for task in tasks:
        groups[task.timeout_seconds].append(task)
    parcels = []
    for timeout, members in groups.items():
        attributes = {} if timeout is None else {TIMEOUT_ATTRIBUTE: repr(timeout)}
        calls = [_call(task) for task in members]
        sizes = [utf8_size(call) for call in calls]
        max_items = min(max_tasks, max(1, len(tasks) // _SPREAD))
        for start, end in pack(sizes, max_bytes=max_bytes, max_items=max_items):
            parcels.append(Parcel(Outgoing(join_batch(calls[start:end]), attributes), members[start:end]))
            metrics.BATCH_SIZE.labels("outbound_message").observe(end - start)
    return parcels


def _call(task: Claimed) -> str:
    # Escaped before it is measured: what SQS does not take as a character grows from 3 bytes to 6.
    return escape_for_sqs(encode_call(task.id, task.claim, task.action, task.payload))


def _parcel(tasks: Sequence[Claimed], attributes: Mapping[str, str]) -> Parcel:
    return Parcel(Outgoing(join_batch([_call(task) for task in tasks]), attributes), tasks)
