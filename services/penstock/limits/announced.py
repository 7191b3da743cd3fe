"""Which workers run which actions, as they announce it, and the tasks that wait for one."""

from collections.abc import Sequence

from penstock.db.session import Session
from penstock.limits.model import AnnouncedAction
from penstock.protocol.reports import Announced
from penstock.protocol.task import ANNOUNCED_SECONDS, MAX_ACTIONS_SHOWN
from penstock.protocol.views import raw, view_of
from penstock.tasks.records import columns_of

COUNTED = 10_000  # tasks of one action


async def record(session: Session, announcements: Sequence[Announced]) -> None:
    given = columns_of(announcements, "action", "worker", "version", "description", "params", "result")
    await session.fetch("note_announced", *given, ANNOUNCED_SECONDS)


async def list_announced(session: Session) -> list[AnnouncedAction]:
    """Actions by name, those that no worker runs any more included."""
    return [
        view_of(AnnouncedAction, row, params=raw(row["params"]), result=raw(row["result"]))
        for row in await session.fetch("list_announced", ANNOUNCED_SECONDS, MAX_ACTIONS_SHOWN, COUNTED)
    ]
