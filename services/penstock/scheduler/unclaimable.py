"""Fail tasks whose claim Postgres refuses, so that they do not block all others.

A claim is one statement over a thousand tasks, refused as a whole because of one. The batch is tried by halves, without
effect, and tasks that are refused alone fail permanently.
"""

from collections.abc import Sequence
from contextlib import suppress

from penstock.db.pool import Store
from penstock.protocol.errors import HANDLER_ERROR, PenstockError, Refused
from penstock.protocol.reports import error_text
from penstock.protocol.task import Failure, Stretch
from penstock.runtime.halving import in_halves
from penstock.runtime.logs import log
from penstock.settings.model import Settings
from penstock.tasks import claim, settle


class _Undone(Exception):
    """Undoes a savepoint."""


async def give_up_unclaimable(
    store: Store, settings: Settings, error: Refused, limit: int, stretches: Sequence[Stretch], due_seconds: float = 0.0
) -> int:
    """Fail the tasks because of which a claim was refused; returns how many. Raises Refused: there are none."""
    async with store.transaction() as session:
        ids = await claim.find_candidates(session, limit, stretches, due_seconds)
        await session.plan_for(len(ids))

        async def try_claim(part: Sequence[int], _hurried: bool) -> list[int]:
            with suppress(_Undone):
                async with session.savepoint():
                    await session.fetch("claim_candidates", part)
                    raise _Undone
            return []

        async def is_refused(task_id: int, _error: PenstockError) -> list[int]:
            return [task_id]

        parts = await in_halves(ids, try_claim, is_refused, errors=(Refused,))
        refused_ids = [task_id for part in parts for task_id in part]
        if not refused_ids:
            raise error
        rows = await session.fetch("claim_plainly", refused_ids)
        problem = "Postgres refuses to claim the task"
        text = error_text(HANDLER_ERROR, problem, type="Unclaimable", message=str(error))
        failures = [Failure(row["id"], row["claim"], text, None) for row in rows]
        await settle.fail(session, failures, hold_keys=settings.holds_ordering_keys)
        await claim.confirm(session, rows[0]["claim"])
    for row in rows:
        log.error("task_unclaimable", task_id=row["id"], claim=row["claim"], action=row["action"], reason=str(error))
    return len(rows)
