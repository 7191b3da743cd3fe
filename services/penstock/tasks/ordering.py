"""Ordering keys: one task of each runs at a time, the others wait for it, and are promoted in their order."""

import asyncio
from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

from penstock.db.notify import Notifier
from penstock.db.pool import Store
from penstock.db.session import Session
from penstock.protocol.answers import HeldKey
from penstock.protocol.record import view_of
from penstock.protocol.task import State
from penstock.protocol.tenant import own_key, tenant_of_key
from penstock.runtime import metrics
from penstock.runtime.periodic import is_set_within
from penstock.runtime.sweeps import Sweeps

_WAITING_COUNTED = 10_000  # behind one ordering key
_LOOK_SECONDS = 1.0
_SOON_SECONDS = 0.02  # most transactions that hold a key enqueue a task and end
_AT_ONCE = 10  # rows, some thousand tasks


class Overdue(NamedTuple):
    """How many promotions a look took, and how many tasks it promoted."""

    taken: int
    promoted: int


async def list_held_keys(session: Session, limit: int, after: str | None = None) -> list[HeldKey]:
    """Ordering keys held by a task in CRITICAL_ERROR, by key, from after ``after``, a key as it is stored."""
    return [
        view_of(HeldKey, row, key=own_key(row["key"]), since=row["finished_at"], tenant=tenant_of_key(row["key"]))
        for row in await session.fetch("list_held_keys", after, limit, _WAITING_COUNTED)
    ]


async def release_keys(session: Session, keys: Sequence[str]) -> dict[str, int | None]:
    """Release held ordering keys, inside a transaction; returns the task promoted by each that was held."""
    held = [row["key"] for row in await session.fetch("release_ordering_keys", list(keys))]
    promoted = await _promote(session, held) if held else {}
    return {key: promoted.get(key) for key in held}


async def release_orphaned_keys(session: Session, limit: int, after: str = "") -> tuple[int, str | None]:
    """Look at up to ``limit`` held ordering keys, inside a transaction, and release those whose task cannot be retried;
    returns how many, and the last key looked at, None at the end."""
    ((keys, last),) = await session.fetch("release_orphaned_keys", limit, after)
    if keys:
        await _promote(session, keys)
    return len(keys), last


async def promote_overdue(
    session: Session, limit: int, *, also_running: bool = False, sweeps: Sweeps | None = None
) -> Overdue:
    """Promote the tasks of up to ``limit`` overdue promotions, inside a transaction.

    For a cancelled task, the next of its ordering key is promoted. also_running: not only of overdue promotions.
    Fewer than ``limit`` are taken if no more are left. Keys that another transaction holds are put off, in few rows.
    """
    behind: dict[int, str] = {}
    sweeps = sweeps or Sweeps()
    with sweeps.look() as since:
        overdue = await session.fetch("take_overdue_promotions", limit, also_running, since)
    for task_ids, keys, late_seconds in overdue:
        behind.update(zip(task_ids, keys, strict=True))
        sweeps.found(late_seconds)
    if not behind:
        return Overdue(len(overdue), 0)
    rows = await session.fetch("promote_tasks", list(behind))
    for task_id, _ in rows:
        del behind[task_id]
    for action, count in Counter(action for _, action in rows).items():
        metrics.TRANSITIONS.labels(action, State.SCHEDULED).inc(count)
    return Overdue(len(overdue), len(rows) + len(await _promote(session, behind.values())))


async def _promote(session: Session, keys: Collection[str]) -> dict[str, int]:
    """Promote the next task of each ordering key without a running one; returns the promoted tasks by key.

    A key without waiting tasks is forgotten, and only then its head is locked, which an enqueuer holds until its task
    is visible. A task that was cancelled meanwhile makes it look again. No other transaction is waited for: a key whose
    head or next task one holds is looked at later.
    """
    promoted: dict[str, int] = {}
    actions: Counter[str] = Counter()
    rest, locked, missed, later = list(keys), set[str](), set[str](), list[str]()
    while rest:
        taken, empty = [], []
        for key, task_id, action in await session.fetch("promote_successors", rest):
            if task_id is None:
                empty.append(key)
            elif action is None:
                taken.append(key)
            else:
                promoted[key] = task_id
                actions[action] += 1
        later += [key for key in taken if key in missed]
        rest = [key for key in taken if key not in missed]
        missed.update(taken)
        if empty:
            rest += [key for key in await _forget(session, empty) if key not in locked]
            locked.update(empty)
    await _look_later(session, later)
    session.wakes |= bool(promoted)
    for action, count in actions.items():
        metrics.TRANSITIONS.labels(action, State.SCHEDULED).inc(count)
    return promoted


async def _forget(session: Session, keys: Sequence[str]) -> list[str]:
    """Forget keys without waiting tasks, or look later if another transaction holds one; returns those with a task."""
    heads = {row["key"]: row["is_held"] for row in await session.fetch("lock_ordering_heads", keys)}
    held = [key for key, is_held in heads.items() if is_held]
    await _look_later(session, [key for key, is_held in heads.items() if not is_held])
    forgotten = {row["key"] for row in await session.fetch("forget_ordering_keys", held)} if held else set()
    return [key for key in held if key not in forgotten]


async def _look_later(session: Session, keys: Sequence[str]) -> None:
    if keys:
        session.left_keys = True
        await session.fetch("look_later", keys)


class Promotions:
    """Promote the next tasks of ordering keys that no scheduler claimed in time.

    A resulter that settles tasks of many ordering keys promotes their next tasks in one row, from which a scheduler
    claims them (see finish_tasks). Those not claimed within a few seconds are promoted one by one here, so that older
    schedulers, claims by rules and queries by state see them. Resulters do this, and supervisors for when the last
    resulter has gone. Keys that another transaction held then are promoted here too (see look_later).
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

    async def run_once(self, *, also_running: bool = False) -> float:
        """Promote the tasks of a few rows; returns the seconds to the next look. also_running: as promote_overdue."""
        sweeps = None if also_running else self._sweeps
        async with self._store.transaction() as session:
            overdue = await promote_overdue(session, _AT_ONCE, also_running=also_running, sweeps=sweeps)
        self._store.left_keys = False  # such keys were left before
        if overdue.promoted:
            self._notifier.wake()
        # Most rows promote nothing: of keys in which no task waits. Those put off again are too few to fill a look.
        return 0.0 if overdue.promoted or overdue.taken == _AT_ONCE else _LOOK_SECONDS

    async def end_all(self) -> None:
        """Promote the tasks of all rows, since the version that follows a resulter may know of none."""
        while not await self.run_once(also_running=True):
            pass

    async def work_or_wait(self) -> float:
        seconds = await self.run_once()
        if not seconds or not await is_set_within(self._left, seconds):
            return 0.0
        self._left.clear()
        return _SOON_SECONDS
