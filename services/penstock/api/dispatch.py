"""Carrying out requests: each is read, limited to what its caller may see, recorded, and given to its method.

New tasks of any number of callers are stored together, many with one statement.
"""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from time import monotonic
from typing import Any

import msgspec
from msgspec.structs import replace

from penstock.api.audit import Audit
from penstock.api.context import ApiContext
from penstock.api.long_polls import LongPolls
from penstock.api.rpc import Handler, Outcome, each
from penstock.api.table import METHODS
from penstock.brokers.base import Depth, Queue
from penstock.db.context import Recent
from penstock.db.notify import CHANNEL, DUE, Notifier
from penstock.db.pool import PATIENT_SECONDS, Store
from penstock.db.replica import Replica
from penstock.db.session import OpenSession, Session
from penstock.methods.inbound import check_fits, read_schemas, refusal_of, take_in_tasks
from penstock.methods.table import SUBMIT_PREFIX, read_command
from penstock.protocol import trace_context
from penstock.protocol.answers import Accepted
from penstock.protocol.api_key import Permission
from penstock.protocol.errors import InvalidParams, InvalidRequest, PenstockError, Refused, RpcError, Unavailable
from penstock.protocol.method import Method
from penstock.protocol.requests import Request
from penstock.protocol.task import NewTask
from penstock.runtime.batcher import Batcher
from penstock.runtime.budget import in_hand
from penstock.runtime.halving import in_halves
from penstock.runtime.logs import log
from penstock.runtime.tracing import active
from penstock.settings.model import Settings
from penstock.tasks import enqueue

MAX_INSERT_TASKS = 1000
PARALLEL_INSERTS = 2  # of tasks without keys
READS_AT_ONCE = 8  # of one body: each may have an answer of megabytes
_SPARED_CONNECTIONS = PARALLEL_INSERTS + 2  # for enqueues and the ping, whatever the other methods are busy with


class Methods:
    """Carries out requests; ``handlers`` are what a Dispatcher takes. replica: of the store, None without one."""

    def __init__(
        self,
        store: Store,
        notifier: Notifier,
        settings: Settings,
        *,
        queues: Mapping[str, Queue],
        dead_letters: Mapping[str, Queue],
        replica: Replica | None = None,
        keys_changed: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._store = store
        self._settings = settings
        self._queues = queues
        self._turns = asyncio.Semaphore(max(1, settings.database_pool_size - _SPARED_CONNECTIONS))
        self._enqueuer = Enqueuer(store, self.session, notifier, settings)
        self.audit = Audit(self.session)
        self._replica = replica
        self.long_polls = LongPolls(store, self.session, settings, replica)
        self._context = ApiContext(
            settings=settings,
            session=self.session,
            transaction=self._transaction,
            wake=notifier.wake,
            enqueue=self._enqueuer.enqueue,
            await_results=self.long_polls.answer,
            recent=Recent(),
            store=store,
            turns=self._turns,
            queues={**queues, **dead_letters},
            keys_changed=keys_changed,
        )
        if replica is not None:
            self._context_of_replica = dataclasses.replace(self._context, session=replica.session, recent=Recent())
        self.handlers = {name: self._handler(method) for name, method in METHODS.items()}
        self.handlers[SUBMIT_PREFIX] = self.handlers["enqueue"]

    def _handler(self, method: Method) -> Handler:
        if method.together:
            return partial(self._answer_together, method)
        if method.permission is Permission.READ:
            return each(partial(self._read, method), at_once=READS_AT_ONCE)
        return each(partial(self._answer, method))

    def _command(self, method: Method, request: Request) -> Any:
        """Raises InvalidParams, TooLarge, AccessDenied."""
        return method.narrow(read_command(request.method, request.params, self._settings, METHODS))

    async def _answer(self, method: Method, request: Request) -> Any:
        command = self._command(method, request)
        if method.by_replica and self._replica is not None:
            contexts = (self._context_of_replica, self._context)
            return await self._replica.read(*(partial(method.carry_out, context, command) for context in contexts))
        if not method.audited or method.dry(command):
            return await method.carry_out(self._context, command)
        async with self.audit.recording(method.name, bytes(request.params)):
            return await method.carry_out(self._context, command)

    async def fetch(self, *statements: tuple[Any, ...]) -> list[list[Any]]:
        """The rows of statements, each with its arguments, which may be as old as a replica is."""

        async def fetch_all(open_session: OpenSession) -> list[list[Any]]:
            async with open_session() as session:
                return [await session.fetch(*statement) for statement in statements]

        if self._replica is None:
            return await fetch_all(self.session)
        return await self._replica.read(partial(fetch_all, self._replica.session), partial(fetch_all, self.session))

    async def _read(self, method: Method, request: Request) -> Any:
        """As ``_answer``, of a method that changes nothing: refused once the answer of its body is full."""
        load = in_hand()
        if not load.room_bytes:
            raise InvalidRequest("Invalid Request: the answer to this batch is full; send the rest in another")
        result = msgspec.Raw(msgspec.json.encode(await self._answer(method, request)))
        load.answer(len(result))
        return result

    async def _answer_together(self, method: Method, requests: Sequence[Request]) -> Sequence[Outcome]:
        """Carry out the requests that can be read in one call; the outcome of each other is its error."""
        outcomes: list[Outcome] = [None] * len(requests)
        commands: dict[int, Any] = {}
        for place, request in enumerate(requests):
            try:
                commands[place] = self._command(method, request)
            except RpcError as exc:
                outcomes[place] = exc
        found = await method.carry_out(self._context, list(commands.values()))
        for place, outcome in zip(commands, found, strict=True):
            outcomes[place] = outcome
        return outcomes

    async def call(self, name: str, params: Mapping[str, Any]) -> Any:
        """Carry out one request that came in no body. Raises what the method raises."""
        method = METHODS[name]
        request = Request("2.0", name, msgspec.Raw(msgspec.json.encode(params)))
        if not method.together:
            return await self._answer(method, request)
        (outcome,) = await self._answer_together(method, [request])
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    async def check_enqueue(self, params: bytes) -> None:
        """Raises what an enqueue with these parameters is refused with, but for keys of other tasks."""
        task = self._command(METHODS["enqueue"], Request("2.0", "enqueue", msgspec.Raw(params)))
        if self._settings.check_payloads and task.offered is None:
            async with self.session() as session:
                check_fits(await read_schemas(session, [task.action]), task.action, task.payload)

    async def drain(self) -> None:
        """Wait until every task taken has been stored or refused, and every outcome is recorded."""
        await self._enqueuer.drain()
        await self.audit.drain()

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Session]:
        """A session for reading, out of those that leave enqueues enough."""
        async with self._turns, self._store.session() as session:
            yield session

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[Session]:
        async with self._turns, self._store.transaction(lock_wait_seconds=PATIENT_SECONDS) as session:
            yield session

    async def depths(self) -> dict[str, Depth | None]:
        """Approximate counts of the three queues by label; None for one that cannot be read."""

        async def of(queue: Queue) -> Depth | None:
            try:
                return await queue.depth()
            except Unavailable:
                return None

        return dict(zip(self._queues, await asyncio.gather(*map(of, self._queues.values())), strict=True))


class Enqueuer:
    """Stores new tasks."""

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
