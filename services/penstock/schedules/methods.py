"""The methods about schedules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import msgspec

from penstock.db.context import Context
from penstock.protocol.api_key import Permission
from penstock.protocol.caller import actions_of_caller, bound_to, check_actions, narrow_tenant, own_tenant
from penstock.protocol.checks import HIGHEST_ID, read_cursor, read_id, read_limit
from penstock.protocol.errors import AccessDenied, InvalidParams, ScheduleNotFound, TooLarge
from penstock.protocol.method import Scope, method
from penstock.protocol.params import decode
from penstock.protocol.task import BEGINNING, NewTask
from penstock.protocol.tenant import read_tenant
from penstock.schedules import store, views
from penstock.schedules.model import (
    IMPORT_LIMIT,
    CreateSchedule,
    ListRuns,
    ListSchedules,
    NewSchedule,
    ScheduleCreateManyParams,
    ScheduleCreateParams,
    ScheduleImportStatusParams,
    ScheduleListParams,
    ScheduleName,
    ScheduleRunsParams,
    ScheduleUpdateParams,
    UpdateSchedule,
    new_schedule,
    read_kept_name,
    read_labels,
    read_update,
)
from penstock.schedules.names import new_schedule_of_caller, schedule_of_caller, shown_name
from penstock.schedules.policy import render
from penstock.settings.model import Settings
from penstock.tasks.new_task import check_task_payload, new_task
from penstock.tasks.params import EnqueueParams

PART_ENTRIES = 500  # of an import, read and written by the supervisor in one transaction
UPCOMING = 5


def _read_create(given: ScheduleCreateParams, settings: Settings) -> CreateSchedule:
    return CreateSchedule(new_schedule(given, _template(given, settings)), given.replace)


def _template(given: ScheduleCreateParams, settings: Settings) -> NewTask:
    """The task that each fire makes, but for what is filled into its payload, which must have room too."""
    task = new_task(
        EnqueueParams(
            given.action,
            given.payload,
            priority=given.priority,
            ordering_key=given.ordering_key,
            max_attempts=given.max_attempts,
            timeout=given.timeout,
            tenant=given.tenant,
        ),
        settings,
    )
    check_task_payload(render(task.payload, given.name, HIGHEST_ID, BEGINNING.run_at), settings)
    return task


def _narrow_create(command: CreateSchedule) -> CreateSchedule:
    check_actions({command.schedule.action})
    return replace(command, schedule=replace(command.schedule, tenant=own_tenant(command.schedule.tenant)))


@method(
    "schedule.create", permission=Permission.ADMIN, scope=Scope.OWN, errors=(TooLarge,), read=_read_create,
    narrow=_narrow_create, by_queue=True,
)  # fmt: skip
async def create(context: Context, command: CreateSchedule) -> views.ScheduleDetail:
    """Have a task made by the clock, again and again."""
    async with context.transaction() as session:
        schedule = await new_schedule_of_caller(session, command.schedule)
        created = await store.create_schedule(session, schedule, replace_existing=command.replace)
    return _detail(created)


def _read_update(given: ScheduleUpdateParams, settings: Settings) -> UpdateSchedule:  # type: ignore[valid-type]
    def whole(members: Mapping[str, Any]) -> NewSchedule:
        return _read_create(decode(ScheduleCreateParams, msgspec.json.encode(members)), settings).schedule

    return read_update(given, whole)


def _narrow_update(command: UpdateSchedule) -> UpdateSchedule:
    if "action" in command.given:
        check_actions({msgspec.json.decode(command.given["action"])})
    if bound_to() is not None and "tenant" in command.given:
        raise InvalidParams("tenant", "of a schedule is not changed by a key that is bound to one")
    return command


@method(
    "schedule.update", permission=Permission.ADMIN, scope=Scope.OWN, errors=(ScheduleNotFound, TooLarge),
    read=_read_update, narrow=_narrow_update, by_queue=True,
)  # fmt: skip
async def update(context: Context, command: UpdateSchedule) -> views.ScheduleDetail:
    """Change what is named of a schedule and leave the rest."""
    async with context.transaction() as session:
        name = await schedule_of_caller(session, command.name, lock=True)
        updated = await store.update_schedule(session, replace(command, name=name))
    return _detail(updated)


def _read_name(given: ScheduleName, _settings: Settings) -> str:
    return read_kept_name(given.name)


@method(
    "schedule.get", permission=Permission.READ, scope=Scope.OWN, errors=(ScheduleNotFound,), read=_read_name
)  # fmt: skip
async def get(context: Context, name: str) -> views.ScheduleDetail:
    """Show a schedule, with its payload and the next few instants."""
    async with context.session() as session:
        return _detail(await store.read_schedule(session, await schedule_of_caller(session, name)))


def _read_list(given: ScheduleListParams, _settings: Settings) -> ListSchedules:
    return ListSchedules(
        None if given.labels is None else read_labels(given.labels),
        given.action,
        given.paused,
        read_limit(given.limit),
        read_cursor(given.cursor),
        read_tenant(given.tenant),
    )


@method("schedule.list", permission=Permission.READ, scope=Scope.OWN, read=_read_list, narrow=narrow_tenant)
async def list_schedules(context: Context, command: ListSchedules) -> views.SchedulePage:
    """List schedules, newest first, without their payloads."""
    async with context.session() as session:
        records = await store.list_schedules(session, command)
    cursor = str(records[-1].id) if len(records) == command.limit else None
    return views.SchedulePage([views.schedule(record) for record in records], cursor)


@method(
    "schedule.delete", permission=Permission.ADMIN, scope=Scope.OWN, errors=(ScheduleNotFound,), read=_read_name,
    by_queue=True,
)  # fmt: skip
async def delete(context: Context, name: str) -> views.ScheduleDeleted:
    """Delete a schedule; tasks that it made stay as they are."""
    async with context.transaction() as session:
        deleted = await store.delete_schedule(session, await schedule_of_caller(session, name, lock=True))
    return views.ScheduleDeleted(deleted.id, shown_name(deleted.schedule.name))


@method(
    "schedule.pause", permission=Permission.ADMIN, scope=Scope.OWN, errors=(ScheduleNotFound,), read=_read_name,
    by_queue=True,
)  # fmt: skip
async def pause(context: Context, name: str) -> views.ScheduleDetail:
    """Stop a schedule; the instants of the pause are not made up for."""
    return await _pause(context, name, paused=True)


@method(
    "schedule.resume", permission=Permission.ADMIN, scope=Scope.OWN, errors=(ScheduleNotFound,), read=_read_name,
    by_queue=True,
)  # fmt: skip
async def resume(context: Context, name: str) -> views.ScheduleDetail:
    """Let a schedule go on, from now."""
    return await _pause(context, name, paused=False)


async def _pause(context: Context, name: str, *, paused: bool) -> views.ScheduleDetail:
    async with context.transaction() as session:
        name = await schedule_of_caller(session, name, lock=True)
        record = await store.pause_schedule(session, name, paused=paused)
    return _detail(record)


@method(
    "schedule.run_now", permission=Permission.ADMIN, scope=Scope.OWN, errors=(ScheduleNotFound,), read=_read_name,
    by_queue=True,
)  # fmt: skip
async def run_now(context: Context, name: str) -> views.ScheduleRun:
    """Run a schedule once, beside its clock, also when it is paused."""
    async with context.transaction() as session:
        name = await schedule_of_caller(session, name, lock=True)
        run = await store.run_schedule(session, name, max_attempts=context.settings.max_attempts)
    context.wake()
    return views.run(run)


def _read_runs(given: ScheduleRunsParams, _settings: Settings) -> ListRuns:
    return ListRuns(read_kept_name(given.name), read_limit(given.limit), read_cursor(given.cursor))


@method(
    "schedule.runs", permission=Permission.READ, scope=Scope.OWN, errors=(ScheduleNotFound,), read=_read_runs
)  # fmt: skip
async def list_runs(context: Context, command: ListRuns) -> views.SchedulePageOfRuns:
    """List what became of a schedule's instants, newest first."""
    async with context.session() as session:
        name = await schedule_of_caller(session, command.name)
        runs = await store.list_runs(session, name, before=command.before, limit=command.limit)
    cursor = store.run_cursor(runs[-1]) if len(runs) == command.limit else None
    return views.SchedulePageOfRuns([views.run(run) for run in runs], cursor)


