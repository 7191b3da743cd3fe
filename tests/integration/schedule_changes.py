"""Changes of schedules as the store makes them, with their records."""

from __future__ import annotations

from typing import Any

from penstock.db.session import Session
from penstock.methods.table import read_command
from penstock.schedules import store
from penstock.settings.model import Settings


async def change_schedule(session: Session, method: str, params: bytes, settings: Settings) -> Any:
    """Carry out a method; returns the schedule as it is then, as it was for a delete, or the run."""
    command = read_command(method, params, settings)
    match method:
        case "schedule.create":
            return await store.write_schedule(session, command.schedule, replace_existing=command.replace)
        case "schedule.update":
            return await store.update_schedule(session, command)
        case "schedule.delete":
            return await store.delete_schedule(session, command.name)
        case "schedule.run_now":
            return await store.run_schedule(session, command.name, max_attempts=settings.max_attempts)
    return await store.pause_schedule(session, command.name, paused=method == "schedule.pause")
