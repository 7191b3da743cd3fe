"""Remove payloads and results before their records, at most a day and an hour after their retention.

A day (UTC) is handled once it is over, because an emptied record is rewritten to the end of its partition. Records are
walked once, in the order in which they settled; the instant reached is stored, and steps grow while they find little.
"""

from datetime import UTC, datetime, timedelta

from penstock.db.pool import Store
from penstock.protocol.errors import TooSlow, Unavailable
from penstock.runtime import metrics
from penstock.runtime.logs import log
from penstock.settings.model import Settings
from penstock.settings.values import DAY

_MOST = 4000  # records in one step
_FEW = _MOST // 4
_STEPS_PER_ROUND = 25
_SHORTEST_STEP_SECONDS = 1e-6  # one statement settles no more than _MOST at an instant
_LONGEST_STEP_SECONDS = 30.0 * DAY
_MARGIN_SECONDS = 3600.0


class PayloadRetention:
    """One round: some steps for payloads, some for results; none where they are kept as long as their records."""

    def __init__(self, *, store: Store, settings: Settings) -> None:
        self._store = store
        longest = max(settings.retention_success_seconds, settings.retention_cancelled_seconds)
        self._longest_kept = timedelta(seconds=max(longest, settings.retention_critical_error_seconds) + 2 * DAY)
        # A record may be committed a while after its finished_at, the begin of a transaction that may be a handler's.
        self._margin_seconds = max(2 * settings.statement_timeout_seconds, _MARGIN_SECONDS)
        kept = {"payload": settings.payload_retention_seconds, "result": settings.result_retention_seconds}
        self._kept = {what: seconds for what, seconds in kept.items() if seconds is not None}
        self._parts = 1  # of what a step takes otherwise, as Postgres was too slow for it

    async def run_once(self, *, now: datetime | None = None) -> int:
        """Returns how many were emptied. now: the database's clock unless given."""
        total = 0
        for what, kept_seconds in self._kept.items():
            emptied = 0
            for number in range(_STEPS_PER_ROUND):
                try:
                    changed = await self._step(what, kept_seconds, now, summarize=not number)
                except TooSlow:
                    self._parts = min(self._parts * 2, _MOST)
                    raise
                if changed is None:
                    self._parts = 1
                    break
                emptied += changed
            if emptied:
                metrics.CLEANED.labels(what).inc(emptied)
                log.info("records_emptied", what=what, count=emptied)
            total += emptied
        return total

    async def _step(self, what: str, kept_seconds: float, now: datetime | None, *, summarize: bool) -> int | None:
        """Returns how many were emptied; None when all is done, or another supervisor is at it."""
        async with self._store.transaction() as session:
            if not await session.value("try_upkeep_lock"):
                return None
            clock = now or await session.value("read_clock")
            past = clock - timedelta(seconds=kept_seconds + self._margin_seconds)
            end = past.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
            ((upto, step_seconds),) = await session.fetch("read_emptied", what, clock - self._longest_kept)
            if upto >= end:
                return None
            if summarize:
                await self._summarize(upto)
            step_end = min(end, upto + timedelta(seconds=step_seconds))
            most, few = _MOST // self._parts, _FEW // self._parts
            found = await session.value("count_settled_between", upto, step_end, most + 1)
            if found > most and step_seconds > _SHORTEST_STEP_SECONDS:
                seconds = (step_end - upto).total_seconds()
                await session.fetch("note_emptied", what, upto, max(_SHORTEST_STEP_SECONDS, seconds / 8))
                return 0
            statement = "empty_payloads" if what == "payload" else "empty_results"
            changed = len(await session.fetch(statement, upto, step_end)) if found else 0
            longer = min(_LONGEST_STEP_SECONDS, step_seconds * (2 if found < few or not found else 1))
            await session.fetch("note_emptied", what, step_end, longer)
            return changed

    async def _summarize(self, upto: datetime) -> None:
        """Add the newest rows of the next partitions to the index on finished_at, as a vacuum does."""
        days = [(upto.astimezone(UTC) + timedelta(days=n)).strftime("%Y%m%d") for n in (0, 1)]
        try:
            async with self._store.transaction() as session:
                await session.fetch("limit_lock_wait_briefly")  # a longer wait would cancel a running vacuum
                await session.fetch("summarize_settled", days)
        except Unavailable as exc:
            log.debug("index_not_summarized", reason=str(exc))
