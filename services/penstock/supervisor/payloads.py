"""Payloads and results that are kept no longer: emptied in their records, and deleted as objects in the bucket."""

from datetime import UTC, date, datetime, timedelta

from penstock.db.pool import Store
from penstock.payloads.bucket import Bucket
from penstock.payloads.codec import counted
from penstock.protocol.errors import PayloadUnavailable, TooSlow, Unavailable
from penstock.runtime import metrics
from penstock.runtime.logs import log
from penstock.runtime.periodic import in_batches
from penstock.settings.model import Settings
from penstock.settings.values import DAY

_MOST = 4000  # records in one step
_FEW = _MOST // 4
_STEPS_PER_ROUND = 25
_SHORTEST_STEP_SECONDS = 1e-6  # one statement settles no more than _MOST at an instant
_LONGEST_STEP_SECONDS = 30.0 * DAY
_MARGIN_SECONDS = 3600.0
_LOOKED_AT_ONCE = 1000
_LOOKS_PER_ROUND = 10
_DELETED_AT_ONCE = 1000  # what S3 takes in one call
_DELETIONS_PER_ROUND = 5
_PAGES_PER_ROUND = 10
_FIRST_DAY = timedelta(days=400)  # how far back the first search for orphans begins
_WARNED_EVERY = 100
_SEARCHED = "orphans"


class PayloadRetention:
    """Removes payloads and results before their records, at most a day and an hour after their retention.

    A day (UTC) is handled once it is over, because an emptied record is rewritten to the end of its partition. Records
    are walked once, in the order in which they settled; the instant reached is stored, and steps grow while they find
    little. One round: some steps for payloads, some for results; none where they are kept as long as their records.
    """

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


class PayloadObjects:
    """Deletes objects of large payloads and results from the bucket once no record names them (decisions/026).

    Each object is checked repeatedly for a record that names it. A deletion is noted first, so a kill repeats it, which
    is harmless. Objects of a process that died before it inserted the task are found by listing old days, by folder.
    One round: checks, deletions, and a part of the search for orphans; nothing without a bucket.
    """

    def __init__(self, *, store: Store, settings: Settings) -> None:
        self._store = store
        self._sweep_seconds = settings.payload_sweep_seconds
        self._orphan_seconds = settings.payload_orphan_seconds
        self._day = date.min  # that is searched
        self._folders: list[str] = []  # of that day, those still to be listed
        self._behind = ""  # the last name listed of the first of these
        self._tried_upto = ""  # the name of an object that is to be deleted
        self._failures = 0

    async def run_once(self, *, now: datetime | None = None) -> int:
        """Returns how many objects were deleted. now: the database's clock unless given. Raises Unavailable."""
        bucket = self._store.codec.bucket
        if bucket is None:
            return 0

        async def look() -> int:
            return len(await self._store.fetch("look_at_objects", self._sweep_seconds, _LOOKED_AT_ONCE, now))

        await in_batches(look, full=_LOOKED_AT_ONCE, most=_LOOKS_PER_ROUND)
        deleted = 0
        try:
            deleted = await self._delete(bucket)
            await self._search(bucket, now)
        except PayloadUnavailable as exc:  # other upkeep goes on; deletions are tried again in the next round
            if self._failures % _WARNED_EVERY == 0:
                log.warning("objects_not_deleted", reason=str(exc), failures=self._failures + 1)
            self._failures += 1
        else:
            self._failures = 0
        if deleted:
            metrics.CLEANED.labels("object").inc(deleted)
            log.info("records_removed", kind="object", count=deleted)
        return deleted

    async def _delete(self, bucket: Bucket) -> int:
        deleted = 0
        for _ in range(_DELETIONS_PER_ROUND):
            rows = await self._store.fetch("find_objects_to_delete", self._tried_upto, _DELETED_AT_ONCE)
            if not rows:
                self._tried_upto = ""
                break
            names = [row["name"] for row in rows if not row["needed"]]
            gone = set[str]()
            if names:
                with counted("delete"):
                    gone = await bucket.delete(names)
            self._tried_upto = rows[-1]["name"]  # those that S3 does not delete keep no others from it
            await self._store.fetch("forget_objects", [*gone, *(row["name"] for row in rows if row["needed"])])
            deleted += len(gone)
            if len(gone) < len(names):
                log.warning("objects_not_deleted", objects=len(names) - len(gone), next="they are tried again")
        return deleted

    async def _search(self, bucket: Bucket, now: datetime | None) -> None:
        """Schedule objects without a task for deletion, day by day; the day reached is stored in Postgres."""
        for _ in range(_PAGES_PER_ROUND):
            clock: datetime = now or await self._store.value("read_clock")
            ((upto, _),) = await self._store.fetch("read_emptied", _SEARCHED, clock - _FIRST_DAY)
            day: date = upto.astimezone(UTC).date()
            if day >= (clock - timedelta(seconds=self._orphan_seconds) - timedelta(days=1)).astimezone(UTC).date():
                return
            if day != self._day or not self._folders:
                self._day, self._folders, self._behind = day, await bucket.folders(), ""
            names = await bucket.list(self._folders[0], day, self._behind)
            if names:
                self._behind = names[-1]
                orphans = await self._store.fetch("delete_orphans_later", names)
                if orphans:
                    log.info("orphans_found", objects=len(orphans), day=day.isoformat())
                continue
            self._behind = ""
            del self._folders[0]
            if not self._folders:
                end = datetime(day.year, day.month, day.day, tzinfo=UTC) + timedelta(days=1)
                await self._store.fetch("note_emptied", _SEARCHED, end, DAY)
