"""The backend: its tasks, which are enqueued on Django's own connection, their handlers, and results from the api."""

from __future__ import annotations  # older releases of Django cannot subscript these classes

import asyncio
import builtins
import functools
import inspect
import os
import re
import socket
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

import django
from django.apps import apps
from django.conf import settings
from django.core import checks
from django.db import connections
from django.utils import timezone
from django.utils.module_loading import import_string

from penstock.client import default
from penstock.protocol import errors
from penstock.protocol.answers import Failure, TaskDetail
from penstock.protocol.options import EnqueueOptions
from penstock.protocol.spelling import did_you_mean
from penstock.protocol.task import State
from penstock.tasks.transactional import enqueue_sync
from penstock.worker.handlers.actions import REGISTRY, Handler
from penstock.worker.handlers.context import Context, Wait
from penstock.worker.handlers.outcomes import ASKED, Fail, Retry

# The tasks framework is Django's own since Django 6, before that the package django-tasks, from which it was taken.
if TYPE_CHECKING or django.VERSION >= (6, 0):
    from django.tasks import TaskContext, TaskResult, TaskResultStatus, task_backends
    from django.tasks.backends.base import BaseTaskBackend
    from django.tasks.base import Task, TaskError
    from django.tasks.exceptions import InvalidTask, TaskResultDoesNotExist
    from django.tasks.signals import task_enqueued, task_finished, task_started
    from django.utils.json import normalize_json
else:
    from django_tasks import TaskContext, TaskResult, TaskResultStatus, task_backends
    from django_tasks.backends.base import BaseTaskBackend
    from django_tasks.base import Task, TaskError
    from django_tasks.exceptions import InvalidTaskError as InvalidTask
    from django_tasks.exceptions import TaskResultDoesNotExist
    from django_tasks.signals import task_enqueued, task_finished, task_started
    from django_tasks.utils import normalize_json

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


def _handler(task: PenstockTask) -> Callable[..., Any]:
    function = task.func

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

    made: Any = run_async if inspect.iscoroutinefunction(function) else run
    # Penstock's context, then the task's arguments as plain JSON, whatever their annotations.
    context = inspect.Parameter("_penstock_context", inspect.Parameter.POSITIONAL_ONLY)
    given = list(inspect.signature(function).parameters.values())[1 if task.takes_context else 0 :]
    plain = [one.replace(annotation=inspect.Parameter.empty) for one in given]
    made.__signature__ = inspect.Signature([context, *plain])
    return made  # type: ignore[no-any-return]


