"""Expiry: tasks that were not started by their ``expires_at`` become CANCELLED, with the reason ``expired``.

No claim takes such a task from that instant on, whether or not a supervisor runs. A running task is left to finish; if
it fails, or its claim is released, it is cancelled then.
"""

from __future__ import annotations

from penstock.db.pool import Store
from penstock.runtime.logs import get_logger
from penstock.runtime.periodic import in_batches
from penstock.tasks import stale

_BATCH = 500
_BATCHES_PER_ROUND = 20

log = get_logger()


class Expiry:
    """One round cancels what has expired, in bounded batches."""

    def __init__(self, *, store: Store) -> None:
        self._store = store

    async def run_once(self) -> int:
        """Returns how many tasks were cancelled."""
        total = await in_batches(self._expire, full=_BATCH, most=_BATCHES_PER_ROUND)
        if total:
            log.info("tasks_expired", tasks=total)
        return total

    async def _expire(self) -> int:
        async with self._store.transaction() as session:
            return await stale.expire(session, _BATCH)
