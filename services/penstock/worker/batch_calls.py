"""Batches: attempts of one action, collected from any messages for one call of its handler."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator

from penstock.worker.attempt import Attempt
from penstock.worker.handlers.actions import Handler
from penstock.worker.leases import Lease
from penstock.worker.threads import Call


class Batch:
    """Attempts of one call; members shared with Attempt describe the call as a whole.

    limit_seconds: of the call, the same for all attempts. queued: ready to start.
    """

    __slots__ = (
        "attempts", "call", "cut", "deadline", "handler", "limit_seconds", "overdue", "queued", "ran_seconds",
        "received_at", "started_at", "task", "timer", "where",
    )  # fmt: skip

    def __init__(self, handler: Handler, limit_seconds: float | None, attempts: list[Attempt]) -> None:
        self.handler = handler
        self.limit_seconds = limit_seconds
        self.attempts = attempts
        self.received_at = attempts[0].received_at
        self.started_at = 0.0
        self.ran_seconds = 0.0
        self.where: str | None = None
        self.deadline = math.inf
        self.task: asyncio.Task[None] | None = None
        self.call: Call | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.queued = False
        self.overdue = False
        self.cut = False

    @property
    def is_full(self) -> bool:
        """Whether the batch has reached its size."""
        return len(self.attempts) >= (self.handler.batch or 1)

    def drop_lost(self) -> list[Attempt]:
        """Remove and return the attempts whose claim has ended."""
        lost = [attempt for attempt in self.attempts if attempt.is_lost]
        if lost:
            self.attempts = [attempt for attempt in self.attempts if not attempt.is_lost]
        return lost

    def take_back(self) -> list[Lease]:
        """Remove the attempts of messages of which no task has started; returns the leases of these messages."""
        leases = [attempt.lease for attempt in self.attempts if not attempt.lease.begun]
        self.attempts = [attempt for attempt in self.attempts if attempt.lease.begun]
        return leases


class OpenBatches:
    """Batches that accept attempts, one for each handler and time limit.

    queue: called once with each batch, when it is full or its first attempt has waited for the handler's batching
    delay. A batch that is not full accepts attempts until it starts.
    """

    def __init__(self, queue: Callable[[Batch], None]) -> None:
        self._queue = queue
        self._loop = asyncio.get_running_loop()
        self._open: dict[tuple[Handler, float | None], Batch] = {}

    def __bool__(self) -> bool:
        return bool(self._open)

    def add(self, attempt: Attempt) -> None:
        """Add an attempt to the batch of its handler and time limit."""
        key = attempt.handler, attempt.limit_seconds
        batch = self._open.get(key)
        if batch is None:
            batch = self._open[key] = Batch(attempt.handler, attempt.limit_seconds, [attempt])
            batch.timer = self._loop.call_later(attempt.handler.linger_seconds, self._ready, batch)
        else:
            batch.attempts.append(attempt)
        if batch.is_full:
            del self._open[key]
            self._ready(batch)

    def _ready(self, batch: Batch) -> None:
        if batch.timer is not None:
            batch.timer.cancel()
            batch.timer = None
        if not batch.queued:
            batch.queued = True
            self._queue(batch)

    def unqueued(self) -> Iterator[Batch]:
        """Batches within their batching delay."""
        return (batch for batch in self._open.values() if not batch.queued)

    def close(self, batch: Batch) -> None:
        """Stop adding attempts to a batch."""
        key = batch.handler, batch.limit_seconds
        if self._open.get(key) is batch:
            del self._open[key]

    def flush(self) -> None:
        """End every batching delay now."""
        for batch in list(self._open.values()):
            self._ready(batch)

    def take_back(self) -> list[Lease]:
        """As :meth:`Batch.take_back`, of the batches within their batching delay."""
        leases: list[Lease] = []
        for batch in list(self.unqueued()):
            leases += batch.take_back()
            if not batch.attempts:
                self._forget(batch)
        return leases

    def clear(self) -> None:
        """Forget all batches."""
        for batch in list(self._open.values()):
            self._forget(batch)

    def _forget(self, batch: Batch) -> None:
        if batch.timer is not None:
            batch.timer.cancel()
        self.close(batch)
