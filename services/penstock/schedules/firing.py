"""Fires due schedules: locks their clocks, adds tasks, records runs, moves the clocks, in the caller's transaction.

A clock's row is locked while its schedule is fired, and its ``last_at`` only grows, so any number of supervisors fire
an instant once.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from time import monotonic
from typing import Any, NamedTuple

from penstock.db.session import Session
from penstock.protocol.errors import PenstockError, Refused
from penstock.protocol.task import NewTask
from penstock.protocol.tenant import own_key
from penstock.runtime import metrics
from penstock.runtime.halving import in_halves
from penstock.runtime.logs import log
from penstock.runtime.sweeps import Sweeps
from penstock.schedules.cron import CronError, timing
from penstock.schedules.policy import Missed, Overlap, Plan, Rule, plan, queue_of, render
from penstock.schedules.store import add_tasks
from penstock.settings.model import Settings

DECIDING_SECONDS = 2.0  # of a round at most: Postgres ends a transaction that is idle for a minute
ROUND_BYTES = 16 * 1024 * 1024  # of payloads, which are in memory several times
_READ_AT_ONCE = 250
_AT_A_STRETCH_SECONDS = 0.02
_MISSED = {policy.value: policy for policy in Missed}
PUT_OFF_SECONDS = 5.0  # a schedule whose keys another transaction holds; each look costs the others its wait


class FiringSummary(NamedTuple):
    """One round: due schedules, tasks added for them, and instants skipped and missed."""

    schedules: int = 0
    tasks: int = 0
    skipped: int = 0
    missed: int = 0


class _Due(NamedTuple):
    """A due schedule and its plan. tasks: of the first instants of the plan."""

    id: int
    name: str
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
            sweeps.found((row["now"] - row["due_at"]).total_seconds())
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
            lateness.append((row["now"] - row["due_at"]).total_seconds())
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
    (schedule_id, name, expression, timezone, start_at, end_at, jitter_seconds, missed, max_missed, max_lateness,
     overlap, action, payload, priority, attempts, timeout_seconds, ordering_key, tenant, created_at, next_at, _due_at,
     now, busy) = row  # fmt: skip
    when = timing(expression, timezone, start_at or created_at.replace(microsecond=0))
    rule = Rule(name, when, start_at, end_at, jitter_seconds, _MISSED[missed], max_missed, max_lateness)
    most = None if overlap == Overlap.SKIP else max(1, ROUND_BYTES // len(payload))
    decided = plan(rule, next_at, now, settings.schedule_grace_seconds, most)
    instants = decided.run
    if overlap == Overlap.SKIP:
        instants = [] if busy else instants[:1]
    elif ordering_key is None and overlap == Overlap.QUEUE:
        ordering_key = queue_of(schedule_id)
    own_name = own_key(name)
    # No run_at: a past one sorts before the position that claims have reached.
    tasks = [
        NewTask(
            action, render(payload, own_name, schedule_id, instant), None, None, priority, None, ordering_key,
            attempts or settings.max_attempts, timeout_seconds, tenant=tenant,
        )
        for instant in instants
    ]  # fmt: skip
    return _Due(schedule_id, name, decided, tasks)


async def _carry_out(session: Session, due: Sequence[_Due]) -> FiringSummary:
    """Store tasks, runs and clocks. A schedule whose values Postgres rejects is stopped, and one whose keys another
    transaction holds is fired later, without an effect on others."""

    async def store(part: Sequence[_Due], hurried: bool) -> FiringSummary:
        async with session.savepoint(hurried=hurried):
            return await _store(session, part)

    async def stop(one: _Due, error: PenstockError) -> FiringSummary:
        if isinstance(error, Refused):
            await _stop(session, one.id, one.name, str(error))
            return FiringSummary(1)
        return await put_off([one], error)

    async def put_off(part: Sequence[_Due], error: PenstockError) -> FiringSummary:
        await session.fetch("put_clocks_off", [one.id for one in part], PUT_OFF_SECONDS)
        log.warning("schedules_put_off", schedules=len(part), first=part[0].name, reason=str(error))
        return FiringSummary(len(part))

    parts = await in_halves(due, store, stop, put_off)
    return FiringSummary(*map(sum, zip(*parts, strict=True)))


async def _store(session: Session, due: Sequence[_Due]) -> FiringSummary:
    added = iter(await add_tasks(session, [task for one in due for task in one.tasks]))
    runs: list[tuple[Any, ...]] = []
    clocks: list[tuple[Any, ...]] = []
    skipped = missed = 0
    for one in due:
        decided = one.plan
        fires = len(one.tasks)
        newest = None
        for instant in decided.run[:fires]:
            newest = next(added)[0]
            runs.append((one.id, instant, "FIRED", newest, False, None, 1))
        for instant in decided.run[fires:]:
            skipped += 1
            runs.append((one.id, instant, "SKIPPED", None, False, None, 1))
        misfires = decided.misfires
        if misfires is not None:
            missed += misfires.instants
            since = misfires.since if misfires.instants > 1 else None
            runs.append((one.id, misfires.until, "MISSED", None, False, since, misfires.instants))
        clocks.append((one.id, decided.next.at, decided.next.due, decided.last, newest))
    await session.fetch("record_runs", *map(list, zip(*runs, strict=True)))
    await session.fetch("move_clocks", *map(list, zip(*clocks, strict=True)))
    fired = sum(len(one.tasks) for one in due)
    for outcome, count in (("FIRED", fired), ("SKIPPED", skipped), ("MISSED", missed)):
        if count:
            metrics.SCHEDULE_RUNS.labels(outcome).inc(count)
    return FiringSummary(len(due), fired, skipped, missed)


async def _stop(session: Session, schedule_id: int, name: str, problem: str) -> None:
    await session.fetch("stop_clock", schedule_id, problem[:1000].replace("\0", "\ufffd"))
    log.error("schedule_stopped", id=schedule_id, name=name, reason=problem, next="penstock schedules show")
