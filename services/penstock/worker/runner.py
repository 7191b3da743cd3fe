"""Starts tasks within the concurrency, stops them at their time limit, and gives each exactly one response."""

import asyncio
import contextvars
import inspect
import math
import threading
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from time import monotonic, time
from typing import Any

from penstock.payloads.codec import PayloadCodec
from penstock.protocol.errors import InvalidParams
from penstock.protocol.journal import Entry, decode_entry, encode_entry
from penstock.protocol.json_text import utf8_size
from penstock.protocol.requests import ClaimId
from penstock.runtime import metrics
from penstock.runtime.logs import bind_task, log
from penstock.runtime.tracing import active
from penstock.settings.model import Settings
from penstock.worker import responses
from penstock.worker.attempt import Attempt, Batch, OpenBatches, Unit
from penstock.worker.handlers.context import Call, Context
from penstock.worker.handlers.lifespan import HOOKS, Entered, Resources, enter_hooks, leave_hooks
from penstock.worker.handlers.steps import Suspend
from penstock.worker.leases import Lease
from penstock.worker.output import Outputs
from penstock.worker.payload_io import AttemptSteps, needs_opening, open_attempt, store_result
from penstock.worker.processes.channel import Child
from penstock.worker.processes.pool import ProcessDied, ProcessPool
from penstock.worker.result_sender import Timings
from penstock.worker.threads import Threads, stack_of

_CANCEL_SECONDS = 5.0  # clean-up time of a cancelled handler before the task is answered without it
_SHORT_SECONDS = 1.0  # shorter tasks are fetched ahead
_WAITING_SECONDS = 5.0  # for its start, after which a worker counts as saturated
_DELAY_NOTED_SECONDS = 0.001  # from one measured start to the next: an observation costs as much as a short handler
_MEAN_WEIGHT = 0.05
_KILL_SECONDS = _CANCEL_SECONDS + 1  # from the time limit until the child that did not stop its handler is killed

Answer = tuple[str, responses.Problem | None]


