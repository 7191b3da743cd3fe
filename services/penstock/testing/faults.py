"""One worker of a test, which runs every task in its queue; attempts that fail and workers that die, as planned."""

import asyncio
import copy
import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from penstock.brokers.base import Outgoing, SendReport
from penstock.brokers.sqs import LIMITS
from penstock.protocol.json_text import entry_text
from penstock.protocol.reports import Outcome, SharedResult, Stepped, decode_report
from penstock.protocol.requests import join_batch, split_body
from penstock.settings.model import Settings
from penstock.testing.queue import MemoryQueue
from penstock.worker.handlers.actions import Handler, Registry
from penstock.worker.handlers.context import Context
from penstock.worker.process import Worker

ONE_AT_A_TIME = replace(LIMITS, max_call_messages=1)
"""Limits of an outbound queue from which a worker takes one message after another, so that a crash concerns one."""

ALONE: Mapping[str, Any] = {
    "payload_bucket": None, "payload_keys": (), "control_url": None, "receive_wait_seconds": 0, "worker_concurrency": 1,
    "task_output": "logs", "database_schema": "penstock",
    "billed_call_wait_seconds": 0,  # else deletes wait for a side task
}  # fmt: skip
"""Settings of a test: nothing reaches beyond this process, and one task runs at a time."""

_SIDE_TASKS = ("send responses", "delete messages", "watch threads")  # the others are for long runs


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


def matches(payload: Any, wanted: Any) -> bool:
    """Whether a payload is the wanted one, None for any; an object matches by the members that are given."""
    if isinstance(wanted, Mapping) and isinstance(payload, Mapping):
        return all(name in payload and payload[name] == value for name, value in wanted.items())
    return wanted is None or payload == wanted


class _Died(Exception):
    """The worker is dead."""


class _Results(MemoryQueue):
    """The results queue as a worker sees it, which dies on its way there with the answer of a dying task."""

    def __init__(self, queue: MemoryQueue, faults: Faults) -> None:
        super().__init__(queue.label, queue._now)
        self.messages = queue.messages
        self._faults = faults

    async def send(self, messages: Sequence[Outgoing]) -> SendReport:
        for message in messages:
            _, entries = split_body(message.body, batch_limit=len(message.body))
            for place, entry in enumerate(entries):
                report = decode_report(entry)
                if isinstance(report, Stepped):
                    is_sent, dies = 1, self._faults.dies_after(report.task_id, report.entry.label)
                elif isinstance(report, SharedResult | Outcome):
                    ids = {*report.task_ids} if isinstance(report, SharedResult) else {report.task_id}
                    is_sent, dies = 0, not ids.isdisjoint(self._faults.dying)
                    self._faults.dying -= ids
                else:
                    continue
                if dies:
                    if sent := entries[: place + is_sent]:  # what was answered before
                        self.put(Outgoing(join_batch([entry_text(one) for one in sent]), message.attributes))
                    raise _Died
            self.put(message)
        return SendReport([], None)


async def run_worker(
    outbound: MemoryQueue, results: MemoryQueue, settings: Settings, registry: Registry, faults: Faults
) -> None:
    """Run the tasks in the outbound queue until all are answered, or the worker dies: its messages come again."""
    dying = _Results(results, faults)
    worker = Worker(outbound=outbound, results=dying, settings=settings, registry=faults.over(registry))
    sides = [asyncio.create_task(run()) for name, run in worker.side_tasks().items() if name in _SIDE_TASKS]
    work = asyncio.create_task(_work(worker))
    try:
        await asyncio.wait((work, *sides), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            await worker.drain(0)
    finally:
        for task in (work, *sides):
            task.cancel()
        ended = await asyncio.gather(work, *sides, return_exceptions=True)
        await worker.close()
    for outcome in ended:
        if isinstance(outcome, BaseException) and not isinstance(outcome, _Died | asyncio.CancelledError):
            raise outcome


async def _work(worker: Worker) -> None:
    await worker.open()  # lifespans of the handlers
    while await worker.run_once():
        await worker.settle()
