"""Fire schedules, to the second, and carry out imports.

Firing sleeps until the next schedule is due, by the database's clock, and at most a second, for a new one may come.
"""

import asyncio
from collections.abc import Sequence
from time import monotonic
from typing import Any

import msgspec

from penstock.db.notify import Notifier
from penstock.db.pool import PATIENT_SECONDS, Store
from penstock.db.session import Session
from penstock.methods.table import read_command
from penstock.protocol.errors import InvalidParams, PenstockError, Refused, RpcError
from penstock.protocol.json_text import decode_any
from penstock.runtime.halving import in_halves
from penstock.runtime.logs import log
from penstock.runtime.sweeps import Sweeps
from penstock.schedules.firing import FiringSummary, fire_due
from penstock.schedules.model import NAME_MAX_CHARS, CreateSchedule, NewSchedule, check_not_a_jobs
from penstock.schedules.store import create_batch, note_import
from penstock.settings.model import Settings

LOOK_SECONDS = 1.0
_ROUNDS_AT_ONCE = 2  # of a backlog: one is decided while Postgres stores the other


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
            await note_import(session, import_id, outcomes, errors)
        log.info("schedules_imported", id=import_id, entries=len(outcomes), refused=len(errors))
        return len(outcomes)

    async def work_or_wait(self) -> float:
        return 0 if await self.run_once() else LOOK_SECONDS

    async def _write(
        self, session: Session, import_id: int, place: int, entries: list[msgspec.Raw], replaces: bool
    ) -> tuple[list[bool | InvalidParams], list[dict[str, Any]]]:
        """Check and write entries; returns outcomes in their order, and errors that name their entry."""
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
        ordered = [outcomes[number] for number in range(len(entries))]
        errors = []
        for number, outcome in enumerate(ordered):
            if isinstance(outcome, InvalidParams):
                entry = decode_any(bytes(entries[number]))
                name = entry.get("name") if isinstance(entry, dict) else None
                shown = name[:NAME_MAX_CHARS] if isinstance(name, str) else None
                errors.append({"index": place + number, "name": shown} | outcome.data)
        return ordered, errors

    def _read(self, entry: msgspec.Raw) -> NewSchedule:
        try:
            command = read_command("schedule.create", entry, self._settings)
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
