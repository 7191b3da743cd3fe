"""An event loop without input and output, whose time passes when nothing is left to do at once.

A coroutine belongs to the process in whose context it was started. A process is killed between two steps of its
coroutines: none of them runs again, not even to clean up, as after SIGKILL.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from itertools import count
from typing import Any

from tests.simulation.clock import Clock

_left_behind: list[object] = []  # coroutines of the dead: collected, they would run their ``finally`` blocks


class Stalled(Exception):
    """Nothing will ever happen again."""


class Process:
    """One simulated process. died: called once, when it is killed. kill_at: the number of the step that kills it."""

    def __init__(self, name: str, number: int, died: Callable[[Process], None]) -> None:
        self.name = name
        self.number = number
        self.is_dead = False
        self.steps = 0
        self.kill_at: int | None = None
        self._died = died

    def kill(self) -> None:
        if not self.is_dead:
            self.is_dead = True
            self._died(self)

    def start(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Run a coroutine as part of this process."""
        context = copy_context()
        context.run(_CURRENT.set, self)
        return asyncio.get_running_loop().create_task(work, name=name, context=context)

    def step(self, callback: Callable[..., Any], *args: Any) -> None:
        if self.is_dead:
            return
        self.steps += 1
        if self.steps == self.kill_at:
            self.kill()
        else:
            callback(*args)


_CURRENT: ContextVar[Process | None] = ContextVar("process", default=None)


def current() -> Process | None:
    """The process that the running code is part of; None for the world around."""
    return _CURRENT.get()


class _Idle(selectors.DefaultSelector):
    """Instead of waiting for sockets, time passes."""

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Stalled
        Clock.now += max(0.0, timeout)
        return []


class _Future(asyncio.Future[Any]):
    """Ordered in sets by its number, not by its address."""

    def __init__(self, number: int, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self._number = number

    def __hash__(self) -> int:
        return self._number


class _Task(asyncio.Task[Any]):
    """As :class:`_Future`."""

    def __init__(self, number: int, coro: Coroutine[Any, Any, Any], **options: Any) -> None:
        self._number = number  # before it joins the set of all tasks
        super().__init__(coro, **options)

    def __hash__(self) -> int:
        return self._number


class SimulatedLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        super().__init__(_Idle())
        self._numbers = count(1)

    def time(self) -> float:
        return Clock.now

    def call_soon(self, callback: Any, *args: Any, context: Context | None = None) -> asyncio.Handle:
        callback, args = _of_process(callback, args, context)
        return super().call_soon(callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Context | None = None) -> asyncio.TimerHandle:
        callback, args = _of_process(callback, args, context)
        return super().call_at(when, callback, *args, context=context)

    def create_future(self) -> asyncio.Future[Any]:
        return _Future(next(self._numbers), self)

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        task = _Task(next(self._numbers), coro, loop=self, **options)
        _left_behind.append(task)
        return task

    def add_signal_handler(self, *_: Any) -> None:
        raise NotImplementedError  # the only signal here is SIGKILL


def _of_process(callback: Any, args: tuple[Any, ...], context: Context | None) -> tuple[Any, tuple[Any, ...]]:
    process = current() if context is None else context.get(_CURRENT)
    return (callback, args) if process is None else (process.step, (callback, *args))
