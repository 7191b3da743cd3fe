"""Packs claimed tasks into messages by number, bytes and run time, sends them, and handles what could not be sent."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import add
from time import time_ns

from penstock.brokers.base import Limits, Outgoing, Queue
from penstock.db.pool import PATIENT_SECONDS, Store
from penstock.db.session import columns
from penstock.protocol import message_attributes
from penstock.protocol.errors import HANDLER_ERROR, Unavailable
from penstock.protocol.fence import Fence
from penstock.protocol.json_text import escape_for_sqs, utf8_size
from penstock.protocol.reports import error_text
from penstock.protocol.requests import encode_call, join_batch, pack
from penstock.protocol.task import Claimed, Failure
from penstock.protocol.trace_context import Hop
from penstock.runtime import metrics
from penstock.runtime.logs import log
from penstock.runtime.tracing import active
from penstock.settings.model import Settings
from penstock.tasks import claim, settle

_SPREAD = 10  # messages that a claim is cut into, unless they would be too large
_SECONDS_UNKNOWN = 0.1  # the run time of an action that no worker has reported yet
# The time limit, a pack id, and a tenant of all, whose 128 characters are up to 6 bytes each as JSON.
_ATTRIBUTES_BYTES = 1024 + message_attributes.PACK_ID_MAX_BYTES
_UNSIGNED = Fence()
_SENDING_SHARE = 2 / 3  # of unsent_after_seconds, that a send may take


@dataclass(frozen=True, slots=True)
class PackedMessage:
    message: Outgoing
    tasks: Sequence[Claimed]


def pack_messages(
    tasks: Sequence[Claimed], run_seconds: Mapping[str, float], settings: Settings, limits: Limits, fence: Fence
) -> list[PackedMessage]:
    """Pack claimed tasks into messages of a queue, in the order of the claim.

    A small claim travels one task a message, so that idle workers share it; a larger one in about ``_SPREAD``, which
    are one call to SQS. Tasks of different time limits travel apart, because the limit is the message's attribute; a
    suspect travels alone, so that a crash of its worker affects no other task. In fair queues so do the tasks of each
    tenant, in messages of its group. run_seconds: mean run time by action. fence: makes their claim ids.
    """
    by_tenant = settings.fair_queues and limits.fair_groups
    groups: dict[tuple[float | None, str | None, int | None], list[Claimed]] = defaultdict(list)
    for task in tasks:
        groups[task.timeout_seconds, task.tenant if by_tenant else None, task.id if task.suspect else None].append(task)
    max_items = min(settings.pack_max_tasks, max(1, -(-len(tasks) // _SPREAD)))
    messages: list[PackedMessage] = []
    for (_, tenant, _), members in groups.items():
        calls = [call_of(task, fence) for task in members]
        sizes = [utf8_size(call) for call in calls]
        # Attributes of single tasks; one tenant for all is counted in _ATTRIBUTES_BYTES.
        beside = any(task.trace is not None or (task.tenant is not None and not by_tenant) for task in members)
        if beside:
            added = [_bytes_beside(task) for task in members]
            sizes = list(map(add, sizes, added))
        weights = [run_seconds.get(task.action, _SECONDS_UNKNOWN) for task in members]
        room = limits.max_message_bytes - _ATTRIBUTES_BYTES
        slices = pack(sizes, weights, max_bytes=room, max_items=max_items, max_weight=settings.pack_seconds)
        if beside:  # nearly always there is room in the attributes
            most = message_attributes.TRACES_MAX_BYTES
            slices = (
                (start + first, start + last)
                for start, end in slices
                for first, last in pack(added[start:end], max_bytes=most, max_items=max_items)
            )
        for start, end in slices:
            part = members[start:end]
            attributes = _attributes(part) | _pack_id(part, fence)
            messages.append(PackedMessage(Outgoing(join_batch(calls[start:end]), attributes, tenant), part))
    metrics.BATCH_SIZE.labels("outbound_message").observe_many([len(packed.tasks) for packed in messages])
    return messages


def call_of(task: Claimed, fence: Fence) -> str:
    # Escaped before it is measured: what SQS does not take as a character grows from 3 bytes to 6.
    claim_id = fence.name(task.id, task.claim)
    call = encode_call(task.id, task.claim, task.action, task.payload, claim_id=claim_id, journal=task.journal)
    return escape_for_sqs(call)


def message_of(tasks: Sequence[Claimed], group: str | None = None, fence: Fence = _UNSIGNED) -> PackedMessage:
    """Tasks of one time limit and one group in one message; a suspect alone."""
    body = join_batch([call_of(task, fence) for task in tasks])
    return PackedMessage(Outgoing(body, _attributes(tasks), group), tasks)


def _attributes(tasks: Sequence[Claimed]) -> dict[str, str]:
    first, attributes = tasks[0], dict[str, str]()
    if first.timeout_seconds is not None:
        attributes[message_attributes.TIMEOUT_ATTRIBUTE] = repr(first.timeout_seconds)
    if first.suspect:
        attributes[message_attributes.SUSPECT_ATTRIBUTE] = "1"
    if any(task.trace is not None for task in tasks):
        attributes |= message_attributes.encode_traces((task.id, task.trace) for task in tasks)
    if any(task.tenant is not None for task in tasks):
        attributes |= message_attributes.encode_tenants((task.id, task.tenant) for task in tasks)
    return attributes


def _pack_id(tasks: Sequence[Claimed], fence: Fence) -> dict[str, str]:
    """The attribute with the name of all, by which a worker reports a result that they share; of a few, nothing."""
    if len(tasks) < message_attributes.PACK_FROM:
        return {}
    plain = message_attributes.name_pack(tasks[0].claim, [task.id for task in tasks])
    return {} if plain is None else {message_attributes.PACK_ATTRIBUTE: fence.sign(plain)}


def _bytes_beside(task: Claimed) -> int:
    size = 0 if task.trace is None else len(task.trace) + message_attributes.TRACE_ENTRY_BYTES
    return size if task.tenant is None else size + message_attributes.tenant_bytes(task.tenant)


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

    async def send_batch(self, batch: claim.ClaimBatch) -> int:
        """Send a claim, which is confirmed later; returns how many were sent. Raises Unavailable if none was."""
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
        failed = len(report.failed)
        log.warning("send_failed", queue=queue.label, messages=failed, of=len(messages), reason=report.reason)
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

    async def _conclude(self, batch: claim.ClaimBatch, outcome: SendOutcome) -> None:
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
        if task.trace is not None and (carried := message_attributes.read_carried(task.trace)):
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
