"""Starts tasks within the concurrency, stops them at their time limit, and gives each exactly one response."""

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
from penstock.worker.attempt import Attempt
from penstock.worker.attempt_spans import begin_attempt, begin_batch, end_attempt
from penstock.worker.batch_calls import Batch, OpenBatches
from penstock.worker.handlers.batches import Call
from penstock.worker.handlers.parameters import Arguments
from penstock.worker.leases import Lease
from penstock.worker.payload_io import StoredResponse, needs_opening, open_params, store_result
from penstock.worker.threads import Threads
from penstock.worker.timings import Timings

_CANCEL_SECONDS = 5.0  # clean-up time of a cancelled handler before the task is answered without it
_SHORT_SECONDS = 1.0  # shorter tasks are fetched ahead
_MEAN_WEIGHT = 0.05

log = get_logger()


Unit = Attempt | Batch
"""What occupies one slot: an attempt, or a batched call."""


class Runner:
    """Runs attempts, at most ``concurrency`` calls at once, plain functions in free threads.

    timeout_seconds: time limit where neither task nor action sets one. bad_params_attempts: attempts of a task with
    invalid parameters, where its action sets none. log_details: log message and traceback of failures.
    answer: called once with each attempt and its response. progress: called with each report of a handler.
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
        answer: Callable[[Attempt, str], None],
        progress: Callable[[Attempt, float | None, str | None], None],
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
        self._open_batches = OpenBatches(self._queue)
        self._may_start = True
        self._mean_seconds = 0.0
        self._last_end = -math.inf
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at = math.inf
        self._empty = asyncio.Event()
        self._empty.set()
        self.changed = asyncio.Event()  # set whenever an attempt has ended
        metrics.RUNNING.set_function(lambda: len(self._running))

    # Adding

    @property
    def has_room(self) -> bool:
        """Whether to fetch more: a slot is free, or tasks are short and few wait.

        Long tasks are never fetched ahead: they would wait here while other workers are idle.
        """
        waiting = len(self._waiting) + len(self._waiting_for_thread)
        if not waiting:
            return len(self._running) < self._concurrency
        is_short = self._mean_seconds < _SHORT_SECONDS and monotonic() - self._last_end < _SHORT_SECONDS
        return is_short and len(self._running) + waiting < 2 * self._concurrency

    def add(self, attempts: Iterable[Attempt], *, alone: bool = False) -> None:
        """Start attempts in order within the concurrency. ``alone``: in batches of one."""
        for attempt in attempts:
            if attempt.handler.batch is not None:
                self._join(attempt, alone)
            else:
                (self._waiting if attempt.handler.is_async else self._waiting_for_thread).append(attempt)
        self._empty.clear()
        self._start_waiting()

    def _join(self, attempt: Attempt, alone: bool) -> None:
        """Add an attempt to a batch, or answer it if its parameters are invalid."""
        attempt.started_at = monotonic()
        if not needs_opening(attempt.params):  # else it is fitted when its batch starts
            try:
                attempt.params = attempt.handler.fit(attempt.params)
            except InvalidParams as exc:
                if not attempt.lease.begun:
                    attempt.lease.begin()
                self._refuse(attempt, self._bad_params(attempt, exc))
                return
        if alone:
            self._queue(Batch(attempt.handler, attempt.limit_seconds, [attempt]))
        else:
            self._open_batches.add(attempt)

    def _refuse(self, attempt: Attempt, refusal: responses.Refusal) -> None:
        """Answer an attempt of a batch without calling its handler."""
        answer = responses.refusal_answer(attempt.claim_id, attempt.handler, refusal)
        self._settle(attempt, answer, "error", responses.Problem(refusal.kind, responses.text_of(refusal)), 0.0)

    def _arguments(self, attempt: Attempt) -> Arguments:
        try:
            return attempt.handler.arguments(attempt.params)
        except InvalidParams as exc:
            raise self._bad_params(attempt, exc) from None

    def _bad_params(self, attempt: Attempt, exc: InvalidParams) -> responses.Refusal:
        own = attempt.handler.bad_params_attempts
        return responses.Refusal(
            "BadParams", exc.message, code=exc.code, data=exc.data,
            attempts=self._bad_params_attempts if own is None else own,
        )  # fmt: skip

    def _queue(self, batch: Batch) -> None:
        """Queue a batch; it accepts attempts until it starts."""
        (self._waiting if batch.handler.is_async else self._waiting_for_thread).append(batch)
        self._start_waiting()

    def _units(self) -> Iterator[Unit]:
        yield from chain(self._running, self._waiting, self._waiting_for_thread, self._open_batches.unqueued())

    def attempts(self) -> Iterator[Attempt]:
        """Every attempt without a response, running or waiting."""
        for unit in self._units():
            if isinstance(unit, Batch):
                yield from (attempt for attempt in unit.attempts if not attempt.answered)
            else:
                yield unit

    def lose(self, attempt: Attempt) -> None:
        """Cancel the handler of an attempt that lost its claim, and drop its outcome."""
        if not attempt.answered:
            log.info(
                "task_lost", task_id=attempt.claim.task_id, claim=attempt.claim.claim, action=attempt.handler.name,
                ran_seconds=round(monotonic() - attempt.started_at, 3),
            )  # fmt: skip
            attempt.cancellation.set()

    def action_of(self, task: asyncio.Task[Any]) -> str | None:
        """The action that a task of the loop runs, or None; from any thread."""
        return next((unit.handler.name for unit in list(self._running) if unit.task is task), None)

    async def wait_empty(self) -> None:
        """End batching delays, and wait until every attempt has its response."""
        self._open_batches.flush()
        await self._empty.wait()

    # Running

    def _start_waiting(self) -> None:
        running, waiting, plain = self._running, self._waiting, self._waiting_for_thread
        create_task = self._loop.create_task
        while self._may_start and len(running) < self._concurrency:
            if plain and self._threads.has_room and self._is_thread_next():
                unit = plain.popleft()
                self._threads.reserve()
            elif waiting:
                unit = waiting.popleft()
            else:
                break
            if isinstance(unit, Batch):
                self._start_batch(unit)
                continue
            if not unit.lease.begun:
                unit.lease.begin()
            running.add(unit)
            unit.task = create_task(self._run(unit))
        if not (running or waiting or plain or self._open_batches):
            self._empty.set()

    def _start_batch(self, batch: Batch) -> None:
        """Start a batch without its lost attempts."""
        self._open_batches.close(batch)
        lost = batch.drop_lost()
        if batch.attempts:
            for attempt in batch.attempts:
                if not attempt.lease.begun:
                    attempt.lease.begin()
            self._running.add(batch)
            batch.task = self._loop.create_task(self._run_batch(batch))
        elif not batch.handler.is_async:
            self._threads.release()
        for attempt in lost:
            attempt.answered = True
            self._answer(attempt, "")
        self.changed.set()

    def _is_thread_next(self) -> bool:
        """Whether the oldest waiting call is a plain function's, so that neither kind delays the other."""
        waiting, plain = self._waiting, self._waiting_for_thread
        return not (waiting and waiting[0].received_at < plain[0].received_at)

    async def _run(self, attempt: Attempt) -> None:
        self._set_deadline(attempt)
        if self._spans is not None:
            begin_attempt(self._spans, attempt).activate()
        bind_task(attempt.claim.task_id, attempt.claim.claim, attempt.handler.name)
        outcome, problem = "error", None
        try:
            if needs_opening(attempt.params):
                await self._open(attempt)
            if attempt.handler.is_async:
                args, kwargs = self._arguments(attempt)
                result = await attempt.handler.function(attempt.context(), *args, **kwargs)
            else:
                result = await self._in_thread(attempt)
            answer = responses.answer_of(
                attempt.claim_id,
                attempt.handler,
                result,
                limit_bytes=self._result_limit_bytes,
                compress_bytes=self._result_compress_bytes,
                spawned=attempt.spawned,
            )
            if self._codec.bucket is not None:
                attempt.deadline = math.inf  # the handler has done its work
                answer = await store_result(self._codec, attempt.claim, answer)
            outcome = "ok"
        except responses.Refusal as exc:
            answer = responses.refusal_answer(attempt.claim_id, attempt.handler, exc)
            problem = responses.Problem(exc.kind, responses.text_of(exc))
        except BaseException as exc:
            # SystemExit, or a CancelledError of the handler's own, fails one task and not the worker.
            if attempt.cut and isinstance(exc, asyncio.CancelledError):
                attempt.answered = True  # by the worker that receives its message next
                end_attempt(attempt, "cut")
                self._end(attempt)
                return
            if attempt.overdue:
                attempt.where = attempt.where or responses.traceback_of(exc)
            if attempt.span is not None and not self._codec.encrypts:
                attempt.span.raised(exc)
            answer, problem = responses.exception_answer(attempt.claim_id, attempt.handler, exc)
        if attempt.overdue:
            self._finish_overdue(attempt)
        else:
            self._finish(attempt, answer, outcome, problem)

    async def _run_batch(self, batch: Batch) -> None:
        self._set_deadline(batch)
        bind_task(None, None, batch.handler.name)
        for attempt in batch.attempts:
            attempt.started_at = batch.started_at
        call = None
        function = batch.handler.function
        outcomes: Sequence[Any]
        try:
            if any(needs_opening(attempt.params) for attempt in batch.attempts):
                await self._open_batch(batch)
                if not batch.attempts:
                    self._end(batch)
                    return
            call = None if self._spans is None else begin_batch(self._spans, batch)
            calls = [
                Call(attempt.context(), attempt.params, partial(self._answer_early, batch, attempt))
                for attempt in batch.attempts
            ]
            if batch.handler.is_async:
                returned = await function(calls)
            else:
                returned = await self._call_in_thread(batch, partial(function, calls))
            outcomes = responses.one_for_each(returned, len(batch.attempts))
            if self._codec.bucket is not None:
                batch.deadline = math.inf
                outcomes = await self._store_results(batch, outcomes)
        except BaseException as exc:
            if batch.cut and isinstance(exc, asyncio.CancelledError):
                for attempt in batch.attempts:
                    if not attempt.answered:
                        attempt.answered = True
                        end_attempt(attempt, "cut")
                if call is not None:
                    call.end("cut")
                self._end(batch)
                return
            if batch.overdue:
                batch.where = batch.where or responses.traceback_of(exc)
            outcomes = [exc] * len(batch.attempts)
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

    async def _open(self, attempt: Attempt) -> None:
        """Open a payload; on failure the reserved thread is released."""
        try:
            await open_params(self._codec, attempt)
        except BaseException:
            if not attempt.handler.is_async:
                self._threads.release()
            raise

    async def _open_batch(self, batch: Batch) -> None:
        """Open and decode payloads; attempts that fail here are answered and leave the batch."""

        async def of(attempt: Attempt) -> None:
            try:
                await open_params(self._codec, attempt)
                attempt.params = attempt.handler.fit(attempt.params)
            except InvalidParams as exc:
                self._refuse(attempt, self._bad_params(attempt, exc))
            except responses.Refusal as exc:
                self._refuse(attempt, exc)

        opened = False
        try:
            await asyncio.gather(*(of(attempt) for attempt in batch.attempts if needs_opening(attempt.params)))
            opened = True
        finally:
            batch.attempts = [attempt for attempt in batch.attempts if not attempt.answered]
            if not batch.handler.is_async and not (opened and batch.attempts):
                self._threads.release()

    async def _store_results(self, batch: Batch, outcomes: Sequence[Any]) -> Sequence[Any]:
        """The outcomes, with each large result replaced by the response that refers to its object."""
        failures = responses.Failures(batch.handler)

        async def of(attempt: Attempt, outcome: Any) -> Any:
            if attempt.answered:
                return outcome
            answer, problem = self._answer_to(failures, attempt, outcome)
            if problem or len(answer) <= self._codec.threshold_bytes:
                return outcome
            try:
                return StoredResponse(await store_result(self._codec, attempt.claim, answer))
            except responses.Refusal as exc:
                return exc

        return await asyncio.gather(*map(of, batch.attempts, outcomes))

    def _answer_to(
        self, failures: responses.Failures, attempt: Attempt, outcome: Any
    ) -> tuple[str, responses.Problem | None]:
        """The response of an attempt in a batch, and its problem."""
        if type(outcome) is StoredResponse:
            return outcome.answer, None
        return failures.answer_to(
            attempt.claim_id,
            outcome,
            limit_bytes=self._result_limit_bytes,
            compress_bytes=self._result_compress_bytes,
            spawned=attempt.spawned,
        )

    def _finish_batch(self, batch: Batch, outcomes: Sequence[Any]) -> None:
        """Answer the attempts, each with its share of the call's run time."""
        now = monotonic()
        share = (now - batch.started_at) / len(batch.attempts)
        failures = responses.Failures(batch.handler)
        for attempt, outcome in zip(batch.attempts, outcomes, strict=True):
            if not attempt.answered:
                answer, problem = self._answer_to(failures, attempt, outcome)
                self._settle(attempt, answer, "error" if problem else "ok", problem, share)
        self._ran(now, now - batch.started_at)
        self._end(batch)

    def _answer_early(self, batch: Batch, attempt: Attempt, outcome: Any) -> None:
        """Answer a task of a batch whose others still run, from any thread."""
        if threading.get_ident() != self._thread_id:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._answer_early, batch, attempt, outcome)
            return
        if attempt.answered or batch.overdue or batch.cut:
            return
        answer, problem = self._answer_to(responses.Failures(batch.handler), attempt, outcome)
        if self._codec.bucket is not None and problem is None and len(answer) > self._codec.threshold_bytes:
            return  # stored with the others' when the call ends
        share = (monotonic() - batch.started_at) / len(batch.attempts)
        self._settle(attempt, answer, "error" if problem else "ok", problem, share)
        if not self.changed.is_set():
            self.changed.set()

    async def _in_thread(self, attempt: Attempt) -> Any:
        try:
            args, kwargs = self._arguments(attempt)
        except BaseException:
            self._threads.release()
            raise
        return await self._call_in_thread(
            attempt, partial(attempt.handler.function, attempt.context(), *args, **kwargs)
        )

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
        # A plain function may return a coroutine: a decorator that is not async around one that is.
        return await result if inspect.iscoroutine(result) else result

    def _finish(self, attempt: Attempt, answer: str, outcome: str, problem: responses.Problem | None) -> None:
        if attempt.answered:
            return
        now = monotonic()
        ran = now - attempt.started_at
        self._settle(attempt, answer, outcome, problem, ran)
        self._ran(now, ran)
        self._end(attempt)

    def _settle(
        self, attempt: Attempt, answer: str, outcome: str, problem: responses.Problem | None, ran: float
    ) -> None:
        attempt.answered = True
        action = attempt.handler.name
        trace_id = None
        if attempt.span is not None:
            trace_id = attempt.span.trace_id
            answer = end_attempt(attempt, "" if problem is None else problem.kind, answer)
        self._timings.add(action, outcome, ran, trace_id)
        if attempt.is_lost:
            log.info(
                "task_dropped", task_id=attempt.claim.task_id, claim=attempt.claim.claim, action=action,
                ran_seconds=round(ran, 3),
            )  # fmt: skip
        elif problem is not None:
            log_failure(attempt.claim, action, problem, details=self._log_details)
        self._answer(attempt, answer)

    def _ran(self, now: float, seconds: float) -> None:
        self._mean_seconds += (seconds - self._mean_seconds) * _MEAN_WEIGHT
        self._last_end = now

    def _end(self, unit: Unit) -> None:
        self._running.discard(unit)
        if self._waiting or self._waiting_for_thread or not self._running:
            self._start_waiting()
        if not self.changed.is_set():
            self.changed.set()

    # Time limits. One timer, set for the earliest deadline: a task that ends before its own costs nothing.

    def _set_deadline(self, unit: Unit) -> None:
        unit.started_at = now = monotonic()
        handler = unit.handler
        unit.limit_seconds = unit.limit_seconds or handler.timeout_seconds or self._timeout_seconds
        unit.deadline = now + unit.limit_seconds
        if unit.deadline < self._alarm_at:
            self._set_alarm(unit.deadline)

    def _set_alarm(self, at: float) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm_at = at
        self._alarm = self._loop.call_later(max(0.0, at - monotonic()), self._look_for_overdue)

    def _look_for_overdue(self) -> None:
        self._alarm, self._alarm_at = None, math.inf
        now = monotonic()
        for unit in [unit for unit in self._running if unit.deadline <= now]:
            self._stop(unit, now)
        earliest = min((unit.deadline for unit in self._running), default=math.inf)
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
        attempts = [
            attempt for attempt in (unit.attempts if isinstance(unit, Batch) else [unit]) if not attempt.answered
        ]
        if not attempts:
            return  # its tasks were answered before, while it went on
        text = responses.timeout_text(unit.ran_seconds, unit.limit_seconds or 0.0)
        problem = responses.Problem("TaskTimeout", text, unit.where)
        now = monotonic()
        ran = now - unit.started_at
        for attempt in attempts:
            answer = responses.timeout_answer(
                attempt.claim_id, attempt.handler, ran_seconds=unit.ran_seconds,
                limit_seconds=unit.limit_seconds or 0.0, where=unit.where,
            )  # fmt: skip
            self._settle(attempt, answer, "timeout", problem, ran / len(attempts))
            problem = problem._replace(traceback=None)  # of one call; its stack is logged once
        self._ran(now, ran)
        self._end(unit)

    # Progress

    def report(self, attempt: Attempt, percent: float | None, note: str | None) -> None:
        """Pass on progress, from any thread."""
        if threading.get_ident() == self._thread_id:
            self._pass_on(attempt, percent, note)
            return
        try:
            self._loop.call_soon_threadsafe(self._pass_on, attempt, percent, note)
        except RuntimeError:
            pass  # the loop is closed

    def _pass_on(self, attempt: Attempt, percent: float | None, note: str | None) -> None:
        if not attempt.answered:
            attempt.seen_at = monotonic()
            self._progress(attempt, percent, note)

    # Stopping

    def take_back(self) -> list[Lease]:
        """Remove the attempts of messages of which no task has started; returns the leases of these messages."""
        given_back: dict[Lease, None] = {}
        for queue in (self._waiting, self._waiting_for_thread):
            kept: list[Unit] = []
            for unit in queue:
                if isinstance(unit, Batch):
                    given_back.update(dict.fromkeys(unit.take_back()))
                    if unit.attempts:
                        kept.append(unit)
                    else:
                        self._open_batches.close(unit)
                elif unit.lease.begun:
                    kept.append(unit)
                else:
                    given_back[unit.lease] = None
            queue.clear()
            queue.extend(kept)
        given_back.update(dict.fromkeys(self._open_batches.take_back()))
        self._open_batches.flush()
        self._start_waiting()
        return list(given_back)

    def stop_starting(self) -> None:
        """Start no more waiting attempts."""
        self._may_start = False

    async def cut(self, seconds: float) -> int:
        """Cancel running calls, wait so long for their clean-up; returns the number of attempts without a response."""
        self._may_start = False
        unanswered = sum(1 for _ in self.attempts())
        self._waiting.clear()
        self._waiting_for_thread.clear()
        self._open_batches.clear()
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
        self._open_batches.clear()
        if self._alarm is not None:
            self._alarm.cancel()
        metrics.RUNNING.set_function(lambda: 0)


def log_failure(claim: ClaimId, action: str, problem: responses.Problem, *, details: bool) -> None:
    """Log a failed attempt: at info where the handler asked for a retry, else as a warning."""
    details_of = {"message": problem.message, "traceback": problem.traceback} if details else {}
    write = log.info if problem.is_asked else log.warning
    write(
        "task_failed", task_id=claim.task_id, claim=claim.claim, action=action, error=problem.kind,
        **{name: value for name, value in details_of.items() if value},
    )  # fmt: skip


def _named(unit: Unit) -> dict[str, Any]:
    """Fields of a log line; of a batch, its first task and the number of tasks."""
    if isinstance(unit, Batch):
        return {**_named(unit.attempts[0]), "tasks": len(unit.attempts)}
    return {"task_id": unit.claim.task_id, "claim": unit.claim.claim, "action": unit.handler.name}
