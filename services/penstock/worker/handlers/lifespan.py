"""Lifespans: what a process opens once for its handlers. Hooks: what runs around each attempt."""

import asyncio
import inspect
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, TypeVar, overload

from penstock.protocol.errors import SettingsError
from penstock.runtime.logs import log
from penstock.worker.handlers.context import Context

Lifespan = Callable[[], AsyncGenerator[Any, None]]
Hook = Callable[[Context], Iterator[None]]
Entered = list[AbstractContextManager[None]]  # the hooks of one attempt
L = TypeVar("L", bound=Lifespan)
H = TypeVar("H", bound=Hook)

INJECTED: Any = type("Injected", (), {"__repr__": lambda self: "inject()"})()
LIFESPANS: dict[str, tuple[Lifespan, bool | None]] = {}
HOOKS: dict[str, Callable[[Context], AbstractContextManager[None]]] = {}


def inject() -> Any:
    """The default of a handler's parameter that is given the lifespan's value of the annotated type."""
    return INJECTED


@overload
def lifespan(function: L, /) -> L: ...
@overload
def lifespan(*, process: bool | None = None) -> Callable[[L], L]: ...


def lifespan(function: Any = None, *, process: bool | None = None) -> Any:
    """Register an async generator that yields one value for handlers, and closes it when the process stops.

    Each process runs it once before its first task. process: True, in child processes alone; False, in the worker
    alone. Raises SettingsError for a function that is no async generator.
    """
    if function is None:
        return partial(lifespan, process=process)
    if not inspect.isasyncgenfunction(function):
        raise SettingsError(f"@lifespan takes an async def with one yield, which {place(function)} is not")
    LIFESPANS[place(function)] = function, process
    return function


def around_attempt(function: H) -> H:
    """Register a generator that is given the Context; it runs up to its ``yield`` before each attempt, then after it.

    A failure is raised at the ``yield``, and stays the attempt's outcome. An error before it fails the attempt.
    Raises SettingsError for a function that is no generator.
    """
    hook: Hook = function
    if not inspect.isgeneratorfunction(hook):
        raise SettingsError(f"@around_attempt takes a def with one yield, which {place(function)} is not")
    HOOKS[place(function)] = contextmanager(hook)
    return function


def place(function: Any) -> str:
    """Where a function is defined, for messages."""
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


class Resources:
    """The values of this process's lifespans. in_child: whether it is a child process."""

    def __init__(self, *, in_child: bool) -> None:
        self._in_child = in_child
        self._open: list[tuple[str, AsyncGenerator[Any, None], Any]] = []
        self._holding: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._has_broken = asyncio.Event()

    async def open(self) -> None:
        """Run each lifespan up to its value, once; if one fails, close the others and raise what it raises.

        Raises SettingsError for one without a value.
        """
        if self._holding is not None:
            return
        self._closing.clear()
        opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        holding = self._holding = asyncio.create_task(self._hold(opened), name="lifespans")
        try:
            await asyncio.shield(opened)
        except BaseException:
            holding.cancel()
            await self.close()
            raise

    async def _hold(self, opened: asyncio.Future[None]) -> None:
        """Open and close them all in one task: what enters a task group or a cancel scope has to leave it."""
        self._open.clear()
        failure: BaseException | None = None
        try:
            for name, (function, process) in LIFESPANS.items():
                if process is None or process == self._in_child:
                    generator = function()
                    try:
                        self._open.append((name, generator, await anext(generator)))
                    except StopAsyncIteration:
                        raise SettingsError(f"@lifespan {name} ended without a yield") from None
            opened.set_result(None)
            await self._closing.wait()
        except BaseException as exc:
            failure = exc
        if opened.done() and not self._closing.is_set():
            self._has_broken.set()
        for name, generator, _ in reversed(self._open):
            try:
                await anext(generator, None)
                await generator.aclose()
            except (Exception, asyncio.CancelledError):  # a broken cancel scope cancels until it is left
                log.exception("lifespan_not_closed", lifespan=name)
        if failure is None or opened.done():
            return
        if not isinstance(failure, asyncio.CancelledError):
            opened.set_exception(failure)
        elif not self._closing.is_set():  # else open() has given up
            opened.set_exception(RuntimeError("a @lifespan ended while others were opened"))

    async def watch(self) -> None:
        """Raise RuntimeError once a lifespan has ended too early, as when its task group fails; a side task."""
        await self._has_broken.wait()
        raise RuntimeError("a @lifespan ended while it was in use")

    def check(self, action: str, wanted: Mapping[str, type]) -> None:
        """Raises SettingsError when a handler's type is none of a value's."""
        for parameter, kind in wanted.items():
            if not any(isinstance(value, kind) for _, _, value in self._open):
                there = ", ".join(f"{type(value).__name__} of {name}" for name, _, value in self._open) or "none"
                problem = f"takes a {kind.__name__} as {parameter}, which no @lifespan yields; there is {there}"
                raise SettingsError(f"action {action!r} {problem}")

    def values(self, wanted: Mapping[str, type]) -> dict[str, Any]:
        """The values by parameter; of several of a type the first."""
        return {
            parameter: next(value for _, _, value in self._open if isinstance(value, kind))
            for parameter, kind in wanted.items()
        }

    async def close(self) -> None:
        """Run each lifespan to its end, the newest first; an error is logged, and the others are closed."""
        holding, self._holding = self._holding, None
        if holding is not None:
            self._closing.set()
            await asyncio.wait((holding,))


def enter_hooks(context: Context) -> Entered:
    """Run the hooks of an attempt up to their ``yield``; raises what one raises."""
    entered: Entered = []
    try:
        for hook in HOOKS.values():
            manager = hook(context)
            manager.__enter__()
            entered.append(manager)
    except BaseException as exc:
        leave_hooks([entered], [exc])
        raise
    return entered


def leave_hooks(entered: Sequence[Entered], outcomes: Sequence[Any]) -> None:
    """Run the rest of the hooks, each with the outcome of its attempt; an error of a hook's own is logged."""
    for managers, outcome in reversed([*zip(entered, outcomes, strict=False)]):
        error = outcome if isinstance(outcome, BaseException) else None
        for manager in reversed(managers):
            try:
                if error is None:
                    manager.__exit__(None, None, None)
                else:
                    manager.__exit__(type(error), error, error.__traceback__)
            except BaseException as exc:
                if exc is not error:
                    log.exception("hook_failed", error=type(exc).__name__)
