"""Retention: settled tasks are dropped by the day, other records deleted by age.

The history has one partition per final state and day (UTC), dropped once its end is older than the state's retention;
so a record is kept at least its retention and at most a day longer. For a retention under two days rows are deleted in
batches as well, as are rows in the default partitions, which fill only while no supervisor runs for days, and are
copied by day then (docs/decisions/033-full-default-partitions.md).
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from operator import methodcaller
from time import monotonic

from penstock.db.pool import Store
from penstock.db.session import Session
from penstock.protocol.errors import Refused, Unavailable
from penstock.protocol.task import MAX_ACTIONS_SHOWN, OTHER_ACTIONS, State
from penstock.runtime import metrics
from penstock.runtime.logs import log
from penstock.runtime.periodic import in_batches
from penstock.settings.model import Settings
from penstock.settings.values import DAY
from penstock.supervisor.duties import DutyGuard
from penstock.tasks import ordering

_BATCH = 2000
_BATCHES_PER_ROUND = 10
_WORKFLOW_STEPS = 20_000  # of the workflows of one batch
_DAYS_AHEAD = 3
_TALLY_KEPT_SECONDS = 180.0
_TALLY_BY_MINUTE_SECONDS = 3700.0  # the dashboard draws an hour
_TALLY_ROWS_AT_ONCE = 20_000
_KEYS_LOOKED_AT = 500  # of the held ones in one round, as each is searched in every partition
_SHORT_SECONDS = 2 * DAY  # records that are kept for less leave one by one
_LOCK_WAIT_MS = 100  # all reads, or inserts, queue up behind this wait
_LOCK_PAUSE_SECONDS = 180.0  # after a reader kept the lock
_BLOCKS_AT_ONCE = 256  # 2 MiB, of the smallest records some ten thousand
_FORGETTING_SECONDS = 2.0  # of one round
_BLOCKS_COPIED_AT_ONCE = 128  # of the smallest records some six thousand
_CHANGES_AT_ONCE = 1000  # the last of them are copied under a lock
_COPYING_SECONDS = 2.0  # of one round
_LOOKING_SECONDS = 0.5  # of one round
_BESIDE_TASKS = {"journal": "delete_gone_journals", "output": "delete_gone_output"}  # kept as long as their task


class Retention:
    """One round: partitions made ahead, expired ones dropped, and bounded deletes."""

    def __init__(self, *, store: Store, settings: Settings) -> None:
        self._store = store
        self._guard = DutyGuard()
        self._locks_rest_until: dict[str, float] = {}
        self._held_upto = ""  # ordering key
        self._looked_upto = dict.fromkeys(_BESIDE_TASKS, 0)  # task
        self._blocks_copied = _BLOCKS_COPIED_AT_ONCE
        self._keep = {
            State.SUCCESS: settings.retention_success_seconds,
            State.CRITICAL_ERROR: settings.retention_critical_error_seconds,
            State.CANCELLED: settings.retention_cancelled_seconds,
        }
        delete, runs_seconds = self._delete, settings.retention_schedule_runs_seconds
        self._deletes = {
            **{state.value: partial(self._delete_expired, state) for state in self._keep},
            "receipt": partial(delete, "delete_old_receipts", max(settings.retention_receipts_seconds, 1.0), _BATCH),
            "rejected": partial(delete, "delete_old_rejected", settings.retention_rejected_seconds, _BATCH),
            "job": partial(delete, "delete_old_jobs", settings.retention_jobs_seconds, _BATCH),
            "audit": partial(delete, "delete_old_audit", settings.retention_audit_seconds, _BATCH),
            "schedule_run": partial(delete, "delete_old_runs", runs_seconds, 5000, full=5000, most=20),
            # Before its import, which a request needs for its state.
            "scheduler0_request": partial(delete, "delete_old_requests", runs_seconds, _BATCH),
            "schedule_import": partial(delete, "delete_old_imports", runs_seconds, _BATCH),
            "waits": partial(delete, "delete_ended_waits", settings.retention_waits_seconds, _BATCH, None),
            # The tasks of workflows settled before they ended, so none is kept for longer.
            "workflow": partial(delete, "delete_old_workflows", max(self._keep.values()), _WORKFLOW_STEPS, full=1),
        }

    async def run_once(self) -> int:
        """Returns how many records were removed and keys released. Raises Unavailable when a part failed."""
        kept = {f"task_{state.lower()}": seconds for state, seconds in self._keep.items()}
        short = [parent for parent, seconds in kept.items() if seconds < _SHORT_SECONDS]
        detach = methodcaller("fetch", "detach_expired_partition", [*kept], [*kept.values()])
        parts: dict[str, Callable[[], Awaitable[int | None]]] = {
            "default partitions": self._empty_defaults,
            "partitions": partial(self._all_with_lock, "make", self._make_partition),
            "indexes": partial(self._all_with_lock, "index", methodcaller("fetch", "index_next_partition", short)),
            "tally": self._compact_tally,
            "expired partitions": partial(self._all_with_lock, "detach", detach),
            "detached partitions": self._drop_detached,
            **{f"records {kind}": partial(delete, kind=kind) for kind, delete in self._deletes.items()},
            "ordering keys": self._release_orphaned_keys,
            **{f"gone {kind}": partial(self._delete_gone, kind) for kind in _BESIDE_TASKS},
        }
        return sum([count async for _, count in self._guard.run(parts)])

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[Session | None]:
        """A transaction under the lock of upkeep; None while another supervisor has it."""
        async with self._store.transaction() as session:
            yield session if await session.value("try_upkeep_lock") else None

    async def _with_lock(self, what: str, step: Callable[[Session], Awaitable[object]]) -> bool:
        """Do in a transaction what locks a busy table. The wait is short, and after a failure there is a pause."""
        if monotonic() < self._locks_rest_until.get(what, 0.0):
            return False
        try:
            async with self._alone() as session:
                if session is None:
                    return False
                await session.fetch("limit_lock_wait_to", _LOCK_WAIT_MS)
                return bool(await step(session))
        except Unavailable:
            self._locks_rest_until[what] = monotonic() + _LOCK_PAUSE_SECONDS
            raise

    async def _all_with_lock(self, what: str, step: Callable[[Session], Awaitable[object]]) -> None:
        """Repeat a step, each in a transaction of its own, until it finds nothing to do."""
        while await self._with_lock(what, step):
            pass

    async def _empty_defaults(self) -> None:
        """Move records of the default partitions to partitions of their days."""
        deadline = monotonic() + _COPYING_SECONDS
        for state in self._keep:
            while await self._empty_some(f"task_{state.lower()}") and monotonic() < deadline:
                pass

    async def _empty_some(self, parent: str) -> bool:
        """Do one step; returns whether another follows."""
        try:
            async with self._alone() as session:
                if session is None:
                    return False
                next_step = await session.value("step_default_move", parent, self._blocks_copied, _CHANGES_AT_ONCE)
        except Unavailable:
            self._blocks_copied = max(self._blocks_copied // 2, 1)  # of large records
            raise
        self._blocks_copied = min(self._blocks_copied * 2, _BLOCKS_COPIED_AT_ONCE)

        async def begin_or_end(session: Session) -> bool:
            if next_step == "begin":
                await session.fetch("begin_default_move", parent)
                log.info("default_partition_being_emptied", parent=parent)
            elif await session.value("end_default_move", parent, _CHANGES_AT_ONCE):
                log.info("default_partition_emptied", parent=parent)
            return bool(next_step == "begin")

        if next_step in ("begin", "ready"):
            return await self._with_lock(f"default {parent}", begin_or_end)
        return bool(next_step == "more")

    async def _make_partition(self, session: Session) -> bool:
        """Make one of those of the days ahead, but for days of which the default partition has records."""
        for missing in await session.fetch("list_missing_partitions", _DAYS_AHEAD):
            try:
                async with session.savepoint():
                    await session.fetch("make_partition", *missing)
            except Refused:
                continue
            log.info("partition_made", partition=missing["name"])
            return True
        return False

    async def _compact_tally(self) -> None:
        limits = _TALLY_KEPT_SECONDS, _TALLY_BY_MINUTE_SECONDS, _TALLY_ROWS_AT_ONCE, MAX_ACTIONS_SHOWN, OTHER_ACTIONS

        async def compact() -> int:
            async with self._alone() as session:
                return 0 if session is None else int(await session.value("compact_tally", *limits))

        await in_batches(compact, full=_TALLY_ROWS_AT_ONCE, most=_BATCHES_PER_ROUND)

    async def _drop_detached(self) -> int:
        """Drop detached partitions, in transactions that do not grow with a day; returns how many records they had."""
        dropped = 0
        deadline = monotonic() + _FORGETTING_SECONDS
        for partition, state in await self._store.fetch("list_detached"):
            while (rows := await self._forget_some(partition, State(state))) is None:
                if monotonic() >= deadline:
                    return dropped
            dropped += rows
        return dropped

    async def _forget_some(self, partition: str, state: State) -> int | None:
        """Delete the unique keys of the next blocks, or drop the table after the last; returns its records then."""
        async with self._alone() as session:
            if session is None:
                return 0
            await session.fetch("limit_lock_wait")
            found = await session.fetch("begin_forgetting", partition=partition)
            if not found:
                return 0  # another supervisor has dropped it
            at = found[0]
            first, upto = at["next_block"], min(at["next_block"] + _BLOCKS_AT_ONCE, at["blocks"])
            if first < upto:
                # A retried record left the partition before it was detached, so no key of a live task is deleted.
                await session.fetch("plan_forgetting")
                await session.fetch("forget_blocks", first, upto, partition=partition)
                return None
            await session.lift_timeout()
            rows: int = await session.value("end_forgetting", partition, state.value)
            await session.fetch("drop_partition", partition)
        metrics.CLEANED.labels(state.value).inc(rows)
        log.info("partition_dropped", partition=partition, rows=rows)
        return rows

    async def _delete_expired(self, state: State, *, kind: str) -> int:
        partition, seconds = f"task_{state.lower()}", self._keep[state]
        if seconds >= _SHORT_SECONDS:
            partition = f"{partition}_default"
        return await self._delete("delete_expired", state.value, seconds, _BATCH, None, kind=kind, partition=partition)

    async def _delete(
        self, statement: str, *given: object, kind: str, full: int | None = None, most: int | None = None,
        partition: str | None = None,
    ) -> int:  # fmt: skip
        """Delete records of a kind in batches; returns how many."""
        delete = partial(self._store.value, statement, *given, partition=partition)
        total = await in_batches(delete, full=full or _BATCH, most=most or _BATCHES_PER_ROUND)
        if total:
            metrics.CLEANED.labels(kind).inc(total)
            log.info("records_removed", kind=kind, count=total)
        return total

    async def _delete_gone(self, kind: str) -> int:
        """Look at what some tasks have of a kind, and delete that of tasks that are gone; the next round looks on."""
        total, ends = 0, monotonic() + _LOOKING_SECONDS
        while monotonic() < ends:
            ((last, looked, deleted),) = await self._store.fetch(_BESIDE_TASKS[kind], self._looked_upto[kind], _BATCH)
            self._looked_upto[kind] = last if looked == _BATCH else 0
            total += deleted
            if looked < _BATCH:
                break
        metrics.CLEANED.labels(kind).inc(total)
        return total

    async def _release_orphaned_keys(self) -> int:
        """Release ordering keys of failed tasks that were deleted, emptied, or cancelled as a step: no retry does."""
        async with self._store.transaction() as session:
            released, last = await ordering.release_orphaned_keys(session, _KEYS_LOOKED_AT, self._held_upto)
        self._held_upto = last or ""
        if released:
            log.warning("ordering_keys_released", keys=released, reason="the failed task cannot be retried any more")
        return released
