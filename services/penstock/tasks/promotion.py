"""Promotions that are over: their tasks are promoted, each by itself.

A resulter that lets the next of many ordering keys go tells so in one row, from which a scheduler claims them (see
finish_tasks). What is not claimed within a few seconds, or could not be, is promoted here, and so becomes to everybody
what it would have been without: to an older scheduler, to one whose claims go by rules, to whoever looks for it by its
state. Resulters do it, for they give the turns, and supervisors, for when the last resulter has gone. A resulter that
stops ends all turns: the version that follows may know of none.

So is what a settled task could not promote, for another transaction held the key: that is noted as a turn that is over,
and looked at a moment later, and then each second until the other transaction has ended (see look_later).
"""

from __future__ import annotations

import asyncio

from penstock.db.notify import Notifier
from penstock.db.pool import Store
from penstock.runtime.periodic import repeat
from penstock.runtime.sweeps import Sweeps
from penstock.tasks import ordering

_LOOK_SECONDS = 1.0
_SOON_SECONDS = 0.02  # most transactions that hold a key enqueue a task and end
_AT_ONCE = 10  # turns, some thousand tasks


class Promotions:
    """``run_once`` promotes the tasks of a few turns and returns after how many seconds to look again."""

    def __init__(self, *, store: Store, notifier: Notifier) -> None:
        self._store = store
        self._notifier = notifier
        self._left = asyncio.Event()
        self._sweeps = Sweeps()

    def settled(self) -> None:
        """Tasks were settled through the store: keys that were left are looked at soon."""
        if self._store.has_left:
            self._store.has_left = False
            self._left.set()

    async def run(self) -> None:
        """Until it is cancelled."""
        await repeat("turns", self._work_or_wait)

    async def run_once(self) -> float:
        async with self._store.transaction() as session:
            promoted = await ordering.promote_overdue(session, _AT_ONCE, sweeps=self._sweeps)
        self._store.has_left = False  # what is left by now was left before
        if not promoted:
            return _LOOK_SECONDS
        self._notifier.wake()
        return 0.0

    async def end_all(self) -> None:
        """End the turns that are not over too."""
        promoted = 1
        while promoted:
            async with self._store.transaction() as session:
                promoted = await ordering.promote_overdue(session, _AT_ONCE, also_running=True)
            if promoted:
                self._notifier.wake()

    async def _work_or_wait(self) -> float:
        seconds = await self.run_once()
        if not seconds:
            return 0.0
        try:
            async with asyncio.timeout(seconds):
                await self._left.wait()
        except TimeoutError:
            return 0.0
        self._left.clear()
        return _SOON_SECONDS
