"""Promote the next tasks of ordering keys that no scheduler claimed in time.

A resulter that settles tasks of many ordering keys promotes their next tasks in one row, from which a scheduler claims
them (see finish_tasks). Those not claimed within a few seconds are promoted one by one here, so that older schedulers,
claims by rules and queries by state see them. Resulters do this, and supervisors for when the last resulter has gone.
Keys that another transaction held when their task settled are promoted here too (see look_later).
"""

import asyncio

from penstock.db.notify import Notifier
from penstock.db.pool import Store
from penstock.runtime.periodic import is_set_within, repeat
from penstock.runtime.sweeps import Sweeps
from penstock.tasks import ordering

_LOOK_SECONDS = 1.0
_SOON_SECONDS = 0.02  # most transactions that hold a key enqueue a task and end
_AT_ONCE = 10  # rows, some thousand tasks


class Promotions:
    """``run_once`` promotes the tasks of a few rows and returns after how many seconds to look again.

    also_running: of those that have not lasted too long either.
    """

    def __init__(self, *, store: Store, notifier: Notifier) -> None:
        self._store = store
        self._notifier = notifier
        self._left = asyncio.Event()
        self._sweeps = Sweeps()

    def settled(self) -> None:
        """Look soon at keys that were left: tasks were settled through the store."""
        if self._store.left_keys:
            self._store.left_keys = False
            self._left.set()

    async def run(self) -> None:
        await repeat("turns", self._work_or_wait)

    async def run_once(self, *, also_running: bool = False) -> float:
        sweeps = None if also_running else self._sweeps
        async with self._store.transaction() as session:
            overdue = await ordering.promote_overdue(session, _AT_ONCE, also_running=also_running, sweeps=sweeps)
        self._store.left_keys = False  # such keys were left before
        if overdue.promoted:
            self._notifier.wake()
        # Most rows promote nothing: of keys in which no task waits. Those put off again are too few to fill a look.
        return 0.0 if overdue.promoted or overdue.taken == _AT_ONCE else _LOOK_SECONDS

    async def end_all(self) -> None:
        """Promote the tasks of all rows, since the version that follows a resulter may know of none."""
        while not await self.run_once(also_running=True):
            pass

    async def _work_or_wait(self) -> float:
        seconds = await self.run_once()
        if not seconds or not await is_set_within(self._left, seconds):
            return 0.0
        self._left.clear()
        return _SOON_SECONDS
