"""The methods about schedules, whose names are stored behind the tenant's, and shown to the tenant without it."""

import json
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import asdict, replace

from penstock.db.session import Session
from penstock.protocol import answers
from penstock.protocol.answers import Accepted, Overlap
from penstock.protocol.api_key import Permission, actions_of_caller, bound_to, check_actions, narrow_tenant
from penstock.protocol.checks import HIGHEST_ID, read_cursor
from penstock.protocol.errors import AccessDenied, InvalidParams, ScheduleNotFound, TooLarge
from penstock.protocol.method import Scope, checked, decode, method
from penstock.protocol.record import view_of
from penstock.protocol.task import BEGINNING
from penstock.protocol.tenant import stored_key, tenant_of_key
from penstock.protocol.views import raw, timestamp
from penstock.runtime import metrics
from penstock.runtime.logs import log
from penstock.schedules import model, store
from penstock.schedules.cron import CronError
from penstock.schedules.model import CreateSchedule
from penstock.schedules.policy import render, run_name
from penstock.settings.model import Settings
from penstock.tasks.enqueue import enqueue
from penstock.tasks.params import EnqueueParams, check_task_payload, new_task

UPCOMING = 5
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_change = partial(method, permission=Permission.ADMIN, scope=Scope.OWN, errors=(ScheduleNotFound,), by_queue=True)


def _read_create(given: model.ScheduleCreateParams, settings: Settings) -> CreateSchedule:
    model.check_name(given.name, "name")  # here, since it is filled in
    params = EnqueueParams(
        given.action, given.payload, priority=given.priority, ordering_key=given.ordering_key,
        max_attempts=given.max_attempts, timeout=given.timeout, tenant=given.tenant,
    )  # fmt: skip
    task = new_task(checked(params), settings, large=False)
    # Checked with the longest values filled in.
    check_task_payload(render(task.payload, given.name, HIGHEST_ID, BEGINNING.run_at), settings, large=False)
    return CreateSchedule(model.new_schedule(given, task), given.replace)


def _narrow_create(command: CreateSchedule) -> CreateSchedule:
    check_actions({command.schedule.action})
    return CreateSchedule(narrow_tenant(command.schedule), command.replace)


@_change("schedule.create", errors=(TooLarge,), read=_read_create, narrow=_narrow_create)
async def create(session: Session, command: CreateSchedule) -> answers.ScheduleDetail:
    """Create a schedule, which creates tasks at set times."""
    names = _names(command.schedule.name)
    rows = await session.fetch("lock_schedules" if command.replace else "read_schedules", names, bound_to())
    actions = {row["name"]: row["action"] for row in rows}
    name = next((one for one in names if one in actions), names[0])
    schedule = replace(command.schedule, name=name)
    model.check_not_a_jobs(schedule.own_name)
    if command.replace and name in actions:
        check_actions({actions[name]})
    return await _detail(session, await store.write_schedule(session, schedule, replace_existing=command.replace))


def _changes(given: Any) -> dict[str, Any]:
    return {name: value for name, value in asdict(given).items() if name != "name" and value is not msgspec.UNSET}


def _read_update(given: model.ScheduleUpdateParams) -> Any:  # type: ignore[valid-type]
    command: Any = given
    if not _changes(command):
        raise InvalidParams("name", "is given alone: name what is to change, too")
    model.check_stored_name(command.name, "name")
    return command


def _narrow_update(command: Any) -> Any:
    if bound_to() is not None and "tenant" in _changes(command):
        raise InvalidParams("tenant", "of a schedule is not changed by a key that is bound to one")
    return command


@_change("schedule.update", errors=(ScheduleNotFound, TooLarge), read=_read_update, narrow=_narrow_update)
async def update(session: Session, command: Any, settings: Settings) -> answers.ScheduleDetail:
    """Change what is named of a schedule and leave the rest."""
    current = await _find(session, command.name, lock=True)
    return await _detail(session, await update_schedule(session, current, _changes(command), settings))


async def update_schedule(
    session: Session, current: model.ScheduleRecord, given: dict[str, Any], settings: Settings
) -> model.ScheduleRecord:
    """current: locked. Raises InvalidParams, TooLarge, AccessDenied."""
    members = msgspec.json.encode(current.params() | given)
    checked = _read_create(decode(model.ScheduleCreateParams, members), settings).schedule
    check_actions({current.action, checked.action})  # also of another payload alone
    owner = tenant_of_key(current.name)
    if owner not in (None, checked.tenant):
        raise InvalidParams("tenant", f"must stay {owner!r}, whose API key made the schedule")
    return await store.rewrite_schedule(session, current, **asdict(checked) | {"name": current.name})


@method("schedule.get", permission=Permission.READ, scope=Scope.OWN, errors=(ScheduleNotFound,))
async def get(session: Session, given: model.ScheduleName) -> answers.ScheduleDetail:
    """Show a schedule, its payload and its next few runs."""
    return await _detail(session, await _find(session, given.name))


@method("schedule.list", permission=Permission.READ, scope=Scope.OWN, narrow=narrow_tenant)
async def list_schedules(session: Session, given: model.ScheduleListParams) -> answers.SchedulePage:
    """List schedules, newest first, without their payloads."""
    labels = json.dumps(given.labels) if given.labels else None
    page = read_cursor(given.cursor), given.limit, labels, given.action, given.paused, given.tenant
    records = [store.record_of(row) for row in await session.fetch("list_schedules", *page)]
    cursor = str(records[-1].id) if len(records) == given.limit else None
    return answers.SchedulePage(
        schedules=[view_of(answers.Schedule, _members(record)) for record in records], cursor=cursor
    )


