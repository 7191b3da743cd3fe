"""Changes of schedules by their methods, with the records that they leave."""

from __future__ import annotations

from typing import Any

from penstock.db.context import within
from penstock.db.session import Session
from penstock.methods.table import METHODS, read_command
from penstock.schedules.store import read_schedule
from penstock.settings.model import Settings


async def change_schedule(session: Session, method: str, params: bytes, settings: Settings) -> Any:
    """Carry out a method; returns the schedule as it is then, as it was for a delete, or the run."""
    command = read_command(method, params, settings)
    name = command.schedule.name if method == "schedule.create" else command.name
    before = await read_schedule(session, name) if method == "schedule.delete" else None
    answer = await METHODS[method].carry_out(within(session, settings), command)
    if method == "schedule.run_now":
        return answer
    return before or await read_schedule(session, name)