class _Attempt:
    """One run of a task's function. args: those that it is called with. result: what Django's signals are given."""

    def __init__(self, task: PenstockTask, ctx: Context, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        now = timezone.now()
        self.result: TaskResult[Any, Any] = TaskResult(
            task=task, id=str(ctx.task_id), status=TaskResultStatus.RUNNING, enqueued_at=None, started_at=now,
            last_attempted_at=now, finished_at=None, args=[*args], kwargs={**kwargs}, backend=task.backend, errors=[],
            worker_ids=[f"{socket.gethostname()}:{os.getpid()}"],
        )  # fmt: skip
        self.sender = type(task.get_backend())
        self.args = (PenstockTaskContext(task_result=self.result, penstock=ctx), *args) if task.takes_context else args

    def succeeded(self, returned: Any) -> Any:
        """Note a result; a wait is none yet."""
        if not isinstance(returned, Wait):
            object.__setattr__(self.result, "_return_value", returned)
            self._finish(TaskResultStatus.SUCCESSFUL)
        return returned

    def failed(self, exc: BaseException) -> None:
        """Note a failure; one that the function asks for, to run again, is none to Django."""
        if not isinstance(exc, ASKED):
            path, text = f"{type(exc).__module__}.{type(exc).__qualname__}", "".join(traceback.format_exception(exc))
            self.result.errors.append(TaskError(exception_class_path=path, traceback=text))
            self._finish(TaskResultStatus.FAILED)

    def _finish(self, status: TaskResultStatus) -> None:
        object.__setattr__(self.result, "status", status)
        object.__setattr__(self.result, "finished_at", timezone.now())


APP = "penstock.contrib.django"
_STATUS = {
    State.ACQUIRED: TaskResultStatus.RUNNING, State.SUCCESS: TaskResultStatus.SUCCESSFUL,
    State.CRITICAL_ERROR: TaskResultStatus.FAILED, State.CANCELLED: TaskResultStatus.FAILED,
}  # fmt: skip


class PenstockBackend(BaseTaskBackend):
    """Set as ``BACKEND`` in ``TASKS``.

    ``OPTIONS``: ``database``, the alias of the database with Penstock's functions; ``enqueue``, options of all tasks.
    """

    task_class = PenstockTask
    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        super().__init__(alias, params)
        self.database: str = self.options.get("database", "default")
        self.defaults: dict[str, Any] = dict(self.options.get("enqueue", {}))

    def validate_task(self, task: Task[..., Any]) -> None:
        """Make the function of a valid task the handler of the action that has its path as name. Raises InvalidTask."""
        super().validate_task(task)
        if not isinstance(task, PenstockTask):
            return
        for name in task.options.keys() - OPTIONS:
            raise InvalidTask(f"no option of a task is named {name!r}{did_you_mean(name, OPTIONS)}")
        known = REGISTRY.get(task.module_path)
        if known is None or inspect.unwrap(known.function) is not inspect.unwrap(task.func):  # else made by using()
            try:
                REGISTRY.add(Handler(task.module_path, _handler(task)))
            except errors.SettingsError as exc:
                raise InvalidTask(str(exc)) from exc

    def enqueue(self, task: Task[..., Any], args: Iterable[Any], kwargs: Mapping[str, Any]) -> TaskResult[Any, Any]:
        """Add a task in the transaction of the database's connection; without one, at once.

        Raises InvalidTask, TypeError for arguments that are not JSON, and what `penstock.enqueue_sync` raises.
        """
        self.validate_task(task)
        if not isinstance(task, PenstockTask):
            raise InvalidTask(f"workers would not know {task.module_path}: declare it as @task(backend={self.alias!r})")
        given: Any = normalize_json([*args])
        named: Any = normalize_json(kwargs)
        payload = REGISTRY[task.module_path].payload(given, named)
        answer = enqueue_sync(connections[self.database], task.module_path, payload, **self._options(task))
        result: TaskResult[Any, Any] = TaskResult(
            task=task, id=str(answer.id), status=TaskResultStatus.READY, enqueued_at=timezone.now(), started_at=None,
            last_attempted_at=None, finished_at=None, args=given, kwargs=named, backend=self.alias, errors=[],
            worker_ids=[],
        )  # fmt: skip
        task_enqueued.send(type(self), task_result=result)
        return result

    def _options(self, task: PenstockTask) -> dict[str, Any]:
        """queue_name becomes a label, by which a route may select the task."""
        options = {**self.defaults, **task.options, "priority": task.priority}
        if task.queue_name != "default":
            options["labels"] = {"queue": task.queue_name, **(options.get("labels") or {})}
        if task.run_after is not None:
            aware = timezone.is_aware(task.run_after)
            options["run_at"] = task.run_after if aware else timezone.make_aware(task.run_after)
        return options

    def get_result(self, result_id: str) -> TaskResult[Any, Any]:
        """Ask the api that `penstock.connect` or the environment names.

        Raises TaskResultDoesNotExist; ResultGone for one that is kept no more; PayloadUnavailable, PayloadLost for one
        that cannot be read.
        """
        client = default.client()
        try:
            detail = client.status(int(result_id), detail=True)
            if detail.payload_unread:
                # Why the task failed is shown all the same.
                with suppress(errors.PayloadUnavailable, errors.PayloadLost):
                    detail["payload"] = client.download(detail.id, "payload")
            if detail.result_unread:
                detail["result"] = client.download(detail.id, "result")
        except (ValueError, errors.TaskNotFound, errors.InvalidParams):
            raise TaskResultDoesNotExist(f"there is no task {result_id}") from None
        if detail.result_gone:
            raise errors.ResultGone(detail.id)
        task = None
        with suppress(Exception):  # a module of another program may fail in any way
            task = import_string(detail.action)
        if not isinstance(task, Task):
            raise TaskResultDoesNotExist(f"task {result_id} is of {detail.action}, which is no task of this project")
        return self._result(task, detail)

    def _result(self, task: Task[..., Any], detail: TaskDetail) -> TaskResult[Any, Any]:
        status = _STATUS.get(State(detail.state), TaskResultStatus.READY)
        is_final = status in (TaskResultStatus.SUCCESSFUL, TaskResultStatus.FAILED)
        payload, failures = detail.payload, detail.failures
        begun = None if detail.claimed_at is None else _instant(detail.claimed_at)
        workers = [one.worker or "" for one in failures] + [detail.worker or ""] * detail.attempts
        result: TaskResult[Any, Any] = TaskResult(
            task=task, id=str(detail.id), status=status, enqueued_at=_instant(detail.created_at),
            started_at=begun if detail.attempts == 1 else _instant(failures[0].at) if failures else None,
            last_attempted_at=begun or (_instant(failures[-1].at) if failures else None),
            finished_at=_instant(detail.updated_at) if is_final else None,
            args=payload if isinstance(payload, list) else [], kwargs=payload if isinstance(payload, dict) else {},
            backend=self.alias, errors=[_error(one) for one in failures], worker_ids=workers[: detail.attempts],
        )  # fmt: skip
        object.__setattr__(result, "_return_value", detail.result)
        return result

    def check(self, **_: Any) -> Iterable[checks.CheckMessage]:  # type: ignore[override]  # any iterable will do
        where = f"TASKS[{self.alias!r}]"
        for name in self.options.keys() - {"database", "enqueue"}:
            yield checks.Error(f"{where}: OPTIONS has no {name!r}; it has database and enqueue", id="penstock.E001")
        for name in self.defaults.keys() - OPTIONS:
            hint = did_you_mean(name, OPTIONS).lstrip("; ") or None
            yield checks.Error(f"{where}: no option of a task is named {name!r}", hint=hint, id="penstock.E002")
        if self.database not in connections:
            yield checks.Error(f"{where}: there is no database {self.database!r}", id="penstock.E003")
        elif connections[self.database].vendor != "postgresql":
            yield checks.Error(f"{where}: the database {self.database!r} is not Postgres", id="penstock.E004")
        if not apps.is_installed(APP):
            hint = f"Add {APP!r} to INSTALLED_APPS for penstock_worker, penstock_migrate and checks of the database."
            yield checks.Warning(f"{where}: {APP} is not installed", hint=hint, id="penstock.W001")


def aliases() -> list[str]:
    """Aliases of the databases in which these backends enqueue."""
    return sorted({one.database for one in task_backends.all() if isinstance(one, PenstockBackend)})


def _instant(text: str) -> datetime:
    read = datetime.fromisoformat(text)
    return read if settings.USE_TZ else timezone.make_naive(read)


def _error(failure: Failure) -> TaskError:
    """Of a failure without an exception, such as a worker's death, the class is `penstock.TaskFailed`."""
    data = failure.error.get("data")
    given = data if isinstance(data, dict) else {}  # by workers and answers of any kind
    name, trace = (one if isinstance(one, str) else "" for one in map(given.get, ("type", "traceback")))
    shown = trace or f"{failure.error.get('message', '')}\n"
    # The last line of a traceback has the module of the class too.
    found = re.findall(rf"^((?:\w+\.)+{re.escape(name)})(?::|$)", shown, re.MULTILINE) if name else []
    if found:
        path = found[-1]
    elif isinstance(getattr(builtins, name, None), type):
        path = f"builtins.{name}"
    else:
        path = f"penstock.{name if name in (Retry.__name__, Fail.__name__) else errors.TaskFailed.__name__}"
    return TaskError(exception_class_path=path, traceback=shown)