@_change("schedule.delete")
async def delete(session: Session, given: model.ScheduleName) -> answers.ScheduleDeleted:
    """Delete a schedule; its tasks stay."""
    deleted = await _lock(session, given)
    await session.fetch("delete_schedules", [deleted.name])
    log.info("schedule_deleted", name=deleted.name)
    return answers.ScheduleDeleted(id=deleted.id, name=_members(deleted)["name"], deleted=True)


@_change("schedule.pause")
async def pause(session: Session, given: model.ScheduleName) -> answers.ScheduleDetail:
    """Pause a schedule; runs in the meantime are not made up."""
    return await _detail(session, await store.rewrite_schedule(session, await _lock(session, given), paused=True))


@_change("schedule.resume")
async def resume(session: Session, given: model.ScheduleName) -> answers.ScheduleDetail:
    """Resume a schedule, from now on."""
    return await _detail(session, await store.rewrite_schedule(session, await _lock(session, given), paused=False))


@_change("schedule.run_now", wakes=True)
async def run_now(session: Session, given: model.ScheduleName, settings: Settings) -> answers.ScheduleRun:
    """Trigger a schedule now, even if paused."""
    standing = await _lock(session, given)
    instant: datetime = await session.value("read_instant")
    added: list[Accepted] = []
    if standing.overlap is not Overlap.SKIP or not await session.value("is_live_task", standing.last_task_id):
        task = standing.task(instant, settings.max_attempts)
        added = await enqueue(session, [task], source="schedule")
    (row,) = await session.fetch("record_manual_run", standing.id, instant, added[0].id if added else None)
    metrics.SCHEDULE_RUNS.labels(row["outcome"]).inc()
    return _run(standing.id, dict(row) | ({"outcome": added[0].state} if added else {}))


@method("schedule.runs", permission=Permission.READ, scope=Scope.OWN, errors=(ScheduleNotFound,))
async def list_runs(session: Session, given: model.ScheduleRunsParams) -> answers.SchedulePageOfRuns:
    """List the runs of a schedule and their outcomes, newest first."""
    schedule = await _find(session, given.name)
    before = read_cursor(given.cursor)
    try:
        instant = None if before is None else _EPOCH + before * _MICROSECOND
    except OverflowError:
        raise InvalidParams("cursor", f"must be that of the page before, not {before}") from None
    rows = await session.fetch("list_runs", schedule.id, instant, given.limit)
    cursor = str((rows[-1]["scheduled_at"] - _EPOCH) // _MICROSECOND) if len(rows) == given.limit else None
    return answers.SchedulePageOfRuns(runs=[_run(schedule.id, row) for row in rows], cursor=cursor)


def _run(schedule_id: int, row: Any) -> answers.ScheduleRun:
    return view_of(answers.ScheduleRun, row, run=run_name(schedule_id, row["scheduled_at"]))


def _narrow_many(given: model.ScheduleCreateManyParams) -> model.ScheduleCreateManyParams:
    if actions_of_caller() is not None:
        raise AccessDenied(403, "Not permitted: this API key is limited to actions: create schedules one by one")
    return given


# The supervisor writes an import later, entry by entry, without a caller to limit it to a tenant.
@method("schedule.create_many", permission=Permission.ADMIN, scope=Scope.CLOSED, narrow=_narrow_many)
async def create_many(session: Session, given: model.ScheduleCreateManyParams) -> answers.ImportStarted:
    """Import many schedules in the background; schedule.import_status shows the progress."""
    import_id = await store.start_import(session, given.schedules, replaces=given.replace)
    return answers.ImportStarted(id=import_id, total=len(given.schedules))


@method("schedule.import_status", permission=Permission.READ, scope=Scope.CLOSED, errors=(ScheduleNotFound,))
async def import_status(session: Session, given: model.ScheduleImportStatusParams) -> answers.ImportStatus:
    """Show how far a schedule.create_many has come."""
    rows = await session.fetch("read_import", int(given.id))
    if not rows:
        raise ScheduleNotFound(int(given.id))
    (row,) = rows
    state = "RUNNING" if row["finished_at"] is None else "DONE"
    return view_of(answers.ImportStatus, row, state=state, errors=msgspec.json.decode(row["errors"]))


async def _detail(session: Session, record: model.ScheduleRecord) -> answers.ScheduleDetail:
    upcoming: list[datetime] = []
    instant = record.next_at
    if instant is not None or (record.paused and record.problem is None):
        with suppress(CronError):  # a paused one whose zone is known no more
            rule = record.rule(record.created_at)
            if instant is None:
                instant = rule.next_after(await session.value("read_instant")).at
            while instant is not None and len(upcoming) < UPCOMING:
                upcoming.append(instant)
                instant = rule.next_after(instant).at
    return view_of(answers.ScheduleDetail, _members(record), upcoming=[timestamp(one) for one in upcoming])


def _members(record: model.ScheduleRecord) -> dict[str, Any]:
    name = record.name if bound_to() is None else record.own_name
    return asdict(record) | {"name": name, "payload": raw(record.payload)}


async def _lock(session: Session, given: model.ScheduleName) -> model.ScheduleRecord:
    """The caller's schedule, locked for a change. Raises ScheduleNotFound; AccessDenied if it is of another action."""
    standing = await _find(session, given.name, lock=True)
    check_actions({standing.action})
    return standing


async def _find(session: Session, name: str, *, lock: bool = False) -> model.ScheduleRecord:
    """The caller's schedule. lock: for a change. Raises ScheduleNotFound."""
    return await store.read_schedule(session, *_names(name), tenant=bound_to(), lock=lock)


def _names(name: str) -> list[str]:
    """As a schedule of the caller may be stored: by a key of its tenant, which is preferred, or by another key."""
    bound = bound_to()
    return [name] if bound is None else [stored_key(bound, name), name]
