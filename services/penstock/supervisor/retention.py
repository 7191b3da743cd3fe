"""Retention: what has settled leaves after its time, by the day.

The history has one partition per final state and day (UTC). A partition whose last moment is older than the state's
retention is dropped, so a record lives at least its retention and at most a day longer. A retention under two days
would make that coarse, so there rows are deleted in batches as well; so are rows in the default partitions, which
fill only while no supervisor runs for days. An ordering key that a cleaned task held is let go.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from penstock import metrics
from penstock.logs import get_logger
from penstock.settings import DAY, Settings
from penstock.store import Session, Store
from penstock.tasks import State

_BATCH = 2000
_BATCHES_PER_ROUND = 10
_DAYS_AHEAD = 3
_TALLY_KEPT_SECONDS = 180.0
_TALLY_BY_MINUTE_SECONDS = 3700.0  # the dashboard draws an hour

log = get_logger()


class Retention:
    """One round: partitions made ahead, expired ones dropped, and bounded deletes."""

    def __init__(self, *, store: Store, settings: Settings) -> None:
        self._store = store
        self._settings = settings
        self._keep = {
            State.SUCCESS: settings.retention_success_seconds,
            State.CRITICAL_ERROR: settings.retention_critical_error_seconds,
            State.CANCELLED: settings.retention_cancelled_seconds,
        }

    async def run_once(self) -> int:
        """Returns how many records were removed."""
        removed = 0
        async with self._store.transaction() as session:
            if not await session.value("try_upkeep_lock"):
                return 0  # another supervisor is at it
            await session.fetch("limit_lock_wait")
            await session.fetch("ensure_partitions", _DAYS_AHEAD)
            await session.fetch("compact_tally", _TALLY_KEPT_SECONDS, _TALLY_BY_MINUTE_SECONDS)
            await self._detach_expired(session)
        # In a transaction of its own: counting a day's records must not keep others from the history's lock, and
        # a record that a retry has just taken back must be gone from the partition before its key is freed.
        removed += await self._drop_detached()
        for state, keep_seconds in self._keep.items():
            parent = f"task_{state.lower()}"
            partition = parent if keep_seconds < 2 * DAY else f"{parent}_default"
            removed += await self._delete(state, "delete_expired", state.value, keep_seconds, partition=partition)
        await self._release_orphaned_keys()
        removed += await self._delete(
            "receipt", "delete_old_receipts", max(self._settings.retention_receipts_seconds, 1.0)
        )
        removed += await self._delete("rejected", "delete_old_rejected", self._settings.retention_rejected_seconds)
        removed += await self._delete("job", "delete_old_jobs", self._settings.retention_jobs_seconds)
        removed += await self._delete("audit", "delete_old_audit", self._settings.retention_audit_seconds)
        return removed

    async def _detach_expired(self, session: Session) -> None:
        now = await session.value("read_clock")
        for row in await session.fetch("list_partitions"):
            if row["day"] is None:
                continue
            end = datetime.strptime(row["day"], "%Y%m%d").replace(tzinfo=UTC) + timedelta(days=1)
            if end < now - timedelta(seconds=self._keep[_state_of(row["parent"])]):
                await session.fetch_of("detach_partition", partition=row["name"])

    async def _drop_detached(self) -> int:
        """Forget and drop what is detached, also by a supervisor that died in between; returns how many records."""
        dropped = 0
        async with self._store.transaction() as session:
            if not await session.value("try_upkeep_lock"):
                return 0
            await session.fetch("limit_lock_wait")
            for row in await session.fetch("list_detached"):
                state = _state_of(row["parent"])
                rows = await session.value_of("forget_partition", state.value, partition=row["name"])
                await session.fetch_of("drop_partition", partition=row["name"])
                metrics.CLEANED.labels(state.value).inc(rows)
                log.info("partition_dropped", partition=row["name"], rows=rows)
                dropped += rows
        return dropped

    async def _release_orphaned_keys(self) -> None:
        """Release ordering keys whose failed task was cleaned, or cancelled as a step, so that no retry ends them."""
        for _ in range(_BATCHES_PER_ROUND):
            async with self._store.transaction() as session:
                released = await session.release_orphaned_keys(_BATCH)
            if released:
                log.warning(
                    "ordering_keys_released", keys=released, reason="the failed task cannot be retried any more"
                )
            if released < _BATCH:
                break

    async def _delete(self, kind: str, statement: str, *args: object, partition: str | None = None) -> int:
        total = 0
        for _ in range(_BATCHES_PER_ROUND):
            async with self._store.session() as session:
                if partition is None:
                    count = await session.value(statement, *args, _BATCH)
                else:
                    count = await session.value_of(statement, *args, _BATCH, None, partition=partition)
            total += count
            if count < _BATCH:
                break
        if total:
            metrics.CLEANED.labels(kind).inc(total)
            log.info("records_removed", kind=str(kind), count=total)
        return total


def _state_of(parent: str) -> State:
    return State(parent.removeprefix("task_").upper())
