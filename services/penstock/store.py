"""Postgres: one thin method per statement of ``penstock.sql``, over an asyncpg pool.

``store.session()`` runs statements one by one, ``store.transaction()`` runs several as one; both translate what a
database does when it is away, overloaded or switching over into :class:`~penstock.errors.Unavailable`.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from time import perf_counter
from typing import Any

import asyncpg

from penstock import metrics, tracing
from penstock.errors import Refused, TooSlow, Unavailable
from penstock.objects import enqueue_sealed
from penstock.payloads import Vault
from penstock.sql import SQL
from penstock.tasks import (
    BEGINNING,
    EVERYTHING,
    EXPIRED,
    MAX_ATTEMPTS_LIMIT,
    Claimed,
    Enqueued,
    Failure,
    HeldKey,
    NewTask,
    Position,
    State,
    Stretch,
)

Pair = tuple[int, int]  # (task id, claim)
PLANNING = {"jit": "off", "enable_seqscan": "off"}
"""Settings of every connection that decide on plans.

A plan outlives the state it was made for. One that is kept from the moment at which the live table was empty reads all
of it and sorts, for each claim and each handful of results, until the next analyze; of an empty table that is cheapest.
Every statement of ours has an index to go by; where one has not, Postgres scans all the same.
"""
_MANY_ROWS = 50
_DEADLOCK_TRIES = 3
WAITING_COUNTED = 10_000  # behind one ordering key
_PARTITION = re.compile(r"(task_(?:success|critical_error|cancelled))(?:_[0-9]{8}|_default)?")

# What passes by itself or by an operator's hand; everything else is a mistake of ours and stays loud.
_TRANSIENT = (
    OSError,
    TimeoutError,
    asyncpg.InterfaceError,
    asyncpg.PostgresConnectionError,
    asyncpg.InsufficientResourcesError,  # too many connections, disk full, out of memory
    asyncpg.OperatorInterventionError,  # shutdown, crash recovery, cancelled by timeout
    asyncpg.TransactionRollbackError,  # deadlock, serialization
    asyncpg.ReadOnlySQLTransactionError,  # a failover in progress
    asyncpg.IdleInTransactionSessionTimeoutError,  # this process stood still in the middle of a transaction
    asyncpg.TransactionTimeoutError,
    asyncpg.InvalidCachedStatementError,  # a migration has just changed a table; the next call plans anew
    asyncpg.InternalClientError,  # a connection used just as it is being closed, or its cache of types out of date
    asyncpg.InsufficientPrivilegeError,
    asyncpg.PostgresSystemError,
    asyncpg.InvalidAuthorizationSpecificationError,
    asyncpg.InvalidCatalogNameError,
    asyncpg.ObjectNotInPrerequisiteStateError,
    asyncpg.InternalServerError,
)
_TOO_SLOW = (TimeoutError, asyncpg.QueryCanceledError)
_REFUSALS = (asyncpg.DataError, asyncpg.IntegrityConstraintViolationError, asyncpg.ProgramLimitExceededError)
_NO_SCHEMA = (asyncpg.UndefinedTableError, asyncpg.InvalidSchemaNameError, asyncpg.UndefinedColumnError)


@dataclass(frozen=True, slots=True)
class Dispatch:
    """One claim: its token, by which the sending is confirmed, the tasks, and the last position by priority."""

    id: int
    tasks: list[Claimed]
    reached: dict[int, Position]


@dataclass(frozen=True, slots=True)
class InFlight:
    """How many tasks are claimed and unsettled; ``aged`` of them were claimed before ``aged_before``, a moment ago."""

    count: int
    aged: int
    aged_before: datetime


@dataclass(frozen=True, slots=True)
class Pace:
    """What attempts of one action did lately. ``timed``: those of known run time, which is ``seconds`` together."""

    action: str
    ended: int
    timed: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Settled:
    """A task that has changed state. ``waited``: for an event, when it was cancelled."""

    id: int
    action: str
    waited: bool = False


@dataclass(frozen=True, slots=True)
class Stale:
    """An ACQUIRED task without a sign of life.

    taken: a worker has reported it at least once. suspect: it travelled alone, after another silence. route: by which
    it was sent. worker: which one has reported it, where it told. trace: what its claim told; see wire.read_carried.
    """

    id: int
    claim: int
    action: str
    attempts: int
    max_attempts: int
    claimed_at: datetime
    taken: bool
    suspect: bool
    held_seconds: float
    route: str | None
    worker: str | None
    trace: str | None


class Session:
    """The statements, on one connection. has_told: one of them has settled a task that belongs to a workflow.

    vault: what payloads are sealed by before they are stored, None for nothing.
    """

    def __init__(self, connection: Any, vault: Vault | None = None) -> None:
        self._connection = connection
        self.vault = vault or Vault()
        self.has_told = False

    async def fetch(self, name: str, *args: Any) -> list[asyncpg.Record]:
        """Run the statement of that name and return its rows."""
        started = perf_counter()
        rows: list[asyncpg.Record] = await self._connection.fetch(SQL[name], *args)
        metrics.STATEMENT_SECONDS.labels(name).observe(perf_counter() - started)
        return rows

    async def value(self, name: str, *args: Any) -> Any:
        """Run the statement of that name and return the first column of its first row, or None."""
        rows = await self.fetch(name, *args)
        return rows[0][0] if rows else None

    async def fetch_of(self, name: str, *args: Any, partition: str) -> list[asyncpg.Record]:
        """As ``fetch``, for a statement about one partition, whose name no parameter can carry."""
        match = _PARTITION.fullmatch(partition)
        if match is None:
            raise ValueError(f"{partition!r} is no partition of the history")
        text = SQL[name].replace("{partition}", partition).replace("{parent}", match[1])
        rows: list[asyncpg.Record] = await self._connection.fetch(text, *args)
        return rows

    async def value_of(self, name: str, *args: Any, partition: str) -> Any:
        """As ``value``, for a statement about one partition."""
        return (await self.fetch_of(name, *args, partition=partition))[0][0]

    @asynccontextmanager
    async def savepoint(self) -> AsyncIterator[None]:
        """Part of a transaction: when the block raises, what it did is undone and the rest may go on."""
        with _Translated():
            async with self._connection.transaction():
                yield

    async def plan_for(self, rows: int) -> None:
        """Have the statements that follow in this transaction planned for the arrays that they are given.

        A plan that is kept for any array takes it for ten elements and joins by nested loops: over a thousand rows, at
        ten times the price. For a few rows the kept plan is right, and planning would cost more than running.
        """
        if rows >= _MANY_ROWS:
            await self._connection.execute("set local plan_cache_mode = force_custom_plan")

    # Bringing tasks in

    async def enqueue(self, tasks: Sequence[NewTask]) -> list[Enqueued]:
        """Insert tasks, all or none; the answers stand in the order of ``tasks``. Payloads are sealed."""
        if not tasks:
            return []
        spans = tracing.active()
        if spans is None:
            return await self._enqueue(tasks)
        with spans.enqueuing(tasks) as producing:
            enqueued = await self._enqueue(producing.tasks)
            producing.stored(enqueued)
            return enqueued

    async def _enqueue(self, tasks: Sequence[NewTask]) -> list[Enqueued]:
        if self.vault.is_on:
            return await enqueue_sealed(self, tasks)
        return await self.insert(tasks)

    async def insert(self, tasks: Sequence[NewTask]) -> list[Enqueued]:
        """As ``enqueue``, of tasks whose payloads are as they are to be stored."""
        metrics.BATCH_SIZE.labels("enqueue").observe(len(tasks))
        traced = tracing.active() is not None
        if all(t.is_plain for t in tasks):
            if traced:
                rows = await self.fetch("enqueue_traced_tasks", *_plain_columns(tasks), [t.trace for t in tasks])
            else:
                rows = await self.fetch("enqueue_plain_tasks", *_plain_columns(tasks))
            return [Enqueued(row[0], State.SCHEDULED, False) for row in rows]
        parts = _cut_at_repeated_keys(tasks)
        tries = _DEADLOCK_TRIES
        while True:
            tries -= 1
            try:
                async with self._connection.transaction():
                    await self.plan_for(len(tasks))
                    enqueued = [answer for part in parts for answer in await self._enqueue_keyed(part)]
                    if traced:
                        await self._note_traces(tasks, enqueued)
                    return enqueued
            except asyncpg.DeadlockDetectedError:
                # Each statement takes its keys in sorted order, but several of them together do not; and one that
                # replaces a task wants its row behind the heads, where whoever settles it comes from the row.
                if not tries:
                    raise

    async def _note_traces(self, tasks: Sequence[NewTask], enqueued: Sequence[Enqueued]) -> None:
        traces = {
            made.id: task.trace
            for task, made in zip(tasks, enqueued, strict=True)
            if task.trace is not None and not made.duplicate
        }
        if traces:
            await self.fetch("note_traces", list(traces), list(traces.values()))

    async def _enqueue_keyed(self, tasks: Sequence[NewTask]) -> list[Enqueued]:
        rows = await self.fetch(
            "enqueue_keyed_tasks",
            *_plain_columns(tasks),
            [t.unique_key for t in tasks],
            [t.ordering_key for t in tasks],
            [t.labels for t in tasks],
            [t.expires_at for t in tasks],
            [t.expires_in_seconds for t in tasks],
            [t.limit_key for t in tasks],
            [t.unique == "live" for t in tasks],
            [None if isinstance(t.unique, str) else t.unique for t in tasks],
            [t.tenant for t in tasks],
        )
        states = {row["id"]: row["state"] for row in rows if row["state"] is not None}
        replacing = {
            row["id"]: task
            for row, task in zip(rows, tasks, strict=True)
            if task.on_duplicate == "replace" and not row["fresh"]
        }
        replaced = await self._replace(replacing)
        states |= replaced
        earlier = {row["id"] for row in rows if not row["fresh"]} - states.keys()
        if earlier:
            states |= {row["id"]: row["state"] for row in await self.fetch("read_states", list(earlier))}
        # A first task cleaned between the two statements is answered as it last must have been.
        return [
            Enqueued(
                row["id"],
                State(states.get(row["id"], State.SUCCESS)),
                duplicate=not row["fresh"],
                replaced=row["id"] in replaced if task.on_duplicate == "replace" else None,
            )
            for row, task in zip(rows, tasks, strict=True)
        ]

    async def _replace(self, tasks: Mapping[int, NewTask]) -> dict[int, str]:
        """Put these in the place of the tasks of those ids; returns the states of those that waited."""
        if not tasks:
            return {}
        given = tasks.values()
        rows = await self.fetch(
            "replace_tasks", list(tasks), [t.payload for t in given], [t.run_at for t in given],
            [t.delay_seconds for t in given], [t.priority if t.replaces_priority else None for t in given],
        )  # fmt: skip
        return {row["id"]: row["state"] for row in rows}

    async def record_receipts(self, message_ids: Sequence[str]) -> set[str]:
        """Note inbound messages as accepted; returns those that were not before."""
        return {row[0] for row in await self.fetch("record_receipts", list(message_ids))}

    async def insert_rejected(self, source: str, bodies: Sequence[tuple[str, str]]) -> None:
        """Keep (body, reason) pairs that could not be understood."""
        if bodies:
            texts = [body.encode("utf-8", "surrogatepass") for body, _ in bodies]
            reasons = [reason.replace("\0", "\ufffd") for _, reason in bodies]
            await self.fetch("insert_rejected", [source] * len(bodies), texts, reasons)
            metrics.REJECTED.labels(source).inc(len(bodies))

    # Claiming

    async def claim(
        self,
        limit: int,
        *,
        stretches: Sequence[Stretch] = EVERYTHING,
        now: datetime | None = None,
        due_seconds: float = 0.0,
    ) -> Dispatch | None:
        """Claim up to ``limit`` due tasks by priority, run_at, id, out of ``stretches``; None when there is none.

        due_seconds: only those that have been due for so long. Once there are rules, this finds nothing; see
        ``claim_by_rules``.
        """
        rows = await self.fetch("claim_tasks", limit, now, *_columns_of(stretches), due_seconds)
        return _dispatch(rows) if rows else None

    async def claim_by_rules(
        self, limit: int, *, stretches: Sequence[Stretch] = EVERYTHING, due_seconds: float = 0.0
    ) -> tuple[Dispatch | None, int]:
        """As ``claim``, where there are rules; also how many tasks were put aside, at a gate or for a route."""
        rows = await self.fetch("claim_tasks_by_rules", limit, None, *_columns_of(stretches), due_seconds)
        diverted: int = rows[0]["diverted"]
        return (None if rows[0][0] is None else _dispatch(rows)), diverted

    async def put_aside(self, limit: int, priority: int, after: Position) -> tuple[int, int, Position | None]:
        """Put what is of a limited action or goes by a route aside, among ``limit`` due tasks of a priority behind a
        position, and claim nothing; returns how many were looked at, how many put aside, and the last position."""
        ((looked, diverted, run_at, task_id),) = await self.fetch("put_tasks_aside", limit, priority, *after)
        return looked, diverted, None if task_id is None else Position(run_at, task_id)

    async def claim_by_route(self, limit: int, route: str) -> Dispatch | None:
        """Claim up to ``limit`` due tasks of a route, in the same order."""
        rows = await self.fetch("claim_tasks_by_route", limit, route)
        return _dispatch(rows) if rows else None

    async def claim_at_gates(self, limits: Mapping[str, int]) -> tuple[Dispatch | None, Counter[str]]:
        """Claim due tasks at gates, up to so many of each; also how many that were by gate.

        The gates are locked before, in the same transaction.
        """
        rows = await self.fetch("claim_tasks_at_gates", list(limits), list(limits.values()))
        return (_dispatch(rows) if rows else None), Counter(row["gate"] for row in rows)

    async def read_priorities(self, limit: int) -> list[int]:
        """Up to ``limit`` priorities, highest first, that any task has which is due now or later."""
        return [row[0] for row in await self.fetch("read_priorities", limit)]

    async def confirm(self, dispatch_id: int) -> None:
        """Everything of the dispatch was sent or released."""
        await self.fetch("confirm_dispatch", dispatch_id)

    async def release(self, pairs: Iterable[Pair]) -> int:
        """Give claims back, with their attempt; returns how many still held."""
        ids, claims = _columns(pairs)
        return len(await self.fetch("release_tasks", ids, claims)) if ids else 0

    async def count_in_flight(
        self, limit: int, *, since: datetime = BEGINNING.run_at, route: str | None = None
    ) -> InFlight:
        """Tasks of a route, None for no route, ACQUIRED now, counted up to ``limit``, claimed at ``since`` or later."""
        if route is None:
            (row,) = await self.fetch("count_in_flight", limit, since)
        else:
            (row,) = await self.fetch("count_in_flight_by_route", limit, since, route)
        return InFlight(*row)

    async def read_pace(self, seconds: float) -> list[Pace]:
        """What attempts of each action did within the last ``seconds``."""
        return [Pace(*row) for row in await self.fetch("read_pace", seconds)]

    # Settling

    async def finish(self, results: dict[Pair, str], workers: Mapping[Pair, str | None] | None = None) -> int:
        """ACQUIRED to SUCCESS for each (id, claim) that still holds; returns how many. Ids are distinct.

        workers: who ran them, where that is known.
        """
        if not results:
            return 0
        ids, claims = _columns(results)
        metrics.BATCH_SIZE.labels("finish").observe(len(ids))
        await self.plan_for(len(ids))
        finished = 0
        columns = ids, claims, list(results.values()), [*map((workers or {}).get, results)]
        rows = await self.fetch("finish_tasks", *columns)
        for action, count, told, promoted, keys in rows:
            if count:
                self.has_told |= told > 0
                metrics.TRANSITIONS.labels(action, State.SUCCESS).inc(count)
                finished += count
            elif promoted:
                metrics.TRANSITIONS.labels(action, State.SCHEDULED).inc(promoted)
            elif rest := await self._forget(keys):
                await self._promote(rest)
        return finished

    async def note_run_times(self, times: Mapping[str, tuple[int, float]]) -> None:
        """Add what workers tell of run times: by action, how many attempts and how many seconds together."""
        if times:
            counts, seconds = zip(*times.values(), strict=True)
            await self.fetch("note_run_times", list(times), list(counts), list(seconds))

    async def read_attempts(self, pairs: Iterable[Pair]) -> dict[Pair, tuple[int, int]]:
        """(attempts, max_attempts) of each claim that still holds its task."""
        ids, claims = _columns(pairs)
        rows = await self.fetch("read_attempts", ids, claims) if ids else []
        return {(row["id"], row["claim"]): (row["attempts"], row["max_attempts"]) for row in rows}

    async def find_claims(self, by_attempt: Iterable[tuple[int, int]]) -> dict[tuple[int, int], int]:
        """Claims of ACQUIRED tasks by (id, attempt), for results in the older convention."""
        # No task has such an attempt, and the driver would refuse the number.
        ids, attempts = _columns(pair for pair in by_attempt if 0 < pair[1] <= MAX_ATTEMPTS_LIMIT)
        rows = await self.fetch("find_claims_by_attempt", ids, attempts) if ids else []
        return {(row["id"], row["attempts"]): row["claim"] for row in rows}

    async def fail(self, failures: Sequence[Failure], *, hold_keys: bool = False) -> list[Settled]:
        """ACQUIRED to ERROR with its delay, or to CRITICAL_ERROR where there is none. Ids are distinct.

        hold_keys: the ordering key of a task in CRITICAL_ERROR stands still; otherwise its successor goes.
        """
        settled: list[Settled] = []
        await self.plan_for(len(failures))
        again = [f for f in failures if f.delay_seconds is not None]
        if again:
            rows = await self.fetch(
                "delay_tasks", [f.id for f in again], [f.claim for f in again], [f.error for f in again],
                [f.delay_seconds for f in again], [f.suspect for f in again], [f.worker for f in again],
            )  # fmt: skip
            settled += _count(rows, State.ERROR)
        buried = [f for f in failures if f.delay_seconds is None]
        if buried:
            columns = [f.id for f in buried], [f.claim for f in buried], [f.error for f in buried]
            settled += await self._settle("bury_tasks", *columns, [f.worker for f in buried], hold_keys=hold_keys)
        return settled

    async def spare(self, failures: Sequence[Failure]) -> set[int]:
        """Give back the claims of lost attempts, which are kept as failures and not counted; from now on sent alone.

        Ids are distinct. Returns those that still held.
        """
        ids, claims = _columns((failure.id, failure.claim) for failure in failures)
        rows = await self.fetch("spare_tasks", ids, claims, [failure.error for failure in failures]) if ids else []
        return {row["id"] for row in rows}

    async def note_heartbeats(
        self, beats: dict[Pair, str | None], workers: Mapping[Pair, str | None] | None = None
    ) -> int:
        """Record signs of life, with progress as JSON text and who gave them where known. Ids are distinct."""
        ids, claims = _columns(beats)
        await self.plan_for(len(ids))
        columns = ids, claims, list(beats.values()), [*map((workers or {}).get, beats)]
        return len(await self.fetch("note_heartbeats", *columns)) if ids else 0

    async def cancel(self, ids: Sequence[int], reason: str | None = None) -> set[int]:
        """Any live state to CANCELLED, inside a transaction; returns the ids that were live."""
        settled = await self._settle("cancel_tasks", list(ids), reason)
        waited = [task.id for task in settled if task.waited]
        if waited:
            await self.fetch("end_waits_of", waited)
        return {task.id for task in settled}

    async def reschedule(
        self,
        ids: Sequence[int],
        *,
        run_at: datetime | None = None,
        delay_seconds: float | None = None,
        priority: int | None = None,
    ) -> dict[int, State]:
        """Move tasks that wait (WAITING, SCHEDULED, ERROR), what is None staying; returns the state of each moved."""
        rows = await self.fetch("reschedule_tasks", list(ids), run_at, delay_seconds, priority)
        return {row["id"]: State(row["state"]) for row in rows}

    async def restart(self, ids: Sequence[int]) -> dict[int, State]:
        """CRITICAL_ERROR or CANCELLED to a new life; returns the state of each that restarted.

        One whose unique key another task has by now stays as it is: see ``find_key_holder``.
        """
        rows = await self.fetch("restart_tasks", list(ids))
        for row in rows:
            metrics.TRANSITIONS.labels(row["action"], row["state"]).inc()
        return {row["id"]: State(row["state"]) for row in rows}

    async def find_workflow_of(self, task_id: int) -> int | None:
        """The workflow that a settled task is a step of."""
        workflow: int | None = await self.value("find_workflow_of", task_id)
        return workflow

    async def find_key_holder(self, task_id: int) -> int | None:
        """The task that has the unique key of a settled one in its place."""
        holder: int | None = await self.value("find_key_holder", task_id)
        return holder

    async def _settle(self, name: str, *args: Any, hold_keys: bool = False) -> list[Settled]:
        """Run a statement that makes tasks final, then let their successors by ordering key go, or hold them.

        Must run inside a transaction: a crash between the two would leave a key standing still.
        """
        rows = await self.fetch(name, *args)
        self.has_told |= any(row["workflow"] is not None for row in rows)
        # One task of a key runs at a time, so each key stands here once.
        keys = {row["ordering_key"]: row["id"] for row in rows if row["ordering_key"] is not None}
        if keys and hold_keys:
            await self.fetch("lock_ordering_heads", list(keys))
            await self.fetch("hold_ordering_keys", list(keys), list(keys.values()))
        elif keys:
            await self._promote(keys)
        return _count(rows, _STATE_AFTER[name])

    async def _promote(self, keys: Collection[str]) -> dict[str, int]:
        """Let the next of each ordering key go, of which nothing runs any more; returns the tasks promoted, by key.

        Where none waits the key is forgotten, and only for that its head is locked: the row that an enqueuer holds
        until its task can be seen. What a look finds may be cancelled before it is promoted; then it looks again.
        """
        promoted: dict[str, int] = {}
        actions: Counter[str] = Counter()
        rest, locked = list(keys), set[str]()
        while rest:
            taken, empty = [], []
            for key, task_id, action in await self.fetch("promote_successors", rest):
                if task_id is None:
                    empty.append(key)
                elif action is None:
                    taken.append(key)
                else:
                    promoted[key] = task_id
                    actions[action] += 1
            rest = taken
            if empty:
                rest += [key for key in await self._forget(empty) if key not in locked]
                locked.update(empty)
        for action, count in actions.items():
            metrics.TRANSITIONS.labels(action, State.SCHEDULED).inc(count)
        return promoted

    async def _forget(self, keys: Sequence[str]) -> list[str]:
        """Forget the keys of which nobody waits; returns the others, of which somebody does by now."""
        await self.fetch("lock_ordering_heads", keys)
        forgotten = {row["key"] for row in await self.fetch("forget_ordering_keys", keys)}
        return [key for key in keys if key not in forgotten]

    async def list_held_keys(self, limit: int, after: str | None = None) -> list[HeldKey]:
        """Ordering keys that a task in CRITICAL_ERROR holds, by key, from behind ``after``."""
        rows = await self.fetch("list_held_keys", after, limit, WAITING_COUNTED)
        return [HeldKey(row["key"], row["task_id"], row["action"], row["finished_at"], row["waiting"]) for row in rows]

    async def release_keys(self, keys: Sequence[str]) -> dict[str, int | None]:
        """Let held ordering keys go, inside a transaction; of each that was held, the task that may run next."""
        held = [row["key"] for row in await self.fetch("release_ordering_keys", list(keys))]
        promoted = await self._promote(held) if held else {}
        return {key: promoted.get(key) for key in held}

    # Upkeep

    async def expire(self, limit: int, *, now: datetime | None = None) -> int:
        """Cancel up to ``limit`` tasks that were not started in time, inside a transaction; returns how many."""
        ids = [row["id"] for row in await self.fetch("find_expired", limit, now)]
        return len(await self.cancel(ids, EXPIRED)) if ids else 0

    async def release_orphaned_keys(self, limit: int) -> int:
        """Let go of ordering keys whose failed task is no longer kept, inside a transaction; returns how many."""
        keys = [row["key"] for row in await self.fetch("release_orphaned_keys", limit)]
        if keys:
            await self._promote(keys)
        return len(keys)

    async def release_unsent(self, after_seconds: float, *, limit: int, now: datetime | None = None) -> int:
        """Give back the claims of dispatches never confirmed; returns how many tasks."""
        return len(await self.fetch("release_unsent", after_seconds, limit, now))

    async def find_stale(
        self, after_seconds: float, *, limit: int, now: datetime | None = None, after: Stale | None = None
    ) -> list[Stale]:
        """ACQUIRED tasks without a sign of life for that long, oldest claim first, from behind ``after``."""
        claimed_at, task_id = (after.claimed_at, after.id) if after else (None, None)
        rows = await self.fetch("find_stale", after_seconds, limit, now, claimed_at, task_id)
        return [Stale(**{name: row[name] for name in Stale.__slots__}) for row in rows]


_STATE_AFTER = {
    "bury_tasks": State.CRITICAL_ERROR,
    "cancel_tasks": State.CANCELLED,
}


def _columns_of(stretches: Sequence[Stretch]) -> list[list[Any]]:
    return [
        [s.low for s in stretches], [s.high for s in stretches],
        [s.after.run_at for s in stretches], [s.after.id for s in stretches],
    ]  # fmt: skip


_MEMBERS = len(Claimed._fields)


def _dispatch(rows: Sequence[asyncpg.Record]) -> Dispatch:
    """Of the rows of a claim: the members of Claimed, then perhaps its priority and its last run_at."""
    metrics.BATCH_SIZE.labels("claim").observe(len(rows))
    reached: dict[int, Position] = {}
    if "last_run_at" in rows[0].keys():  # noqa: SIM118 - of a Record, `in` asks for a value
        at = _MEMBERS + 1
        reached = {row["priority"]: Position(row[at], row[0]) for row in rows if row[at] is not None}
    return Dispatch(rows[0][1], [tuple.__new__(Claimed, row[:_MEMBERS]) for row in rows], reached)


def _plain_columns(tasks: Sequence[NewTask]) -> list[list[Any]]:
    return [
        [t.action for t in tasks],
        [t.payload for t in tasks],
        [t.run_at for t in tasks],
        [t.delay_seconds for t in tasks],
        [t.priority for t in tasks],
        [t.max_attempts for t in tasks],
        [t.timeout_seconds for t in tasks],
    ]


def _cut_at_repeated_keys(tasks: Sequence[NewTask]) -> list[Sequence[NewTask]]:
    """Tasks in parts, one after the other, so that none meets a task of its own part by a key that it would take or
    whose task it would replace: a statement does not see the rows that it makes itself."""
    usual = all(t.unique == "retained" and t.on_duplicate != "replace" for t in tasks)
    if usual:
        return [tasks]
    parts: list[Sequence[NewTask]] = []
    seen: set[tuple[str, str | None, str]] = set()
    start = 0
    for place, task in enumerate(tasks):
        if task.unique_key is None:
            continue
        key = task.action, task.tenant, task.unique_key
        if key in seen:
            parts.append(tasks[start:place])
            seen, start = set(), place
        seen.add(key)
    return [*parts, tasks[start:]]


def _columns(pairs: Iterable[Pair]) -> tuple[list[int], list[int]]:
    listed = list(pairs)
    return [pair[0] for pair in listed], [pair[1] for pair in listed]


def _count(rows: Sequence[asyncpg.Record], state: State) -> list[Settled]:
    settled = [Settled(row["id"], row["action"], row.get("waited", False)) for row in rows]
    by_action: dict[str, int] = {}
    for task in settled:
        by_action[task.action] = by_action.get(task.action, 0) + 1
    for action, count in by_action.items():
        metrics.TRANSITIONS.labels(action, state).inc(count)
    return settled


class Store:
    """A pool of connections to the database that holds the tasks; opened when first used."""

    def __init__(self, database_url: str, *, pool_size: int = 8, statement_timeout_seconds: float = 30,
                 acquire_timeout_seconds: float = 30, application_name: str = "penstock",
                 vault: Vault | None = None) -> None:  # fmt: skip
        self.vault = vault or Vault()
        self._url = database_url
        self._pool_size = pool_size
        self._statement_timeout_seconds = statement_timeout_seconds
        self._acquire_timeout_seconds = acquire_timeout_seconds
        self._application_name = application_name
        self._pool: Any = None
        self._opening = asyncio.Lock()
        self.has_told = False
        """Whether a task of a workflow was settled here, since somebody last took this back."""

    async def open(self) -> Any:
        """The pool, made if there is none yet. Raises Unavailable while the database is away."""
        async with self._opening:
            if self._pool is None:
                with _Translated():
                    self._pool = await asyncpg.create_pool(
                        self._url,
                        min_size=1,
                        max_size=self._pool_size,
                        timeout=10,
                        command_timeout=self._statement_timeout_seconds + 5,
                        reset=_no_reset,
                        server_settings={
                            "application_name": self._application_name,
                            "statement_timeout": str(int(self._statement_timeout_seconds * 1000)),
                            "idle_in_transaction_session_timeout": "60000",
                            **PLANNING,
                        },
                    )
        return self._pool

    async def close(self) -> None:
        if self._pool is not None:
            pool, self._pool = self._pool, None
            try:
                await asyncio.wait_for(pool.close(), 5)
            except (TimeoutError, *_TRANSIENT):
                pool.terminate()
        await self.vault.close()

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Session]:
        """Statements that commit one by one."""
        with _Translated():
            pool, connection = await self._acquire()
            session = Session(connection, self.vault)
            try:
                yield session
            finally:
                self.has_told |= session.has_told
                await pool.release(connection)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Session]:
        """Statements that commit together when the block ends without an error."""
        with _Translated():
            pool, connection = await self._acquire()
            try:
                async with connection.transaction():
                    session = Session(connection, self.vault)
                    yield session
                self.has_told |= session.has_told
            finally:
                await pool.release(connection)

    async def _acquire(self) -> tuple[Any, Any]:
        """The pool and a connection of it. Raises Unavailable when none comes free in time."""
        pool = await self.open()
        try:
            return pool, await pool.acquire(timeout=self._acquire_timeout_seconds)
        except TimeoutError:
            if pool.get_size() < self._pool_size or pool.get_idle_size():
                raise
            raise Unavailable(
                f"all {self._pool_size} connections of the pool were in use for {self._acquire_timeout_seconds:g} s: "
                "is Postgres slow, or is PENSTOCK_DATABASE_POOL_SIZE too small?"
            ) from None

    async def ping(self) -> None:
        """Ask the database for an answer. Raises Unavailable."""
        async with self.session() as session:
            await session.fetch("read_clock")

    async def connect(self) -> Any:
        """A connection of its own beside the pool, for LISTEN; the caller closes it."""
        with _Translated():
            return await asyncpg.connect(
                self._url, timeout=10, server_settings={"application_name": f"{self._application_name}-listen"}
            )


async def _no_reset(_connection: Any) -> None:
    """Nothing of ours survives a statement or its transaction, so the reset's round trip is saved."""


class _Translated:
    """Turn a driver's error into ours: the text names the kind, never the URL."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, _trace: object) -> None:
        if isinstance(exc, _NO_SCHEMA):
            raise Unavailable(
                "Postgres lacks Penstock's tables, or an older version has them: run `penstock migrate`"
            ) from exc
        # The driver refuses a value before it is sent: an InterfaceError that is a ValueError too.
        unsent = isinstance(exc, asyncpg.InterfaceError) and isinstance(exc, ValueError)
        if unsent or isinstance(exc, _REFUSALS):
            raise Refused(f"Postgres refuses the values: {exc}") from exc
        if isinstance(exc, _TOO_SLOW):
            raise TooSlow(f"Postgres did not answer in time: {str(exc) or type(exc).__name__}") from exc
        if isinstance(exc, _TRANSIENT) and not isinstance(exc, Unavailable):
            raise Unavailable(f"Postgres is away or refuses: {type(exc).__name__}: {exc}") from exc
