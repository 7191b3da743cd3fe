"""Runner: starts tasks as there is room, stops those that take too long, and gives each exactly one answer."""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from time import monotonic
from typing import Any

from penstock.payloads.codec import PayloadCodec
from penstock.protocol.errors import InvalidParams
from penstock.protocol.requests import ClaimId
from penstock.runtime import metrics
from penstock.runtime.logs import bind_task, get_logger
from penstock.runtime.tracing import active
from penstock.worker import responses
from penstock.worker.attempt import Job
from penstock.worker.attempt_spans import begin_attempt, begin_batch, end_attempt
from penstock.worker.batch_calls import Batch, Gathering
from penstock.worker.handlers.batches import Call
from penstock.worker.handlers.parameters import Arguments
from penstock.worker.leases import Held
from penstock.worker.payload_io import Kept, keep_result, needs_opening, open_params
from penstock.worker.threads import Threads
from penstock.worker.timings import Timings

_CANCEL_SECONDS = 5.0  # a handler that was cancelled may clean up so long before its task is answered without it
_SHORT_SECONDS = 1.0  # tasks that run shorter are worth fetching ahead
_MEAN_WEIGHT = 0.05

log = get_logger()


Unit = Job | Batch
"""What takes one place among those that run: a task, or a call for many."""


