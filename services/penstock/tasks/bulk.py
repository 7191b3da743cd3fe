"""Bulk operations, batch by batch.

A batch walks the ids of one table, from the job's cursor up to the highest id when the job was made. It reads and
changes a bounded number of records, so filters need no index and no lock is held for long. A record that another
transaction holds, such as a claim, is not waited for: the batch ends before it, and the next one begins there.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import msgspec

from penstock.db.session import Session
from penstock.protocol.errors import StateConflict
from penstock.protocol.task import FINAL_STATES, State
from penstock.tasks import reschedule, settle
from penstock.tasks.bulk_jobs import MAX_ERRORS, Batch, BatchResult, BulkJob
from penstock.tasks.filters import BulkWork, Operation, Selection

LOOKED_AT = 10_000  # records in one batch
PICKED = 1000
PICKED_BYTES = 16 * 1024 * 1024
COUNTED = 50_000  # records looked at to count; beyond, the number is estimated
SAMPLE = 10
HELD_TRIES = 100  # of a record that another transaction holds, before it is skipped
HELD_REST_SECONDS = 0.05
_GOLDEN = 0.6180339887498949


@dataclass(frozen=True, slots=True)
class Count:
    """How many tasks match. count: found; estimate: of all records, if too many; sample: the lowest ids."""

    count: int
    exact: bool
    estimate: int
    sample: Sequence[int]


@dataclass(frozen=True, slots=True)
class _Range:
    """The records of a job: ids after ``after`` up to ``top``, created no later than ``now``."""

    after: int
    top: int
    now: datetime


async def count_matches(session: Session, work: BulkWork, *, top: int, now: datetime) -> Count:
    """Count the matching tasks in bounded time, inside a transaction."""
    await session.fetch("plan_jobs")
    select = work.select
    within = _range(select, top, now)
    row = (
        await session.fetch(_COUNT[_is_settled(select)], within.after, within.top, COUNTED, *_filters(select, within))
    )[0]
    count, seen, first, last = row["matching"], row["seen"], row["first"], row["last"]
    if seen < COUNTED or last == within.top:
        return Count(count, True, count, row["ids"][:SAMPLE])
    # The other ids are assumed to be like these.
    return Count(count, False, count + round(count / (last - first + 1) * (within.top - last)), row["ids"][:SAMPLE])


async def preview(session: Session, work: BulkWork) -> Count:
    """Count the tasks of a job if it were made now, inside a transaction."""
    top, now = await session.value("read_last_id"), await session.value("read_clock")
    return await count_matches(session, work, top=top, now=now)


async def run_batch(session: Session, job: BulkJob) -> BatchResult:
    """Do one batch of a bulk job; the first one counts, the last one finds nothing left."""
    work = msgspec.convert(job.params, BulkWork)
    select = work.select
    if job.cursor is None:
        count = await count_matches(session, work, top=work.top, now=job.created_at)
        after = _range(select, work.top, job.created_at).after
        return BatchResult(
            {"after": after, "exact": count.exact}, total=count.estimate, done=count.exact and not count.count
        )
    within = _Range(job.cursor["after"], _range(select, work.top, job.created_at).top, job.created_at)
    look = job.cursor.get("look", PICKED)
    found = await _find(session, select, within, look=look, pick=PICKED)
    ids: list[int] = found["ids"]
    held = await _hold(session, select, ids)
    cut = next((place for place, task_id in enumerate(ids) if task_id in held.busy), None)
    if cut == 0:
        return _wait(job, ids[0], look)
    mine = [task_id for task_id in ids[:cut] if task_id in held.mine]
    changed = await _CHANGES[Operation(job.kind)](session, job, work, mine) if mine else set()
    refused = [task_id for task_id in mine if task_id not in changed]
    if cut is not None:
        after, seen, done = ids[cut] - 1, found["places"][cut] - 1, False
    elif len(ids) < found["matching"]:
        after, seen, done = ids[-1], found["places"][-1], False
    else:
        after, seen, done = found["last"] or within.top, found["seen"], found["seen"] < look
    return BatchResult(
        {"after": after, "exact": job.cursor["exact"], "look": _next_look(found["matching"], found["seen"])},
        seen=seen,
        changed=len(changed),
        refused=len(refused),
        errors=await _reasons(session, job, refused),
        done=done,
    )


async def _reasons(session: Session, job: BulkJob, refused: Sequence[int]) -> list[dict[str, Any]]:
    """Why tasks could not be changed, of as many as the job has room for."""
    reported = refused[: MAX_ERRORS - len(job.errors)]
    rows = {row["id"]: row for row in await session.fetch("read_states", reported)} if reported else {}
    errors = []
    for task_id in reported:
        row = rows.get(task_id)
        if row is None:
            reason = "its record is no longer kept"
        elif Operation(job.kind) is Operation.RETRY:
            gone = bool(row["payload_gone"])
            reason = (
                await reschedule.why_not_restarted(session, task_id, State(row["state"]), payload_gone=gone)
            ).message
        else:
            reason = StateConflict(task_id, row["state"], _DONE[Operation(job.kind)]).message
        errors.append({"id": task_id, "reason": reason})
    return errors


_DONE = {Operation.CANCEL: "cancelled", Operation.DELETE: "deleted", Operation.RESCHEDULE: "rescheduled"}

BATCHES: Mapping[str, Batch] = dict.fromkeys(Operation, run_batch)
"""By kind of job."""


@dataclass(frozen=True, slots=True)
class _LockedRecords:
    mine: set[int]
    busy: set[int]


async def _hold(session: Session, select: Selection, ids: Sequence[int]) -> _LockedRecords:
    """Lock the records that no other transaction holds; those of another state by now are left out."""
    if not ids:
        return _LockedRecords(set(), set())
    hold = "hold_settled_tasks" if _is_settled(select) else "hold_live_tasks"
    mine = {row["id"] for row in await session.fetch(hold, ids, list(select.states))}
    missing = [task_id for task_id in ids if task_id not in mine]
    if not missing:
        return _LockedRecords(mine, set())
    there = await session.fetch("read_states", missing)
    return _LockedRecords(mine, {row["id"] for row in there if row["state"] in select.states})


def _next_look(matching: int, seen: int) -> int:
    """How many records to look at to fill a batch, if they are like the last ones."""
    return LOOKED_AT if not matching else min(LOOKED_AT, max(PICKED, PICKED * seen // matching))


def _wait(job: BulkJob, task_id: int, look: int) -> BatchResult:
    """Try again a moment later, a limited number of times."""
    assert job.cursor is not None
    tries = job.cursor.get("tries", 0) + 1
    if tries < HELD_TRIES:
        return BatchResult({**job.cursor, "tries": tries}, rest_seconds=HELD_REST_SECONDS)
    error = {"id": task_id, "reason": "another transaction held it for too long"}
    return BatchResult(
        {"after": task_id, "exact": job.cursor["exact"], "look": look}, seen=1, refused=1, errors=[error]
    )


async def _cancel(session: Session, _job: BulkJob, _work: BulkWork, ids: Sequence[int]) -> set[int]:
    return await settle.cancel(session, ids)


async def _retry(session: Session, _job: BulkJob, _work: BulkWork, ids: Sequence[int]) -> set[int]:
    return set(await reschedule.restart(session, ids))


async def _delete(session: Session, _job: BulkJob, _work: BulkWork, ids: Sequence[int]) -> set[int]:
    await session.fetch("hold_unique_keys", ids)
    return {row["id"] for row in await session.fetch("delete_settled_tasks", ids)}


async def _reschedule(session: Session, job: BulkJob, work: BulkWork, ids: Sequence[int]) -> set[int]:
    how = work.reschedule
    assert how is not None
    base = how.run_at
    if how.delay is not None:
        base = job.created_at + timedelta(seconds=how.delay)
    # Multiples of the golden ratio spread evenly, however many follow.
    later = [how.spread * ((job.changed + place) * _GOLDEN % 1) for place in range(len(ids))]
    return {row["id"] for row in await session.fetch("spread_tasks", ids, later, base, how.priority)}


_CHANGES: Mapping[Operation, Callable[[Session, BulkJob, BulkWork, Sequence[int]], Awaitable[set[int]]]] = {
    Operation.CANCEL: _cancel,
    Operation.RETRY: _retry,
    Operation.DELETE: _delete,
    Operation.RESCHEDULE: _reschedule,
}


def _is_settled(select: Selection) -> bool:
    return select.states[0] in FINAL_STATES


def _range(select: Selection, top: int, now: datetime) -> _Range:
    after = 0 if select.ids_from is None else select.ids_from - 1
    return _Range(after, top if select.ids_to is None else min(top, select.ids_to), now)


async def _find(session: Session, select: Selection, within: _Range, *, look: int, pick: int) -> Any:
    """The row of find_live_matches or find_settled_matches."""
    statement = "find_settled_matches" if _is_settled(select) else "find_live_matches"
    rows = await session.fetch(statement, within.after, within.top, look, pick, PICKED_BYTES, *_filters(select, within))
    return rows[0]


_COUNT = {False: "count_live_matches", True: "count_settled_matches"}


def _filters(select: Selection, within: _Range) -> tuple[Any, ...]:
    """Pattern of the action, states, labels, created no later than, created later than, tenant."""
    labels = None if select.labels is None else msgspec.json.encode(select.labels).decode("utf-8")
    no_later = within.now - timedelta(seconds=select.older_than or 0)
    later = None if select.newer_than is None else within.now - timedelta(seconds=select.newer_than)
    return select.action_like, list(select.states), labels, no_later, later, select.tenant
