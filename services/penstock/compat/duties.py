"""Armed schedules: fired when they are due, by one supervisor at a time, and counted."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from time import monotonic

from penstock.compat.delayed_records import FIRED_AT_ONCE, fire_armed
from penstock.db.notify import ARMED, Listener, Notifier
from penstock.db.pool import Store
from penstock.runtime import metrics
from penstock.runtime.logs import get_logger
from penstock.runtime.loop import SideTask
from penstock.runtime.periodic import repeat

LOOK_SECONDS = 1.0
_HELD_SECONDS = 0.05  # another supervisor is at them
_GATHER_SECONDS = 0.02  # what comes due within this is fired together; also, until a busy key is looked at again
_REST = 2  # a round that fired nothing, over many that wait for their keys, is followed by so many times its time
_COUNT_SECONDS = 60.0
_COUNT_REST = 50

log = get_logger()


class DelayedRecords:
    """What a supervisor is given to do about delayed records."""

    def __init__(self, *, store: Store, notifier: Notifier, listener: Listener) -> None:
        self._firing = FiringArmed(store=store, notifier=notifier, listener=listener)
        self._counting = CountArmed(store=store)

    @property
    def duties(self) -> tuple[CountArmed]:
        return (self._counting,)

    @property
    def side_tasks(self) -> dict[str, SideTask]:
        return {"armed": self._firing.run}


class FiringArmed:
    """Makes tasks of what is due; ``run_once`` is one transaction.

    listener: by which it hears that something was armed that is due soon.
    """

    def __init__(self, *, store: Store, notifier: Notifier, listener: Listener) -> None:
        self._store = store
        self._notifier = notifier
        self._heard = listener.also(ARMED)

    async def run(self) -> None:
        await repeat("armed", self._fire_or_wait)

    async def run_once(self) -> int | None:
        """Returns how many were fired, None while another supervisor does. Raises Unavailable."""
        started = monotonic()
        async with self._store.transaction() as session:
            fired = await fire_armed(session)
        if fired:
            self._notifier.wake()
            log.debug("armed_fired", schedules=fired, seconds=round(monotonic() - started, 4))
        return fired

    async def _fire_or_wait(self) -> float:
        self._heard.clear()
        async with self._store.session() as session:
            wait: float | None = await session.value("read_armed_wait")
        if wait is None or wait > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS if wait is None else min(LOOK_SECONDS, wait)):
                    await self._heard.wait()
            return 0
        started = monotonic()
        fired = await self.run_once()
        if fired is None:
            return _HELD_SECONDS
        if fired >= FIRED_AT_ONCE:
            return 0
        return _GATHER_SECONDS if fired else max(_GATHER_SECONDS, _REST * (monotonic() - started))


class CountArmed:
    """Sets the gauge once a minute; a round of its own, for there may be millions.

    Counting reads them all, so a count that takes long is followed by a pause of fifty times as much.
    """

    def __init__(self, *, store: Store) -> None:
        self._store = store
        self._next_at = float("-inf")
        self._sources: set[str] = set()

    async def run_once(self) -> int:
        """Returns 0: looking changes nothing."""
        if monotonic() < self._next_at:
            return 0
        started = monotonic()
        try:
            async with self._store.session() as session:
                counts = {row["source"]: row["count"] for row in await session.fetch("count_armed")}
        finally:
            ended = monotonic()
            self._next_at = ended + max(_COUNT_SECONDS, _COUNT_REST * (ended - started))
        self._sources |= counts.keys()
        for source in self._sources:
            metrics.ARMED.labels(source).set(counts.get(source, 0))
        return 0
