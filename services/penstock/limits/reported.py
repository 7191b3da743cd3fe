"""What workers report of actions: which of them run where, and holds, after a handler met a rate limit."""

from collections.abc import Sequence
from typing import NamedTuple

from penstock.db.session import Session, columns_of
from penstock.protocol.answers import AnnouncedAction
from penstock.protocol.record import view_of
from penstock.protocol.reports import Announced
from penstock.protocol.task import ANNOUNCED_SECONDS, MAX_ACTIONS_SHOWN
from penstock.protocol.views import raw

COUNTED = 10_000  # tasks of one action that wait for a worker
LONGEST_HOLD_SECONDS = 86_400.0  # that a handler may ask for; an operator ends one by any change of the limits


async def announce(session: Session, announcements: Sequence[Announced]) -> None:
    given = columns_of(announcements, "action", "worker", "version", "description", "params", "result")
    await session.fetch("note_announced", *given, ANNOUNCED_SECONDS)


async def list_announced(session: Session) -> list[AnnouncedAction]:
    """Actions by name, those that no worker runs any more included."""
    return [
        view_of(AnnouncedAction, row, params=raw(row["params"]), result=raw(row["result"]))
        for row in await session.fetch("list_announced", ANNOUNCED_SECONDS, MAX_ACTIONS_SHOWN, COUNTED)
    ]


class Hold(NamedTuple):
    """What the handler of a claim asks to be held. key: None for the task's own. whole: the action with all keys."""

    task_id: int
    claim: int
    seconds: float
    key: str | None
    whole: bool


async def hold(session: Session, holds: Sequence[Hold]) -> None:
    """Send no task of these actions or limit keys for a while; first of all in a transaction, as ``lock_rules``."""
    given = [list(column) for column in zip(*holds, strict=True)]
    await session.fetch("hold_actions", *given)
    await session.fetch("hold_gates", *given)
