"""Fail tasks whose claim Postgres refuses, so that they do not block all others.

A claim is one statement over a thousand tasks, refused as a whole because of one. The batch is tried by halves, without
effect, and tasks that are refused alone fail permanently.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from penstock.db.pool import Store
from penstock.db.session import Session
from penstock.protocol.errors import HANDLER_ERROR, Refused
from penstock.protocol.reports import error_text
from penstock.protocol.task import Failure, Stretch
from penstock.runtime.logs import get_logger
from penstock.tasks import claim, settle

log = get_logger()


class _Undone(Exception):
    """Undoes a savepoint."""


async def give_up_unclaimable(
    store: Store, refused: Refused, limit: int, stretches: Sequence[Stretch], *, due_seconds: float, hold_keys: bool
) -> int:
    """Fail the tasks because of which the claim of these stretches was refused; returns how many.

    Raises Refused: not even a plain claim of them is accepted.
    """
    async with store.transaction() as session:
        ids = await claim.find_candidates(session, limit, stretches, due_seconds)
        await session.plan_for(len(ids))
        refused_ids = await _refused_alone(session, ids)
        if not refused_ids:
            return 0
        rows = await session.fetch("claim_plainly", refused_ids)
        problem = "Postgres refuses to claim the task"
        error = error_text(HANDLER_ERROR, problem, type="Unclaimable", message=str(refused))
        failures = [Failure(row["id"], row["claim"], error, None) for row in rows]
        await settle.fail(session, failures, hold_keys=hold_keys)
        await claim.confirm(session, rows[0]["claim"])
    for row in rows:
        log.error("task_unclaimable", task_id=row["id"], claim=row["claim"], action=row["action"], reason=str(refused))
    return len(rows)


async def _refused_alone(session: Session, ids: Sequence[int]) -> list[int]:
    """The tasks whose claim is refused when tried alone."""
    if not ids:
        return []
    try:
        with suppress(_Undone):
            async with session.savepoint():
                await session.fetch("claim_candidates", ids)
                raise _Undone
    except Refused:
        if len(ids) == 1:
            return [*ids]
        middle = len(ids) // 2
        return await _refused_alone(session, ids[:middle]) + await _refused_alone(session, ids[middle:])
    return []
