"""Tasks of Django with options of Penstock, and the handlers that run them in a worker."""

from __future__ import annotations  # older releases of Django cannot subscript these classes

import asyncio
import functools
import inspect
import os
import socket
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from django.utils import timezone

from penstock.contrib.django.framework import (
    InvalidTask,
    Task,
    TaskContext,
    TaskError,
    TaskResult,
    TaskResultStatus,
    task_finished,
    task_started,
)
from penstock.protocol.errors import SettingsError
from penstock.protocol.options import EnqueueOptions
from penstock.worker.handlers.actions import REGISTRY, Handler
from penstock.worker.handlers.context import Context, Wait
from penstock.worker.handlers.outcomes import ASKED

OPTIONS = EnqueueOptions.__annotations__.keys() - {"priority", "run_at", "delay"}
"""Options of Penstock that a task may have; Django has words of its own for the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PenstockTask(Task):  # type: ignore[type-arg]  # it is generic for type checkers alone
    """What ``@task`` makes for this backend. options: of the tasks that it enqueues, those of `penstock.enqueue`."""

    options: EnqueueOptions = field(default_factory=EnqueueOptions, hash=False)

    def using(self, *, options: EnqueueOptions | None = None, **changes: Any) -> Any:
        """As Django's ``using``. options: beside those that the task has."""
        changed: Any = Task.using(self, **changes)
        return changed if options is None else replace(changed, options=self.options | options)


@dataclass(frozen=True, slots=True, kw_only=True)
class PenstockTaskContext(TaskContext):  # type: ignore[type-arg, misc]  # frozen, which the stubs leave out
    """What a task with ``takes_context=True`` is given. penstock: for progress, steps and `penstock.settle_sync`.

    attempt: 1 in each attempt, for a message does not say how often its task was claimed.
    """

    penstock: Context


def register(task: PenstockTask) -> None:
    """Make a task's function the handler of the action that has its path as name. Raises InvalidTask."""
    known = REGISTRY.get(task.module_path)
    if known is not None and inspect.unwrap(known.function) is inspect.unwrap(task.func):
        return  # by using(): the same function with other options
    try:
        REGISTRY.add(Handler(task.module_path, _handler(task)))
    except SettingsError as exc:
        raise InvalidTask(str(exc)) from exc


def _handler(task: PenstockTask) -> Callable[..., Any]:
    function = task.func
    is_async = inspect.iscoroutinefunction(function)

    @functools.wraps(function)
    async def run_async(ctx: Context, /, *args: Any, **kwargs: Any) -> Any:
        attempt = _Attempt(task, ctx, args, kwargs)
        try:
            await task_started.asend(attempt.sender, task_result=attempt.result)
            return attempt.succeeded(await function(*attempt.args, **kwargs))
        except (Exception, asyncio.CancelledError) as exc:  # at its time limit
            attempt.failed(exc)
            raise
        finally:
            if attempt.result.finished_at is not None:
                await task_finished.asend_robust(attempt.sender, task_result=attempt.result)

    @functools.wraps(function)
    def run(ctx: Context, /, *args: Any, **kwargs: Any) -> Any:
        attempt = _Attempt(task, ctx, args, kwargs)
        try:
            task_started.send(attempt.sender, task_result=attempt.result)
            return attempt.succeeded(function(*attempt.args, **kwargs))
        except Exception as exc:
            attempt.failed(exc)
            raise
        finally:
            if attempt.result.finished_at is not None:
                task_finished.send_robust(attempt.sender, task_result=attempt.result)

    made: Any = run_async if is_async else run
    made.__signature__ = _signature(function, takes_context=task.takes_context)
    return made  # type: ignore[no-any-return]


def _signature(function: Callable[..., Any], *, takes_context: bool) -> inspect.Signature:
    """Of a handler: Penstock's context, then the task's arguments as plain JSON, whatever their annotations."""
    given = list(inspect.signature(function).parameters.values())[1 if takes_context else 0 :]
    context = inspect.Parameter("_penstock_context", inspect.Parameter.POSITIONAL_ONLY)
    return inspect.Signature([context, *(one.replace(annotation=inspect.Parameter.empty) for one in given)])


class _Attempt:
    """One run of a task's function. args: those that it is called with. result: what Django's signals are given."""

    def __init__(self, task: PenstockTask, ctx: Context, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        now = timezone.now()
        worker = f"{socket.gethostname()}:{os.getpid()}"
        self.result: TaskResult[Any, Any] = TaskResult(
            task=task, id=str(ctx.task_id), status=TaskResultStatus.RUNNING, enqueued_at=None, started_at=now,
            last_attempted_at=now, finished_at=None, args=[*args], kwargs={**kwargs}, backend=task.backend, errors=[],
            worker_ids=[worker],
        )  # fmt: skip
        self.sender = type(task.get_backend())
        self.args = (PenstockTaskContext(task_result=self.result, penstock=ctx), *args) if task.takes_context else args

    def succeeded(self, returned: Any) -> Any:
        """Note a result; a wait is none yet."""
        if isinstance(returned, Wait):
            return returned
        self._finish(TaskResultStatus.SUCCESSFUL)
        object.__setattr__(self.result, "_return_value", returned)
        return returned

    def failed(self, exc: BaseException) -> None:
        """Note a failure; one that the function asks for, to run again, is none to Django."""
        if isinstance(exc, ASKED):
            return
        path, text = f"{type(exc).__module__}.{type(exc).__qualname__}", "".join(traceback.format_exception(exc))
        self.result.errors.append(TaskError(exception_class_path=path, traceback=text))
        self._finish(TaskResultStatus.FAILED)

    def _finish(self, status: TaskResultStatus) -> None:
        object.__setattr__(self.result, "status", status)
        object.__setattr__(self.result, "finished_at", timezone.now())
