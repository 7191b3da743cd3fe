"""The methods of the api: what each command does with the database, and how its answer looks."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from time import monotonic
from typing import Any

import msgspec

from penstock import tracecontext, tracing
from penstock.api import tenancy, views
from penstock.api.access import AUDITED
from penstock.api.audit import Audit
from penstock.api.dead_letters import DeadLetters
from penstock.api.discover import describe
from penstock.api.hidden import hide_others
from penstock.api.jobs import Jobs
from penstock.api.keys import Keys
from penstock.api.replay import purge_rejected, retry_rejected
from penstock.api.results import Results
from penstock.api.rpc import Handler, Outcome, each
from penstock.api.rules import Rules
from penstock.api.schedules import Schedules
from penstock.api.tenant_stats import TenantCounts, TenantStatistics
from penstock.api.tenants import Tenants
from penstock.api.workflows import Workflows
from penstock.batching import Batcher
from penstock.commands import (
    PARAMS,
    SUBMIT_PREFIX,
    AnswerWait,
    AwaitResults,
    Cancel,
    CancelJob,
    CheckClaims,
    CountDead,
    CreateKey,
    Discover,
    Enqueue,
    GetJob,
    ListAudit,
    ListDead,
    ListHeldKeys,
    ListJobs,
    ListKeys,
    ListRejected,
    ListTasks,
    PreviewBulk,
    PurgeDead,
    PurgeRejected,
    ReleaseKey,
    ReplayDead,
    Reschedule,
    Restart,
    RetryRejected,
    RevokeKey,
    ShowDead,
    ShowRejected,
    StartBulk,
    Stats,
    Status,
    read_command,
)
from penstock.errors import InvalidParams, MessageNotFound, Refused, RpcError, TaskNotFound, Unavailable
from penstock.intake import apply_change, count_enqueued, refusal_of, take_in_task
from penstock.logs import get_logger
from penstock.notify import Notifier
from penstock.payloads import shown_rows
from penstock.settings import Settings
from penstock.store import Session, Store
from penstock.tasks import FINAL_STATES, Enqueued, NewTask, State
from penstock.tenants import kept_key, own_key
from penstock.transports import Depth, Queue
from penstock.wire import Request

MAX_INSERT_TASKS = 1000
PARALLEL_INSERTS = 2
STATISTICS_KEPT_SECONDS = 1.0
RATES_OVER_SECONDS = 60.0
SHOWN_BYTES = 8 * 1024 * 1024  # of large payloads and results in one answer
SCAN_TASKS = 20_000  # that one page of a filtered list looks at; a rare action must not read the whole history
REJECTED_PAGE_BYTES = 8 * 1024 * 1024
_REJECTED_AT_ONCE = 50
_SPARED_CONNECTIONS = PARALLEL_INSERTS + 1  # for enqueues and the ping, whatever the other methods are busy with
_NO_CURSOR = 2**63 - 1

log = get_logger()


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
        self.vault = store.vault
        self._notifier = notifier
        self._settings = settings
        self._queues = queues
        self._inserts: Batcher[NewTask, Enqueued] = Batcher(
            self._insert, max_items=MAX_INSERT_TASKS, max_parallel=PARALLEL_INSERTS
        )
        self._others = asyncio.Semaphore(max(1, settings.database_pool_size - _SPARED_CONNECTIONS))
        self._statistics: msgspec.Raw | None = None
        self._statistics_at = 0.0
        self._counting = asyncio.Lock()
        self._of_tenants = TenantCounts(self._session)
        self._description: msgspec.Raw | None = None
        dead = DeadLetters(
            store=store,
            session=self._session,
            notifier=notifier,
            queues=queues,
            dead_letters=dead_letters,
            settings=settings,
        )
        keys = Keys(self._session, keys_changed)
        self.audit = Audit(self._session)
        rules = Rules(self._session, self._transaction, notifier.poke)
        tenants = Tenants(self._session, self._transaction, notifier.poke)
        jobs = Jobs(self._transaction)
        self.results = Results(
            store,
            self._session,
            tasks_limit=settings.result_waits_limit,
            requests_limit=max(1, settings.http_connections // 2),
        )
        schedules = Schedules(self._session, self._transaction, notifier.poke)
        workflows = Workflows(self._transaction, notifier.poke, settings)
        self._carry_out: dict[type, Callable[[Any], Awaitable[Any]]] = {
            Status: self._status,
            Cancel: self._change,
            Restart: self._change,
            Reschedule: self._change,
            AnswerWait: self._answer_wait,
            ListTasks: self._list,
            Stats: self._stats,
            ListRejected: self._list_rejected,
            ShowRejected: self._show_rejected,
            RetryRejected: self._retry_rejected,
            PurgeRejected: self._purge_rejected,
            CountDead: lambda _: dead.count(),
            ListDead: dead.browse,
            ShowDead: dead.show,
            ReplayDead: dead.replay,
            PurgeDead: dead.purge,
            CreateKey: keys.create,
            ListKeys: keys.list,
            RevokeKey: keys.revoke,
            **rules.commands,
            **tenants.commands,
            StartBulk: jobs.start,
            PreviewBulk: jobs.preview,
            GetJob: jobs.get,
            ListJobs: jobs.list,
            CancelJob: jobs.cancel,
            ListAudit: self.audit.browse,
            ListHeldKeys: self._list_held_keys,
            ReleaseKey: self._release_key,
            CheckClaims: self._check_claims,
            Discover: self._discover,
            **schedules.commands,
            **workflows.commands,
        }

    @property
    def handlers(self) -> Mapping[str, Handler]:
        return dict.fromkeys(PARAMS, each(self._answer)) | {"enqueue": self._enqueue, "result": self._result}

    @property
    def prefixes(self) -> Mapping[str, Handler]:
        return {SUBMIT_PREFIX: self._enqueue}

    async def _answer(self, request: Request) -> Any:
        command = tenancy.narrowed(read_command(request.method, request.params, self._settings))
        if request.method not in AUDITED or isinstance(command, PreviewBulk):
            return await self._carry_out[type(command)](command)
        async with self.audit.noting(request.method, bytes(request.params)):
            return await self._carry_out[type(command)](command)

    async def call(self, method: str, params: Mapping[str, Any]) -> Any:
        """Carry out one request that came in no body. Raises what the method raises."""
        request = Request("2.0", method, msgspec.Raw(msgspec.json.encode(params)))
        (outcome,) = await self.handlers[method]([request])
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    async def _enqueue(self, requests: Sequence[Request]) -> Sequence[Outcome]:
        """Have tasks stored together with those of other callers; the outcomes come after the commit."""
        outcomes: list[Outcome] = []
        trace = None if tracing.active() is None else tracecontext.current()
        for request in requests:
            try:
                command = tenancy.narrowed(read_command(request.method, request.params, self._settings))
                assert isinstance(command, Enqueue)
                task = command.task if trace is None else replace(command.task, trace=trace.text)
                outcomes.append(task)
            except RpcError as exc:
                outcomes.append(exc)
        if self.vault.is_on:
            outcomes = await self._take_in(outcomes)
        outcomes = [self._inserts.submit_soon(one) if isinstance(one, NewTask) else one for one in outcomes]
        for place, stored in enumerate(outcomes):
            if isinstance(stored, asyncio.Future):
                try:
                    accepted = await stored
                except Exception as exc:
                    outcomes[place] = exc
                else:
                    outcomes[place] = views.Accepted(accepted.id, accepted.state, accepted.duplicate, accepted.replaced)
        return outcomes

    async def _take_in(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """With large payloads kept as objects; all before any is stored, for tasks are stored in their order."""

        async def of(one: Outcome) -> Outcome:
            if not isinstance(one, NewTask):
                return one
            return await take_in_task(one, self.vault, self._settings)

        taken: list[Outcome] = await asyncio.gather(*map(of, outcomes), return_exceptions=True)
        return taken

    async def _result(self, requests: Sequence[Request]) -> Sequence[Outcome]:
        """Wait for results; all that one body asks for is one who waits."""
        commands: list[AwaitResults | RpcError] = []
        for request in requests:
            try:
                command = read_command(request.method, request.params, self._settings)
                assert isinstance(command, AwaitResults)
                commands.append(command)
            except RpcError as exc:
                commands.append(exc)
        if tenancy.bound_to() is None:
            return await self.results.answer(commands)
        async with self._session() as session:
            hidden = await hide_others(session, commands)
        return hidden.shown(await self.results.answer(hidden.commands))

    async def drain(self) -> None:
        """Wait until every task taken has been stored or refused, and what was done is noted."""
        await self._inserts.drain()
        await self.audit.drain()

    async def _insert(self, tasks: Sequence[NewTask]) -> list[Enqueued | Exception]:
        """Store tasks of any number of callers with one statement, which is its own transaction."""
        try:
            async with self._store.session() as session:
                accepted = await session.enqueue(tasks)
        except Refused as exc:
            if len(tasks) == 1:
                log.warning("task_refused", action=tasks[0].action, reason=str(exc))
                return [InvalidParams("params", "hold a value that Postgres refuses to store")]
            # One caller's values spoil the statement of all: each half by itself, down to the guilty one.
            middle = len(tasks) // 2
            return await self._insert(tasks[:middle]) + await self._insert(tasks[middle:])
        count_enqueued(tasks, accepted, door="http")
        self._notifier.poke()
        return [refusal_of(task, answer) or answer for task, answer in zip(tasks, accepted, strict=True)]

    def session(self) -> AbstractAsyncContextManager[Session]:
        """A session for reading, out of those that leave enqueues enough."""
        return self._session()

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[Session]:
        async with self._others, self._store.session() as session:
            yield session

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[Session]:
        async with self._others, self._store.transaction() as session:
            yield session

    async def depths(self) -> dict[str, Depth | None]:
        """Approximate counts of the three queues by label; None for one that cannot be asked."""

        async def of(queue: Queue) -> Depth | None:
            try:
                return await queue.depth()
            except Unavailable:
                return None

        return dict(zip(self._queues, await asyncio.gather(*map(of, self._queues.values())), strict=True))

    async def _status(self, command: Status) -> Any:
        async with self._session() as session:
            rows: Sequence[Any] = tenancy.seen(await session.fetch("read_tasks", command.ids))
            waits = await self._read_waits(session, rows) if command.detail else {}
        rows = await shown_rows(self.vault, rows, room_bytes=SHOWN_BYTES, payload=command.detail)
        show = views.task_detail if command.detail else views.task
        found = {row["id"]: show(row) for row in rows}
        for task_id, wait in waits.items():
            found[task_id] = msgspec.structs.replace(found[task_id], waits_for=wait)
        if command.many:
            return [found.get(task_id) for task_id in command.ids]
        if not found:
            raise TaskNotFound(command.ids[0])
        return found[command.ids[0]]

    @staticmethod
    async def _read_waits(session: Session, rows: Sequence[Any]) -> dict[int, views.WaitsFor]:
        """What tasks wait for, of those that do."""
        ids = [row["id"] for row in rows if row["state"] == State.WAITING and row["attempts"]]
        found = await session.fetch("read_waits", ids) if ids else []
        return {row["task_id"]: views.WaitsFor(row["token"], views.timestamp(row["deadline"])) for row in found}

    async def _change(self, command: Cancel | Restart | Reschedule) -> views.Changed:
        async with self._others, self._store.transaction() as session:
            await tenancy.check_task(session, command.id)
            changed = await apply_change(session, command)
        self._notifier.poke()  # a task may run, or there is room for one
        return views.Changed(changed["id"], changed["state"])

    async def _answer_wait(self, command: AnswerWait) -> views.Answered:
        try:
            async with self._others, self._store.transaction() as session:
                answered = await apply_change(session, command)
        except Refused as exc:
            log.warning("answer_refused", reason=str(exc))
            raise InvalidParams("result", "holds a value that Postgres refuses to store") from exc
        if not answered["kept"]:
            self._notifier.poke()  # a successor by ordering key may run, or the next attempt
        return views.Answered(**answered)

    async def _list(self, command: ListTasks) -> views.TaskPage:
        """A page, newest first. With a filter that no index serves, a bounded stretch of ids is looked at."""
        if command.is_search:
            return await self._search(command)
        before = _NO_CURSOR if command.before is None else command.before
        served = command.action is None and (command.state is None or command.state in FINAL_STATES)
        scan = command.limit if served else max(command.limit, SCAN_TASKS)
        arguments = [before, command.limit, scan, command.action]
        async with self._session() as session:
            if command.state is None:
                seen = await session.fetch("list_tasks", *arguments)
            elif command.state in FINAL_STATES:
                seen = await session.fetch("list_settled_tasks", *arguments, command.state)
            else:
                seen = await session.fetch("list_live_tasks", *arguments, command.state)
            ids: list[int] = seen[0]["ids"]
            rows: Sequence[Any] = await session.fetch("read_tasks", ids) if ids else []
        rows = await shown_rows(self.vault, rows, room_bytes=0)
        tasks = sorted((views.task(row) for row in rows), key=lambda task: task.id, reverse=True)
        return views.TaskPage(tasks, _cursor(ids, command.limit, seen[0]["last"], seen[0]["count"], scan))

    async def _search(self, command: ListTasks) -> views.TaskPage:
        """The same by labels, key and time of creation; a key is looked up in the indexes first, however old it is."""
        labels = None if command.labels is None else msgspec.json.encode(command.labels).decode("utf-8")
        before = _NO_CURSOR if command.before is None else command.before
        first, extra = 0, list[int]()
        async with self._session() as session:
            if command.until is not None:
                before = min(before, await session.value("find_first_id", command.until))
            if command.since is not None:
                first = await session.value("find_first_id", command.since)
            arguments = [before, command.limit, SCAN_TASKS, command.action, first, labels, command.key, command.tenant]
            if command.state is None:
                seen = await session.fetch("search_tasks", *arguments)
            elif command.state in FINAL_STATES:
                seen = await session.fetch("search_settled_tasks", *arguments, command.state)
            else:
                seen = await session.fetch("search_live_tasks", *arguments, command.state)
            ids: list[int] = seen[0]["ids"]
            if command.key is not None and command.before is None:
                kept = kept_key(command.tenant, command.key)
                found = {row["id"] for row in await session.fetch("find_by_key", kept, command.limit)}
                extra = sorted(found - set(ids), reverse=True)
            rows: Sequence[Any] = await session.fetch("read_tasks", ids + extra) if ids or extra else []
        rows = await shown_rows(self.vault, rows, room_bytes=0)
        found_late = [row for row in rows if row["id"] in extra and _fits(row, command)]
        found_late.sort(key=lambda row: row["id"], reverse=True)
        # What has no room on the page stands on a later one, for it is among those that were not looked at yet.
        shown = [row for row in rows if row["id"] not in extra] + found_late[: command.limit - len(ids)]
        tasks = sorted(map(views.task, shown), key=lambda task: task.id, reverse=True)
        return views.TaskPage(tasks, _cursor(ids, command.limit, seen[0]["last"], seen[0]["count"], SCAN_TASKS))

    async def _stats(self, command: Stats) -> msgspec.Raw | TenantStatistics:
        """Counts, rates and lag; read at most once a second, however many ask. Of one tenant, counts alone."""
        if command.tenant is not None:
            return await self._of_tenants.count(command.tenant)
        async with self._counting:
            if self._statistics is None or monotonic() - self._statistics_at >= STATISTICS_KEPT_SECONDS:
                self._statistics = msgspec.Raw(msgspec.json.encode(await self._count()))
                self._statistics_at = monotonic()
            return self._statistics

    async def _count(self) -> views.Statistics:
        async with self._session() as session:
            counts = await session.fetch("count_live") + await session.fetch("count_settled")
            counted: dict[str, int] = dict(map(tuple, await session.fetch("read_rates", RATES_OVER_SECONDS)))
            lag = (await session.fetch("read_lag"))[0]
        actions: dict[str, Counter[State]] = defaultdict(Counter)
        for row in counts:
            actions[row["action"]][State(row["state"])] += row["count"]

        return views.Statistics(
            {state: sum(of_action[state] for of_action in actions.values()) for state in State},
            {
                action: {state: of_action[state] for state in State if of_action[state]}
                for action, of_action in sorted(actions.items())
            },
            views.rates(counted, RATES_OVER_SECONDS),
            views.Lag(lag["due"], round(max(0.0, lag["oldest_seconds"]), 3)),
        )

    async def _list_rejected(self, command: ListRejected) -> views.RejectedPage:
        """A page, newest first, shorter than asked for where the bodies are large."""
        page: list[views.Rejected] = []
        before, size = command.before, 0
        async with self._session() as session:
            while len(page) < command.limit and size < REJECTED_PAGE_BYTES:
                at_once = min(_REJECTED_AT_ONCE, command.limit - len(page))
                rows = await session.fetch("list_rejected", before, at_once, command.source)
                page += map(views.rejected, rows)
                size += sum(len(row["body"]) for row in rows)
                if len(rows) < at_once:
                    return views.RejectedPage(page, None)
                before = rows[-1]["id"]
        return views.RejectedPage(page, str(before))

    async def _show_rejected(self, command: ShowRejected) -> views.Rejected:
        async with self._session() as session:
            rows = await session.fetch("read_rejected", command.id)
        if not rows:
            raise MessageNotFound(command.id, "among the rejected")
        return views.rejected(rows[0])

    async def _retry_rejected(self, command: RetryRejected) -> views.Replayed:
        async with self._session() as session:
            ids, cursor = await _choose_rejected(session, command.which)
        async with self._others:
            replayed = await retry_rejected(self._store, ids, self._settings, cursor=cursor)
        self._notifier.poke()
        return replayed

    async def _purge_rejected(self, command: PurgeRejected) -> views.Purged:
        async with self._session() as session:
            ids, cursor = await _choose_rejected(session, command.which)
            return views.Purged(await purge_rejected(session, ids), cursor)

    async def _list_held_keys(self, command: ListHeldKeys) -> views.HeldKeys:
        async with self._session() as session:
            return views.held_keys(await session.list_held_keys(command.limit, command.after), command.limit)

    async def _release_key(self, command: ReleaseKey) -> views.ReleasedKey:
        async with self._others, self._store.transaction() as session:
            released = await session.release_keys([command.key])
        self._notifier.poke()
        return views.ReleasedKey(own_key(command.key) or "", command.key in released, released.get(command.key))

    async def _check_claims(self, command: CheckClaims) -> views.CheckedClaims:
        async with self._session() as session:
            held = await session.read_attempts((c.task_id, c.claim) for c in command.claims)
        return views.CheckedClaims(
            [f"{c.task_id}:{c.claim}" for c in command.claims if (c.task_id, c.claim) not in held]
        )

    async def _discover(self, _command: Discover) -> msgspec.Raw:
        if self._description is None:
            self._description = msgspec.Raw(msgspec.json.encode(describe()))
        return self._description


async def _choose_rejected(session: Session, which: Sequence[int] | ListRejected) -> tuple[Sequence[int], str | None]:
    """Ids of rejected messages, and where the next page of them begins.

    Newest first, so that what a retry rejects again, as a record of its own, is on no later page.
    """
    if not isinstance(which, ListRejected):
        return which, None
    rows = await session.fetch("list_rejected_ids", which.before, which.limit, which.source)
    ids = [row["id"] for row in rows]
    return ids, str(ids[-1]) if len(ids) == which.limit else None


def _fits(row: Any, command: ListTasks) -> bool:
    """Whether a task that was found by its key fits the rest of a search."""
    labels = msgspec.json.decode(row["labels"] or "{}")
    return (
        (command.state is None or row["state"] == command.state)
        and (command.action is None or row["action"] == command.action)
        and (command.tenant is None or row["tenant"] == command.tenant)
        and all(labels.get(name) == value for name, value in (command.labels or {}).items())
        and (command.since is None or row["created_at"] >= command.since)
        and (command.until is None or row["created_at"] < command.until)
    )


def _cursor(ids: Sequence[int], limit: int, last: int | None, seen: int, scan: int) -> str | None:
    """Where the next page begins: behind the last task of a full page, else behind the last one looked at."""
    if len(ids) >= limit:
        at_end = seen < scan and ids[-1] == last
        return None if at_end else str(ids[-1])
    return str(last) if seen >= scan else None
