"""Handlers: functions registered with ``@action``, the Context they are given, and how they steer retries."""

from __future__ import annotations

import importlib
import inspect
import math
import os
import sys
from collections.abc import Awaitable, Callable, Generator, Iterator
from datetime import timedelta
from typing import Any, TypeVar, overload

import msgspec

from penstock.calls import prepared
from penstock.errors import SettingsError
from penstock.handlers.batches import DEFAULT_LINGER_SECONDS, MAX_BATCH, MAX_LINGER_SECONDS, BatchParameters
from penstock.handlers.cancellation import Cancellation, TaskCancelled
from penstock.handlers.parameters import Arguments, Parameters, place
from penstock.handlers.waiting import OnTimeout, Wait
from penstock.jsonable import dumps
from penstock.logs import get_logger
from penstock.retry import Backoff
from penstock.spelling import nearest
from penstock.tasks import ACTION_MAX_CHARS, MAX_ATTEMPTS_LIMIT
from penstock.wire import check_token, check_wait_seconds, make_token

_NOTE_KEPT_CHARS = 1000
_SPAWN_OPTIONS = frozenset(
    (
        "name", "on_failure", "compensate", "run_at", "delay", "priority", "ordering_key", "max_attempts", "timeout",
        "labels", "expires_at", "expires_in", "limit_key",
    )
)  # fmt: skip

log = get_logger()
Function = TypeVar("Function", bound=Callable[..., Any])
Report = Callable[[float | None, str | None], None]


class Retry(Exception):
    """Raised by a handler: this attempt failed, try again after ``delay`` (seconds or a timedelta; None: the usual
    backoff).

    The attempt counts like any other. Raises ValueError for a delay that is no number of seconds.
    """

    def __init__(self, delay: float | timedelta | None = None, reason: str = "") -> None:
        if isinstance(delay, timedelta):
            delay = delay.total_seconds()
        if delay is not None and not (_is_number(delay) and 0 <= delay < math.inf):
            raise ValueError(f"Retry(delay=...) takes seconds, 0 or more, not {delay!r}")
        super().__init__(reason or "the handler asked to be tried again")
        self.delay = delay


class Fail(Exception):
    """Raised by a handler: no attempt will succeed, so the task becomes CRITICAL_ERROR now."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason or "the handler gave up")


class _Done:
    """Something to await that has happened already; nothing warns when nobody awaits it."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, None, None]:
        return
        yield


_DONE = _Done()


