"""Waits: tasks whose outside event did not come in time, and answers that nobody came to wait for.

A time is judged by the database's clock; it is up within the supervisor's interval.
"""

from __future__ import annotations

from penstock.db.pool import Store
from penstock.results.wait_answers import give_up_overdue
from penstock.results.wait_store import delete_ended_waits
from penstock.runtime import metrics
from penstock.runtime.logs import get_logger
from penstock.settings.model import Settings

_BATCH = 500
_BATCHES_PER_ROUND = 20

log = get_logger()


class Waits:
    """One round ends what is overdue and forgets what is old, in bounded batches."""

    def __init__(self, *, store: Store, settings: Settings) -> None:
        self._store = store
        self._settings = settings

    async def run_once(self) -> int:
        """Returns how many waits were ended."""
        total = 0
        for _ in range(_BATCHES_PER_ROUND):
            async with self._store.transaction() as session:
                ended = await give_up_overdue(session, _BATCH, self._settings)
            total += ended
            if ended < _BATCH:
                break
        if total:
            log.info("waits_timed_out", waits=total)
        await self._forget()
        return total

    async def _forget(self) -> None:
        for _ in range(_BATCHES_PER_ROUND):
            async with self._store.session() as session:
                gone = await delete_ended_waits(session, self._settings.retention_waits_seconds, limit=_BATCH)
            if gone:
                metrics.CLEANED.labels("waits").inc(gone)
            if gone < _BATCH:
                return
