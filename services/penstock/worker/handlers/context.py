"""What a handler is given, a Context, and how it decides about its task: Retry, Fail, Wait."""

from __future__ import annotations

import asyncio
import math
import threading
import types
from collections.abc import Awaitable, Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Generic, Literal, Protocol, TypeVar

from penstock.protocol.json_text import dumps
from penstock.protocol.reports import check_token, check_wait_seconds, make_token
from penstock.protocol.requests import prepared
from penstock.protocol.task import ACTION_MAX_CHARS
from penstock.runtime.logs import get_logger

_NOTE_KEPT_CHARS = 1000
_SPAWN_OPTIONS = {
    "name", "on_failure", "compensate", "run_at", "delay", "priority", "ordering_key", "max_attempts", "timeout",
    "labels", "expires_at", "expires_in", "limit_key",
}  # fmt: skip

_lock = threading.Lock()  # for all cancellations: it is held briefly

Report = Callable[[float | None, str | None], None]
OnTimeout = Literal["retry", "fail"]
Params = TypeVar("Params")


@types.coroutine
def _done() -> Generator[None, None, None]:
    """An already-completed awaitable; safe to ignore."""
    yield from ()


class Retry(Exception):
    """Raised by a handler: this attempt failed, and counts like any other; try again after ``delay``.

    delay: seconds or a timedelta, None for the usual backoff. Raises ValueError for a delay that is neither.
    """

    def __init__(self, delay: float | timedelta | None = None, reason: str = "") -> None:
        if isinstance(delay, timedelta):
            delay = delay.total_seconds()
        if delay is not None and not (is_number(delay) and 0 <= delay < math.inf):
            raise ValueError(f"Retry(delay=...) takes seconds, 0 or more, not {delay!r}")
        super().__init__(reason or "the handler asked to be tried again")
        self.delay = delay


class Fail(Exception):
    """Raised by a handler: no attempt will succeed, so the task becomes CRITICAL_ERROR now."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason or "the handler gave up")


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
    _waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = field(default_factory=list)

    def set(self) -> None:
        with _lock:
            self.is_set = True
            waiting, self._waiting = self._waiting, []
        for loop, event in waiting:
            with suppress(RuntimeError):  # that loop is closed
                loop.call_soon_threadsafe(event.set)

    async def wait(self) -> None:
        event = asyncio.Event()
        with _lock:
            if self.is_set:
                return
            entry = asyncio.get_running_loop(), event
            self._waiting.append(entry)
        try:
            await event.wait()
        finally:
            with _lock:
                if entry in self._waiting:
                    self._waiting.remove(entry)


@dataclass(slots=True, eq=False, repr=False)
class Context:
    """The task of a handler, and what it may do with it.

    task_id, claim: together they identify this attempt; later attempts have a higher claim.
    redelivered: the message was delivered before, so an earlier worker may have done part of the work.
    report: receives progress, from any thread; without one progress is dropped, as in a test of a handler.
    cancellation: set when the task is no longer this worker's. tenant: from the scheduler, not the payload.
    spawned: the tasks that go with the result, as JSON texts of the arguments of ``spawn``. lease: of its message.
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
    _token: str | None = field(init=False, default=None)

    @property
    def cancelled(self) -> bool:
        """True once the task was cancelled or reassigned to another worker.

        It turns true within seconds where the worker has PENSTOCK_CONTROL_URL, and never elsewhere.
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

    def spawn(self, action: str, payload: Any = None, **options: Any) -> None:
        """Enqueue another task when, and only if, this attempt's result is accepted.

        It travels with the result, so a retried or lost attempt makes none twice. In a workflow it is a child of this
        step: the following steps wait for it too, and get its result as ``<step>/<name>``, the name being its number
        unless given. Otherwise it is a plain task.
        options: those of ``enqueue`` but unique_key, unique and on_duplicate; and name, on_failure, compensate.
        Raises ValueError for an unknown option, an empty action, or a payload that is no JSON object or array.
        """
        unknown = options.keys() - _SPAWN_OPTIONS
        if unknown:
            raise ValueError(f"spawn() takes no {min(unknown)!r}; it takes {', '.join(sorted(_SPAWN_OPTIONS))}")
        if not isinstance(action, str) or not 1 <= len(action) <= ACTION_MAX_CHARS:
            raise ValueError(f"spawn() takes an action of 1 to {ACTION_MAX_CHARS} characters, not {action!r}")
        try:
            given = dumps({} if payload is None else payload)
            more = dumps({"action": action, **prepared(options)})
        except (TypeError, ValueError, RecursionError) as exc:
            raise ValueError(f"spawn() of {action!r}: what it is given cannot be written as JSON: {exc}") from None
        if given[0] not in "{[":
            raise ValueError(f"spawn() takes an object or an array as payload, not {type(payload).__name__}")
        self.spawned.append(f'{more[:-1]},"payload":{given}}}')

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

    @property
    def log(self) -> Any:
        """A logger whose lines carry the task's id, claim and action."""
        return get_logger().bind(task_id=self.task_id, claim=self.claim, action=self.action)

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
            self.report(percent, note[:_NOTE_KEPT_CHARS] if note else note)
        return _done()

    def progress_sync(self, percent: float | None = None, note: str | None = None) -> None:
        """As :meth:`progress`, for plain functions, where type checkers would miss an ``await``."""
        self.progress(percent, note)


@dataclass(frozen=True, slots=True)
class Call(Generic[Params]):
    """One task of a batch. params: its payload, checked and converted to the type in ``list[Call[...]]``."""

    ctx: Context
    params: Params
    _answer: Callable[[Any], None] = field(default=lambda outcome: None, repr=False, compare=False)

    def answer(self, outcome: Any) -> None:
        """Answer this task now, while the handler still works on others of the batch; from any thread.

        outcome: as in the list that the handler returns, whose entry for this task is ignored then.
        """
        self._answer(outcome)


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
