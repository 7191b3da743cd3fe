"""What a handler is given: a Context, with which it may do more than return a result."""

import asyncio
import math
import threading
import types
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Generic, Literal, ParamSpec, Protocol, TypeVar, overload

from penstock.protocol.journal import EVENT, LONGEST_SLEEP_SECONDS, SLEEP, decode_entries
from penstock.protocol.json_text import MAX_DEPTH, dumps, foreign, is_deeper, replace_unstorable
from penstock.protocol.options import TaskOptions
from penstock.protocol.reports import LONGEST_WAIT_SECONDS, check_token, check_wait_seconds, make_token
from penstock.protocol.requests import prepared
from penstock.protocol.task import ACTION_MAX_CHARS
from penstock.runtime.logs import task_log
from penstock.worker.handlers.enqueueing import Action
from penstock.worker.handlers.outcomes import is_number, seconds_of
from penstock.worker.handlers.steps import Step, StepPort, Steps

_SPAWN_OPTIONS = {*TaskOptions.__annotations__, "name", "on_failure", "compensate"}

_lock = threading.Lock()  # for all cancellations: it is held briefly

Report = Callable[[float | None, str | None], None]
OnTimeout = Literal["retry", "fail"]
Params = TypeVar("Params")
P = ParamSpec("P")


@types.coroutine
def _done() -> Generator[None, None, None]:
    """An already-completed awaitable; safe to ignore."""
    yield from ()


@dataclass(frozen=True, slots=True)
class Wait:
    """Made by ``ctx.wait(...)`` and returned by the handler: the task is suspended until ``token`` is answered.

    timeout: seconds, None for PENSTOCK_WAIT_TIMEOUT_SECONDS. on_timeout: "retry", a failed attempt; "fail", the last.
    attempt: the task and the claim that it was made for.
    """

    token: str
    timeout: float | None = None
    on_timeout: OnTimeout = "retry"
    attempt: tuple[int, int] = field(default=(0, 0), repr=False)


class Lease(Protocol):
    """The worker's hold on a task's message."""

    lost: bool


class TaskCancelled(Exception):
    """Raised by ``ctx.raise_if_cancelled()``: this attempt's result would be ignored."""


