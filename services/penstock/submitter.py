"""Submitter: the inbound queue to Postgres. A message is deleted only after its tasks are committed.

A redelivered message adds nothing: its receipt is written in the transaction of its tasks. A message replayed from the
dead-letter queue carries its first id.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from penstock.brokers.base import Message, Queue
from penstock.db.pool import Store
from penstock.methods.inbound import Inbound, accept_inbound, read_inbound, take_in
from penstock.protocol.answers import Accepted
from penstock.protocol.errors import Locked, PayloadUnavailable, PenstockError, Refused, TooSlow
from penstock.protocol.json_text import entry_text
from penstock.protocol.requests import split_body
from penstock.protocol.retry import Backoff
from penstock.protocol.trace_context import of_headers
from penstock.runtime.halving import SPOILING, in_halves
from penstock.runtime.logs import log
from penstock.runtime.tracing import active
from penstock.settings.model import Settings
from penstock.tasks import enqueue
from penstock.tasks.consumer import Consumer, Uncommitted
from penstock.workflows.model import CreateWorkflow

_PUT_OFF = Backoff(60, 2, 3600, jitter=0)


class Submitter(Consumer):
    """One submitter process; ``run_once`` is one receive, committed and deleted."""

    name = "submitter"

    def __init__(self, *, store: Store, inbound: Queue, settings: Settings) -> None:
        super().__init__(store=store, queue=inbound, settings=settings)

    async def commit(self, messages: Sequence[Message]) -> Uncommitted:
        left = Uncommitted()
        read: list[tuple[Message, Inbound]] = []

        def put_off(message: Message, reason: PayloadUnavailable) -> None:
            left.put_off.append(message)
            log.warning("payload_not_kept", message_id=message.id, reason=str(reason))

        for message in messages:
            try:
                read.append((message, await self._read(message, message.body)))
            except PayloadUnavailable as exc:
                put_off(message, exc)

        async def store(part: Sequence[tuple[Message, Inbound]], hurried: bool) -> None:
            await self._store_together({message.original_id: inbound for message, inbound in part}, hurried=hurried)

        async def leave(one: tuple[Message, Inbound], error: PenstockError) -> None:
            message, inbound = one
            try:
                if not isinstance(error, Refused):
                    raise error
                await self._store_alone(message, inbound, error)
            except (Locked, TooSlow) as exc:
                left.add(message, exc)
            except PayloadUnavailable as exc:  # of a result that a step of a workflow is given, or of a payload
                put_off(message, exc)

        await in_halves(read, store, leave, errors=(*SPOILING, PayloadUnavailable))
        for message in left.put_off:  # received again later, each time after a longer pause
            seconds = _PUT_OFF.delay_seconds(message.receive_count + 1)
            await self._queue.extend([message], min(int(seconds), self._queue.limits.max_extend_seconds))
        return left

    async def _store_alone(self, message: Message, inbound: Inbound, reason: Refused) -> None:
        try:
            if not (inbound.tasks or inbound.changes):
                raise reason
            await self._store_singly(message)
        except Refused as exc:  # at the commit, so it is unknown of which entry
            await self._store_together({message.original_id: Inbound(refused=[(message.body, str(exc))])})

    async def _store_together(self, read: Mapping[str, Inbound], *, hurried: bool = False) -> None:
        async with self._store.transaction(hurried=hurried) as session:
            fresh = await enqueue.record_receipts(session, list(read))
            merged = _merge([read[message_id] for message_id in read if message_id in fresh])
            enqueued = await accept_inbound(session, merged, self._settings, source="inbound")
            await enqueue.insert_rejected(session, "inbound", merged.refused)
        self._stored(merged, enqueued)

    async def _store_singly(self, message: Message) -> None:
        _, entries = split_body(message.body, batch_limit=self._settings.batch_limit)
        parts: list[Inbound] = []
        enqueued: list[Accepted] = []
        async with self._store.transaction() as session:
            if not await enqueue.record_receipts(session, [message.original_id]):
                return
            for entry in entries:
                text = entry_text(entry)
                part = await self._read(message, f"[{text}]")  # as of a batch: an entry that is one is refused
                try:
                    async with session.savepoint():
                        enqueued += await accept_inbound(session, part, self._settings, source="inbound")
                except Refused as exc:
                    part = Inbound(refused=[(text, str(exc))])
                parts.append(part)
            merged = _merge(parts)
            await enqueue.insert_rejected(session, "inbound", merged.refused)
        self._stored(merged, enqueued)

    async def _read(self, message: Message, body: str) -> Inbound:
        """Read a body, or part of it, and take in its payloads; its tasks continue the trace of the message."""
        inbound = read_inbound(body, self._settings, sender=message.sender or "")
        await take_in(inbound, self._store.codec, self._settings, self._store.session)
        trace = None if active.active() is None else of_headers(message.attributes)
        if trace is not None:
            inbound.tasks = [msgspec.structs.replace(task, trace=trace.text) for task in inbound.tasks]
            inbound.changes = [wanted._replace(change=_traced(wanted.change, trace.text)) for wanted in inbound.changes]
        return inbound

    def _stored(self, inbound: Inbound, enqueued: Sequence[Accepted]) -> None:
        if enqueued or inbound.changes:
            self._notifier.wake()
        for text, reason in inbound.refused:
            log.warning("message_rejected", source="inbound", reason=reason, bytes=len(text))
        log.debug("accepted", tasks=len(enqueued), refused=len(inbound.refused))


def _traced(change: Any, trace: str) -> Any:
    """The change, with the trace in the tasks of a workflow that it creates."""
    if not isinstance(change, CreateWorkflow):
        return change
    steps = [replace(step, task=step.task and msgspec.structs.replace(step.task, trace=trace)) for step in change.steps]
    return replace(change, steps=steps)


def _merge(parts: Sequence[Inbound]) -> Inbound:
    return Inbound(*([one for part in parts for one in getattr(part, name)] for name in Inbound.__slots__))
