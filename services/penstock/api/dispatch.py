"""The methods of the api: what each command does with the database, and how its answer looks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from penstock.api import tenancy
from penstock.api.access import AUDITED, PERMISSION_OF
from penstock.api.audit import Audit
from penstock.api.dead_letters import DeadLetters
from penstock.api.hidden import hide_others
from penstock.api.keys import Keys
from penstock.api.long_polls import Results
from penstock.api.openrpc import describe
from penstock.api.rejected import RejectedMessages
from penstock.api.rpc import Handler, Outcome, each
from penstock.brokers.base import Depth, Queue
from penstock.db.context import Context
from penstock.db.notify import Notifier
from penstock.db.pool import PATIENT_SECONDS, Store
from penstock.db.session import Session
from penstock.methods.inbound import apply_change, count_enqueued, refusal_of, take_in_tasks
from penstock.methods.reading import read_command
from penstock.methods.table import METHODS, PARAMS
from penstock.payloads.records import shown_rows
from penstock.protocol import trace_context
from penstock.protocol.api_key import Permission
from penstock.protocol.caller import bound_to, seen
from penstock.protocol.errors import (
    InvalidParams,
    InvalidRequest,
    PenstockError,
    Refused,
    RpcError,
    TaskNotFound,
    Unavailable,
)
from penstock.protocol.requests import Request
from penstock.protocol.task import Enqueued, NewTask, State
from penstock.protocol.tenant import own_key
from penstock.protocol.views import timestamp
from penstock.protocol.wait_tokens import claim_of_token
from penstock.runtime.batcher import Batcher
from penstock.runtime.budget import in_hand
from penstock.runtime.halving import in_halves
from penstock.runtime.logs import get_logger
from penstock.runtime.tracing import active
from penstock.settings.model import Settings
from penstock.tasks import enqueue, views
from penstock.tasks.commands import (
    AnswerWait,
    Cancel,
    CountDead,
    CreateKey,
    Discover,
    Enqueue,
    ListAudit,
    ListDead,
    ListKeys,
    ListRejected,
    ListTasks,
    PurgeDead,
    PurgeRejected,
    ReplayDead,
    Reschedule,
    Restart,
    RetryRejected,
    RevokeKey,
    ShowDead,
    ShowRejected,
    Stats,
    Status,
)
from penstock.tasks.list import TaskLists
from penstock.tasks.params import SUBMIT_PREFIX
from penstock.tasks.stats import TaskCounts
from penstock.tasks.tenant_stats import TenantCounts, TenantStatistics

MAX_INSERT_TASKS = 1000
PARALLEL_INSERTS = 2  # of tasks without keys
READS_AT_ONCE = 8  # of one body: each may have an answer of megabytes
_SPARED_CONNECTIONS = PARALLEL_INSERTS + 2  # for enqueues and the ping, whatever the other methods are busy with

log = get_logger()
_encode = msgspec.json.Encoder().encode


class Methods:
    """Carries out requests; ``handlers`` and ``prefixes`` are what a Dispatcher takes.

    queues, dead_letters: by label, for the methods about dead-letter queues; all others do without.
    keys_changed: called after a key was made or revoked, so that it counts here at once.
    """

    def __init__(
        self,
        store: Store,
        notifier: Notifier,
        settings: Settings,
        *,
        queues: Mapping[str, Queue],
        dead_letters: Mapping[str, Queue],
        keys_changed: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._store = store
        self.codec = store.codec
        self._notifier = notifier
        self._settings = settings
        self._queues = queues
        self._inserts: Batcher[NewTask, Enqueued] = Batcher(
            self._insert, max_items=MAX_INSERT_TASKS, max_parallel=PARALLEL_INSERTS
        )
        # One insert at a time keeps the order of a body that it cuts: that of an ordering key is the order of ids, and
        # of two that replace one task the last one counts.
        self._keyed_inserts: Batcher[NewTask, Enqueued] = Batcher(self._insert, max_items=MAX_INSERT_TASKS)
        self._others = asyncio.Semaphore(max(1, settings.database_pool_size - _SPARED_CONNECTIONS))
        self._of_all = TaskCounts(self._session)
        self._of_tenants = TenantCounts(self._session)
        self._context = Context(settings, self._session, self._transaction, notifier.wake)
        self._description: msgspec.Raw | None = None
        dead = DeadLetters(
            store=store,
            session=self._session,
            notifier=notifier,
            queues=queues,
            dead_letters=dead_letters,
            settings=settings,
        )
        rejected = RejectedMessages(store, self._session, settings, turns=self._others, changed=notifier.wake)
        keys = Keys(self._session, keys_changed)
        self.audit = Audit(self._session)
        self.results = Results(
            store,
            self._session,
            tasks_limit=settings.result_waits_limit,
            requests_limit=max(1, settings.http_connections // 2),
        )
        # Those of a body are carried out together.
        self._joined: dict[str, Handler] = {
            "enqueue": self._enqueue, "result": self._result, "status": self._status,
        }  # fmt: skip
        self._carry_out: dict[type, Callable[[Any], Awaitable[Any]]] = {
            Cancel: self._change,
            Restart: self._change,
            Reschedule: self._change,
            AnswerWait: self._answer_wait,
            ListTasks: TaskLists(self._session, self.codec).list,
            Stats: self._stats,
            ListRejected: rejected.list,
            ShowRejected: rejected.show,
            RetryRejected: rejected.retry,
            PurgeRejected: rejected.purge,
            CountDead: lambda _: dead.count(),
            ListDead: dead.browse,
            ShowDead: dead.show,
            ReplayDead: dead.replay,
            PurgeDead: dead.purge,
            CreateKey: keys.create,
            ListKeys: keys.list,
            RevokeKey: keys.revoke,
            ListAudit: self.audit.browse,
            Discover: self._discover,
        }

    @property
    def handlers(self) -> Mapping[str, Handler]:
        reading = {name for name, needed in PERMISSION_OF.items() if needed is Permission.READ}
        return {
            **{name: each(self._answer) for name in PARAMS.keys() - reading},
            **{name: each(self._read, at_once=READS_AT_ONCE) for name in reading},
            **self._joined,
        }

    @property
    def prefixes(self) -> Mapping[str, Handler]:
        return {SUBMIT_PREFIX: self._enqueue}

    async def _answer(self, request: Request) -> Any:
        name = request.method
        command = tenancy.narrowed(name, read_command(name, request.params, self._settings))
        if name in METHODS:
            carry_out: Callable[[Any], Awaitable[Any]] = partial(METHODS[name].carry_out, self._context)
        else:
            carry_out = self._carry_out[type(command)]
        if name not in AUDITED or (name in METHODS and METHODS[name].dry(command)):
            return await carry_out(command)
        async with self.audit.noting(name, bytes(request.params)):
            return await carry_out(command)

    async def _read(self, request: Request) -> Any:
        """As ``_answer``, of a method that changes nothing: refused once the answer of its body is full."""
        load = in_hand()
        if not load.room_bytes:
            raise InvalidRequest("Invalid Request: the answer to this batch is full; send the rest in another")
        result = msgspec.Raw(_encode(await self._answer(request)))
        load.answer(len(result))
        return result

    async def call(self, method: str, params: Mapping[str, Any]) -> Any:
        """Carry out one request that came in no body. Raises what the method raises."""
        request = Request("2.0", method, msgspec.Raw(msgspec.json.encode(params)))
        if method not in self._joined:
            return await self._answer(request)
        (outcome,) = await self._joined[method]([request])
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    async def _enqueue(self, requests: Sequence[Request]) -> Sequence[Outcome]:
        """Have tasks stored together with those of other callers; the outcomes come after the commit."""
        outcomes: list[Outcome] = []
        trace = None if active.active() is None else trace_context.current()
        for request in requests:
            try:
                command = read_command(request.method, request.params, self._settings)
                command = tenancy.narrowed(request.method, command)
                assert isinstance(command, Enqueue)
                task = command.task if trace is None else replace(command.task, trace=trace.text)
                outcomes.append(task)
            except RpcError as exc:
                outcomes.append(exc)
        if self.codec.is_on:
            outcomes = await self._take_in(outcomes)
        outcomes = [self._insert_soon(one) if isinstance(one, NewTask) else one for one in outcomes]
        for place, stored in enumerate(outcomes):
            if isinstance(stored, asyncio.Future):
                try:
                    accepted = await stored
                except Exception as exc:
                    outcomes[place] = exc
                else:
                    outcomes[place] = views.Accepted(accepted.id, accepted.state, accepted.duplicate, accepted.replaced)
        return outcomes

    def _insert_soon(self, task: NewTask) -> asyncio.Future[Enqueued]:
        is_keyed = task.ordering_key is not None or task.unique_key is not None
        return (self._keyed_inserts if is_keyed else self._inserts).submit_soon(task)

    async def _take_in(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """With large payloads kept as objects; all before any is stored, for tasks are stored in their order."""
        tasks = [one for one in outcomes if isinstance(one, NewTask)]
        taken = iter(await take_in_tasks(tasks, self.codec, self._settings, self._session))
        return [next(taken) if isinstance(one, NewTask) else one for one in outcomes]

    async def _result(self, requests: Sequence[Request]) -> Sequence[Outcome]:
        """Wait for results; all that one body asks for is one who waits."""
        commands = self._commands(requests)
        if bound_to() is None:
            return await self.results.answer(commands)
        async with self._session() as session:
            hidden = await hide_others(session, commands)
        return hidden.shown(await self.results.answer(hidden.commands))

    def _commands(self, requests: Sequence[Request]) -> list[Any]:
        """Commands with ``ids``, or why one is none. One body names so many ids and no more."""
        load = in_hand()
        commands: list[Any] = []
        for request in requests:
            try:
                command: Any = read_command(request.method, request.params, self._settings)
                load.ask(len(command.ids))
                commands.append(command)
            except RpcError as exc:
                commands.append(exc)
        return commands

    async def drain(self) -> None:
        """Wait until every task taken has been stored or refused, and what was done is noted."""
        await self._inserts.drain()
        await self._keyed_inserts.drain()
        await self.audit.drain()

    async def _insert(self, tasks: Sequence[NewTask]) -> list[Enqueued | Exception]:
        """Store tasks of any number of callers with one statement, which is its own transaction."""
        return [answer for part in await in_halves(tasks, self._insert_part, self._answer_alone) for answer in part]

    async def _insert_part(self, tasks: Sequence[NewTask], hurried: bool) -> list[Enqueued | Exception]:
        async with self._store.transaction(hurried=True) if hurried else self._store.session() as session:
            accepted = await enqueue.enqueue(session, tasks)
        count_enqueued(tasks, accepted, source="http")
        self._notifier.wake()
        return [refusal_of(task, answer) or answer for task, answer in zip(tasks, accepted, strict=True)]

    @staticmethod
    async def _answer_alone(task: NewTask, error: PenstockError) -> list[Enqueued | Exception]:
        if not isinstance(error, Refused):
            return [error]
        log.warning("task_refused", action=task.action, reason=str(error))
        return [InvalidParams("params", "hold a value that Postgres refuses to store")]

    def session(self) -> AbstractAsyncContextManager[Session]:
        """A session for reading, out of those that leave enqueues enough."""
        return self._session()

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[Session]:
        async with self._others, self._store.session() as session:
            yield session

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[Session]:
        async with self._others, self._store.transaction(lock_wait_seconds=PATIENT_SECONDS) as session:
            yield session

    async def depths(self) -> dict[str, Depth | None]:
        """Approximate counts of the three queues by label; None for one that cannot be asked."""

        async def of(queue: Queue) -> Depth | None:
            try:
                return await queue.depth()
            except Unavailable:
                return None

        return dict(zip(self._queues, await asyncio.gather(*map(of, self._queues.values())), strict=True))

    async def _status(self, requests: Sequence[Request]) -> Sequence[Outcome]:
        """Show tasks; all that one body asks for are read together."""
        commands = self._commands(requests)
        rows: dict[bool, dict[int, Any]] = {}
        waits: dict[int, views.WaitsFor] = {}
        for detail in (False, True):
            ids = {
                task_id
                for command in commands
                if isinstance(command, Status) and command.detail == detail
                for task_id in command.ids
            }
            if ids:
                rows[detail], found = await self._read_shown(list(ids), detail=detail)
                waits |= found
        outcomes: list[Outcome] = []
        for command in commands:
            if not isinstance(command, Status):
                outcomes.append(command)
                continue
            shown = [self._shown(rows[command.detail].get(one), waits, command.detail) for one in command.ids]
            if command.many:
                outcomes.append(shown)
            else:
                outcomes.append(shown[0] or TaskNotFound(command.ids[0]))
        return outcomes

    async def _read_shown(
        self, ids: Sequence[int], *, detail: bool
    ) -> tuple[dict[int, Any], dict[int, views.WaitsFor]]:
        """Rows of tasks that the caller may see, opened, and what they wait for."""
        load = in_hand()
        room = load.room_bytes
        async with self._session() as session:
            rows: Sequence[Any] = seen(await session.fetch("show_tasks", ids, detail, room))
            waits = await self._read_waits(session, rows) if detail else {}
        load.hold(sum(map(views.task_bytes, rows)))
        rows = await shown_rows(self.codec, rows, room_bytes=room, payload=detail)
        return {row["id"]: row for row in rows}, waits

    @staticmethod
    def _shown(row: Any, waits: Mapping[int, views.WaitsFor], detail: bool) -> views.Task | None:
        """A task as it is answered, with what of it is large while the answer has room: a body may ask for it often."""
        if row is None:
            return None
        if not row["is_cut"] and not in_hand().answer(views.task_bytes(row)):
            row = {**row, "is_cut": True, "payload": None, "result": None, "failures": None, "error": None}
        if not detail:
            return views.task(row)
        return msgspec.structs.replace(views.task_detail(row), waits_for=waits.get(row["id"]))

    @staticmethod
    async def _read_waits(session: Session, rows: Sequence[Any]) -> dict[int, views.WaitsFor]:
        """What tasks wait for, of those that do."""
        ids = [row["id"] for row in rows if row["state"] == State.WAITING and row["attempts"]]
        found = await session.fetch("read_waits", ids) if ids else []
        return {row["task_id"]: views.WaitsFor(own_key(row["token"]), timestamp(row["deadline"])) for row in found}

    async def _change(self, command: Cancel | Restart | Reschedule) -> views.Changed:
        async with self._transaction() as session:
            await tenancy.check_task(session, command.id)
            changed = await apply_change(session, command)
        self._notifier.wake()  # a task may run, or there is room for one
        return views.Changed(changed["id"], changed["state"])

    async def _answer_wait(self, command: AnswerWait) -> views.Answered:
        try:
            async with self._transaction() as session:
                made_for = claim_of_token(command.token)
                if made_for is not None:
                    await tenancy.check_task(session, made_for[0])
                answered = await apply_change(session, command)
        except Refused as exc:
            log.warning("answer_refused", reason=str(exc))
            raise InvalidParams("result", "holds a value that Postgres refuses to store") from exc
        if not answered["kept"]:
            self._notifier.wake()  # a successor by ordering key may run, or the next attempt
        return views.Answered(**answered)

    async def _stats(self, command: Stats) -> msgspec.Raw | TenantStatistics:
        """Counts, rates and lag; of one tenant, counts alone."""
        if command.tenant is not None:
            return await self._of_tenants.count(command.tenant)
        return await self._of_all.count()

    async def _discover(self, _command: Discover) -> msgspec.Raw:
        if self._description is None:
            self._description = msgspec.Raw(msgspec.json.encode(describe()))
        return self._description