@dataclass(slots=True, eq=False)
class Cancellation:
    """Set once, when a task's claim has ended; ``is_set`` may be read, and ``wait`` awaited, from any thread.

    is_settled: the handler has recorded the result by `penstock.settle`, so the worker sends none.
    """

    is_set: bool = False
    is_settled: bool = False
    _waiting: Sequence[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = ()

    def set(self) -> None:
        with _lock:
            self.is_set = True
            waiting, self._waiting = self._waiting, ()
        for loop, event in waiting:
            with suppress(RuntimeError):  # that loop is closed
                loop.call_soon_threadsafe(event.set)

    async def wait(self) -> None:
        event = asyncio.Event()
        with _lock:
            if self.is_set:
                return
            entry = asyncio.get_running_loop(), event
            self._waiting = (*self._waiting, entry)
        try:
            await event.wait()
        finally:
            with _lock:
                self._waiting = [one for one in self._waiting if one != entry]


@dataclass(slots=True, eq=False, repr=False)
class Context:
    """The task of a handler, and what it may do with it.

    task_id, claim: together they identify this attempt; later attempts have a higher claim.
    redelivered: the message was delivered before, so an earlier worker may have done part of the work.
    report: receives progress, from any thread; without one progress is dropped, as in a test of a handler.
    cancellation: set when the task is no longer this worker's. tenant: from the scheduler, not the payload.
    spawned: the tasks that go with the result, as JSON texts of the arguments of ``spawn``. lease: of its message.
    journal: JSON text of the steps that earlier attempts have finished. step_port: the worker's side of further ones.
    emitter: receives chunks as JSON, from any thread; None where output is off, so that they are dropped.
    """

    task_id: int
    claim: int
    action: str
    redelivered: bool = False
    report: Report | None = None
    cancellation: Cancellation = field(default_factory=Cancellation)
    spawned: list[str] = field(default_factory=list)
    tenant: str | None = None
    lease: Lease | None = None
    journal: str = ""
    step_port: StepPort | None = None
    emitter: Callable[[bytes], None] | None = None
    _token: str | None = field(init=False, default=None)
    _steps: Steps | None = field(init=False, default=None)

    @property
    def cancelled(self) -> bool:
        """True once the task was cancelled or reassigned to another worker.

        It turns true within seconds where the worker has PENSTOCK_CONTROL_URL, elsewhere only once `penstock.settle`
        has answered False.
        """
        return self.cancellation.is_set

    @property
    def lease_lost(self) -> bool:
        """True while the message's lease has ended, so that another worker may receive the task and run it too.

        The outcome of this attempt still counts, unless another claim of the task was made meanwhile.
        """
        return self.lease is not None and self.lease.lost

    async def wait_cancelled(self) -> None:
        """Wait until ``cancelled``, beside the work."""
        await self.cancellation.wait()

    def raise_if_cancelled(self) -> None:
        """Raises TaskCancelled once ``cancelled``; the handler's outcome is dropped then."""
        if self.cancellation.is_set:
            raise TaskCancelled(f"task {self.task_id} is no longer claim {self.claim}'s")

    @overload
    def spawn(self, action: str, payload: Any = None, **options: Any) -> None: ...
    @overload
    def spawn(self, action: Action[P, Any], /, *args: P.args, **kwargs: P.kwargs) -> None: ...
    def spawn(self, *args: Any, **given: Any) -> None:  # type: ignore[misc]  # mypy wants the names of both forms
        """Enqueue another task when, and only if, this attempt's result is accepted.

        It travels with the result, so a retried or lost attempt makes none twice. In a workflow it is a child of this
        step: the following steps wait for it too, and get its result as ``<step>/<name>``, the name being its number
        unless given. Otherwise it is a plain task.
        An action is given by its name, with a payload and options: those of ``enqueue`` but unique_key, unique,
        on_duplicate and tenant; and name, on_failure, compensate. Or as its handler, with arguments that are checked,
        ``ctx.spawn(resize, url="a.png")``, and the options of ``resize.with_options(priority=5)``.
        Raises InvalidParams for arguments that do not fit, ValueError for an unknown option, an empty action, a
        payload that is no JSON object or array or is nested too deeply, or behind `penstock.settle`.
        """
        if self.cancellation.is_settled:
            raise ValueError("the attempt is settled: enqueue in your transaction instead of ctx.spawn()")
        if args and isinstance(args[0], Action):
            given, args = args[0].bind(*args[1:], **given), ()
        name, payload, options = _call_of(*args, **given)
        unknown = options.keys() - _SPAWN_OPTIONS
        if unknown:
            raise ValueError(f"spawn() takes no {min(unknown)!r}; it takes {', '.join(sorted(_SPAWN_OPTIONS))}")
        if not isinstance(name, str) or not 1 <= len(name) <= ACTION_MAX_CHARS:
            raise ValueError(f"spawn() takes an action of 1 to {ACTION_MAX_CHARS} characters, not {name!r}")
        try:
            text = dumps({} if payload is None else payload)
            more = dumps({"action": name, **prepared(options)})
        except (TypeError, ValueError, RecursionError) as exc:
            raise ValueError(f"spawn() of {name!r}: what it is given cannot be written as JSON: {exc}") from None
        if text[0] not in "{[":
            raise ValueError(f"spawn() takes an object or an array as payload, not {type(payload).__name__}")
        if is_deeper(text):
            raise ValueError(f"spawn() of {name!r}: the payload is nested deeper than {MAX_DEPTH} levels")
        self.spawned.append(replace_unstorable(f'{more[:-1]},"payload":{text}}}'))

    def wait_token(self) -> str:
        """A token that cannot be guessed, to hand out before :meth:`wait`; each attempt has its own."""
        if self._token is None:
            self._token = make_token(self.task_id, self.claim)
        return self._token

    def wait(self, token: str | None = None, timeout: float | None = None, *, on_timeout: OnTimeout = "retry") -> Wait:
        """Return this from a handler to suspend the task until ``task.complete`` or ``task.fail`` with this token.

        token: your own, or None for :meth:`wait_token`. timeout: seconds, None for PENSTOCK_WAIT_TIMEOUT_SECONDS.
        on_timeout: "retry" makes it a failed attempt, "fail" the last one.
        Raises ValueError for an invalid token or time.
        """
        if on_timeout not in ("retry", "fail"):
            raise ValueError(f'on_timeout is "retry" or "fail", not {on_timeout!r}')
        token = self.wait_token() if token is None else check_token(token)
        seconds = None if timeout is None else check_wait_seconds(timeout)
        return Wait(token, seconds, on_timeout, (self.task_id, self.claim))

    # Durable steps

    def _durable(self) -> Steps:
        if self._steps is None:
            self._steps = Steps(decode_entries(self.journal), self.step_port or StepPort())
        return self._steps

    async def step(self, name: str | Step, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a function once over all attempts of the task; a later attempt gets its result from the journal.

        It returns once the report of the result is in the results queue: the result as JSON makes it, in each attempt.
        name: with it and the number of earlier steps of that name, later attempts recognise the step; or a
        :class:`Step` with options. function: async or plain, which then runs in a thread.
        Raises what the function raises, so that the attempt fails and the next one runs the step again; StepFailed once
        its own retries are used up or it raises Fail; StepChanged if the handler no longer fits the journal.
        """
        return await self._durable().run(_step_of(name), function, args, kwargs)

    def step_sync(self, name: str | Step, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """As :meth:`step`, in a handler that is a plain function."""
        return self._durable().run_sync(_step_of(name), function, args, kwargs)

    async def sleep(self, seconds: float | timedelta) -> None:
        """Suspend the task, which occupies no worker then; it goes on here in another attempt, and spends none."""
        self.sleep_sync(seconds)

    async def sleep_until(self, instant: datetime) -> None:
        """As :meth:`sleep`, until an instant, which has a zone. Raises ValueError for one over a century away."""
        self.sleep_until_sync(instant)

    async def event(self, token: str, timeout: float | None = None) -> Any:
        """Suspend the task until ``task.complete`` with this token, and return what that gives; spends no attempt.

        token: the same in each attempt. timeout: seconds, None for PENSTOCK_WAIT_TIMEOUT_SECONDS.
        Raises EventTimeout, or StepFailed after ``task.fail``.
        """
        return self.event_sync(token, timeout)

    def sleep_sync(self, seconds: float | timedelta) -> None:
        """As :meth:`sleep`, in a handler that is a plain function."""
        rule = f"a task sleeps for 0 to {LONGEST_SLEEP_SECONDS:.0f} seconds"
        self._durable().suspend(SLEEP, seconds=seconds_of(seconds, rule, longest=LONGEST_SLEEP_SECONDS))

    def sleep_until_sync(self, instant: datetime) -> None:
        """As :meth:`sleep_until`, in a handler that is a plain function."""
        if instant.tzinfo is None:
            raise ValueError(f"the instant needs a zone: {instant.isoformat()} is another one in each")
        if (instant - datetime.now(UTC)).total_seconds() > LONGEST_WAIT_SECONDS:  # which no report may exceed
            longest = f"{LONGEST_WAIT_SECONDS:.0f} seconds from now"
            raise ValueError(f"a task sleeps until at most {longest}, not until {instant.isoformat()}")
        self._durable().suspend(SLEEP, until=instant)

    def event_sync(self, token: str, timeout: float | None = None) -> Any:
        """As :meth:`event`, in a handler that is a plain function."""
        seconds = None if timeout is None else check_wait_seconds(timeout)
        return self._durable().suspend(EVENT, token=check_token(token), timeout=seconds)

    def check_steps(self) -> None:
        """Raises StepChanged when the handler has returned without asking for a step that its task has finished."""
        if self.journal:
            self._durable().check_all_asked()

    @property
    def log(self) -> Any:
        """A logger whose lines carry the task's id, claim and action, and belong to its output where that is on."""
        return task_log.bind(task_id=self.task_id, claim=self.claim, action=self.action)

    def note_settled(self, *, holds: bool) -> None:
        """The attempt is settled by `penstock.settle`; or holds its task no more, and ``cancelled`` is true."""
        self.cancellation.is_settled = holds
        if not holds:
            self.cancellation.set()

    def progress(self, percent: float | None = None, note: str | None = None) -> Awaitable[None]:
        """Report progress, which `status` shows, as a heartbeat.

        It returns at once, awaited or not, in an ``async def`` and in a thread; the newest report is sent with the
        next results. A note is cut after 1000 characters. Raises ValueError for a percent that is no finite number,
        TypeError for a note that is no text.
        """
        if percent is not None and not (is_number(percent) and math.isfinite(percent)):
            raise ValueError(f"percent must be a finite number, not {percent!r}")
        if note is not None and not isinstance(note, str):
            raise TypeError(f"note must be text, not {type(note).__name__}")
        if self.report is not None:
            self.report(percent, note and note[:1000])
        return _done()

    def progress_sync(self, percent: float | None = None, note: str | None = None) -> None:
        """As :meth:`progress`, for plain functions, where type checkers would miss an ``await``."""
        self.progress(percent, note)

    def emit(self, chunk: Any) -> Awaitable[None]:
        """Give out a chunk of output, any value that JSON has: readers of the task's events get it while it runs.

        It returns at once, awaited or not; dropped above PENSTOCK_OUTPUT_LIMIT_BYTES, and where output is off.
        Raises ValueError for what cannot be written as JSON.
        """
        if self.emitter is not None:
            try:
                encoded = replace_unstorable(dumps(chunk, foreign)).encode()
            except (TypeError, ValueError, RecursionError) as exc:
                raise ValueError(f"the chunk, {type(chunk).__name__}, cannot be written as JSON: {exc}") from None
            self.emitter(encoded)
        return _done()

    def emit_sync(self, chunk: Any) -> None:
        """As :meth:`emit`, for plain functions, where type checkers would miss an ``await``."""
        self.emit(chunk)


class Call(Generic[Params]):
    """One task of a batch. params: its payload, checked and converted to the type in ``list[Call[...]]``.

    ctx: what the handler may do with this task; or a function that makes it when it is first asked for.
    """

    __slots__ = ("_answer", "_ctx", "params")

    def __init__(
        self, ctx: Context | Callable[[], Context], params: Params, _answer: Callable[[Any], None] | None = None
    ) -> None:
        self._ctx = ctx
        self.params = params
        self._answer = _answer

    @property
    def ctx(self) -> Context:
        context = self._ctx
        if not isinstance(context, Context):
            context = self._ctx = context()
        return context

    def __repr__(self) -> str:
        return f"Call(task_id={self.ctx.task_id}, params={self.params!r})"

    def answer(self, outcome: Any) -> None:
        """Answer this task now, while the handler still works on others of the batch; from any thread.

        outcome: as in the list that the handler returns, whose entry for this task is ignored then.
        """
        if self._answer is not None:
            self._answer(outcome)


def _call_of(action: Any, payload: Any = None, **options: Any) -> tuple[Any, Any, dict[str, Any]]:
    return action, payload, options


def _step_of(name: str | Step) -> Step:
    return name if isinstance(name, Step) else Step(name)
