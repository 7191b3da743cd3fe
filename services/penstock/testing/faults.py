"""Planned failures: attempts that fail, and workers that die at a chosen point."""

import copy
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from penstock.worker.handlers.actions import Handler, Registry
from penstock.worker.handlers.context import Context


class WorkerCrash(BaseException):
    """Raised in a handler, or in a fake that it calls, the worker dies there: nothing of this attempt is reported."""


@dataclass(slots=True)
class _Plan:
    """action: None for any. times: how often it still happens. error: None for a crash. step: behind which."""

    action: str | None
    times: int
    error: BaseException | None = None
    step: str | None = None


class Faults:
    """dying: ids of tasks whose worker dies when it would report them."""

    def __init__(self) -> None:
        self.dying: set[int] = set()
        self._plans: list[_Plan] = []
        self._actions: dict[int, str] = {}  # of the tasks that ran

    def fail(self, action: str, *, times: int = 1, error: BaseException | None = None) -> None:
        """Let the next attempts of an action fail before their handler runs, with this error."""
        self._plans.append(_Plan(action, times, error or RuntimeError("failed on purpose, by the test")))

    def crash(
        self, action: str | None = None, *, before_answer: bool = True, after_step: str | None = None, times: int = 1
    ) -> None:
        """Let the worker die in the next attempts of an action, or of any: once the handler has done its work, and
        before its answer is sent. after_step: instead as soon as this durable step is reported, such as ``charge#2``.
        """
        if not before_answer and after_step is None:
            raise ValueError("crash() needs a place: after_step, before_answer=True, or raise WorkerCrash in a fake")
        self._plans.append(_Plan(action, times, step=after_step))

    def dies_after(self, task_id: int, step: str) -> bool:
        """Whether the worker dies now that a task's step is reported."""
        return self._due(self._actions.get(task_id), crash=True, step=step) is not None

    def _due(self, action: str | None, *, crash: bool, step: str | None = None) -> _Plan | None:
        """The next plan for an action, counted."""
        for plan in self._plans:
            is_one = plan.action in (None, action) and (plan.error is None) is crash and plan.step == step
            if plan.times > 0 and is_one:
                plan.times -= 1
                return plan
        return None

    def over(self, registry: Registry) -> Registry:
        """The same handlers, with these failures."""
        return Registry({action: self._faulty(handler) for action, handler in registry.items()})

    def _faulty(self, handler: Handler) -> Handler:
        function, made = handler.function, copy.copy(handler)
        if not handler.takes_context and handler.batch is None:  # a context tells which task it is
            made.takes_context = True
            made.function = functools.wraps(function)(lambda _, /, *args, **kwargs: function(*args, **kwargs))
        return made.inside(functools.partial(self._around, handler.name))

    @contextmanager
    def _around(self, action: str, first: Context | Sequence[Any], /, *_: Any, **__: Any) -> Iterator[None]:
        tasks = {first.task_id} if isinstance(first, Context) else {call.ctx.task_id for call in first}
        self._actions |= dict.fromkeys(tasks, action)
        planned = self._due(action, crash=False)
        if planned is not None and planned.error is not None:
            raise planned.error
        try:
            yield
        except WorkerCrash:
            self.dying |= tasks
            raise
        finally:
            if self._due(action, crash=True) is not None:
                self.dying |= tasks