def _read_many(given: ScheduleCreateManyParams, _settings: Settings) -> ScheduleCreateManyParams:
    if not 1 <= len(given.schedules) <= IMPORT_LIMIT:
        raise InvalidParams("schedules", f"must hold 1 to {IMPORT_LIMIT} schedules, not {len(given.schedules)}")
    return given


def _narrow_many(given: ScheduleCreateManyParams) -> ScheduleCreateManyParams:
    if actions_of_caller() is not None:
        raise AccessDenied(403, "Not permitted: this API key is limited to actions: create schedules one by one")
    return given


# The supervisor writes an import later, entry by entry, without a caller to limit it to a tenant.
@method(
    "schedule.create_many", permission=Permission.ADMIN, scope=Scope.CLOSED, read=_read_many, narrow=_narrow_many
)  # fmt: skip
async def create_many(context: Context, given: ScheduleCreateManyParams) -> views.ImportStarted:
    """Take many schedules, to be written by the supervisor; schedule.import_status tells how far it is."""
    entries = given.schedules
    cuts = [*range(0, len(entries), PART_ENTRIES), len(entries)]
    parts = ((start, msgspec.json.encode(entries[start:end]).decode("utf-8")) for start, end in pairwise(cuts))
    async with context.transaction() as session:
        import_id = await store.start_import(session, parts, total=len(entries), replaces=given.replace)
    return views.ImportStarted(import_id, len(entries))


def _read_import(given: ScheduleImportStatusParams, _settings: Settings) -> int:
    return read_id(given.id, "id")


@method(
    "schedule.import_status", permission=Permission.READ, scope=Scope.CLOSED, errors=(ScheduleNotFound,),
    read=_read_import,
)  # fmt: skip
async def import_status(context: Context, import_id: int) -> views.ImportStatus:
    """Show how far a schedule.create_many has come."""
    async with context.session() as session:
        return views.import_status(await store.read_import(session, import_id))


def _detail(record: store.ScheduleRecord) -> views.ScheduleDetail:
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
