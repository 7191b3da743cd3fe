"""Tasks past their expiry, claims never sent, and attempts without heartbeats."""

from collections.abc import Sequence
from datetime import datetime

from penstock.db.session import Session
from penstock.protocol.errors import PenstockError
from penstock.protocol.task import EXPIRED
from penstock.runtime.halving import in_halves
from penstock.runtime.logs import log
from penstock.tasks import settle
from penstock.tasks.records import StaleTask


async def expire(session: Session, limit: int, *, now: datetime | None = None) -> int:
    """Cancel up to ``limit`` tasks that were not started in time, inside a transaction; returns how many."""

    async def cancel(ids: Sequence[int], hurried: bool) -> int:
        async with session.savepoint(hurried=hurried):
            return len(await settle.cancel(session, ids, EXPIRED))

    async def leave(task_id: int, error: PenstockError) -> int:  # for the next round
        log.warning("expired_task_left", task_id=task_id, reason=str(error))
        return 0

    ids = [row["id"] for row in await session.fetch("find_expired", limit, now)]
    return sum(await in_halves(ids, cancel, leave))


async def release_unsent(session: Session, after_seconds: float, *, limit: int, now: datetime | None = None) -> int:
    """Release the claims of batches never confirmed; returns how many tasks."""
    return len(await session.fetch("release_unsent", after_seconds, limit, now))


async def find_stale(
    session: Session,
    after_seconds: float,
    *,
    limit: int,
    now: datetime | None = None,
    after: StaleTask | None = None,
    since: datetime | None = None,
) -> list[StaleTask]:
    """ACQUIRED tasks without a heartbeat for that long, oldest claim first, from after ``after`` or from ``since``."""
    claimed_at, task_id = (after.claimed_at, after.id) if after else (since, 0)
    rows = await session.fetch("find_stale", after_seconds, limit, now, claimed_at, task_id)
    return [StaleTask(**{name: row[name] for name in StaleTask._fields}) for row in rows]
