"""What supervisors do about schedules: fire due ones, to the second, and carry out imports.

A clock's row is locked while its schedule is fired, and its ``last_at`` only grows, so any number of supervisors fire
an instant once. Firing sleeps until the next schedule is due, by the database's clock, and at most a second, for a new
one may come.
"""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from itertools import zip_longest
from time import monotonic
from typing import Any, NamedTuple

import msgspec

from penstock.db.notify import Notifier
from penstock.db.pool import PATIENT_SECONDS, Store
from penstock.db.session import Session
from penstock.protocol.answers import Overlap
from penstock.protocol.errors import InvalidParams, PenstockError, Refused, RpcError
from penstock.protocol.json_text import decode_any, replace_unstorable
from penstock.protocol.task import NewTask
from penstock.runtime import metrics
from penstock.runtime.halving import in_halves
from penstock.runtime.logs import log
from penstock.runtime.sweeps import Sweeps
from penstock.schedules import methods
from penstock.schedules.cron import CronError
from penstock.schedules.model import NAME_MAX_CHARS, CreateSchedule, NewSchedule, ScheduleRecord, check_not_a_jobs
from penstock.schedules.policy import Plan, plan
from penstock.schedules.store import create_batch, record_of
from penstock.settings.model import Settings
from penstock.tasks.enqueue import enqueue

LOOK_SECONDS = 1.0
_ROUNDS_AT_ONCE = 2  # of a backlog: one is decided while Postgres stores the other
DECIDING_SECONDS = 2.0  # of a round at most: Postgres ends a transaction that is idle for a minute
ROUND_BYTES = 16 * 1024 * 1024  # of payloads, which are in memory several times
_READ_AT_ONCE = 250
_AT_A_STRETCH_SECONDS = 0.02
PUT_OFF_SECONDS = 5.0  # a schedule whose keys another transaction holds; each look costs the others its wait
_ERRORS_KEPT = 100  # of an import, or a few more


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

    async def give_up(part: Sequence[_Due], error: PenstockError) -> FiringSummary:
        first = part[0].schedule
        if isinstance(error, Refused):  # of this one alone
            await _stop(session, first.id, first.name, str(error))
        else:
            await session.fetch("put_clocks_off", [one.schedule.id for one in part], PUT_OFF_SECONDS)
            log.warning("schedules_put_off", schedules=len(part), first=first.name, reason=str(error))
        return FiringSummary(len(part))

    parts = await in_halves(due, partial(_store, session), lambda one, error: give_up([one], error), give_up)
    return FiringSummary(*map(sum, zip(*parts, strict=True)))


async def _store(session: Session, due: Sequence[_Due], hurried: bool) -> FiringSummary:
    runs: list[tuple[Any, ...]] = []
    clocks: list[tuple[Any, ...]] = []
    counts: Counter[str] = Counter()
    async with session.savepoint(hurried=hurried):
        added = iter(await enqueue(session, [task for one in due for task in one.tasks], source="schedule"))
        for one in due:
            schedule_id, decided = one.schedule.id, one.plan
            ids = [next(added).id for _ in one.tasks]
            for instant, task_id in zip_longest(decided.run, ids):
                runs.append((schedule_id, instant, "SKIPPED" if task_id is None else "FIRED", task_id, None, 1))
            misfires = decided.misfires
            if misfires is not None:
                since = misfires.since if misfires.instants > 1 else None
                runs.append((schedule_id, misfires.until, "MISSED", None, since, misfires.instants))
            clocks.append((schedule_id, decided.next.at, decided.next.due, decided.last, ids[-1] if ids else None))
        await session.fetch("record_runs", *map(list, zip(*runs, strict=True)))
        await session.fetch("move_clocks", *map(list, zip(*clocks, strict=True)))
    for _, _, outcome, *_, instants in runs:
        counts[outcome] += instants
    for outcome, count in counts.items():
        metrics.SCHEDULE_RUNS.labels(outcome).inc(count)
    return FiringSummary(len(due), counts["FIRED"], counts["SKIPPED"], counts["MISSED"])


async def _stop(session: Session, schedule_id: int, name: str, problem: str) -> None:
    await session.fetch("stop_clock", schedule_id, problem[:1000].replace("\0", "\ufffd"))
    log.error("schedule_stopped", id=schedule_id, name=name, reason=problem, next="penstock schedules show")


