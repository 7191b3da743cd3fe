"""Batches: jobs of one action gathered, from whichever messages, for one call of its handler."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator

from penstock.worker.attempt import Job
from penstock.worker.handlers.actions import Handler
from penstock.worker.leases import Held
from penstock.worker.threads import Call


class Batch:
    """Jobs that one call takes; the members that it shares with a Job mean the same, of the call as a whole.

    limit_seconds: of the call; all of its jobs have the same. queued: it is ready to start.
    """

    __slots__ = (
        "call", "cut", "deadline", "handler", "jobs", "limit_seconds", "overdue", "queued", "ran_seconds",
        "received_at", "started_at", "task", "timer", "where",
    )  # fmt: skip

    def __init__(self, handler: Handler, limit_seconds: float | None, jobs: list[Job]) -> None:
        self.handler = handler
        self.limit_seconds = limit_seconds
        self.jobs = jobs
        self.received_at = jobs[0].received_at
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
        """Whether it takes no more jobs."""
        return len(self.jobs) >= (self.handler.batch or 1)

    def drop_lost(self) -> list[Job]:
        """Take out the jobs whose claim holds no more, and return them."""
        lost = [job for job in self.jobs if job.is_lost]
        if lost:
            self.jobs = [job for job in self.jobs if not job.is_lost]
        return lost

    def take_back(self) -> list[Held]:
        """Take out the jobs of messages of which none has started, and return those messages."""
        held = [job.held for job in self.jobs if not job.held.begun]
        self.jobs = [job for job in self.jobs if job.held.begun]
        return held


class Gathering:
    """The batches that take more jobs, one for each handler and time limit.

    queue: called with a batch once, when it is full or its first job has waited for its handler's linger. One that is
    not full then takes more until it starts.
    """

    def __init__(self, queue: Callable[[Batch], None]) -> None:
        self._queue = queue
        self._loop = asyncio.get_running_loop()
        self._open: dict[tuple[Handler, float | None], Batch] = {}

    def __bool__(self) -> bool:
        return bool(self._open)

    def add(self, job: Job) -> None:
        """Have a job join the batch of its kind."""
        key = job.handler, job.limit_seconds
        batch = self._open.get(key)
        if batch is None:
            batch = self._open[key] = Batch(job.handler, job.limit_seconds, [job])
            batch.timer = self._loop.call_later(job.handler.linger_seconds, self._ready, batch)
        else:
            batch.jobs.append(job)
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
        """Batches that wait for company."""
        return (batch for batch in self._open.values() if not batch.queued)

    def close(self, batch: Batch) -> None:
        """A batch takes no more jobs."""
        key = batch.handler, batch.limit_seconds
        if self._open.get(key) is batch:
            del self._open[key]

    def flush(self) -> None:
        """No batch waits for company any more."""
        for batch in list(self._open.values()):
            self._ready(batch)

    def take_back(self) -> list[Held]:
        """As :meth:`Batch.take_back`, of those that wait for company."""
        held: list[Held] = []
        for batch in list(self.unqueued()):
            held += batch.take_back()
            if not batch.jobs:
                self._forget(batch)
        return held

    def clear(self) -> None:
        """Forget all batches."""
        for batch in list(self._open.values()):
            self._forget(batch)

    def _forget(self, batch: Batch) -> None:
        if batch.timer is not None:
            batch.timer.cancel()
        self.close(batch)