class Context:
    """What a handler knows of its task.

    task_id, claim: together they name this attempt; later attempts have a higher claim.
    redelivered: the message was delivered before, so an earlier worker may have done part of the work.
    report: where progress goes, callable from any thread; without one it goes nowhere, as in a test of a handler.
    cancellation: set when the task is no longer this worker's; without one it never is.
    spawned: the tasks that go with the result, as JSON texts of what ``spawn`` was given.
    tenant: for whom the task is, None where it is for none; it is the scheduler's word, not the payload's.
    """

    __slots__ = ("_cancellation", "_report", "_token", "action", "claim", "redelivered", "spawned", "task_id", "tenant")

    def __init__(
        self,
        task_id: int,
        claim: int,
        action: str,
        redelivered: bool = False,
        report: Report | None = None,
        cancellation: Cancellation | None = None,
        spawned: list[str] | None = None,
        tenant: str | None = None,
    ) -> None:
        self.task_id = task_id
        self.claim = claim
        self.action = action
        self.redelivered = redelivered
        self.tenant = tenant
        self._report = report
        self._cancellation = cancellation or Cancellation()
        self.spawned = [] if spawned is None else spawned
        self._token: str | None = None

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits for the result any more: the task was cancelled, or is somebody else's by now.

        It turns true within seconds where the worker has PENSTOCK_CONTROL_URL, and never where it has not.
        """
        return self._cancellation.is_set

    async def wait_cancelled(self) -> None:
        """Until ``cancelled``, to be raced against the work."""
        await self._cancellation.wait()

    def raise_if_cancelled(self) -> None:
        """Raises TaskCancelled, at a place where the handler may stop; what it raises or returns then is dropped."""
        if self._cancellation.is_set:
            raise TaskCancelled(f"task {self.task_id} is no longer claim {self.claim}'s")

    def spawn(self, action: str, payload: Any = None, **options: Any) -> None:
        """Have another task made when, and only if, this attempt's result is accepted.

        It travels with the result, so a retried or lost attempt makes none twice. In a workflow it is a child of this
        step: what comes after the step waits for it too, and is given its result as ``<step>/<name>``, the name
        being its number unless given. Otherwise it is a plain task.
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
        """A token that cannot be guessed, to hand out before :meth:`wait`; the same one throughout this run.

        It answers this attempt and no other.
        """
        if self._token is None:
            self._token = make_token(self.task_id, self.claim)
        return self._token

    def wait(self, token: str | None = None, timeout: float | None = None, *, on_timeout: OnTimeout = "retry") -> Wait:
        """To be returned: the task waits for ``task.complete`` or ``task.fail`` with this token, and takes no room.

        token: one that is yours, or None for :meth:`wait_token`. timeout: seconds, None for
        PENSTOCK_WAIT_TIMEOUT_SECONDS. on_timeout: "retry" makes it a failed attempt, "fail" the last one.
        Raises ValueError for a token or a time that cannot be.
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

    def progress(self, percent: float | None = None, note: str | None = None) -> Awaitable[None]:
        """Report how far the work is, which `status` shows, and that it is alive.

        It returns at once, awaited or not, in an ``async def`` and in a thread; the newest report is sent with the
        next results. Raises ValueError for a percent that is no finite number, TypeError for
        a note that is no text; a note is cut after 1000 characters.
        """
        if percent is not None and not (_is_number(percent) and math.isfinite(percent)):
            raise ValueError(f"percent must be a finite number, not {percent!r}")
        if note is not None and not isinstance(note, str):
            raise TypeError(f"note must be text, not {type(note).__name__}")
        if self._report is not None:
            self._report(percent, note[:_NOTE_KEPT_CHARS] if note else note)
        return _DONE

    def progress_sync(self, percent: float | None = None, note: str | None = None) -> None:
        """As :meth:`progress`, for plain functions, where type checkers would miss an ``await``."""
        self.progress(percent, note)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class Handler:
    """A registered function, made ready for many calls.

    timeout_seconds, max_attempts, bad_params_attempts, backoff: None leaves it to the task or the settings. batch: how
    many tasks one call takes, None for a handler of one task; linger_seconds: how long the first of them waits for the
    others. arguments: fits a task's parameters, raw JSON, to the function; raises InvalidParams. fit: the same of one
    task of a batch.
    Raises SettingsError for a function that cannot be a handler, a bad name, or numbers that make no sense.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        *,
        timeout_seconds: float | None = None,
        max_attempts: int | None = None,
        bad_params_attempts: int | None = None,
        backoff: Backoff | None = None,
        batch: int | None = None,
        linger_seconds: float | None = None,
    ) -> None:
        _check_name(name)
        _check_batch(name, batch, linger_seconds)
        for option, most in (("max_attempts", max_attempts), ("bad_params_attempts", bad_params_attempts)):
            if most is not None and not (type(most) is int and 1 <= most <= MAX_ATTEMPTS_LIMIT):
                raise SettingsError(f"action {name!r}: {option} must be 1 to {MAX_ATTEMPTS_LIMIT}, not {most!r}")
        if timeout_seconds is not None and not (_is_number(timeout_seconds) and 0 < timeout_seconds < math.inf):
            raise SettingsError(f"action {name!r}: timeout must be above 0 seconds, not {timeout_seconds!r}")
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise SettingsError(f"action {name!r}: {place(function)} yields; a handler returns its result")
        self.name = name
        self.function = function
        self.is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
        self.timeout_seconds = timeout_seconds
        self.max_attempts = max_attempts
        self.bad_params_attempts = bad_params_attempts
        self.backoff = backoff
        self.batch = batch
        self.linger_seconds = DEFAULT_LINGER_SECONDS if linger_seconds is None else float(linger_seconds)
        self.arguments: Callable[[msgspec.Raw | bytes], Arguments]
        self.fit: Callable[[msgspec.Raw | bytes], Any]
        if batch is None:
            self.arguments = Parameters(name, function, Context).fit
        else:
            self.fit = BatchParameters(name, function).fit


def _check_batch(name: str, batch: object, linger_seconds: object) -> None:
    if batch is None:
        if linger_seconds is not None:
            raise SettingsError(f"action {name!r}: linger goes with batch, how many tasks one call takes")
        return
    if type(batch) is not int or not 1 <= batch <= MAX_BATCH:
        raise SettingsError(f"action {name!r}: batch must be 1 to {MAX_BATCH} tasks, not {batch!r}")
    if linger_seconds is not None and not (_is_number(linger_seconds) and 0 <= linger_seconds <= MAX_LINGER_SECONDS):  # type: ignore[operator]
        raise SettingsError(
            f"action {name!r}: linger must be 0 to {MAX_LINGER_SECONDS:g} seconds, not {linger_seconds!r}"
        )


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name:
        raise SettingsError(f"an action's name must be text, not {name!r}")
    if len(name) > ACTION_MAX_CHARS:
        raise SettingsError(
            f"action {name[:40]!r}...: a name has at most {ACTION_MAX_CHARS} characters, not {len(name)}"
        )
    if name.startswith("rpc."):
        raise SettingsError(f"action {name!r}: names that begin with rpc. belong to JSON-RPC; take another")