class ScheduleFiring:
    """Fires what is due; ``run_once`` is one transaction."""

    def __init__(self, *, store: Store, notifier: Notifier, settings: Settings) -> None:
        self._store = store
        self._notifier = notifier
        self._settings = settings
        self._sweeps = Sweeps()
        self._wait_sweeps = Sweeps()

    async def run_once(self, sweeps: Sweeps | None = None) -> FiringSummary:
        """sweeps: without it, the look begins at the front. Raises Unavailable."""
        started = monotonic()
        async with self._store.transaction() as session:
            fired = await fire_due(session, self._settings, sweeps)
        if fired.tasks:
            self._notifier.wake()
        if fired.missed:
            log.warning("schedule_fires_missed", instants=fired.missed, schedules=fired.schedules)
        if fired.schedules:
            log.debug(
                "schedules_fired", schedules=fired.schedules, tasks=fired.tasks, skipped=fired.skipped,
                seconds=round(monotonic() - started, 4),
            )  # fmt: skip
        return fired

    async def fire_or_wait(self) -> float:
        fired = await self.run_once(self._sweeps)
        if fired.schedules >= self._settings.schedule_batch_size:
            rounds = (self.run_once(self._sweeps) for _ in range(_ROUNDS_AT_ONCE))
            for outcome in await asyncio.gather(*rounds, return_exceptions=True):
                if isinstance(outcome, BaseException):
                    raise outcome
        if fired.schedules:
            return 0
        with self._wait_sweeps.look() as since:
            wait: float | None = await self._store.value("read_wait", since)
        if wait is None:
            return LOOK_SECONDS
        self._sweeps.found(-wait)
        # Another supervisor holds due schedules that were not claimed: look again soon, not at once.
        return min(LOOK_SECONDS, wait) if wait > 0 else 0.05


class Imports:
    """Carries out ``schedule.create_many``; ``run_once`` is one part of a call, in one transaction."""

    def __init__(self, *, store: Store, settings: Settings) -> None:
        self._store = store
        self._settings = settings

    async def run_once(self) -> int:
        """Returns how many entries were read. Raises Unavailable."""
        async with self._store.transaction(lock_wait_seconds=PATIENT_SECONDS) as session:
            running = await session.fetch("claim_import")
            if not running:
                return 0
            import_id, replaces = running[0]
            ((place, entries),) = await session.fetch("take_import_part", import_id)
            listed = msgspec.json.decode(entries, type=list[msgspec.Raw])
            outcomes, errors = await self._write(session, import_id, place, listed, replaces)
            counts = outcomes.count(True), outcomes.count(False), len(errors)
            kept = replace_unstorable(json.dumps(errors[:_ERRORS_KEPT]))
            await session.fetch("note_import", import_id, *counts, kept, _ERRORS_KEPT)
        log.info("schedules_imported", id=import_id, entries=len(outcomes), refused=len(errors))
        return len(outcomes)

    async def work_or_wait(self) -> float:
        return 0 if await self.run_once() else LOOK_SECONDS

    async def _write(
        self, session: Session, import_id: int, place: int, entries: list[msgspec.Raw], replaces: bool
    ) -> tuple[list[bool | InvalidParams], list[dict[str, Any]]]:
        """Check and write entries; returns outcomes, in no order, and errors that name their entry."""
        outcomes: dict[int, bool | InvalidParams] = {}
        wanted: dict[int, NewSchedule] = {}
        for number, entry in enumerate(entries):
            await asyncio.sleep(0)  # fires go on: to find that a date never comes takes long
            try:
                wanted[number] = self._read(entry)
                check_not_a_jobs(wanted[number].name)
            except InvalidParams as exc:
                outcomes[number] = exc
        reserved = [wanted[number].name for number in wanted if number in outcomes]
        if reserved:
            own = {row["name"] for row in await session.fetch("find_jobs_of_import", reserved, import_id)}
            outcomes = {n: exc for n, exc in outcomes.items() if n not in wanted or wanted[n].name not in own}
        wanted = {number: schedule for number, schedule in wanted.items() if number not in outcomes}
        written = await _write_all(session, list(wanted.values()), replaces)
        outcomes |= zip(wanted, written, strict=True)
        errors = []
        for number, outcome in sorted(outcomes.items()):
            if isinstance(outcome, InvalidParams):
                entry = decode_any(bytes(entries[number]))
                name = entry.get("name") if isinstance(entry, dict) else None
                shown = name[:NAME_MAX_CHARS] if isinstance(name, str) else None
                errors.append({"index": place + number, "name": shown} | outcome.data)
        return list(outcomes.values()), errors

    def _read(self, entry: msgspec.Raw) -> NewSchedule:
        try:
            command = methods.create.command(bytes(entry), self._settings)
        except InvalidParams:
            raise
        except RpcError as exc:  # a payload over its limit
            raise InvalidParams("payload", exc.message) from None
        except Exception:
            log.exception("schedule_not_read")  # one entry must not hold up all imports
            raise InvalidParams("schedules", "could not be read: the log of the supervisor says why") from None
        assert isinstance(command, CreateSchedule)
        if command.replace:
            raise InvalidParams("replace", "belongs to the call as a whole, beside schedules")
        return command.schedule


async def _write_all(session: Session, wanted: list[NewSchedule], replaces: bool) -> list[bool | InvalidParams]:
    """Write schedules; one that Postgres refuses affects no other."""

    async def write(part: Sequence[NewSchedule], hurried: bool) -> Sequence[bool | InvalidParams]:
        async with session.savepoint(hurried=hurried):
            return await create_batch(session, part, replace_existing=replaces)

    async def refuse(_one: NewSchedule, error: PenstockError) -> Sequence[bool | InvalidParams]:
        return [InvalidParams("schedules", str(error))]

    # A lock makes the whole part be tried again: an import reports the outcome of each entry.
    parts = await in_halves(wanted, write, refuse, errors=(Refused,))
    return [outcome for part in parts for outcome in part]
