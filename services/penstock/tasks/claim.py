"""Claim due tasks, confirm or release claims, count them, and give up tasks that Postgres refuses to claim."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, NamedTuple

import asyncpg

from penstock.db.pool import Store
from penstock.db.session import Pair, Session, columns, columns_of
from penstock.protocol.errors import HANDLER_ERROR, PenstockError, Refused
from penstock.protocol.reports import error_text
from penstock.protocol.task import BEGINNING, EVERYTHING, Claimed, Failure, Position, Stretch
from penstock.runtime import metrics
from penstock.runtime.halving import in_halves
from penstock.runtime.logs import log
from penstock.settings.model import Settings
from penstock.tasks import settle

_MEMBERS = len(Claimed._fields)


class ClaimBatch(NamedTuple):
    """One claim. id: its token, by which the sending is confirmed. reached: the last position by priority."""

    id: int
    tasks: list[Claimed]
    reached: dict[int, Position]


class InFlight(NamedTuple):
    """How many tasks are claimed and unsettled; ``aged`` of them were claimed before ``aged_before``."""

    tasks: int
    aged: int
    aged_before: datetime


async def claim(
    session: Session | Store,
    limit: int,
    *,
    stretches: Sequence[Stretch] = EVERYTHING,
    now: datetime | None = None,
    due_seconds: float = 0.0,
) -> ClaimBatch | None:
    """Claim up to ``limit`` due tasks by priority, run_at, id, out of ``stretches``; None when there is none.

    due_seconds: only tasks due for that long; without it, also tasks promoted in an ordering key, of any priority. Once
    there are limits or routes, this finds nothing; see ``claim_by_rules``.
    """
    rows = await session.fetch("claim_tasks", limit, now, *_columns_of(stretches), due_seconds)
    return await _batch(session, rows)


async def claim_ready(
    session: Session | Store, limit: int, *, stretches: Sequence[Stretch], due_seconds: float, sent: Sequence[int]
) -> ClaimBatch | None:
    """As ``claim``, at less cost, but nothing while tasks are promoted many at a time. sent: batches to confirm."""
    rows = await session.fetch("claim_ready_tasks", limit, None, *_columns_of(stretches), due_seconds, list(sent))
    return await _batch(session, rows)


async def claim_by_rules(
    session: Session | Store,
    limit: int,
    *,
    stretches: Sequence[Stretch] = EVERYTHING,
    due_seconds: float = 0.0,
    rooms: Mapping[str, int] = {},
) -> tuple[ClaimBatch | None, int]:
    """As ``claim``, with limits or routes; also returns how many tasks were diverted to a gate or a route.

    rooms: limited actions that are locked, and how many tasks of each are claimed instead of being diverted.
    """
    given = limit, None, *_columns_of(stretches), due_seconds, list(rooms), list(rooms.values())
    rows = await session.fetch("claim_tasks_by_rules", *given)
    return await _batch(session, rows), rows[0]["diverted"]


async def put_aside(
    session: Session | Store, limit: int, priority: int, after: Position, spared: Sequence[str] = ()
) -> tuple[int, int, Position | None]:
    """Divert limited and routed tasks among ``limit`` due ones, but for those of the actions ``spared``; returns how
    many it saw and diverted, and the last."""
    (row,) = await session.fetch("put_tasks_aside", limit, priority, *after, list(spared))
    looked, diverted, run_at, task_id = row
    return looked, diverted, None if task_id is None else Position(run_at, task_id)


async def claim_by_route(session: Session | Store, limit: int, route: str) -> tuple[ClaimBatch | None, int]:
    """Claim up to ``limit`` due tasks of a route, in the same order; also returns how many were diverted to a gate."""
    rows = await session.fetch("claim_tasks_by_route", limit, route)
    return await _batch(session, rows), rows[0]["diverted"]


async def claim_at_gates(session: Session, limits: Mapping[str, int]) -> tuple[ClaimBatch | None, Counter[str]]:
    """Claim due tasks at gates that are locked, up to a limit for each; also returns how many by gate."""
    rows = await session.fetch("claim_tasks_at_gates", list(limits), list(limits.values()))
    return await _batch(session, rows), Counter(row["gate"] for row in rows)


async def read_priorities(session: Session | Store, limit: int) -> list[int]:
    """Up to ``limit`` priorities of tasks due now or later, highest first."""
    return [row[0] for row in await session.fetch("read_priorities", limit)]


async def read_seconds_to_next(session: Session | Store, stretches: Sequence[Stretch], limit: int) -> float | None:
    """Seconds until the next task of these stretches becomes due, None for none. limit: of priorities looked at."""
    lows, highs, *_ = _columns_of(stretches)
    seconds: float | None = await session.value("read_seconds_to_next", lows, highs, limit)
    return seconds


class _Undone(Exception):
    """Undoes a savepoint."""


async def give_up_unclaimable(
    store: Store, settings: Settings, error: Refused, limit: int, stretches: Sequence[Stretch], due_seconds: float = 0.0
) -> int:
    """Fail the tasks because of which a claim was refused; returns how many. Raises Refused: there are none.

    A claim is one statement over a thousand tasks, refused as a whole because of one. The batch is tried by halves,
    without effect, and tasks that are refused alone fail permanently.
    """
    async with store.transaction() as session:
        rows = await session.fetch("find_candidates", limit, None, *_columns_of(stretches), due_seconds)
        await session.plan_for(len(rows))

        async def try_claim(part: Sequence[int], _hurried: bool) -> None:
            with suppress(_Undone):
                async with session.savepoint():
                    await session.fetch("claim_candidates", part)
                    raise _Undone

        refused: list[int] = []

        async def note(task_id: int, _error: PenstockError) -> None:
            refused.append(task_id)

        await in_halves([row["id"] for row in rows], try_claim, note, errors=(Refused,))
        if not refused:
            raise error
        rows = await session.fetch("claim_plainly", refused)
        problem = "Postgres refuses to claim the task"
        text = error_text(HANDLER_ERROR, problem, type="Unclaimable", message=str(error))
        failures = [Failure(row["id"], row["claim"], text, None) for row in rows]
        await settle.fail(session, failures, hold_keys=settings.holds_ordering_keys)
        await confirm(session, rows[0]["claim"])
    for row in rows:
        log.error("task_unclaimable", task_id=row["id"], claim=row["claim"], action=row["action"], reason=str(error))
    return len(rows)


async def confirm(session: Session | Store, *batch_ids: int) -> None:
    """Note that all tasks of these batches were sent or released."""
    await session.fetch("confirm_claim", batch_ids)


async def release(session: Session, pairs: Iterable[Pair], *, silent_seconds: float | None = None) -> int:
    """Release claims, with their attempt; returns how many. silent_seconds: also those last reported so long ago."""
    ids, claims = columns(pairs)
    return len(await session.fetch("release_tasks", ids, claims, silent_seconds)) if ids else 0


async def count_in_flight(
    session: Session, limit: int, *, since: datetime = BEGINNING.run_at, route: str | None = None
) -> InFlight:
    """Count up to ``limit`` ACQUIRED tasks of a route, or of none, claimed at ``since`` or later."""
    statement, more = ("count_in_flight", ()) if route is None else ("count_in_flight_by_route", (route,))
    (row,) = await session.fetch(statement, limit, since, *more)
    return InFlight(*row)


def _columns_of(stretches: Sequence[Stretch]) -> list[list[Any]]:
    return columns_of(stretches, "low", "high", "after.run_at", "after.id")


async def _batch(session: Session | Store, rows: Sequence[asyncpg.Record]) -> ClaimBatch | None:
    """The rows of a claim: the members of Claimed, or nulls, then perhaps priority and last run_at."""
    if not rows or rows[0][0] is None:
        return None
    metrics.BATCH_SIZE.labels("claim").observe(len(rows))
    last = (row for row in rows if row.get("last_run_at") is not None)
    reached = {row["priority"]: Position(row["last_run_at"], row["id"]) for row in last}
    tasks = [tuple.__new__(Claimed, row[:_MEMBERS]) for row in rows]
    begun = [task.id for task in tasks if task.journal is not None]
    if begun:
        carried = dict(map(tuple, await session.fetch("read_carried_journals", begun)))
        tasks = [task if task.journal is None else task._replace(journal=carried.get(task.id)) for task in tasks]
    return ClaimBatch(rows[0][1], tasks, reached)
