"""Schedules in Postgres: created, changed, read, inside the caller's transaction.

Instants are compared with the database's clock. A change locks the schedule's clock too: nothing fires meanwhile.
"""

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import msgspec
from msgspec.structs import replace

from penstock.db.session import Session
from penstock.protocol.errors import InvalidParams, ScheduleNotFound
from penstock.schedules import model
from penstock.schedules.cron import CronError
from penstock.schedules.policy import Next

PART_ENTRIES = 500  # of an import; the supervisor writes a part in one transaction


async def rewrite_schedule(session: Session, current: model.ScheduleRecord, **changes: Any) -> model.ScheduleRecord:
    """current: locked. Raises InvalidParams."""
    changed = replace(current, **changes)
    if changed == current and current.problem is None:
        return current
    return await write_schedule(session, changed, replace_existing=True)


async def write_schedule(
    session: Session, schedule: model.NewSchedule, *, replace_existing: bool
) -> model.ScheduleRecord:
    """Create or replace a schedule. Raises InvalidParams."""
    (outcome,) = await create_batch(session, [schedule], replace_existing=replace_existing)
    if isinstance(outcome, InvalidParams):
        raise outcome
    return await read_schedule(session, schedule.name)


async def create_batch(
    session: Session, wanted: Sequence[model.NewSchedule], *, replace_existing: bool
) -> list[bool | InvalidParams]:
    """Write schedules; one that cannot be written does not affect others. Returns whether each is new, or its error.

    replace_existing: an existing one is replaced; its clock goes on while its ``timing_key`` is unchanged, so that a
    program may write it at each start without losing a fire.
    """
    found = await session.fetch("lock_schedules", [one.name for one in wanted], None) if replace_existing else []
    standing = {row["name"]: record_of(row) for row in found}
    ((began, now),) = await session.fetch("read_instants")
    last_place = {schedule.name: place for place, schedule in enumerate(wanted)}
    outcomes: list[bool | InvalidParams] = [
        InvalidParams("name", f"{schedule.own_name!r} is a schedule's name already: pass replace, or take another one")
        for schedule in wanted
    ]
    ready: dict[str, tuple[int, model.NewSchedule, Next]] = {}
    for place, schedule in enumerate(wanted):
        if schedule.name in ready or (replace_existing and last_place[schedule.name] != place):
            outcomes[place] = InvalidParams("name", f"{schedule.own_name!r} comes more than once in this batch")
            continue
        before = standing.get(schedule.name)
        if schedule.paused is None:  # creating it again, as programs do at each start, does not end a pause
            schedule = replace(schedule, paused=before is not None and before.paused)
        try:
            ready[schedule.name] = place, schedule, _first(schedule, before, began, now)
        except InvalidParams as exc:
            outcomes[place] = exc
    if ready:
        _, schedules, clocks = zip(*ready.values(), strict=True)
        columns = {name: [getattr(one, name) for one in schedules] for name in model.NewSchedule.__struct_fields__}
        columns["labels"] = [json.dumps(labels) for labels in columns["labels"]]
        instants = [clock.at for clock in clocks], [clock.due for clock in clocks]
        rows = await session.fetch("write_schedules", *columns.values(), *instants, replace_existing)
        for row in rows:
            outcomes[ready[row["name"]][0]] = row["fresh"]
    return outcomes


def _first(schedule: model.NewSchedule, standing: model.ScheduleRecord | None, began: datetime, now: datetime) -> Next:
    """The next instant of a new or changed schedule. Raises InvalidParams if it would never fire."""
    if schedule.paused:
        return Next(None, None)
    after, anchor = now, began
    if standing is not None:
        if standing.timing_key == schedule.timing_key and standing.problem is None:
            return Next(standing.next_at, standing.due_at)
        anchor = standing.created_at
        after = now if standing.last_at is None else max(now, standing.last_at)
    try:
        following = schedule.rule(anchor).next_after(after)
    except CronError as exc:  # of a stored one, whose zone is known no more
        raise InvalidParams(exc.field, exc.problem) from None
    if following.at is None:
        if schedule.end_at is None:
            raise InvalidParams("expression", f"{schedule.expression!r} comes no more")
        raise InvalidParams("end_at", f"leaves nothing to fire: {schedule.expression!r} does not come before it")
    return following


# Reading


async def read_schedule(
    session: Session, *names: str, tenant: str | None = None, lock: bool = False
) -> model.ScheduleRecord:
    """The first that there is. lock: lock it and its clock, for a change. Raises ScheduleNotFound."""
    rows = await session.fetch("lock_schedules" if lock else "read_schedules", names, tenant)
    found = {row["name"]: row for row in rows}
    for name in names:
        if name in found:
            return record_of(found[name])
    raise ScheduleNotFound(names[-1])


# Imports of many


async def start_import(session: Session, entries: Sequence[msgspec.Raw], *, replaces: bool) -> int:
    """Store the entries of an import, in parts, for the supervisor; returns its id."""
    import_id: int = await session.value("create_import", replaces, len(entries))
    starts = range(0, len(entries), PART_ENTRIES)
    parts = [msgspec.json.encode(entries[start : start + PART_ENTRIES]).decode() for start in starts]
    await session.fetch("insert_import_parts", import_id, starts, parts)
    return import_id


def record_of(row: Any) -> model.ScheduleRecord:
    """Of a statement with the columns of a schedule and its payload."""
    return msgspec.convert(dict(row) | {"labels": msgspec.json.decode(row["labels"])}, model.ScheduleRecord)
