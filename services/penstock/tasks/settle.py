"""Record outcomes of attempts, and cancel tasks."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from operator import attrgetter
from typing import Any, NamedTuple

import asyncpg

from penstock.db.session import Pair, Session, columns, columns_of
from penstock.protocol.reports import SharedResult, Succeeded
from penstock.protocol.task import ANNOUNCED_SECONDS, MAX_ATTEMPTS_LIMIT, Failure, State
from penstock.runtime import metrics
from penstock.tasks import ordering

PROMOTIONS_FROM = 16  # tasks promoted at a time from which on one row for all is cheaper than one for each


async def finish(
    session: Session,
    results: Mapping[Pair, str],
    workers: Mapping[Pair, str | None] | None = None,
    shared: Iterable[SharedResult] = (),
) -> int:
    """ACQUIRED to SUCCESS for each (id, claim) that still holds; returns how many. Ids are distinct."""
    worker_of = (workers or {}).get
    rows = [(*pair, result, worker_of(pair)) for pair, result in results.items()]
    for one in shared:
        rows += zip(one.task_ids, repeat(one.claim), repeat(one.result), repeat(one.worker), strict=False)
    if not rows:
        return 0
    rows.sort()
    metrics.BATCH_SIZE.labels("finish").observe(len(rows))
    finished = 0
    for action, count, of_workflows, promoted, keys, wakes in await session.fetch(
        "finish_tasks", *map(list, zip(*rows, strict=True)), PROMOTIONS_FROM
    ):
        session.wakes |= wakes
        if count:
            session.settled_steps |= of_workflows > 0
            metrics.TRANSITIONS.labels(action, State.SUCCESS).inc(count)
            finished += count
        elif promoted:
            metrics.TRANSITIONS.labels(action, State.SCHEDULED).inc(promoted)
        elif rest := await ordering._forget(session, keys):
            await ordering._promote(session, rest)
    return finished


async def finish_few(session: Session, results: Sequence[Succeeded]) -> set[int]:
    """As ``finish``, for a few tasks, outside a transaction; returns the ids: never of tasks with an ordering key."""
    metrics.BATCH_SIZE.labels("finish").observe(len(results))
    finished: set[int] = set()
    given = columns_of(sorted(results, key=attrgetter("task_id")), "task_id", "claim", "result", "worker")
    for action, moved, workflows, is_awaited in await session.fetch("finish_few_tasks", *given):
        session.settled_workflows += workflows or ()
        session.wakes |= is_awaited
        metrics.TRANSITIONS.labels(action, State.SUCCESS).inc(len(moved))
        finished.update(moved)
    return finished


async def note_run_times(session: Session, *times: Mapping[str, tuple[int, float]]) -> None:
    """Add run times that workers report: by action, the number of attempts and their total seconds."""
    rows = [(action, *ran) for one in times for action, ran in one.items()]
    if rows:
        await session.fetch("note_run_times", *map(list, zip(*rows, strict=True)))


async def read_attempts(session: Session, pairs: Iterable[Pair]) -> dict[Pair, tuple[int, int]]:
    """(attempts, max_attempts) of each claim that still holds its task."""
    ids, claims = columns(pairs)
    rows = await session.fetch("read_attempts", ids, claims) if ids else []
    return {(row["id"], row["claim"]): (row["attempts"], row["max_attempts"]) for row in rows}


async def find_claims(session: Session, by_attempt: Iterable[tuple[int, int]]) -> dict[tuple[int, int], int]:
    """Claims of ACQUIRED tasks by (id, attempt), for legacy result ids."""
    # The driver refuses larger numbers, which no task has.
    ids, attempts = columns(pair for pair in by_attempt if 0 < pair[1] <= MAX_ATTEMPTS_LIMIT)
    rows = await session.fetch("find_claims_by_attempt", ids, attempts) if ids else []
    return {(row["id"], row["attempts"]): row["claim"] for row in rows}


async def fail(session: Session, failures: Sequence[Failure], *, hold_keys: bool = False) -> set[int]:
    """ACQUIRED to ERROR with its delay, or to CRITICAL_ERROR where there is none. Ids are distinct.

    Returns those whose claim held. hold_keys: those in CRITICAL_ERROR hold their ordering keys, and nothing follows.
    """
    settled: set[int] = set()
    again = [f for f in failures if f.delay_seconds is not None]
    if again:
        given = columns_of(again, "id", "claim", "error", "delay_seconds", "suspect", "worker")
        settled |= _count(await session.fetch("delay_tasks", *given), State.ERROR)
    final = [f for f in failures if f.delay_seconds is None]
    if final:
        given = columns_of(final, "id", "claim", "error", "worker")
        rows = await _settle(session, "fail_tasks_permanently", *given, into=State.CRITICAL_ERROR, hold_keys=hold_keys)
        settled |= {row["id"] for row in rows}
    return settled


async def refund(session: Session, failures: Sequence[Failure]) -> set[int]:
    """Refund lost attempts: do not count them, and send their tasks alone; returns those whose claim still held."""
    given = columns_of(failures, "id", "claim", "error")
    return {row["id"] for row in await session.fetch("refund_attempts", *given)} if failures else set()


class PutOff(NamedTuple):
    """How often and for how long a task was put off before, without an attempt."""

    snoozes: int = 0
    unknown_seconds: float | None = None
    is_announced: bool = False


async def read_postponed(session: Session, pairs: Iterable[Pair]) -> dict[Pair, PutOff]:
    """Of each claim that still holds its task."""
    rows = await session.fetch("read_postponed", *columns(pairs), ANNOUNCED_SECONDS)
    return {(row["id"], row["claim"]): PutOff(*tuple(row)[2:]) for row in rows}


async def note_heartbeats(
    session: Session, beats: dict[Pair, str | None], workers: Mapping[Pair, str | None] | None = None
) -> int:
    """Record heartbeats, with progress as JSON text and the worker if known; returns how many. Ids are distinct."""
    ids, claims = columns(beats)
    given = ids, claims, list(beats.values()), [*map((workers or {}).get, beats)]
    return len(await session.fetch("note_heartbeats", *given)) if ids else 0


async def cancel(session: Session, ids: Sequence[int], reason: str | None = None) -> set[int]:
    """Any live state to CANCELLED, inside a transaction; returns the ids that were live."""
    rows = await _settle(session, "cancel_tasks", list(ids), reason, into=State.CANCELLED)
    waited = [row["id"] for row in rows if row["waited"]]
    if waited:
        await session.fetch("end_waits_of", waited)
    return {row["id"] for row in rows}


async def _settle(session: Session, name: str, *args: Any, into: State, hold_keys: bool = False) -> list[Any]:
    """Make tasks final, then promote the next tasks of their ordering keys, or hold the keys; inside a transaction."""
    rows = await session.fetch(name, *args)
    session.settled_steps |= any(row["workflow"] is not None for row in rows)
    # One task of a key runs at a time, so keys are distinct.
    keys = {row["ordering_key"]: row["id"] for row in rows if row["ordering_key"] is not None}
    if keys and hold_keys:
        await session.fetch("lock_ordering_heads_at_once", list(keys))
        await session.fetch("hold_ordering_keys", list(keys), list(keys.values()))
    elif keys:
        await ordering._promote(session, keys)
    _count(rows, into)
    return rows


def _count(rows: Sequence[asyncpg.Record], state: State) -> set[int]:
    for action, count in Counter(row["action"] for row in rows).items():
        metrics.TRANSITIONS.labels(action, state).inc(count)
    return {row["id"] for row in rows}
