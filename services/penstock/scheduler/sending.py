"""Sends claimed tasks to their queues, and handles those that could not be sent."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import time_ns

from penstock.brokers.base import Queue
from penstock.db.pool import PATIENT_SECONDS, Store
from penstock.db.session import columns
from penstock.protocol.errors import HANDLER_ERROR, Unavailable
from penstock.protocol.message_attributes import read_carried
from penstock.protocol.reports import error_text
from penstock.protocol.task import Claimed, Failure
from penstock.protocol.trace_context import Hop
from penstock.runtime import metrics
from penstock.runtime.logs import log
from penstock.runtime.tracing import active
from penstock.scheduler.packing import PackedMessage, message_of, pack_messages
from penstock.settings.model import Settings
from penstock.tasks import claim, settle
from penstock.tasks.claim import ClaimBatch

_SENDING_SHARE = 2 / 3  # of unsent_after_seconds, that a send may take


@dataclass(slots=True)
class SendOutcome:
    """Tasks to send again, tasks whose message the queue will never take, and why."""

    reason: str | None = None
    unsent: list[Claimed] = field(default_factory=list)
    refused: list[Claimed] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Sender:
    store: Store
    settings: Settings
    run_seconds: Mapping[str, float]  # mean run time by action
    queue_of: Callable[[str | None], Queue]  # of a route, None for the outbound queue
    released: Callable[[], None]  # called after tasks were released, perhaps before the bounds of the next claim
    sent: list[int] = field(default_factory=list)  # batches to be confirmed: by the next claim, or by ``confirm``

    async def send_batch(self, batch: ClaimBatch) -> int:
        """Send a claim, release what could not be sent; returns how many were sent. Raises Unavailable if none was.

        What was sent whole is confirmed later.
        """
        started_ns = time_ns()
        try:
            # Well before the supervisor gives the claims back, while they are still being sent.
            async with asyncio.timeout(self.settings.unsent_after_seconds * _SENDING_SHARE):
                outcome = await self._send_all(batch.tasks)
        except Exception as exc:
            # Released at once rather than by the supervisor later; messages that were sent carry an old claim now.
            await self._conclude(batch, SendOutcome(reason=type(exc).__name__, unsent=batch.tasks))
            if isinstance(exc, TimeoutError):
                raise Unavailable("nothing could be sent in time") from exc
            raise
        await self._conclude(batch, outcome)
        _observe(batch.tasks, outcome, started_ns)
        if len(outcome.unsent) == len(batch.tasks):
            # Without a pause the same tasks would be claimed and released in a loop.
            raise Unavailable(f"nothing could be sent: {outcome.reason}")
        return len(batch.tasks) - len(outcome.unsent)

    async def _send_all(self, tasks: Sequence[Claimed]) -> SendOutcome:
        by_route: dict[str | None, list[Claimed]] = defaultdict(list)
        for task in tasks:
            by_route[task.route].append(task)
        outcome = SendOutcome()
        sends = []
        for route, members in by_route.items():
            queue = self.queue_of(route)
            messages = pack_messages(members, self.run_seconds, self.settings, queue.limits, self.store.fence)
            sends.append(self._send(queue, messages, outcome))
        await asyncio.gather(*sends)
        return outcome

    async def _send(self, queue: Queue, messages: Sequence[PackedMessage], outcome: SendOutcome) -> None:
        """Send; a refused message is tried again with each task in its own.

        When interrupted, it is unknown which messages were sent: the batch stays unconfirmed, the supervisor releases
        its claims, and the messages that were sent carry an old claim.
        """
        report = await queue.send([packed.message for packed in messages])
        if not report.failed:
            return
        log.warning(
            "send_failed", queue=queue.label, messages=len(report.failed), of=len(messages), reason=report.reason
        )
        outcome.reason = outcome.reason or report.reason
        alone: list[PackedMessage] = []
        for position in report.failed:
            tasks = messages[position].tasks
            if position not in report.refused:
                outcome.unsent += tasks
            elif len(tasks) == 1:
                outcome.refused += tasks
            else:
                alone += [message_of([task], messages[position].message.group, self.store.fence) for task in tasks]
        if alone:
            await self._send(queue, alone, outcome)

    async def _conclude(self, batch: ClaimBatch, outcome: SendOutcome) -> None:
        """Release what could not be sent, fail what never can be, confirm the rest; or note that all was sent."""
        if not outcome.unsent and not outcome.refused:
            self.sent.append(batch.id)
            return
        unsent, refused = ([(task.id, task.claim) for task in some] for some in (outcome.unsent, outcome.refused))
        async with self.store.transaction(lock_wait_seconds=PATIENT_SECONDS) as session:
            await session.fetch("give_back_starts", *columns(unsent + refused))
            released = await claim.release(session, unsent)
            # Released, a refused task would be claimed again at once, before all others of its priority, for ever.
            problem = "the outbound queue refuses the task's message"
            error = error_text(HANDLER_ERROR, problem, type="Unsendable", message=outcome.reason)
            failures = [Failure(task.id, task.claim, error, None) for task in outcome.refused]
            await settle.fail(session, failures, hold_keys=self.settings.holds_ordering_keys)
            await claim.confirm(session, batch.id)
        self.released()
        metrics.RELEASED.labels("send_failed").inc(released)
        for task in outcome.refused:
            log.error("task_unsendable", task_id=task.id, claim=task.claim, action=task.action, reason=outcome.reason)

    @contextmanager
    def confirming(self) -> Iterator[Sequence[int]]:
        """The batches that the block confirms; if it raises, they are left for another."""
        sent = self.sent[:]
        self.sent.clear()
        try:
            yield sent
        except BaseException:
            self.sent.extend(sent)
            raise

    async def confirm(self) -> None:
        if self.sent:
            with self.confirming() as sent:
                await claim.confirm(self.store, *sent)


def _observe(tasks: Sequence[Claimed], outcome: SendOutcome, started_ns: int) -> None:
    """Count what was sent, and end the send span of each traced task."""
    errors = {task.id: "unsent" for task in outcome.unsent} | {task.id: "refused" for task in outcome.refused}
    waited: dict[str, list[float]] = defaultdict(list)
    exemplars: dict[str, list[tuple[float, str]]] = defaultdict(list)
    hops: list[Hop] = []
    for task in tasks:
        waited[task.action].append(task.waited_seconds)
        if task.trace is not None and (carried := read_carried(task.trace)):
            hops.append(Hop(carried.context, task.id, task.action, errors.get(task.id)))
            if carried.context.is_sampled:
                exemplars[task.action].append((task.waited_seconds, carried.context.trace_id))
    for action, seconds in waited.items():
        metrics.TRANSITIONS.labels(action, "ACQUIRED").inc(len(seconds))
        metrics.QUEUE_WAIT_SECONDS.labels(action).observe_many(seconds, exemplars[action])
    spans = active.active()
    if spans is not None and hops:
        spans.passed("send", hops, started_ns=started_ns, count=len(tasks))
    log.debug("dispatched", tasks=len(tasks), unsent=len(outcome.unsent))
