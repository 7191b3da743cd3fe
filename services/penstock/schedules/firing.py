"""Fires due schedules: locks their clocks, adds tasks, records runs, moves the clocks, in the caller's transaction.

A clock's row is locked while its schedule is fired, and its ``last_at`` only grows, so any number of supervisors fire
an instant once.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from itertools import zip_longest
from time import monotonic
from typing import Any, NamedTuple

from penstock.db.session import Session
from penstock.protocol.errors import PenstockError, Refused
from penstock.protocol.task import NewTask
from penstock.runtime import metrics
from penstock.runtime.halving import in_halves
from penstock.runtime.logs import log
from penstock.runtime.sweeps import Sweeps
from penstock.schedules.cron import CronError
from penstock.schedules.model import ScheduleRecord
from penstock.schedules.policy import Overlap, Plan, plan
from penstock.schedules.store import add_tasks, record_of
from penstock.settings.model import Settings

DECIDING_SECONDS = 2.0  # of a round at most: Postgres ends a transaction that is idle for a minute
ROUND_BYTES = 16 * 1024 * 1024  # of payloads, which are in memory several times
_READ_AT_ONCE = 250
_AT_A_STRETCH_SECONDS = 0.02
PUT_OFF_SECONDS = 5.0  # a schedule whose keys another transaction holds; each look costs the others its wait


class FiringSummary(NamedTuple):
    """One round: due schedules, tasks added for them, and instants skipped and missed."""

    schedules: int = 0
    tasks: int = 0
    skipped: int = 0
    missed: int = 0


class _Due(NamedTuple):
    """A due schedule and its plan. tasks: of the first instants of the plan."""

    schedule: ScheduleRecord
    plan: Plan
    tasks: list[NewTask]


async def fire_due(session: Session, settings: Settings, sweeps: Sweeps | None = None) -> FiringSummary:
    """Fire a batch of due schedules, oldest first, and move their clocks. sweeps: None to search from the front."""
    limit = settings.schedule_batch_size
    sweeps = sweeps or Sweeps()
    with sweeps.look() as since:
        held = [row[0] for row in await session.fetch("claim_due_schedules", limit, since)]
    if not held:
        return FiringSummary()
    due: list[_Due] = []
    lateness: list[float] = []
    tasks = size = 0
    began = paused = monotonic()
    async with aclosing(_read(session, held)) as rows:
        async for row in rows:
            late = (row["now"] - row["due_at"]).total_seconds()
            sweeps.found(late)
            now = monotonic()
            if tasks >= limit or size >= ROUND_BYTES or now - began > DECIDING_SECONDS:
                break  # many instants were missed, or payloads are large: the other schedules follow in the next round
            if now - paused > _AT_A_STRETCH_SECONDS:
                await asyncio.sleep(0)  # the other duties of the process
                paused = monotonic()
            try:
                one = _decide(row, settings)
            except CronError as exc:
                await _stop(session, row["id"], row["name"], str(exc))
                continue
            lateness.append(late)
            due.append(one)
            tasks += len(one.tasks)
            size += sum(len(task.payload) for task in one.tasks)
    fired = await _carry_out(session, due)
    metrics.SCHEDULE_LATENESS_SECONDS.observe_many(lateness)
    return fired


async def _read(session: Session, held: Sequence[int]) -> AsyncGenerator[Any, None]:
    """The due schedules, as they were claimed; not all at once, for their payloads may be large."""
    for start in range(0, len(held), _READ_AT_ONCE):
        for row in await session.fetch("read_due_schedules", held[start : start + _READ_AT_ONCE]):
            yield row


def _decide(row: Any, settings: Settings) -> _Due:
    """Decide about a row of ``read_due_schedules``; a hundred thousand may be due at once."""
    schedule = record_of(row)
    skips = schedule.overlap is Overlap.SKIP
    most = None if skips else max(1, ROUND_BYTES // len(schedule.payload))
    rule = schedule.rule(schedule.created_at)
    decided = plan(rule, row["next_at"], row["now"], settings.schedule_grace_seconds, most)
    instants = decided.run
    if skips:
        instants = [] if row["busy"] else instants[:1]
    return _Due(schedule, decided, [schedule.task(instant, settings.max_attempts) for instant in instants])


async def _carry_out(session: Session, due: Sequence[_Due]) -> FiringSummary:
    """Store tasks, runs and clocks. A schedule whose values Postgres rejects is stopped, and one whose keys another
    transaction holds is fired later, without an effect on others."""

    async def store(part: Sequence[_Due], hurried: bool) -> FiringSummary:
        async with session.savepoint(hurried=hurried):
            return await _store(session, part)

    async def give_up(part: Sequence[_Due], error: PenstockError) -> FiringSummary:
        first = part[0].schedule
        if isinstance(error, Refused):  # of this one alone
            await _stop(session, first.id, first.name, str(error))
        else:
            await session.fetch("put_clocks_off", [one.schedule.id for one in part], PUT_OFF_SECONDS)
            log.warning("schedules_put_off", schedules=len(part), first=first.name, reason=str(error))
        return FiringSummary(len(part))

    parts = await in_halves(due, store, lambda one, error: give_up([one], error), give_up)
    return FiringSummary(*map(sum, zip(*parts, strict=True)))


async def _store(session: Session, due: Sequence[_Due]) -> FiringSummary:
    added = iter(await add_tasks(session, [task for one in due for task in one.tasks]))
    runs: list[tuple[Any, ...]] = []
    clocks: list[tuple[Any, ...]] = []
    counts: Counter[str] = Counter()
    for one in due:
        schedule_id, decided = one.schedule.id, one.plan
        ids = [next(added)[0] for _ in one.tasks]
        for instant, task_id in zip_longest(decided.run, ids):
            runs.append((schedule_id, instant, "SKIPPED" if task_id is None else "FIRED", task_id, False, None, 1))
        misfires = decided.misfires
        if misfires is not None:
            since = misfires.since if misfires.instants > 1 else None
            runs.append((schedule_id, misfires.until, "MISSED", None, False, since, misfires.instants))
        clocks.append((schedule_id, decided.next.at, decided.next.due, decided.last, ids[-1] if ids else None))
    for _, _, outcome, *_, instants in runs:
        counts[outcome] += instants
    await session.fetch("record_runs", *map(list, zip(*runs, strict=True)))
    await session.fetch("move_clocks", *map(list, zip(*clocks, strict=True)))
    for outcome, count in counts.items():
        metrics.SCHEDULE_RUNS.labels(outcome).inc(count)
    return FiringSummary(len(due), counts["FIRED"], counts["SKIPPED"], counts["MISSED"])


async def _stop(session: Session, schedule_id: int, name: str, problem: str) -> None:
    await session.fetch("stop_clock", schedule_id, problem[:1000].replace("\0", "\ufffd"))
    log.error("schedule_stopped", id=schedule_id, name=name, reason=problem, next="penstock schedules show")