class Runner:
    """Runs jobs, at most ``concurrency`` calls at once; those of plain functions as threads are free.

    timeout_seconds: of one attempt, where neither the task nor its action says. bad_params_attempts: of a task whose
    parameters do not fit, where its action does not say. log_details: lines about failures have message and traceback.
    codec: decodes payloads and encodes results.
    timings: told of every attempt. answer: called with each job and its response, once. progress: called with what
    handlers report.
    """

    def __init__(
        self,
        *,
        concurrency: int,
        threads: Threads,
        timeout_seconds: float,
        bad_params_attempts: int | None,
        log_details: bool,
        result_limit_bytes: int,
        result_compress_bytes: int | None,
        codec: PayloadCodec,
        timings: Timings,
        answer: Callable[[Job, str], None],
        progress: Callable[[Job, float | None, str | None], None],
    ) -> None:
        self._concurrency = concurrency
        self._threads = threads
        self._timeout_seconds = timeout_seconds
        self._bad_params_attempts = bad_params_attempts
        self._log_details = log_details
        self._result_limit_bytes = result_limit_bytes
        self._result_compress_bytes = result_compress_bytes
        self._codec = codec
        self._timings = timings
        self._answer = answer
        self._progress = progress
        self._spans = active.active()
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._running: set[Unit] = set()
        self._waiting: deque[Unit] = deque()
        self._waiting_for_thread: deque[Unit] = deque()
        self._gathering = Gathering(self._queue)
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

    def add(self, jobs: Iterable[Job], *, alone: bool = False) -> None:
        """Take jobs and start them in their order as there is room. ``alone``: none shares a batch with another."""
        for job in jobs:
            if job.handler.batch is not None:
                self._join(job, alone)
            else:
                (self._waiting if job.handler.is_async else self._waiting_for_thread).append(job)
        self._empty.clear()
        self._start_waiting()

    def _join(self, job: Job, alone: bool) -> None:
        """Have a job join a batch, unless its parameters are refused: then it has its answer."""
        job.started_at = monotonic()
        if not needs_opening(job.params):  # else it is fitted when its batch starts
            try:
                job.params = job.handler.fit(job.params)
            except InvalidParams as exc:
                if not job.held.begun:
                    job.held.begin()
                self._refuse(job, self._bad_params(job, exc))
                return
        if alone:
            self._queue(Batch(job.handler, job.limit_seconds, [job]))
        else:
            self._gathering.add(job)

    def _refuse(self, job: Job, refusal: responses.Refusal) -> None:
        """Answer a job of a batch that its handler is not called for."""
        answer = responses.refusal_answer(job.claim_id, job.handler, refusal)
        self._settle(job, answer, "error", responses.Problem(refusal.kind, responses.text_of(refusal)), 0.0)

    def _arguments(self, job: Job) -> Arguments:
        try:
            return job.handler.arguments(job.params)
        except InvalidParams as exc:
            raise self._bad_params(job, exc) from None

    def _bad_params(self, job: Job, exc: InvalidParams) -> responses.Refusal:
        own = job.handler.bad_params_attempts
        return responses.Refusal(
            "BadParams", exc.message, code=exc.code, data=exc.data,
            attempts=self._bad_params_attempts if own is None else own,
        )  # fmt: skip

    def _queue(self, batch: Batch) -> None:
        """A batch is ready to start; until it does it may take more jobs."""
        (self._waiting if batch.handler.is_async else self._waiting_for_thread).append(batch)
        self._start_waiting()

    def _units(self) -> Iterator[Unit]:
        yield from chain(self._running, self._waiting, self._waiting_for_thread, self._gathering.unqueued())

    def jobs(self) -> Iterator[Job]:
        """All jobs without an answer, running or waiting."""
        for unit in self._units():
            if isinstance(unit, Batch):
                yield from (job for job in unit.jobs if not job.answered)
            else:
                yield unit

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
        return next((unit.handler.name for unit in list(self._running) if unit.task is task), None)

    async def wait_empty(self) -> None:
        """Until every job has its answer; no batch waits for company any more."""
        self._gathering.flush()
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
            if isinstance(job, Batch):
                self._start_batch(job)
                continue
            if not job.held.begun:
                job.held.begin()
            running.add(job)
            job.task = create_task(self._run(job))
        if not (running or waiting or plain or self._gathering):
            self._empty.set()

    def _start_batch(self, batch: Batch) -> None:
        """Start a batch without those of its jobs that are lost by now."""
        self._gathering.close(batch)
        lost = batch.drop_lost()
        if batch.jobs:
            for job in batch.jobs:
                if not job.held.begun:
                    job.held.begin()
            self._running.add(batch)
            batch.task = self._loop.create_task(self._run_batch(batch))
        elif not batch.handler.is_async:
            self._threads.give_back()
        for job in lost:
            job.answered = True
            self._answer(job, "")  # nobody waits for it
        self.changed.set()

    def _is_turn_of_plain(self) -> bool:
        """Whichever has waited longer, so that neither kind keeps the other from its turn."""
        waiting, plain = self._waiting, self._waiting_for_thread
        return not (waiting and waiting[0].received_at < plain[0].received_at)

    async def _run(self, job: Job) -> None:
        self._set_deadline(job)
        if self._spans is not None:
            begin_attempt(self._spans, job).activate()
        bind_task(job.claim.task_id, job.claim.claim, job.handler.name)
        outcome, problem = "error", None
        try:
            if needs_opening(job.params):
                await self._open(job)
            if job.handler.is_async:
                args, kwargs = self._arguments(job)
                result = await job.handler.function(job.context(), *args, **kwargs)
            else:
                result = await self._in_thread(job)
            answer = responses.answer_of(
                job.claim_id,
                job.handler,
                result,
                limit_bytes=self._result_limit_bytes,
                compress_bytes=self._result_compress_bytes,
                spawned=job.spawned,
            )
            if self._codec.bucket is not None:
                job.deadline = math.inf  # the handler has done its work
                answer = await keep_result(self._codec, job.claim, answer)
            outcome = "ok"
        except responses.Refusal as exc:
            answer = responses.refusal_answer(job.claim_id, job.handler, exc)
            problem = responses.Problem(exc.kind, responses.text_of(exc))
        except BaseException as exc:
            # SystemExit, or a CancelledError of the handler's own, is one task's affair and not the worker's.
            if job.cut and isinstance(exc, asyncio.CancelledError):
                job.answered = True  # by the worker that gets its message next
                end_attempt(job, "cut")
                self._end(job)
                return
            if job.overdue:
                job.where = job.where or responses.traceback_of(exc)
            if job.attempt is not None and not self._codec.encrypts:
                job.attempt.raised(exc)
            answer, problem = responses.exception_answer(job.claim_id, job.handler, exc)
        if job.overdue:
            self._finish_overdue(job)
        else:
            self._finish(job, answer, outcome, problem)

    async def _run_batch(self, batch: Batch) -> None:
        self._set_deadline(batch)
        bind_task(None, None, batch.handler.name)
        for job in batch.jobs:
            job.started_at = batch.started_at
        call = None
        function = batch.handler.function
        outcomes: Sequence[Any]
        try:
            if any(needs_opening(job.params) for job in batch.jobs):
                await self._open_batch(batch)
                if not batch.jobs:
                    self._end(batch)
                    return
            call = None if self._spans is None else begin_batch(self._spans, batch)
            calls = [Call(job.context(), job.params, partial(self._answer_early, batch, job)) for job in batch.jobs]
            if batch.handler.is_async:
                returned = await function(calls)
            else:
                returned = await self._call_in_thread(batch, partial(function, calls))
            outcomes = responses.one_for_each(returned, len(batch.jobs))
            if self._codec.bucket is not None:
                batch.deadline = math.inf
                outcomes = await self._keep_results(batch, outcomes)
        except BaseException as exc:
            if batch.cut and isinstance(exc, asyncio.CancelledError):
                for job in batch.jobs:
                    if not job.answered:
                        job.answered = True
                        end_attempt(job, "cut")
                if call is not None:
                    call.end("cut")
                self._end(batch)
                return
            if batch.overdue:
                batch.where = batch.where or responses.traceback_of(exc)
            outcomes = [exc] * len(batch.jobs)
            if call is not None:
                if not self._codec.encrypts:
                    call.raised(exc)
                call.end(type(exc).__name__)
        else:
            if call is not None:
                call.end("")
        if batch.overdue:
            self._finish_overdue(batch)
        else:
            self._finish_batch(batch, outcomes)

    async def _open(self, job: Job) -> None:
        """Open a payload. The thread that was kept for its handler is given back where that fails."""
        try:
            await open_params(self._codec, job)
        except BaseException:
            if not job.handler.is_async:
                self._threads.give_back()
            raise

    async def _open_batch(self, batch: Batch) -> None:
        """Open and fit what is sealed; jobs of which that cannot be done are answered, and leave the batch."""

        async def of(job: Job) -> None:
            try:
                await open_params(self._codec, job)
                job.params = job.handler.fit(job.params)
            except InvalidParams as exc:
                self._refuse(job, self._bad_params(job, exc))
            except responses.Refusal as exc:
                self._refuse(job, exc)

        opened = False
        try:
            await asyncio.gather(*(of(job) for job in batch.jobs if needs_opening(job.params)))
            opened = True
        finally:
            batch.jobs = [job for job in batch.jobs if not job.answered]
            if not batch.handler.is_async and not (opened and batch.jobs):
                self._threads.give_back()

    async def _keep_results(self, batch: Batch, outcomes: Sequence[Any]) -> Sequence[Any]:
        """The outcomes, those that are large as answers whose results are objects."""
        failures = responses.Failures(batch.handler)

        async def of(job: Job, outcome: Any) -> Any:
            if job.answered:
                return outcome
            answer, problem = self._answer_to(failures, job, outcome)
            if problem or len(answer) <= self._codec.threshold_bytes:
                return outcome
            try:
                return Kept(await keep_result(self._codec, job.claim, answer))
            except responses.Refusal as exc:
                return exc

        return await asyncio.gather(*map(of, batch.jobs, outcomes))

    def _answer_to(self, failures: responses.Failures, job: Job, outcome: Any) -> tuple[str, responses.Problem | None]:
        """The answer of a job of a batch, and what is wrong with it."""
        if type(outcome) is Kept:
            return outcome.answer, None
        return failures.answer_to(
            job.claim_id,
            outcome,
            limit_bytes=self._result_limit_bytes,
            compress_bytes=self._result_compress_bytes,
            spawned=job.spawned,
        )

    def _finish_batch(self, batch: Batch, outcomes: Sequence[Any]) -> None:
        """Each job has its share of the time that the call ran."""
        now = monotonic()
        share = (now - batch.started_at) / len(batch.jobs)
        failures = responses.Failures(batch.handler)
        for job, outcome in zip(batch.jobs, outcomes, strict=True):
            if not job.answered:
                answer, problem = self._answer_to(failures, job, outcome)
                self._settle(job, answer, "error" if problem else "ok", problem, share)
        self._ran(now, now - batch.started_at)
        self._end(batch)

    def _answer_early(self, batch: Batch, job: Job, outcome: Any) -> None:
        """Answer a task of a batch whose others still run, from any thread."""
        if threading.get_ident() != self._thread_id:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._answer_early, batch, job, outcome)
            return
        if job.answered or batch.overdue or batch.cut:
            return
        answer, problem = self._answer_to(responses.Failures(batch.handler), job, outcome)
        if self._codec.bucket is not None and problem is None and len(answer) > self._codec.threshold_bytes:
            return  # stored with the others' when the call ends
        share = (monotonic() - batch.started_at) / len(batch.jobs)
        self._settle(job, answer, "error" if problem else "ok", problem, share)
        if not self.changed.is_set():
            self.changed.set()

    async def _in_thread(self, job: Job) -> Any:
        try:
            args, kwargs = self._arguments(job)
        except BaseException:
            self._threads.give_back()
            raise
        return await self._call_in_thread(job, partial(job.handler.function, job.context(), *args, **kwargs))

    async def _call_in_thread(self, unit: Unit, function: Callable[[], Any]) -> Any:
        unit.call = self._threads.start(function)
        try:
            result, raised = await unit.call.outcome
        except asyncio.CancelledError:
            self._threads.leave(unit.call)
            log.warning("thread_left_behind", **_named(unit), left=self._threads.left)
            raise
        if raised is not None:
            raise raised
        # A plain function may return what an async one inside it has made: a decorator that forgot to be async.
        return await result if inspect.iscoroutine(result) else result

    def _finish(self, job: Job, answer: str, outcome: str, problem: responses.Problem | None) -> None:
        if job.answered:
            return
        now = monotonic()
        ran = now - job.started_at
        self._settle(job, answer, outcome, problem, ran)
        self._ran(now, ran)
        self._end(job)

    def _settle(self, job: Job, answer: str, outcome: str, problem: responses.Problem | None, ran: float) -> None:
        job.answered = True
        action = job.handler.name
        trace_id = None
        if job.attempt is not None:
            trace_id = job.attempt.trace_id
            answer = end_attempt(job, "" if problem is None else problem.kind, answer)
        self._timings.add(action, outcome, ran, trace_id)
        if job.is_lost:
            log.info(
                "task_dropped", task_id=job.claim.task_id, claim=job.claim.claim, action=action,
                ran_seconds=round(ran, 3),
            )  # fmt: skip
        elif problem is not None:
            log_failure(job.claim, action, problem, details=self._log_details)
        self._answer(job, answer)

    def _ran(self, now: float, seconds: float) -> None:
        self._mean_seconds += (seconds - self._mean_seconds) * _MEAN_WEIGHT
        self._last_end = now

    def _end(self, unit: Unit) -> None:
        self._running.discard(unit)
        if self._waiting or self._waiting_for_thread or not self._running:
            self._start_waiting()
        if not self.changed.is_set():
            self.changed.set()

    # Time limits. One timer for all, set for the earliest deadline: a task that ends before its own costs nothing.

    def _set_deadline(self, job: Unit) -> None:
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

    def _stop(self, unit: Unit, now: float) -> None:
        if not unit.overdue:
            unit.overdue = True
            unit.ran_seconds = now - unit.started_at
            unit.deadline = now + _CANCEL_SECONDS
            if unit.call is not None:
                unit.where = unit.call.stack()
            if unit.task is not None:
                unit.task.cancel()
            return
        hint = "it goes on beside the others; do not swallow CancelledError"
        log.warning("task_ignores_cancel", **_named(unit), hint=hint)
        self._finish_overdue(unit)

    def _finish_overdue(self, unit: Unit) -> None:
        jobs = [job for job in (unit.jobs if isinstance(unit, Batch) else [unit]) if not job.answered]
        if not jobs:
            return  # it went on beside the others, and has ended now
        text = responses.timeout_text(unit.ran_seconds, unit.limit_seconds or 0.0)
        problem = responses.Problem("TaskTimeout", text, unit.where)
        now = monotonic()
        ran = now - unit.started_at
        for job in jobs:
            answer = responses.timeout_answer(
                job.claim_id, job.handler, ran_seconds=unit.ran_seconds, limit_seconds=unit.limit_seconds or 0.0,
                where=unit.where,
            )  # fmt: skip
            self._settle(job, answer, "timeout", problem, ran / len(jobs))
            problem = problem._replace(traceback=None)  # of one call; its stack is logged once
        self._ran(now, ran)
        self._end(unit)

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
            kept: list[Unit] = []
            for unit in lane:
                if isinstance(unit, Batch):
                    given_back.update(dict.fromkeys(unit.take_back()))
                    if unit.jobs:
                        kept.append(unit)
                    else:
                        self._gathering.close(unit)
                elif unit.held.begun:
                    kept.append(unit)
                else:
                    given_back[unit.held] = None
            lane.clear()
            lane.extend(kept)
        given_back.update(dict.fromkeys(self._gathering.take_back()))
        self._gathering.flush()
        self._start_waiting()
        return list(given_back)

    def stop_starting(self) -> None:
        """Start none of the waiting jobs any more."""
        self._may_start = False

    async def cut(self, seconds: float) -> int:
        """Cancel what runs, wait so long for it to clean up, forget the rest; returns how many have no answer."""
        self._may_start = False
        unanswered = sum(1 for _ in self.jobs())
        self._waiting.clear()
        self._waiting_for_thread.clear()
        self._gathering.clear()
        tasks = [unit.task for unit in self._running if unit.task is not None]
        for unit in self._running:
            unit.cut = True
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)
        self._running.clear()
        self._empty.set()
        return unanswered

    def close(self) -> None:
        self._gathering.clear()
        if self._alarm is not None:
            self._alarm.cancel()
        metrics.RUNNING.set_function(lambda: 0)


def log_failure(claim: ClaimId, action: str, problem: responses.Problem, *, details: bool) -> None:
    """Log a failed attempt: at info where the handler has asked to be tried again, else as a warning."""
    told = {"message": problem.message, "traceback": problem.traceback} if details else {}
    write = log.info if problem.is_asked else log.warning
    write(
        "task_failed", task_id=claim.task_id, claim=claim.claim, action=action, error=problem.kind,
        **{name: value for name, value in told.items() if value},
    )  # fmt: skip


def _named(unit: Unit) -> dict[str, Any]:
    """For a line in the log; of a batch, its first task and how many there are."""
    if isinstance(unit, Batch):
        return {**_named(unit.jobs[0]), "tasks": len(unit.jobs)}
    return {"task_id": unit.claim.task_id, "claim": unit.claim.claim, "action": unit.handler.name}
