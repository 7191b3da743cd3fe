"""Side tasks of a supervisor for delayed records: publish due ones, one supervisor at a time, and count them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from time import monotonic

from penstock.compat.delayed_records import MAX_AT_ONCE, publish_due
from penstock.db.notify import DELAYED_RECORDS, Listener, Notifier
from penstock.db.pool import Store
from penstock.runtime import metrics
from penstock.runtime.logs import get_logger
from penstock.runtime.loop import SideTask
from penstock.runtime.periodic import is_set_within, repeat

LOOK_SECONDS = 1.0
_HELD_SECONDS = 0.05  # while another supervisor publishes
_GATHER_SECONDS = 0.02  # records due within it are published together; also the pause before a busy key is read again
_REST = 2  # the pause after a round that published nothing is so many times its duration
_COUNT_SECONDS = 60.0
_COUNT_REST = 50

log = get_logger()


class DelayedRecords:
    """Publishes due records and counts all. listener: wakes it when a record that is due soon was stored."""

    def __init__(self, store: Store, notifier: Notifier, listener: Listener) -> None:
        self._store = store
        self._notifier = notifier
        self._woken = listener.also(DELAYED_RECORDS)
        self._counted: set[str] = set()  # sources
        self.side_tasks: Mapping[str, SideTask] = {
            "delayed records": partial(repeat, "delayed records", self._publish_or_wait),
            "count delayed records": partial(repeat, "count delayed records", self._count),
        }

    async def _publish_or_wait(self) -> float:
        """Wait until a record is due, or publish in one transaction; returns the pause in seconds."""
        self._woken.clear()
        wait: float | None = await self._store.value("read_delayed_record_wait")
        if wait is None or wait > 0:
            await is_set_within(self._woken, LOOK_SECONDS if wait is None else min(LOOK_SECONDS, wait))
            return 0
        started = monotonic()
        async with self._store.transaction() as session:
            published = await publish_due(session)
        seconds = monotonic() - started
        if published is None:
            return _HELD_SECONDS
        if not published:
            return max(_GATHER_SECONDS, _REST * seconds)
        self._notifier.wake()
        log.debug("delayed_records_published", records=published, seconds=round(seconds, 4))
        return 0 if published >= MAX_AT_ONCE else _GATHER_SECONDS

    async def _count(self) -> float:
        """Set the gauge; returns the pause in seconds, which is long: counting reads every record."""
        started = monotonic()
        counts = {row["source"]: row["count"] for row in await self._store.fetch("count_delayed_records")}
        self._counted |= counts.keys()
        for source in self._counted:
            metrics.DELAYED_RECORDS.labels(source).set(counts.get(source, 0))
        return max(_COUNT_SECONDS, _COUNT_REST * (monotonic() - started))
