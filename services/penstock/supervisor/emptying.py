"""Emptying: payloads and results that leave before their records.

Records are walked in the order in which they settled, once: how far is noted in Postgres, and a look goes a step
further that grows while little is found and shrinks where much is, so that each transaction changes a bounded number of
records and reads about as many.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from penstock import metrics
from penstock.logs import get_logger
from penstock.settings import DAY, Settings
from penstock.store import Store

_MOST = 4000  # records in one step
_FEW = _MOST // 4
_STEPS_PER_ROUND = 20
_SHORTEST_STEP_SECONDS = 1e-6  # one statement settles no more than _MOST at an instant
_LONGEST_STEP_SECONDS = 30.0 * DAY

log = get_logger()


class Emptying:
    """One round: some steps for payloads, some for results; nothing where they are kept as long as their records."""

    def __init__(self, *, store: Store, settings: Settings) -> None:
        self._store = store
        self._longest_kept = timedelta(
            seconds=max(
                settings.retention_success_seconds,
                settings.retention_critical_error_seconds,
                settings.retention_cancelled_seconds,
            )
            + 2 * DAY
        )
        # What settled may be committed a while after its finished_at, which is when its transaction began.
        self._margin_seconds = 2 * settings.statement_timeout_seconds
        kept = {"payload": settings.payload_retention_seconds, "result": settings.result_retention_seconds}
        self._kept = {what: seconds for what, seconds in kept.items() if seconds is not None}

    async def run_once(self, *, now: datetime | None = None) -> int:
        """Returns how many were emptied. now: the database's clock unless given."""
        total = 0
        for what, kept_seconds in self._kept.items():
            emptied = 0
            for _ in range(_STEPS_PER_ROUND):
                changed = await self._step(what, kept_seconds, now)
                if changed is None:
                    break
                emptied += changed
            if emptied:
                metrics.CLEANED.labels(what).inc(emptied)
                log.info("records_emptied", what=what, count=emptied)
            total += emptied
        return total

    async def _step(self, what: str, kept_seconds: float, now: datetime | None) -> int | None:
        """One look; how many were emptied, None when there is nothing to look at yet."""
        async with self._store.transaction() as session:
            clock = now or await session.value("read_clock")
            end = clock - timedelta(seconds=kept_seconds + self._margin_seconds)
            row = (await session.fetch("read_emptied", what, clock - self._longest_kept))[0]
            upto, step_seconds = row["upto"], row["step_seconds"]
            if upto >= end:
                return None
            step_end = min(end, upto + timedelta(seconds=step_seconds))
            found = await session.value("count_settled_between", upto, step_end, _MOST + 1)
            if found > _MOST and step_seconds > _SHORTEST_STEP_SECONDS:
                seconds = (step_end - upto).total_seconds()
                await session.fetch("note_emptied", what, upto, max(_SHORTEST_STEP_SECONDS, seconds / 8))
                return 0
            changed = len(await session.fetch(_STATEMENTS[what], upto, step_end)) if found else 0
            longer = min(_LONGEST_STEP_SECONDS, step_seconds * (2 if found < _FEW else 1))
            await session.fetch("note_emptied", what, step_end, longer)
            return changed


_STATEMENTS = {"payload": "empty_payloads", "result": "empty_results"}