@dataclass(eq=False, kw_only=True)
class Runner:
    """Runs attempts, at most ``worker_concurrency`` calls at once, and calls ``answer`` once with each."""

    settings: Settings
    threads: Threads
    processes: ProcessPool | None = None
    resources: Resources
    codec: PayloadCodec
    timings: Timings
    answer: Callable[[Attempt, str], None]
    progress: Callable[[Attempt, float | None, str | None], None]
    send_step: Callable[[Attempt, str], Awaitable[None]]
    send_output: Callable[[Attempt, str, int], None]

    def __post_init__(self) -> None:
        if self.processes is not None:
            self.processes.on_idle = self._start_waiting
        compress_bytes = None if self.codec.is_on else self.settings.result_compress_bytes
        self._answer_of = partial(responses.answer_of, settings=self.settings, compress_bytes=compress_bytes)
        self._outputs = Outputs(self.settings, self.send_output, self._on_loop)
        self._delay_noted_at = float("-inf")
        self._spans = active.active()
        self._loop = asyncio.get_running_loop()
        self._clean = contextvars.copy_context()
        self._recordings: set[asyncio.Task[None]] = set()
        self._thread_id = threading.get_ident()
        self.held: dict[Attempt, None] = {}  # redelivered: their start may take longer than a task may be silent
        self._running: dict[Unit, None] = {}  # in the order in which they began
        self._waiting: deque[Unit] = deque()
        self._waiting_for_thread: deque[Unit] = deque()
        self._waiting_for_process: deque[Unit] = deque()
        self._queues = self._waiting, self._waiting_for_thread, self._waiting_for_process
        self._open_batches = OpenBatches(self._queue)
        self._may_start = True
        self._ends_at = math.inf  # when every call is to end, whatever its own time limit
        self._mean_seconds = 0.0
        self._last_end = -math.inf
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at = math.inf
        self._empty = asyncio.Event()
        self._empty.set()
        self.changed = asyncio.Event()  # set whenever there may be room again
        metrics.RUNNING.set_function(lambda: len(self._running))

    def saturation(self) -> str | None:
        """What the call that has waited longest for its start waits for, if for seconds; from any thread."""
        children = self.processes.size if self.processes is not None else 0
        for waiting, what in (
            (self._waiting_for_thread, f"{self.threads.size} threads"),
            (self._waiting_for_process, f"{children} child processes"),
            (self._waiting, f"{self.settings.worker_concurrency} slots"),
        ):
            with suppress(IndexError):
                seconds = monotonic() - waiting[0].received_at
                if seconds > _WAITING_SECONDS:
                    return f"a task waits for one of {what}, for {seconds:.0f} s"
        return None

    @property
    def has_room(self) -> bool:
        """Whether a slot is free, or tasks are short and few wait: a long one would wait here, and others be idle."""
        waiting = sum(map(len, self._queues))
        if not waiting:
            return len(self._running) < self.settings.worker_concurrency
        is_short = self._mean_seconds < _SHORT_SECONDS and monotonic() - self._last_end < _SHORT_SECONDS
        return is_short and len(self._running) + waiting < 2 * self.settings.worker_concurrency

    def drop(self, attempts: Iterable[Attempt]) -> None:
        for attempt in attempts:
            self.held.pop(attempt, None)

    def add(self, attempts: Sequence[Attempt], *, alone: bool = False) -> None:
        """Start attempts in order within the concurrency. ``alone``: in batches of one."""
        for attempt in attempts:
            if attempt.handler.batch is not None:
                self._join(attempt, alone)
            else:
                self._queue_of(attempt).append(attempt)
        self.drop(attempts)
        self._empty.clear()
        self._start_waiting()

    def _queue_of(self, unit: Unit) -> deque[Unit]:
        if self._is_for_process(unit):
            return self._waiting_for_process
        return self._waiting if unit.handler.is_async else self._waiting_for_thread

    def _is_for_process(self, unit: Unit) -> bool:
        return self.processes is not None and unit.handler.process

    def _queue(self, batch: Batch) -> None:
        self._queue_of(batch).append(batch)
        self._start_waiting()

    def _join(self, attempt: Attempt, alone: bool) -> None:
        """Add an attempt to a batch, or answer it if its parameters are invalid."""
        attempt.started_at = monotonic()
        # Else it is fitted when its batch starts, or in the child.
        if not (needs_opening(attempt.params) or self._is_for_process(attempt)):
            try:
                attempt.params = self._fitted(attempt)
            except BaseException as exc:  # a validator may end in anything, also in SystemExit
                self._refuse(attempt, exc)
                return
        if alone:
            self._queue(Batch.of(attempt))
        else:
            self._open_batches.add(attempt)

    def _refuse(self, attempt: Attempt, exc: BaseException) -> None:
        """Answer an attempt of a batch without calling its handler."""
        attempt.lease.begin()
        self._settle(None, attempt, responses.failure_answer(attempt.claim_id, attempt.handler, exc))

    def _fitted(self, attempt: Attempt) -> Any:
        """What the handler is called with. Raises Refusal."""
        try:
            return attempt.handler.fit(attempt.params)
        except InvalidParams as exc:
            own, cap = attempt.handler.bad_params_attempts, attempt.handler.max_attempts
            caps = (self.settings.bad_params_attempts if own is None else own, cap)
            data: dict[str, Any] = {name: responses.cut(value) for name, value in exc.data.items()}
            data["max_attempts"] = min((most for most in caps if most is not None), default=None)
            raise responses.Refusal("BadParams", exc.message, code=exc.code, data=data) from None

    def attempts(self) -> Iterator[Attempt]:
        """Every attempt without a response, running or waiting; from any thread."""
        # In the order of their way to the end, so that none is missed that moves on meanwhile.
        yield from self.held.copy()
        delayed, *waiting = self._open_batches.delayed(), *map(list, self._queues)
        for unit in chain(delayed, *waiting, self._running.copy()):
            yield from (attempt for attempt in [*unit.attempts] if not attempt.answered)

    def stuck(self, seconds: float) -> list[Attempt]:
        """Attempts that run for so long after they should have been stopped, which the loop does; from any thread."""
        before = monotonic() - seconds
        return [a for unit in self._running.copy() if unit.deadline < before for a in unit.attempts if not a.answered]

    def lose(self, attempt: Attempt) -> None:
        """Cancel the handler of an attempt that lost its claim, and drop its outcome."""
        if not attempt.answered:
            log.info("task_lost", **attempt.log_fields(), ran_seconds=round(monotonic() - attempt.started_at, 3))
            attempt.cancellation.set()

    def attempts_of(self, task: asyncio.Task[Any] | None) -> Sequence[Attempt]:
        """The unanswered attempts that a task of the loop runs; from any thread."""
        return [a for unit in self._running.copy() if unit.task is task for a in unit.attempts if not a.answered]

    async def wait_empty(self) -> None:
        """End batching delays, and wait until every attempt has its response."""
        self._open_batches.flush()
        await self._empty.wait()

    def _start_waiting(self) -> None:
        running, waiting, plain = self._running, self._waiting, self._waiting_for_thread
        in_child = self._waiting_for_process
        while self._may_start and len(running) < self.settings.worker_concurrency:
            # The oldest waiting call is next, so that plain functions and coroutines do not delay each other.
            is_older = plain and not (waiting and waiting[0].received_at < plain[0].received_at)
            if in_child and self.processes is not None and self.processes.idle:
                unit = in_child.popleft()
                unit.child = self.processes.idle.popleft()
            elif is_older and self.threads.has_room:
                unit = plain.popleft()
                self.threads.reserve()
            elif waiting:
                unit = waiting.popleft()
            else:
                break
            if isinstance(unit, Attempt):
                unit.lease.begin()
            elif not self._close_batch(unit):
                continue
            now = monotonic()
            if now >= self._delay_noted_at + _DELAY_NOTED_SECONDS:
                self._delay_noted_at = now
                metrics.START_DELAY_SECONDS.observe(now - unit.received_at)
            # Not in the context of the call that has just ended, where its handler may have set variables.
            unit.task = self._loop.create_task(self._run(unit), context=self._clean.copy())
            running[unit] = None  # with its task, which other threads look at
        if not (running or waiting or plain or in_child or self._open_batches):
            self._empty.set()
        self.changed.set()

    def _close_batch(self, batch: Batch) -> bool:
        """Let no more attempts join a batch, drop the lost ones, and begin the others; False when none is left."""
        self._open_batches.close(batch)
        attempts, batch.attempts = batch.attempts, []
        for attempt in attempts:
            if attempt.is_lost:
                attempt.answered = True
                self.answer(attempt, "")
            else:
                attempt.lease.begin()
                batch.attempts.append(attempt)
        if not batch.attempts:
            self._give_back(batch)
        return bool(batch.attempts)

    async def _run(self, unit: Unit) -> None:
        """Run one call, and answer its attempts."""
        unit.started_at = now = monotonic()
        for attempt in unit.attempts:
            attempt.started_at = now
        unit.limit_seconds = min(unit.limit_seconds, self._ends_at - now)
        unit.deadline = now + unit.limit_seconds
        if unit.deadline < self._alarm_at:
            self._set_alarm(unit.deadline)
        error = ""
        try:
            if self.processes is not None and unit.handler.process:
                await self._run_in_process(unit, self.processes)
            else:
                await (self._run_batch(unit) if isinstance(unit, Batch) else self._run_attempt(unit))
            if self.codec.bucket is not None:
                await self._store_large(unit)
        except BaseException as raised:
            # SystemExit, or a CancelledError of the handler's own, fails one call and not the worker.
            error = await self._end_by(unit, responses.legible(raised))
        if isinstance(unit, Batch) and unit.span is not None:
            unit.span.end(error)
        if unit.overdue:
            self._finish_overdue(unit)
        else:
            self._finish(unit)

    async def _end_by(self, unit: Unit, exc: BaseException) -> str:
        """Answer the attempts by what ended their call; returns the error of its span."""
        if unit.cut and isinstance(exc, asyncio.CancelledError):
            for attempt in unit.attempts:
                if not attempt.answered:  # it is left to the worker that receives its message next
                    attempt.answered = True
                    self._outputs.end(attempt.output)
                    attempt.end_span("cut")
                    if attempt.reported:  # its own report makes sure of the steps; a message that comes again does not
                        self.answer(attempt, responses.suspension(attempt.claim_id, unit.handler, Suspend(seconds=0.0)))
            return "cut"
        if unit.overdue and unit.ended is None:
            unit.where = unit.where or responses.traceback_of(exc)
        suspends: BaseException | None = exc.subgroup(Suspend) if isinstance(exc, BaseExceptionGroup) else None
        while isinstance(suspends, BaseExceptionGroup):  # of task groups, one within another
            exc = suspends = suspends.exceptions[0]
        if unit.span is not None and not (self.codec.encrypts or isinstance(exc, responses.Refusal | Suspend)):
            with suppress(Exception):  # its text may fail
                unit.span.raised(exc)
        await self._store_large(unit)
        if not unit.overdue:
            self._fail(unit, exc)
        return "" if isinstance(exc, Suspend) else type(exc).__name__

    async def _run_attempt(self, attempt: Attempt) -> None:
        handler = attempt.handler
        if self._spans is not None:
            attempt.begin_span(self._spans).activate()
        bind_task(attempt.claim.task_id, attempt.claim.claim, handler.name)
        attempt.output = self._outputs.begin(attempt, handler.output)
        await open_attempt(self.codec, attempt)
        args, kwargs = self._fitted(attempt)
        if handler.injected:
            kwargs = {**kwargs, **self.resources.values(handler.injected)}
        entered: Sequence[Entered] = ()
        context = None
        if handler.takes_context or HOOKS or attempt.journal:
            context = self._context(attempt)
            args = (context, *args) if handler.takes_context else args
            entered = [enter_hooks(context)] if HOOKS else ()
        try:
            if handler.is_async:
                result = await handler.function(*args, **kwargs)
            else:
                result = await self._in_thread(attempt, partial(handler.function, *args, **kwargs))
            if context is not None:
                context.check_steps()
        except BaseException as exc:
            leave_hooks(entered, [exc])
            raise
        if entered:
            leave_hooks(entered, [None])
        self._respond(attempt, attempt, (self._answer_of(attempt, result), None))

    async def _run_batch(self, batch: Batch) -> None:
        handler = batch.handler
        bind_task(None, None, handler.name)
        await self._open_all(batch)
        if not batch.attempts:
            return
        if self._spans is not None:
            batch.begin_span(self._spans).activate()
        for attempt in batch.attempts:
            attempt.output = self._outputs.begin(attempt, handler.output, is_alone=False)
        # Made when it is asked for: it takes longer than the rest, and most batched handlers need none.
        context_of, answer = self._context, partial(self._on_loop, self._respond_early, batch)
        calls: list[Call[Any]] = []
        entered: list[Entered] = []
        for attempt in [*batch.attempts]:
            call = Call(partial(context_of, attempt), attempt.params, partial(answer, attempt))
            try:
                if HOOKS:
                    entered.append(enter_hooks(call.ctx))
            except BaseException as exc:
                batch.attempts.remove(attempt)
                self._refuse(attempt, exc)
            else:
                calls.append(call)
        if not calls:
            return
        function = partial(handler.function, calls, **self.resources.values(handler.injected))
        try:
            returned = await (function() if handler.is_async else self._in_thread(batch, function))
            if not isinstance(returned, list | tuple):
                problem = "a batched handler returns a list with one answer for each task, not a "
                raise responses.Unfit("BadBatch", problem + type(returned).__name__)
            count = len(batch.attempts)
            if len(returned) != count:
                problem = f"the handler returned {len(returned)} answers to {count} tasks: it is unknown which is whose"
                raise responses.Unfit("BadBatch", problem)
        except BaseException as exc:
            leave_hooks(entered, [exc] * len(entered))
            raise
        leave_hooks(entered, returned)
        errors: dict[int, responses.Error] = {}
        for attempt, outcome in zip(batch.attempts, returned, strict=True):
            if not attempt.has_response:
                self._respond(batch, attempt, self._answer_to(attempt, outcome, errors))

    async def _open_all(self, batch: Batch) -> None:
        """Open the payloads of a batch, and drop the attempts for which that fails."""
        sealed = [attempt for attempt in batch.attempts if needs_opening(attempt.params)]
        if sealed:
            await asyncio.gather(*map(self._open, sealed))
            batch.attempts = [attempt for attempt in batch.attempts if not attempt.answered]

    async def _open(self, attempt: Attempt) -> None:
        """Open the payload of an attempt in a batch, and fit it; if that fails, the attempt is answered."""
        try:
            await open_attempt(self.codec, attempt)
            if not self._is_for_process(attempt):
                attempt.params = self._fitted(attempt)
        except Exception as exc:
            self._refuse(attempt, exc)

    def _steps(self, attempt: Attempt) -> AttemptSteps:
        return AttemptSteps(self.settings, self.codec, self.send_step, self._loop, attempt)

    def _context(self, attempt: Attempt) -> Context:
        emit = None if attempt.output is None else attempt.output.emit
        return Context(
            *attempt.claim, attempt.handler.name, attempt.is_redelivered, partial(self._on_loop, self._report, attempt),
            attempt.cancellation, attempt.spawned, attempt.tenant, attempt.lease, attempt.journal,
            self._steps(attempt), emit,
        )  # fmt: skip

    def _answer_to(self, attempt: Attempt, outcome: Any, errors: dict[int, responses.Error]) -> Answer:
        """The response to an outcome, a result or an exception. Raises nothing."""
        try:
            if isinstance(outcome, Suspend):
                if outcome.place is not None and outcome.token is None:
                    attempt.sleep = encode_entry(Entry.of(outcome.place, "null", at=time(), seconds=outcome.seconds))
                return responses.suspension(attempt.claim_id, attempt.handler, outcome), None
            if not isinstance(outcome, BaseException):
                return self._answer_of(attempt, outcome), None
        except BaseException as exc:
            outcome, errors = exc, {}  # it is gone before the next answer is made, and another has its id then
        return responses.failure_answer(attempt.claim_id, attempt.handler, outcome, errors)

    def _respond(self, unit: Unit, attempt: Attempt, answer: Answer) -> None:
        """Answer an attempt of a call; a large result is stored first, once the call has ended."""
        if unit.overdue:
            return  # the time limit is its outcome
        if self.codec.bucket is not None and answer[1] is None and utf8_size(answer[0]) > self.codec.threshold_bytes:
            attempt.large = answer[0]
        else:
            self._settle(unit, attempt, answer)

    def _respond_early(self, batch: Batch, attempt: Attempt, outcome: Any) -> None:
        """Answer a task of a batch whose others still run."""
        if not (attempt.has_response or batch.overdue or batch.cut):
            self._respond(batch, attempt, self._answer_to(attempt, outcome, {}))
            self.changed.set()

    async def _store_large(self, unit: Unit) -> None:
        """Store large results, and answer by references; the handler has done its work for these."""
        large = [attempt for attempt in unit.attempts if attempt.large and not attempt.answered]
        if large:
            unit.deadline = math.inf
            await asyncio.gather(*(self._store(unit, attempt) for attempt in large))

    async def _store(self, unit: Unit, attempt: Attempt) -> None:
        try:
            answer: Answer = (await store_result(self.codec, attempt.claim, attempt.large), None)
        except Exception as exc:
            answer = responses.failure_answer(attempt.claim_id, attempt.handler, exc)
        if not attempt.answered:  # an overdue call may end while its results are stored
            self._settle(unit, attempt, answer)

    def _fail(self, unit: Unit, exc: BaseException) -> None:
        """Answer the attempts without a response by what ended the call."""
        errors: dict[int, responses.Error] = {}
        for attempt in unit.attempts:
            if not attempt.answered:
                self._settle(unit, attempt, self._answer_to(attempt, exc, errors))

    async def _run_in_process(self, unit: Unit, processes: ProcessPool) -> None:
        """Run a call in a child, which sends the responses."""
        unit.deadline += _KILL_SECONDS  # the child stops its handler at the limit; if it does not, it is killed
        if isinstance(unit, Batch):
            await self._open_all(unit)
            if not unit.attempts:
                return
        else:
            await open_attempt(self.codec, unit)
        attempts: defaultdict[str, list[Attempt]] = defaultdict(list)
        for attempt in unit.attempts:
            attempts[attempt.claim_id].append(attempt)  # a send that is repeated makes two messages of one claim
        if self._spans is not None:
            unit.begin_span(self._spans)
        assert unit.child is not None
        child, unit.child = unit.child, None

        def receive(kind: str, claim_id: str, *content: Any) -> None:
            if claim_id not in attempts:
                return  # an earlier call has left something running in the child
            attempt = attempts[claim_id][0]
            if kind == "progress":
                self._report(attempt, *content)
            elif kind == "output":
                self.send_output(attempt, *content)
            elif kind == "step":
                self._keep_running(self._keep_step(child, attempt, *content))
            else:
                text, problem, sleep = content
                for attempt in attempts[claim_id]:  # at once: the child may hang behind its answers, as in a destructor
                    attempt.sleep = sleep
                    self._respond(unit, attempt, (text, problem and responses.Problem(*problem)))

        try:
            await processes.call(child, unit, receive)
        except ProcessDied as exc:
            alone = [attempt for attempt in unit.attempts if not attempt.has_response]
            if not alone:
                return  # it has died behind its answers, which count
            if not isinstance(unit, Batch) or len(unit.attempts) == 1:
                raise
            # Once more, each in a call of its own: one of them ended the child.
            unit.attempts = [attempt for attempt in unit.attempts if attempt.has_response]
            log.warning("batch_split", action=unit.handler.name, tasks=len(alone), reason=str(exc))
            for attempt in alone:
                attempt.end_span("ProcessDied")
            self._waiting_for_process.extend(map(Batch.of, alone))

    def _keep_running(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._recordings.add(task)
        task.add_done_callback(self._recordings.discard)

    async def _keep_step(self, child: Child, attempt: Attempt, number: int, report: str) -> None:
        """Report a step that has finished in a child."""
        try:
            await self._steps(attempt).keep(decode_entry(report))
        except responses.Refusal as exc:
            child.send("recorded", attempt.claim_id, number, [exc.kind, str(exc), exc.code, exc.is_final])
        except Suspend:
            child.send("recorded", attempt.claim_id, number, [])
        else:
            child.send("recorded", attempt.claim_id, number, None)

    async def _in_thread(self, unit: Unit, function: Callable[[], Any]) -> Any:
        unit.thread_call = self.threads.start(function)
        try:
            result, raised = await unit.thread_call.outcome
        except asyncio.CancelledError:
            if unit.thread_call.outcome.cancelled():  # else the thread has ended in the same moment
                self.threads.leave(unit.thread_call)
                log.warning("thread_left_behind", **unit.log_fields(), left=self.threads.left)
            raise
        if raised is not None:
            raise raised
        # A plain function may return a coroutine: a decorator that is not async around one that is.
        return await result if inspect.iscoroutine(result) else result

    def _give_back(self, unit: Unit) -> None:
        """Give back the child of a call, or the thread of one whose handler was not called."""
        if self.processes is not None and unit.handler.process:
            if unit.child is not None:
                self.processes.give_back(unit.child)
        elif unit.thread_call is None and not unit.handler.is_async:
            self.threads.release()

    def _settle(self, unit: Unit | None, attempt: Attempt, answer: Answer) -> None:
        """Give an attempt its response. unit: the call whose run time it has a share in; None: no handler ran."""
        ran = 0.0 if unit is None else (monotonic() - unit.started_at) / len(unit.attempts)
        attempt.answered = True
        self._outputs.end(attempt.output)
        text, problem = answer
        trace_id = None if attempt.span is None else attempt.span.trace_id
        attempt.end_span("" if problem is None else problem.kind)
        outcome = "ok" if problem is None else "timeout" if problem.kind == responses.TIMEOUT_KIND else "error"
        self.timings.add(attempt.handler.name, outcome, ran, trace_id)
        if attempt.is_lost:
            log.info("task_dropped", **attempt.log_fields(), ran_seconds=round(ran, 3))
        elif problem is not None:
            details = self.settings.log_failure_details and not self.codec.encrypts
            log_failure(attempt.claim, attempt.handler.name, problem, details=details)
        self.answer(attempt, text)

    def _finish(self, unit: Unit) -> None:
        self._last_end = monotonic()
        self._mean_seconds += (self._last_end - unit.started_at - self._mean_seconds) * _MEAN_WEIGHT
        self._running.pop(unit, None)
        self._give_back(unit)
        if any(self._queues) or not self._running:
            self._start_waiting()
        self.changed.set()

    # Time limits. One timer, set for the earliest deadline: a task that ends before its own costs nothing.

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
            if unit.thread_call is not None:
                unit.where = stack_of(unit.thread_call.thread_id)
            unit.task.cancel()
            return
        hint = "it goes on beside the others; do not swallow CancelledError"
        log.warning("task_ignores_cancel", **unit.log_fields(), hint=hint)
        if any(attempt.large and not attempt.answered for attempt in unit.attempts):
            unit.deadline = math.inf
            self._keep_running(self._finish_stored(unit))
        else:
            self._finish_overdue(unit)

    async def _finish_stored(self, unit: Unit) -> None:
        """Keep the large results that a call gave early, before it is answered beside its handler."""
        await self._store_large(unit)
        self._finish_overdue(unit)

    def _finish_overdue(self, unit: Unit) -> None:
        if unit not in self._running:
            return  # its attempts were answered before, while it went on
        ended = unit.ended.data if unit.ended else {}
        self._fail(unit, responses.timeout_of(unit.ran_seconds, unit.limit_seconds, unit.where, **ended))
        self._finish(unit)

    def _report(self, attempt: Attempt, percent: float | None, note: str | None) -> None:
        if not attempt.answered:
            attempt.seen_at = monotonic()
            self.progress(attempt, percent, note)

    def _on_loop(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function on the event loop, from any thread."""
        if threading.get_ident() == self._thread_id:
            function(*arguments)
        else:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(function, *arguments)

    def take_back(self) -> Collection[Lease]:
        """Remove the attempts of messages of which no task has started; returns the leases of these messages."""
        waiting = [*chain(*self._queues), *self._open_batches.delayed()]
        untouched = {attempt.lease: None for unit in waiting for attempt in unit.attempts if not attempt.lease.begun}
        for unit in waiting:
            if isinstance(unit, Batch):
                unit.attempts = [attempt for attempt in unit.attempts if attempt.lease.begun]
                if not unit.attempts:
                    self._open_batches.close(unit)
        for queue in self._queues:
            kept = [unit for unit in queue if any(attempt.lease.begun for attempt in unit.attempts)]
            queue.clear()
            queue.extend(kept)
        self._open_batches.flush()
        self._start_waiting()
        return untouched

    def run_until(self, at: float) -> asyncio.TimerHandle:
        self._may_start, self._ends_at = at > monotonic(), at
        return self._loop.call_later(at - monotonic(), self.stop_starting)

    def stop_starting(self) -> None:
        self._may_start = False

    async def cut(self, seconds: float) -> int:
        """Cancel running calls, wait so long for their clean-up; returns the number of attempts without a response."""
        self._may_start = False
        unanswered = sum(1 for _ in self.attempts())
        self._open_batches.flush()
        for queue in self._queues:
            queue.clear()
        for unit in self._running:
            unit.cut = True
            unit.task.cancel()
        if self._running:
            await asyncio.wait([unit.task for unit in self._running], timeout=seconds)
        self._running.clear()
        self._empty.set()
        return unanswered

    def close(self) -> None:
        self._may_start = False
        if self._alarm is not None:
            self._alarm.cancel()
        self._outputs.close()
        metrics.RUNNING.set_function(lambda: 0)


def log_failure(claim: ClaimId, action: str, problem: responses.Problem, *, details: bool) -> None:
    """Log a failed attempt: at info where the handler asked for a retry, else as a warning."""
    details_of = {"message": problem.message, "traceback": problem.traceback} if details else {}
    write = log.info if problem.is_asked else log.warning
    write(
        "task_failed", task_id=claim.task_id, claim=claim.claim, action=action, error=problem.kind,
        **{name: value for name, value in details_of.items() if value},
    )  # fmt: skip
