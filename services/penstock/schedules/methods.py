"""The methods about schedules."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import msgspec

from penstock.db.session import Session
from penstock.schedules import views
from penstock.schedules.model import (
    CreateSchedule,
    DeleteSchedule,
    GetSchedule,
    ImportSchedules,
    ListRuns,
    ListSchedules,
    PauseSchedule,
    ReadImport,
    ResumeSchedule,
    RunSchedule,
    ScheduleChange,
    UpdateSchedule,
)
from penstock.schedules.names import new_schedule_of_caller, schedule_of_caller, shown_name
from penstock.schedules.store import (
    RunRecord,
    ScheduleRecord,
    change_schedule,
    list_runs,
    list_schedules,
    read_import,
    read_schedule,
    run_cursor,
    start_import,
)

PART_ENTRIES = 500  # of an import, read and written by the supervisor in one transaction
UPCOMING = 5


class Schedules:
    """Carries out commands about schedules; ``commands`` is what a table of commands takes.

    session, transaction: open one. poke: called when a task was added.
    """

    def __init__(
        self,
        session: Callable[[], AbstractAsyncContextManager[Session]],
        transaction: Callable[[], AbstractAsyncContextManager[Session]],
        poke: Callable[[], None],
    ) -> None:
        self._session = session
        self._transaction = transaction
        self._poke = poke

    @property
    def commands(self) -> dict[type, Callable[[Any], Awaitable[Any]]]:
        changes = (CreateSchedule, UpdateSchedule, DeleteSchedule, PauseSchedule, ResumeSchedule, RunSchedule)
        return dict.fromkeys(changes, self._change) | {
            GetSchedule: self._get,
            ListSchedules: self._list,
            ListRuns: self._runs,
            ImportSchedules: self._import,
            ReadImport: self._import_status,
        }

    async def _change(
        self, command: ScheduleChange
    ) -> views.ScheduleDetail | views.ScheduleRun | views.ScheduleDeleted:
        """Raises InvalidParams, ScheduleNotFound."""
        async with self._transaction() as session:
            if isinstance(command, CreateSchedule):
                command = await new_schedule_of_caller(session, command)
            else:
                command = replace(command, name=await schedule_of_caller(session, command.name, lock=True))
            changed = await change_schedule(session, command)
        if isinstance(changed, RunRecord):
            self._poke()
            return views.run(changed)
        if isinstance(command, DeleteSchedule):
            return views.ScheduleDeleted(changed.id, shown_name(changed.schedule.name))
        return _detail(changed)

    async def _get(self, command: GetSchedule) -> views.ScheduleDetail:
        """Raises ScheduleNotFound."""
        async with self._session() as session:
            return _detail(await read_schedule(session, await schedule_of_caller(session, command.name)))

    async def _list(self, command: ListSchedules) -> views.SchedulePage:
        async with self._session() as session:
            records = await list_schedules(session, command)
        cursor = str(records[-1].id) if len(records) == command.limit else None
        return views.SchedulePage([views.schedule(record) for record in records], cursor)

    async def _runs(self, command: ListRuns) -> views.SchedulePageOfRuns:
        """Raises ScheduleNotFound."""
        async with self._session() as session:
            name = await schedule_of_caller(session, command.name)
            runs = await list_runs(session, name, before=command.before, limit=command.limit)
        cursor = run_cursor(runs[-1]) if len(runs) == command.limit else None
        return views.SchedulePageOfRuns([views.run(run) for run in runs], cursor)

    async def _import(self, command: ImportSchedules) -> views.ImportStarted:
        """Keep the entries as they came; the supervisor checks and writes them."""
        entries = command.entries
        cuts = [*range(0, len(entries), PART_ENTRIES), len(entries)]
        parts = ((start, msgspec.json.encode(entries[start:end]).decode("utf-8")) for start, end in pairwise(cuts))
        async with self._transaction() as session:
            import_id = await start_import(session, parts, total=len(entries), replaces=command.replace)
        return views.ImportStarted(import_id, len(entries))

    async def _import_status(self, command: ReadImport) -> views.ImportStatus:
        """Raises ScheduleNotFound."""
        async with self._session() as session:
            return views.import_status(await read_import(session, command.id))


def _detail(record: ScheduleRecord) -> views.ScheduleDetail:
    upcoming: list[datetime] = []
    instant = record.next_at
    if instant is not None or (record.schedule.paused and record.problem is None):
        rule = record.schedule.rule(record.created_at)
        if instant is None:
            instant = rule.next_after(datetime.now(UTC)).at
        while instant is not None and len(upcoming) < UPCOMING:
            upcoming.append(instant)
            instant = rule.next_after(instant).at
    return views.schedule_detail(record, upcoming)
