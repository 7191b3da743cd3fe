"""Attempts: tasks in this worker, from their message to their response."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.protocol.message_attributes import CarriedTrace
from penstock.protocol.requests import ClaimId
from penstock.protocol.trace_context import TraceContext
from penstock.worker.handlers.actions import Handler
from penstock.worker.handlers.context import Cancellation
from penstock.worker.leases import Lease
from penstock.worker.output import AttemptOutput
from penstock.worker.processes.channel import Child, Ended
from penstock.worker.threads import Call

if TYPE_CHECKING:
    from penstock.runtime.tracing.spans import AttemptSpan, Spans


@dataclass(slots=True, eq=False)
class HandlerCall:
    """One call of a handler, which occupies one slot of the worker: an attempt, or a batch of attempts.

    limit_seconds: of its run time.
    overdue: stopped at its time limit. cut: stopped with the process. where: the stack at which it was stopped.
    thread_call: of a plain function. child: the process that is reserved. ended: how it did, killed at the time limit.
    """

    handler: Handler
    limit_seconds: float
    received_at: float
    started_at: float = field(init=False, default=0.0)
    ran_seconds: float = field(init=False, default=0.0)
    where: str | None = field(init=False, default=None)
    deadline: float = field(init=False, default=math.inf)
    task: asyncio.Task[None] = field(init=False)
    thread_call: Call | None = field(init=False, default=None)
    child: Child | None = field(init=False, default=None)
    ended: Ended | None = field(init=False, default=None)
    span: AttemptSpan | None = field(init=False, default=None)
    overdue: bool = field(init=False, default=False)
    cut: bool = field(init=False, default=False)


@dataclass(slots=True, eq=False)
class Attempt(HandlerCall):
    """One attempt of a task by this worker.

    params: raw JSON; of a batched handler, decoded when it joins a batch, and ``started_at`` counts from then.
    place: in its message. seen_at: last heartbeat. spawned: tasks that go with its result.
    carried: trace context of the message. trace: the one that goes with the response.
    journal: finished durable steps, JSON text; journal_bytes: as they are stored. reported: entries that this attempt
    has added. sleep: one that begins. large: its response, whose result is to be stored as an object.
    output: what it logs and emits, if that is collected; output_parts: how many reports of it were sent.
    """

    claim_id: str
    claim: ClaimId
    params: Any
    lease: Lease
    seen_at: float
    place: int = 0
    tenant: str | None = field(init=False, default=None)
    carried: CarriedTrace | None = field(init=False, default=None)
    trace: TraceContext | None = field(init=False, default=None)
    answered: bool = field(init=False, default=False)
    cancellation: Cancellation = field(init=False, default_factory=Cancellation)
    spawned: list[str] = field(init=False, default_factory=list)
    journal: str = field(init=False, default="")
    journal_bytes: int = field(init=False, default=0)
    reported: Sequence[str] = field(init=False, default=())
    sleep: str | None = field(init=False, default=None)
    large: str = field(init=False, default="")
    output: AttemptOutput | None = field(init=False, default=None)
    output_parts: int = field(init=False, default=0)

    @property
    def attempts(self) -> Sequence[Attempt]:
        return (self,)

    @property
    def is_redelivered(self) -> bool:
        return self.lease.message.receive_count > 1

    @property
    def has_response(self) -> bool:
        return self.answered or self.large != ""

    @property
    def is_lost(self) -> bool:
        """Whether its claim has ended, so that the response would be ignored."""
        return self.cancellation.is_set

    def log_fields(self) -> dict[str, Any]:
        return {"task_id": self.claim.task_id, "claim": self.claim.claim, "action": self.handler.name}

    def begin_span(self, spans: Spans) -> AttemptSpan:
        self.span = spans.attempt(self.handler.name, *self.claim, self.carried, redelivered=self.is_redelivered)
        return self.span

    def end_span(self, error: str) -> None:
        """End the span, whose context goes with the response if it is sampled or the attempt spawned tasks."""
        if self.span is not None:
            self.span.end(error)
            context = self.span.context
            self.trace = context if context and (context.is_sampled or self.spawned) else None


@dataclass(slots=True, eq=False)
class Batch(HandlerCall):
    """Attempts of one batched call. timer: of the batching delay, while it lasts."""

    attempts: list[Attempt]
    timer: asyncio.TimerHandle | None = field(init=False, default=None)

    @classmethod
    def of(cls, attempt: Attempt) -> Batch:
        """A batch for the attempt's handler and time limit, with this first attempt."""
        return cls(attempt.handler, attempt.limit_seconds, attempt.received_at, [attempt])

    def log_fields(self) -> dict[str, Any]:
        """Those of the first task, and the number of tasks."""
        return {**self.attempts[0].log_fields(), "tasks": len(self.attempts)}

    def begin_span(self, spans: Spans) -> AttemptSpan:
        """Start the span of the call, which the handler's own spans are children of, and those of its attempts."""
        self.span = spans.batch(self.handler.name, [attempt.begin_span(spans) for attempt in self.attempts])
        return self.span


Unit = Attempt | Batch


class OpenBatches:
    """Batches that are not full, by handler and limit. queue: called once with each, full or after its delay."""

    def __init__(self, queue: Callable[[Batch], None]) -> None:
        self._queue = queue
        self._loop = asyncio.get_running_loop()
        self._open: dict[tuple[Handler, float], Batch] = {}

    def __bool__(self) -> bool:
        return bool(self._open)

    def add(self, attempt: Attempt) -> None:
        key = attempt.handler, attempt.limit_seconds
        batch = self._open.get(key)
        if batch is None:
            batch = self._open[key] = Batch.of(attempt)
            batch.timer = self._loop.call_later(attempt.handler.linger_seconds, self._end_delay, batch)
        else:
            batch.attempts.append(attempt)
        if len(batch.attempts) >= (batch.handler.batch or 1):
            del self._open[key]
            self._end_delay(batch)

    def _end_delay(self, batch: Batch) -> None:
        if batch.timer is not None:
            batch.timer.cancel()
            batch.timer = None
            self._queue(batch)

    def delayed(self) -> list[Batch]:
        """Batches within their batching delay."""
        return [batch for batch in [*self._open.values()] if batch.timer is not None]

    def close(self, batch: Batch) -> None:
        """Stop adding attempts to a batch, which is not queued if it is within its batching delay."""
        if batch.timer is not None:
            batch.timer.cancel()
            batch.timer = None
        key = batch.handler, batch.limit_seconds
        if self._open.get(key) is batch:
            del self._open[key]

    def flush(self) -> None:
        """End every batching delay now."""
        for batch in self.delayed():
            self._end_delay(batch)
