"""Storing new tasks of any number of callers, many with one statement."""

import asyncio
from collections.abc import Sequence
from time import monotonic

from msgspec.structs import replace

from penstock.db.notify import CHANNEL, DUE, Notifier
from penstock.db.pool import Store
from penstock.db.session import OpenSession
from penstock.methods.inbound import refusal_of, take_in_tasks
from penstock.protocol import trace_context
from penstock.protocol.errors import InvalidParams, PenstockError, Refused
from penstock.protocol.task import NewTask
from penstock.runtime.batcher import Batcher
from penstock.runtime.halving import in_halves
from penstock.runtime.logs import log
from penstock.runtime.tracing import active
from penstock.settings.model import Settings
from penstock.tasks import enqueue
from penstock.tasks.views import Accepted

MAX_INSERT_TASKS = 1000
PARALLEL_INSERTS = 2  # of tasks without keys


class Enqueuer:
    def __init__(self, store: Store, open_session: OpenSession, notifier: Notifier, settings: Settings) -> None:
        self._store = store
        self._open_session = open_session
        self._notifier = notifier
        self._settings = settings
        self._inserts: Batcher[NewTask, Accepted] = Batcher(
            self._insert, max_items=MAX_INSERT_TASKS, max_parallel=PARALLEL_INSERTS
        )
        # One insert at a time keeps the order of a body that it cuts: that of an ordering key is the order of ids, and
        # of two that replace one task the last one counts.
        self._keyed_inserts: Batcher[NewTask, Accepted] = Batcher(self._insert, max_items=MAX_INSERT_TASKS)

    async def enqueue(self, tasks: Sequence[NewTask]) -> list[Accepted | BaseException]:
        """Store tasks together with those of other callers; the outcomes come after the commit."""
        if active.active() is not None and (trace := trace_context.current()) is not None:
            tasks = [replace(task, trace=trace.text) for task in tasks]
        # All payloads before any task, as tasks are stored in their order.
        taken = await take_in_tasks(tasks, self._store.codec, self._settings, self._open_session)
        answers = [self._insert_soon(one) if isinstance(one, NewTask) else one for one in taken]
        outcomes: list[Accepted | BaseException] = []
        for answer in answers:
            try:
                outcomes.append(answer if isinstance(answer, BaseException) else await answer)
            except Exception as exc:
                outcomes.append(exc)
        return outcomes

    async def drain(self) -> None:
        """Wait until every task taken has been stored or refused."""
        await self._inserts.drain()
        await self._keyed_inserts.drain()

    def _insert_soon(self, task: NewTask) -> asyncio.Future[Accepted]:
        is_keyed = task.ordering_key is not None or task.unique_key is not None
        return (self._keyed_inserts if is_keyed else self._inserts).submit_soon(task)

    async def _insert(self, tasks: Sequence[NewTask]) -> list[Accepted | Exception]:
        """Store tasks with one statement, which is its own transaction."""
        return [answer for part in await in_halves(tasks, self._insert_part, _answer_alone) for answer in part]

    async def _insert_part(self, tasks: Sequence[NewTask], hurried: bool) -> list[Accepted | Exception]:
        are_due = all(task.run_at is None and not task.delay_seconds for task in tasks)
        async with self._store.transaction(hurried=True) if hurried else self._store.session() as session:
            alone = None
            if len(tasks) == 1 and not hurried and self._notifier.may_carry():
                began = monotonic()
                alone = await enqueue.enqueue_and_notify(session, tasks[0], CHANNEL, DUE if are_due else "")
            accepted = [alone] if alone is not None else await enqueue.enqueue(session, tasks)
        enqueue.count_enqueued(tasks, accepted, "http")
        if alone is not None:
            self._notifier.carried(monotonic() - began)
        else:
            self._notifier.wake(due=are_due)
        return [refusal_of(task, answer) or answer for task, answer in zip(tasks, accepted, strict=True)]


async def _answer_alone(task: NewTask, error: PenstockError) -> list[Accepted | Exception]:
    if not isinstance(error, Refused):
        return [error]
    log.warning("task_refused", action=task.action, reason=str(error))
    return [InvalidParams("params", "hold a value that Postgres refuses to store")]
