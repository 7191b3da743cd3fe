"""Names of schedules: a tenant's are kept behind the tenant's name, and shown to it without."""

from __future__ import annotations

from dataclasses import replace

from penstock.db.session import Session
from penstock.protocol.caller import bound_to
from penstock.protocol.errors import ScheduleNotFound
from penstock.protocol.tenant import kept_key, own_key
from penstock.schedules.model import NewSchedule


async def schedule_of_caller(session: Session, name: str, *, lock: bool = False) -> str:
    """The name that a schedule is kept by which the caller calls so; ``lock``: hold its rows, for a change.

    Raises ScheduleNotFound where the caller's tenant has none.
    """
    bound = bound_to()
    if bound is None:
        return name
    found = await _kept_name(session, bound, name, lock=lock)
    if found is None:
        raise ScheduleNotFound(name)
    return found


async def new_schedule_of_caller(session: Session, schedule: NewSchedule) -> NewSchedule:
    """The schedule with the name that it is to be kept by: a tenant's stand behind the tenant's name."""
    bound = bound_to()
    if bound is None:
        return schedule
    kept = await _kept_name(session, bound, schedule.name, lock=True) or kept_key(bound, schedule.name)
    return replace(schedule, name=kept)


def shown_name(kept: str) -> str:
    """A schedule's name as the caller knows it."""
    return kept if bound_to() is None else own_key(kept)


async def _kept_name(session: Session, bound: str, name: str, *, lock: bool) -> str | None:
    """What a tenant's key made comes first; then what a key that is bound to none made for the tenant."""
    names = [kept_key(bound, name), name]
    rows = await session.fetch("lock_schedules_of" if lock else "find_schedules_of", names, bound)
    found = {row["name"] for row in rows}
    return next((kept for kept in names if kept in found), None)
