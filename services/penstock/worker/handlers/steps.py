"""Durable steps on the handler's side. The worker's is behind a ``StepPort``: a handler may run in a child process."""

import asyncio
import inspect
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any

import msgspec

from penstock.protocol.errors import HANDLER_ERROR, RateLimited
from penstock.protocol.journal import Entry, StepKey, StepPlace, check_step_name, read_error
from penstock.protocol.reports import error_text
from penstock.protocol.retry import Backoff
from penstock.runtime.loop_thread import in_own_thread
from penstock.worker.handlers.outcomes import Fail, Retry, Snooze

_TIMEOUT_TYPE = "WaitTimeout"  # of the error of an event that did not come in time
_BACKOFF = Backoff(1, 2, 60)
_LONGEST_PAUSE_SECONDS = 30 * 86_400  # between tries; the system's sleep refuses centuries


class StepFailed(Exception):
    """A durable step has failed finally, in this attempt or an earlier one. kind: the type of its error."""

    def __init__(self, step: str, kind: str, message: str, data: Mapping[str, Any] | None = None) -> None:
        super().__init__(step, kind, message, data)
        self.step, self.kind, self.message, self.data = step, kind, message, data or {}

    def __str__(self) -> str:
        return f"step {self.step}: {self.kind}: {self.message}"


class EventTimeout(StepFailed, TimeoutError):
    """The event of ``ctx.event(...)`` did not come in time."""


class StepChanged(Exception):
    """The handler does not call the steps that its task has finished, in their order: it is another version."""


class Suspend(BaseException):
    """Ends a handler whose task goes on later, in another attempt; do not catch it.

    entry: of a sleep. until, or seconds from now. token, timeout: of an event, whose step is ``place``.
    is_redelivered: another worker may have reported steps, which this message does not have.
    """

    def __init__(
        self, place: StepPlace | None = None, *, seconds: float | None = None, until: datetime | None = None,
        token: str | None = None, timeout: float | None = None, is_redelivered: bool = False,
    ) -> None:  # fmt: skip
        super().__init__("the task is suspended; the handler must not catch this")
        self.place, self.seconds, self.until = place, seconds, until
        self.token, self.timeout, self.is_redelivered = token, timeout, is_redelivered


@dataclass(frozen=True, slots=True)
class Step:
    """A durable step's name and options, for ``ctx.step(Step("charge", retries=3), ...)``.

    retries: further tries of its function within the attempt; when they are used up the step has failed finally. None:
    a failure is the attempt's, and the next attempt runs the step again. backoff: between tries. timeout: seconds of
    one try; a plain function goes on in its thread.
    """

    name: str
    retries: int | None = None
    backoff: Backoff = _BACKOFF
    timeout: float | None = None

    def __post_init__(self) -> None:
        check_step_name(self.name)
        if self.retries is not None and (not isinstance(self.retries, int) or self.retries < 0):
            raise ValueError(f"retries is a number of further tries, 0 or more, not {self.retries!r}")
        if self.timeout is not None and not self.timeout > 0:
            raise ValueError(f"timeout is above 0 seconds, not {self.timeout!r}")


def replayed(entry: Entry, error: Exception | None = None) -> Any:
    """The result of a finished step. error: with which it failed in this attempt. Raises StepFailed."""
    if not entry.has_failed:
        return msgspec.json.decode(entry.value)
    kind, message, data = read_error(entry.error)
    raise (EventTimeout if kind == _TIMEOUT_TYPE else StepFailed)(entry.label, kind, message, data) from error


@dataclass(slots=True)
class Trial:
    """The tries of one step within an attempt. error: of its final failure. at: when it began, in epoch seconds."""

    step: Step
    function: partial[Any]
    at: float = field(init=False, default_factory=time.time)
    began: float = field(init=False, default_factory=time.monotonic)
    tries: int = field(init=False, default=0)
    result: Any = field(init=False, default=None)
    error: Exception | None = field(init=False, default=None)
    is_over: bool = field(init=False, default=False)

    async def call(self) -> Any:
        self.tries += 1
        if inspect.iscoroutinefunction(self.function.func):
            return await self.function()
        result = await asyncio.wrap_future(in_own_thread(self.function))
        return await result if inspect.isawaitable(result) else result

    def call_sync(self) -> Any:
        self.tries += 1
        if self.step.timeout is None:
            return self.function()
        return in_own_thread(self.function).result(min(self.step.timeout, threading.TIMEOUT_MAX))

    def returned(self, result: Any) -> None:
        self.result = result
        self.is_over = True

    def pause_after(self, exc: Exception) -> float:
        """Seconds until the next try; 0 when the step has failed finally. Raises what is the attempt's failure."""
        retries = self.step.retries
        if isinstance(exc, TimeoutError) and not str(exc) and self.step.timeout is not None:
            exc = TimeoutError(f"not finished after {self.step.timeout:g} s")
        ends_attempt = StepFailed | StepChanged | Snooze | RateLimited
        if not isinstance(exc, Fail) and (retries is None or isinstance(exc, ends_attempt)):
            raise exc
        if isinstance(exc, Fail) or self.tries > (retries or 0):
            self.error = exc
            self.is_over = True
            return 0.0
        asked = exc.delay if isinstance(exc, Retry) else None
        return min(self.step.backoff.delay_seconds(self.tries) if asked is None else asked, _LONGEST_PAUSE_SECONDS)