class Registry:
    """Handlers by action."""

    def __init__(self) -> None:
        self._handlers: dict[str, Handler] = {}

    def __len__(self) -> int:
        return len(self._handlers)

    def __iter__(self) -> Iterator[Handler]:
        return iter(self._handlers.values())

    def get(self, name: str) -> Handler | None:
        return self._handlers.get(name)

    def nearest(self, name: str) -> str | None:
        """The registered name most like ``name``, for a hint."""
        return nearest(name, self._handlers)

    def add(self, handler: Handler) -> None:
        """Raises SettingsError when another function has the name. The same one again, reloaded, takes its place."""
        known = self._handlers.get(handler.name)
        if known is not None and not _is_same(known.function, handler.function):
            raise SettingsError(
                f"action {handler.name!r} is registered twice: by {place(known.function)} "
                f"and {place(handler.function)}; rename one"
            )
        self._handlers[handler.name] = handler


REGISTRY = Registry()


@overload
def action(name: Function, /) -> Function: ...


@overload
def action(
    name: str | None = None,
    *,
    max_attempts: int | None = None,
    bad_params_attempts: int | None = None,
    timeout: float | None = None,
    backoff: Backoff | None = None,
    batch: int | None = None,
    linger: float | None = None,
    registry: Registry = REGISTRY,
) -> Callable[[Function], Function]: ...


def action(
    name: Any = None,
    *,
    max_attempts: int | None = None,
    bad_params_attempts: int | None = None,
    timeout: float | None = None,
    backoff: Backoff | None = None,
    batch: int | None = None,
    linger: float | None = None,
    registry: Registry = REGISTRY,
) -> Any:
    """Register a function as the handler of an action, named after it unless a name is given.

    The function takes a Context first, then the payload's members by name (or its items by position). Parameters
    with annotations are checked and converted, pydantic's types by pydantic's rules, others by msgspec's, without
    guessing: ``"1"`` is no int. ``async def`` runs on the event loop, ``def`` in a thread. The function itself is
    returned unchanged.
    max_attempts: lowers the task's own cap. bad_params_attempts: of a task whose parameters do not fit, None for
    PENSTOCK_BAD_PARAMS_ATTEMPTS. timeout: seconds that one attempt may run, unless the task says
    otherwise. backoff: delays between attempts.
    batch: the function takes up to so many tasks at once, as a ``list[Call[MyParams]]`` alone, and returns a list with
    one answer for each, in their order: a result, an exception (Retry, Fail or any other) that fails this task alone,
    or its ``ctx.wait()``. linger: seconds that the first task waits for company, 0.05 unless given.
    Raises SettingsError for a name that is taken, numbers that make no sense, a function that takes no Context, an
    annotation that cannot be checked.
    """
    if callable(name):
        return action()(name)

    def register(function: Function) -> Function:
        called = name if name is not None else getattr(function, "__name__", None)
        handler = Handler(
            called,  # type: ignore[arg-type]
            function,
            timeout_seconds=timeout,
            max_attempts=max_attempts,
            bad_params_attempts=bad_params_attempts,
            backoff=backoff,
            batch=batch,
            linger_seconds=linger,
        )
        registry.add(handler)
        return function

    return register


def _is_same(one: Callable[..., Any], other: Callable[..., Any]) -> bool:
    return one is other or (place(one) == place(other) and "<locals>" not in place(one))


def load_app(module: str, *, registry: Registry = REGISTRY) -> None:
    """Import a module so that its actions register; the current folder is importable.

    Raises SettingsError naming the module, what is wrong with it and what to do.
    """
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    if not all(part.isidentifier() for part in module.split(".")):
        near = module.removesuffix(".py").replace("/", ".").replace("\\", ".").split(":")[0].strip(".")
        raise SettingsError(
            f"--app {module}: name a module as an import statement does, such as {near or 'myapp.tasks'}"
        )
    before = {handler.name for handler in registry}
    try:
        importlib.import_module(module)
    except (Exception, SystemExit) as exc:
        raise SettingsError(_why_not_loaded(module, exc, here)) from exc
    if not any(_belongs(handler, module) or handler.name not in before for handler in registry):
        log.warning("app_registers_nothing", app=module, hint="decorate its handlers with @penstock.action")


def _why_not_loaded(module: str, exc: BaseException, here: str) -> str:
    missing = exc.name if isinstance(exc, ModuleNotFoundError) else None
    if missing is not None and f"{module}.".startswith(f"{missing}."):
        return (
            f"--app {module} cannot be loaded: there is no module {missing!r} in {here} nor among what is installed; "
            "run the worker from the folder that holds it, or install it"
        )
    return f"--app {module} cannot be loaded: its import ended in {type(exc).__name__}: {exc}"


def _belongs(handler: Handler, module: str) -> bool:
    return f"{place(handler.function)}.".startswith(f"{module}.")
