"""Runner: starts tasks as there is room, stops those that take too long, and gives each exactly one answer."""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from time import monotonic
from typing import Any

import msgspec

from penstock import metrics
from penstock.errors import InvalidParams
from penstock.handlers import Context, Handler
from penstock.handlers.cancellation import Cancellation
from penstock.handlers.parameters import Arguments
from penstock.logs import get_logger
from penstock.wire import ClaimId
from penstock.worker import answers
from penstock.worker.holder import Held
from penstock.worker.threads import Call, Threads
from penstock.worker.timings import Timings

_CANCEL_SECONDS = 5.0  # a handler that was cancelled may clean up so long before its task is answered without it
_SHORT_SECONDS = 1.0  # tasks that run shorter are worth fetching ahead
_MEAN_WEIGHT = 0.05

log = get_logger()


class Job:
    """A task in this worker's hands.

    limit_seconds: how long it may run; until it starts, what its message says, None where it says nothing.
    seen_at: when this worker last gave a sign of it. overdue: it was stopped for its limit. cut: for the end of the
    process. where: the stack at which it was stopped. cancellation: what tells its handler that it is lost.
    """

    __slots__ = (
        "answered", "call", "cancellation", "claim", "claim_id", "cut", "deadline", "handler", "held", "limit_seconds",
        "overdue", "params", "ran_seconds", "runner", "seen_at", "started_at", "task", "where",
    )  # fmt: skip

    def __init__(
        self,
        claim_id: str,
        claim: ClaimId,
        handler: Handler,
        params: msgspec.Raw,
        held: Held,
        limit_seconds: float | None,
        runner: Runner,
    ) -> None:
        self.claim_id = claim_id
        self.claim = claim
        self.handler = handler
        self.params = params
        self.held = held
        self.limit_seconds = limit_seconds
        self.runner = runner
        self.seen_at = held.received_at
        self.started_at = 0.0
        self.ran_seconds = 0.0
        self.where: str | None = None
        self.deadline = math.inf
        self.task: asyncio.Task[None] | None = None
        self.call: Call | None = None
        self.overdue = False
        self.cut = False
        self.answered = False
        self.cancellation = Cancellation()

    @property
    def is_lost(self) -> bool:
        """Whether its claim holds no more, so that its answer would change nothing."""
        return self.cancellation.is_set

    def report(self, percent: float | None, note: str | None) -> None:
        """Progress from the handler, from whichever thread it runs in."""
        self.runner.report(self, percent, note)


