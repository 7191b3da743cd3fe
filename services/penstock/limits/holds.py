"""Holds: after a handler met a rate limit, no task of its action, or of one limit key, is sent for a while."""

from collections.abc import Sequence
from typing import NamedTuple

from penstock.db.session import Session

LONGEST_HOLD_SECONDS = 86_400.0  # that a handler may ask for; an operator ends one by any change of the limits


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
