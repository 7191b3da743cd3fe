"""Waits: tasks whose outside event did not come in time.

A time is judged by the database's clock; it is up within the supervisor's interval.
"""

from __future__ import annotations

from penstock.db.pool import Store
from penstock.results.wait_answers import give_up_overdue
from penstock.runtime.logs import get_logger
from penstock.runtime.periodic import in_batches
from penstock.settings.model import Settings

_BATCH = 500
_BATCHES_PER_ROUND = 20

log = get_logger()


class Waits:
    """One round ends overdue waits, in bounded batches."""

    def __init__(self, *, store: Store, settings: Settings) -> None:
        self._store = store
        self._settings = settings

    async def run_once(self) -> int:
        """Returns how many waits were ended."""
        total = await in_batches(self._give_up, full=_BATCH, most=_BATCHES_PER_ROUND)
        if total:
            log.info("waits_timed_out", waits=total)
        return total

    async def _give_up(self) -> int:
        async with self._store.transaction() as session:
            return await give_up_overdue(session, _BATCH, self._settings)
