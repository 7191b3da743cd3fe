"""Delete objects of large payloads and results from the bucket once no record names them (decisions/026).

Each object is checked repeatedly for a record that names it. A deletion is noted first, so a kill repeats it, which is
harmless. Objects of a process that died before it inserted the task are found by listing old days, by folder.
"""

from datetime import UTC, date, datetime, timedelta

from penstock.db.pool import Store
from penstock.payloads.bucket import Bucket
from penstock.payloads.codec import counted
from penstock.protocol.errors import PayloadUnavailable
from penstock.runtime import metrics
from penstock.runtime.logs import log
from penstock.runtime.periodic import in_batches
from penstock.settings.model import Settings
from penstock.settings.values import DAY

_LOOKED_AT_ONCE = 1000
_LOOKS_PER_ROUND = 10
_DELETED_AT_ONCE = 1000  # what S3 takes in one call
_DELETIONS_PER_ROUND = 5
_PAGES_PER_ROUND = 10
_FIRST_DAY = timedelta(days=400)  # how far back the first search for orphans begins
_WARNED_EVERY = 100
_SEARCHED = "orphans"


class PayloadObjects:
    """One round: checks, deletions, and a part of the search for orphans; nothing without a bucket."""

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
            kept = {row["name"] for row in rows if row["needed"]}
            await self._store.fetch("forget_objects", [*gone, *kept])
            deleted += len(gone)
            if len(gone) < len(names):
                log.warning("objects_not_deleted", objects=len(names) - len(gone), next="they are tried again")
        return deleted

    async def _search(self, bucket: Bucket, now: datetime | None) -> None:
        """Schedule objects without a task for deletion, day by day; the day reached is stored in Postgres."""
        for _ in range(_PAGES_PER_ROUND):
            async with self._store.transaction() as session:
                clock: datetime = now or await session.value("read_clock")
                row = (await session.fetch("read_emptied", _SEARCHED, clock - _FIRST_DAY))[0]
            day: date = row["upto"].astimezone(UTC).date()
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
                async with self._store.transaction() as session:
                    await session.fetch("note_emptied", _SEARCHED, end, DAY)