class StepPort:
    """Where an attempt's steps are reported, from any thread; here, as in a test of a handler, nowhere."""

    def check_blocking(self) -> None:
        """Raises RuntimeError on the event loop that sends the reports, which a blocking step would hold up."""

    def begin(self, steps: int) -> None:
        """Raises what forbids another step: the attempt holds its message no more. steps: how many began before it."""

    def record(self, place: StepPlace, trial: Trial) -> Future[Entry]:
        """Done once the report of a finished step is in the results queue; gives what a later attempt gets."""
        error = trial.error
        if error is None:
            text = msgspec.json.encode(trial.result).decode()
        else:
            text = error_text(HANDLER_ERROR, str(error), type=type(error).__name__, message=str(error))
        recorded: Future[Entry] = Future()
        recorded.set_result(Entry.of(place, text, is_error=error is not None))
        return recorded


class Steps:
    """The steps of one attempt: those that its task has finished before, and those that it asks for."""

    def __init__(self, finished: Sequence[Entry], port: StepPort) -> None:
        self._not_asked: dict[StepKey, Entry] = {entry.key: entry for entry in finished}
        self._repetitions: Counter[str] = Counter()
        self._asked = 0
        self._under_way = 0
        self._port = port

    def _ask(self, name: str) -> Entry | StepPlace:
        """The entry of the next step of that name, or its place if it has to run. Raises StepChanged."""
        place = StepPlace(name=name, repetition=self._repetitions[name], position=self._asked)
        known = self._not_asked.pop(place.key, None)
        expected = () if known is not None or self._under_way else self._not_asked.values()
        for entry in expected:
            if not entry.parallel:
                raise StepChanged(
                    f"the handler calls its step {place.label!r}, but the journal of the task has {entry.label!r} "
                    "next: it was changed while the task was under way; restore its steps, or give it a new action"
                )
        self._repetitions[name] += 1
        self._asked += 1
        return place if known is None else known

    def check_all_asked(self) -> None:
        """Raises StepChanged when the handler has ended without asking for a finished step."""
        for entry in self._not_asked.values():
            raise StepChanged(
                f"the handler ended without its step {entry.label!r}, which the journal of the task has: it was "
                "changed while the task was under way; restore the step, or give the handler a new action"
            )

    @contextmanager
    def _running(self, place: StepPlace) -> Generator[Callable[[], StepPlace]]:
        """While a step runs; gives a function for its place, which knows whether others ran meanwhile."""
        overlaps = self._under_way > 0
        self._under_way += 1
        began = self._asked
        try:
            yield lambda: msgspec.structs.replace(place, parallel=overlaps or self._asked != began)
        finally:
            self._under_way -= 1

    async def run(self, step: Step, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        found = self._ask(step.name)
        if isinstance(found, Entry):
            return replayed(found)
        with self._running(found) as place:
            trial = Trial(step, partial(function, *args, **kwargs))
            while not trial.is_over:
                self._port.begin(found.position)
                try:
                    async with asyncio.timeout(step.timeout):
                        trial.returned(await trial.call())
                except Exception as exc:
                    await asyncio.sleep(trial.pause_after(exc))
            entry = await asyncio.wrap_future(self._port.record(place(), trial))
        return replayed(entry, trial.error)

    def run_sync(self, step: Step, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._port.check_blocking()
        found = self._ask(step.name)
        if isinstance(found, Entry):
            return replayed(found)
        with self._running(found) as place:
            trial = Trial(step, partial(function, *args, **kwargs))
            while not trial.is_over:
                self._port.begin(found.position)  # again before each try: a thread goes on behind its time limit
                try:
                    trial.returned(trial.call_sync())
                except Exception as exc:
                    time.sleep(trial.pause_after(exc))
            entry = self._port.record(place(), trial).result()
        return replayed(entry, trial.error)

    def suspend(self, name: str, **when: Any) -> Any:
        """What a sleep or an event that is over gave; raises Suspend for one that begins."""
        found = self._ask(name)
        if isinstance(found, Entry):
            return replayed(found)
        if self._under_way:
            raise RuntimeError(f"{name}() suspends the task, and a step still runs: await the step first")
        self._port.begin(found.position)
        raise Suspend(found, **when)