class Runner:
    """Runs jobs, at most ``concurrency`` at once; those of plain functions as threads are free.

    timeout_seconds: of one attempt, where neither the task nor its action says.
    timings: told of every attempt. answer: called with each job and its response, once. progress: called with what
    handlers report.
    """

    def __init__(
        self,
        *,
        concurrency: int,
        threads: Threads,
        timeout_seconds: float,
        result_limit_bytes: int,
        timings: Timings,
        answer: Callable[[Job, str], None],
        progress: Callable[[Job, float | None, str | None], None],
    ) -> None:
        self._concurrency = concurrency
        self._threads = threads
        self._timeout_seconds = timeout_seconds
        self._result_limit_bytes = result_limit_bytes
        self._timings = timings
        self._answer = answer
        self._progress = progress
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._running: set[Job] = set()
        self._waiting: deque[Job] = deque()
        self._waiting_for_thread: deque[Job] = deque()
        self._may_start = True
        self._mean_seconds = 0.0
        self._last_end = -math.inf
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at = math.inf
        self._empty = asyncio.Event()
        self._empty.set()
        self.changed = asyncio.Event()  # set whenever a job has ended
        metrics.RUNNING.set_function(lambda: len(self._running))

    # Taking

    @property
    def has_room(self) -> bool:
        """Whether more should be fetched: something could start now, or short tasks are run from a small store.

        Long tasks are never fetched ahead; they would wait here while other workers are idle.
        """
        waiting = len(self._waiting) + len(self._waiting_for_thread)
        if not waiting:
            return len(self._running) < self._concurrency
        is_short = self._mean_seconds < _SHORT_SECONDS and monotonic() - self._last_end < _SHORT_SECONDS
        return is_short and len(self._running) + waiting < 2 * self._concurrency

    def add(self, jobs: Iterable[Job]) -> None:
        """Take jobs and start them in their order as there is room."""
        for job in jobs:
            (self._waiting if job.handler.is_async else self._waiting_for_thread).append(job)
        self._empty.clear()
        self._start_waiting()

    def jobs(self) -> Iterator[Job]:
        """All jobs without an answer, running or waiting."""
        yield from self._running
        yield from self._waiting
        yield from self._waiting_for_thread

    def lose(self, job: Job) -> None:
        """Tell a job's handler that its claim holds no more; what it returns or raises is dropped."""
        if not job.answered:
            log.info(
                "task_lost", task_id=job.claim.task_id, claim=job.claim.claim, action=job.handler.name,
                ran_seconds=round(monotonic() - job.started_at, 3),
            )  # fmt: skip
            job.cancellation.set()

    def action_of(self, task: asyncio.Task[Any]) -> str | None:
        """The action that a task of the loop runs, None for a task that runs none; from any thread."""
        return next((job.handler.name for job in list(self._running) if job.task is task), None)

    async def wait_empty(self) -> None:
        """Until every job has its answer."""
        await self._empty.wait()

    # Running

    def _start_waiting(self) -> None:
        running, waiting, plain = self._running, self._waiting, self._waiting_for_thread
        create_task = self._loop.create_task
        while self._may_start and len(running) < self._concurrency:
            if plain and self._threads.has_room and self._is_turn_of_plain():
                job = plain.popleft()
                self._threads.take()
            elif waiting:
                job = waiting.popleft()
            else:
                break
            if not job.held.begun:
                job.held.begin()
            running.add(job)
            job.task = create_task(self._run(job))
        if not (running or waiting or plain):
            self._empty.set()

    def _is_turn_of_plain(self) -> bool:
        """Whichever has waited longer, so that neither kind keeps the other from its turn."""
        waiting, plain = self._waiting, self._waiting_for_thread
        return not (waiting and waiting[0].held.received_at < plain[0].held.received_at)

    async def _run(self, job: Job) -> None:
        self._set_deadline(job)
        outcome, kind = "error", ""
        try:
            if job.handler.is_async:
                args, kwargs = _arguments(job)
                result = await job.handler.function(_context(job), *args, **kwargs)
            else:
                result = await self._in_thread(job)
            answer = answers.answer_of(job.claim_id, job.handler, result, limit_bytes=self._result_limit_bytes)
            outcome = "ok"
        except answers.Refusal as exc:
            answer, kind = answers.refusal_answer(job.claim_id, job.handler, exc), exc.kind
        except BaseException as exc:
            # SystemExit, or a CancelledError of the handler's own, is one task's affair and not the worker's.
            if job.cut and isinstance(exc, asyncio.CancelledError):
                job.answered = True  # by the worker that gets its message next
                self._end(job)
                return
            if job.overdue:
                job.where = job.where or answers.traceback_of(exc)
            answer, kind = answers.exception_answer(job.claim_id, job.handler, exc), type(exc).__name__
        if job.overdue:
            self._finish_overdue(job)
        else:
            self._finish(job, answer, outcome, kind)

    async def _in_thread(self, job: Job) -> Any:
        try:
            args, kwargs = _arguments(job)
        except BaseException:
            self._threads.give_back()
            raise
        job.call = self._threads.start(partial(job.handler.function, _context(job), *args, **kwargs))
        try:
            result, raised = await job.call.outcome
        except asyncio.CancelledError:
            self._threads.leave(job.call)
            log.warning(
                "thread_left_behind", task_id=job.claim.task_id, claim=job.claim.claim, action=job.handler.name,
                left=self._threads.left,
            )  # fmt: skip
            raise
        if raised is not None:
            raise raised
        # A plain function may return what an async one inside it has made: a decorator that forgot to be async.
        return await result if inspect.iscoroutine(result) else result

    def _finish(self, job: Job, answer: str, outcome: str, kind: str) -> None:
        if job.answered:
            return
        job.answered = True
        now = monotonic()
        ran = now - job.started_at
        action = job.handler.name
        self._timings.add(action, outcome, ran)
        self._mean_seconds += (ran - self._mean_seconds) * _MEAN_WEIGHT
        self._last_end = now
        if job.is_lost:
            log.info(
                "task_dropped", task_id=job.claim.task_id, claim=job.claim.claim, action=action,
                ran_seconds=round(ran, 3),
            )  # fmt: skip
        elif kind:
            log.info("task_failed", task_id=job.claim.task_id, claim=job.claim.claim, action=action, error=kind)
        self._answer(job, answer)
        self._end(job)

    def _end(self, job: Job) -> None:
        self._running.discard(job)
        if self._waiting or self._waiting_for_thread or not self._running:
            self._start_waiting()
        if not self.changed.is_set():
            self.changed.set()

    # Time limits. One timer for all, set for the earliest deadline: a task that ends before its own costs nothing.

    def _set_deadline(self, job: Job) -> None:
        job.started_at = now = monotonic()
        handler = job.handler
        job.limit_seconds = job.limit_seconds or handler.timeout_seconds or self._timeout_seconds
        job.deadline = now + job.limit_seconds
        if job.deadline < self._alarm_at:
            self._set_alarm(job.deadline)

    def _set_alarm(self, at: float) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm_at = at
        self._alarm = self._loop.call_later(max(0.0, at - monotonic()), self._look_for_overdue)

    def _look_for_overdue(self) -> None:
        self._alarm, self._alarm_at = None, math.inf
        now = monotonic()
        for job in [job for job in self._running if job.deadline <= now]:
            self._stop(job, now)
        earliest = min((job.deadline for job in self._running), default=math.inf)
        if earliest < math.inf:
            self._set_alarm(earliest)

    def _stop(self, job: Job, now: float) -> None:
        if not job.overdue:
            job.overdue = True
            job.ran_seconds = now - job.started_at
            job.deadline = now + _CANCEL_SECONDS
            if job.call is not None:
                job.where = job.call.stack()
            if job.task is not None:
                job.task.cancel()
            return
        log.warning(
            "task_ignores_cancel", task_id=job.claim.task_id, claim=job.claim.claim, action=job.handler.name,
            hint="it goes on beside the others; do not swallow CancelledError",
        )  # fmt: skip
        self._finish_overdue(job)

    def _finish_overdue(self, job: Job) -> None:
        answer = answers.timeout_answer(
            job.claim_id, job.handler, ran_seconds=job.ran_seconds, limit_seconds=job.limit_seconds or 0.0,
            where=job.where,
        )  # fmt: skip
        self._finish(job, answer, "timeout", "TaskTimeout")

    # Progress

    def report(self, job: Job, percent: float | None, note: str | None) -> None:
        """Pass on progress, from any thread."""
        if threading.get_ident() == self._thread_id:
            self._pass_on(job, percent, note)
            return
        try:
            self._loop.call_soon_threadsafe(self._pass_on, job, percent, note)
        except RuntimeError:
            pass  # the loop is closed, and with it all that this could be for

    def _pass_on(self, job: Job, percent: float | None, note: str | None) -> None:
        if not job.answered:
            job.seen_at = monotonic()
            self._progress(job, percent, note)

    # Stopping

    def take_back(self) -> list[Held]:
        """Forget the jobs of messages of which none has started, and return those messages."""
        given_back: dict[Held, None] = {}
        for lane in (self._waiting, self._waiting_for_thread):
            kept = [job for job in lane if job.held.begun]
            given_back.update(dict.fromkeys(job.held for job in lane if not job.held.begun))
            lane.clear()
            lane.extend(kept)
        self._start_waiting()
        return list(given_back)

    def stop_starting(self) -> None:
        """Start none of the waiting jobs any more."""
        self._may_start = False

    async def cut(self, seconds: float) -> int:
        """Cancel what runs, wait so long for it to clean up, forget the rest; returns how many have no answer."""
        self._may_start = False
        unanswered = len(self._running) + len(self._waiting) + len(self._waiting_for_thread)
        self._waiting.clear()
        self._waiting_for_thread.clear()
        tasks = [job.task for job in self._running if job.task is not None]
        for job in self._running:
            job.cut = True
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)
        self._running.clear()
        self._empty.set()
        return unanswered

    def close(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        metrics.RUNNING.set_function(lambda: 0)


def _arguments(job: Job) -> Arguments:
    try:
        return job.handler.arguments(job.params)
    except InvalidParams as exc:
        raise answers.Refusal("BadParams", exc.message, code=exc.code, data=exc.data) from None


def _context(job: Job) -> Context:
    claim = job.claim
    redelivered = job.held.message.receive_count > 1
    return Context(claim.task_id, claim.claim, job.handler.name, redelivered, job.report, job.cancellation)
