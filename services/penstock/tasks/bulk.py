"""Bulk jobs: work on many records, in batches that commit with the next cursor, so that a kill repeats nothing.

A batch reads and changes a bounded number of records, so filters need no index and no lock is held for long. A record
that another transaction holds, or whose key it holds, is not waited for: the batch ends before it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

import asyncpg
import msgspec

from penstock.db.session import Session
from penstock.protocol.answers import BulkPreview, Job, JobError, JobState
from penstock.protocol.checks import like_pattern, read_instant
from penstock.protocol.errors import JobNotFound, Locked, PenstockError, TaskNotFound
from penstock.protocol.record import read, view_of
from penstock.protocol.task import FINAL_STATES, State
from penstock.runtime.halving import in_halves
from penstock.tasks import reschedule, settle
from penstock.tasks.params import BulkRescheduleParams

MAX_ERRORS = 20  # that a job keeps
LOOKED_AT = 10_000  # records in one batch
PICKED = 1000
PICKED_BYTES = 16 * 1024 * 1024
COUNTED = 50_000  # records looked at to count; beyond, the number is estimated
SAMPLE = 10
HELD_TRIES = 100  # of a record that another transaction holds, before it is skipped
HELD_REST_SECONDS = 0.05
_LOCK_WAIT_MS = 20  # for a key
_GOLDEN = 0.6180339887498949


class Operation(StrEnum):
    """The kinds of bulk jobs; each value is the method's name."""

    CANCEL = "bulk.cancel"
    RETRY = "bulk.retry"
    DELETE = "bulk.delete"
    RESCHEDULE = "bulk.reschedule"


# That each may select; all are live, or all are final.
STATES: Mapping[Operation, tuple[State, ...]] = {
    Operation.CANCEL: (State.WAITING, State.SCHEDULED, State.ACQUIRED, State.ERROR),
    Operation.RETRY: (State.CRITICAL_ERROR, State.CANCELLED),
    Operation.DELETE: (State.SUCCESS, State.CRITICAL_ERROR, State.CANCELLED),
    Operation.RESCHEDULE: (State.WAITING, State.SCHEDULED, State.ERROR),
}


class BulkWork(BulkRescheduleParams, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The parameters of a bulk job. top: the highest task id, noted when the job is made. dry_run: there is no job."""

    states: list[State] = msgspec.field(default_factory=list)
    top: int = 0

    @property
    def is_settled(self) -> bool:
        return self.states[0] in FINAL_STATES


@dataclass(frozen=True, slots=True)
class BatchResult:
    cursor: Mapping[str, Any]  # where the next one begins
    seen: int = 0
    changed: int = 0
    refused: int = 0
    errors: Sequence[JobError] = ()
    total: int | None = None  # how many records match, if it has counted
    done: bool = False
    rest_seconds: float = 0.0  # until the next batch, because another transaction holds the records


async def count_matches(session: Session, work: BulkWork, *, now: datetime, parts: int = 1) -> BulkPreview:
    """Count the matching tasks in bounded time, inside a transaction; behind ``plan_jobs``. parts: as ``run_batch``."""
    after, last_id = _ids(work)
    most = max(COUNTED // parts, 1)
    statement = "count_settled_matches" if work.is_settled else "count_live_matches"
    (row,) = await session.fetch(statement, after, last_id, most, *_filters(work, now))
    count, seen, first, last = row["matching"], row["seen"], row["first"], row["last"]
    is_exact = seen < most or last == last_id
    rest = 0
    if not is_exact:
        # The other ids are assumed to be like these, but where ids were passed over there are no records.
        rows = await session.value("estimate_rows", "task_history" if work.is_settled else "task")
        others = (last_id - last) * seen / (last - first + 1)
        rest = round(count / seen * min(others, rows - seen if rows > seen else others))
    return BulkPreview(count=count, exact=is_exact, estimate=count + rest, sample=row["ids"][:SAMPLE])


async def preview(session: Session, work: BulkWork) -> BulkPreview:
    """Count the tasks of a job if it were made now, inside a transaction."""
    await session.fetch("plan_jobs")
    top, now = await session.value("read_last_id"), await session.value("read_clock")
    return await count_matches(session, msgspec.structs.replace(work, top=top), now=now)


async def run_batch(session: Session, job: asyncpg.Record, *, parts: int = 1) -> BatchResult:
    """Do one batch of a bulk job, inside a transaction; the first one counts, the last one finds nothing left.

    job: a row of ``take_job``. parts: in how many batches to do what is one otherwise, as Postgres was too slow for it.
    """
    await session.fetch("plan_jobs")
    work = msgspec.json.decode(job["params"], type=BulkWork)
    first, top = _ids(work)
    if job["cursor"] is None:
        count = await count_matches(session, work, now=job["created_at"], parts=parts)
        is_done = count.exact and not count.count
        return BatchResult({"after": first, "exact": count.exact}, total=count.estimate, done=is_done)
    behind: dict[str, Any] = msgspec.json.decode(job["cursor"])
    look = max(behind.get("look", PICKED) // parts, 1)
    statement = "find_settled_matches" if work.is_settled else "find_live_matches"
    pick = 1 if "tries" in behind else max(PICKED // parts, 1)  # a record that was held is tried alone
    limits = behind["after"], top, look, pick, PICKED_BYTES // parts
    (found,) = await session.fetch(statement, *limits, *_filters(work, job["created_at"]))
    ids: list[int] = found["ids"]
    locked, busy = await _hold(session, work, ids)
    cut = next((place for place, task_id in enumerate(ids) if task_id in busy), len(ids))
    mine = [task_id for task_id in ids[:cut] if task_id in locked]
    changed, held = await _change_some(session, job, work, mine)
    if held is not None:
        cut, mine = ids.index(held), mine[: mine.index(held)]
    if ids and not cut:
        return _wait(behind, ids[0], look)
    refused = [task_id for task_id in mine if task_id not in changed]
    if cut < len(ids):
        after, seen, done = ids[cut] - 1, found["places"][cut] - 1, False
    elif len(ids) < found["matching"]:
        after, seen, done = ids[-1], found["places"][-1], False
    else:
        after, seen, done = found["last"] or top, found["seen"], found["seen"] < look
    next_look = LOOKED_AT  # to fill a batch, if the next records are like these
    if found["matching"]:
        next_look = min(LOOKED_AT, max(PICKED, PICKED * found["seen"] // found["matching"]))
    cursor = {"after": after, "exact": behind["exact"], "look": next_look}
    errors = await _reasons(session, job, refused)
    return BatchResult(cursor, seen, len(changed), len(refused), errors, done=done)


def _ids(work: BulkWork) -> tuple[int, int]:
    """After which id the records of a job begin, and the last id."""
    after = 0 if work.ids_from is None else int(work.ids_from) - 1
    return after, work.top if work.ids_to is None else min(work.top, int(work.ids_to))


def _filters(work: BulkWork, now: datetime) -> tuple[Any, ...]:
    """Pattern of the action, states, labels, created no later than, created later than, tenant."""
    action = None if work.action is None else like_pattern(work.action)
    labels = None if work.labels is None else _text(work.labels)
    no_later = now - timedelta(seconds=work.older_than or 0)
    later = None if work.newer_than is None else now - timedelta(seconds=work.newer_than)
    return action, work.states, labels, no_later, later, work.tenant


async def _hold(session: Session, work: BulkWork, ids: Sequence[int]) -> tuple[set[int], set[int]]:
    """Lock records; returns the locked ones, and those that another transaction holds in a state that fits."""
    statement = "hold_settled_tasks" if work.is_settled else "hold_live_tasks"
    locked = {row["id"] for row in await session.fetch(statement, ids, work.states)} if ids else set[int]()
    missing = [task_id for task_id in ids if task_id not in locked]
    there = await session.fetch("read_states", missing) if missing else []
    return locked, {row["id"] for row in there if row["state"] in work.states}


def _wait(cursor: Mapping[str, Any], task_id: int, look: int) -> BatchResult:
    """Try again a moment later, a limited number of times."""
    tries = cursor.get("tries", 0) + 1
    if tries < HELD_TRIES:
        return BatchResult({**cursor, "tries": tries}, rest_seconds=HELD_REST_SECONDS)
    error = JobError(id=task_id, reason="another transaction held it, or a key of it, for too long")
    return BatchResult({"after": task_id, "exact": cursor["exact"], "look": look}, seen=1, refused=1, errors=[error])


async def _change_some(
    session: Session, job: asyncpg.Record, work: BulkWork, ids: Sequence[int]
) -> tuple[set[int], int | None]:
    """Change records up to the first whose key another transaction holds; returns the changed ones, and that one."""
    changed, held = set[int](), list[int]()

    async def change(part: Sequence[int], _hurried: bool) -> None:
        if not held:
            async with session.savepoint():
                await session.fetch("limit_lock_wait_to", _LOCK_WAIT_MS)
                changed.update(await _change(session, job, work, part))

    async def leave(task_id: int, _error: PenstockError) -> None:
        held.append(task_id)

    await in_halves(ids, change, leave, errors=(Locked,))
    return changed, held[0] if held else None


async def _change(session: Session, job: asyncpg.Record, work: BulkWork, ids: Sequence[int]) -> set[int]:
    match Operation(job["kind"]):
        case Operation.CANCEL:
            return await settle.cancel(session, ids)
        case Operation.RETRY:
            return set(await reschedule.restart(session, ids))
        case Operation.DELETE:
            await session.fetch("hold_unique_keys", ids)
            return {row["id"] for row in await session.fetch("delete_settled_tasks", ids)}
        case Operation.RESCHEDULE:
            after = work.delay
            base = read_instant(work.run_at) if after is None else job["created_at"] + timedelta(seconds=after)
            # Multiples of the golden ratio spread evenly, however many follow.
            later = [work.spread * ((job["changed"] + place) * _GOLDEN % 1) for place in range(len(ids))]
            return {row["id"] for row in await session.fetch("spread_tasks", ids, later, base, work.priority)}


_VERBS = {"cancel": "cancelled", "retry": "retried", "delete": "deleted", "reschedule": "rescheduled"}


async def _reasons(session: Session, job: asyncpg.Record, refused: Sequence[int]) -> list[JobError]:
    """Why tasks could not be changed, of as many as the job has room for."""
    errors = []
    for task_id in refused[: max(0, MAX_ERRORS - job["refused"])]:
        why = await reschedule.why_unchanged(session, task_id, _VERBS[job["kind"].removeprefix("bulk.")])
        is_gone = isinstance(why, TaskNotFound)
        errors.append(JobError(id=task_id, reason="its record is no longer kept" if is_gone else why.message))
    return errors


# Jobs


async def create_job(session: Session, kind: str, params: bytes) -> Job:
    """Make a job of the tasks that exist now; ``params`` is a JSON object."""
    return job_of((await session.fetch("create_job", kind, params.decode("utf-8")))[0])


async def read_job(session: Session, job_id: int) -> Job:
    """Raises JobNotFound."""
    rows = await session.fetch("read_job", job_id)
    if not rows:
        raise JobNotFound(job_id)
    return job_of(rows[0])


async def take_job(session: Session, *, without: Sequence[int]) -> asyncpg.Record | None:
    """The running job that has waited longest, locked until the transaction ends; None when there is none. Jobs of
    another kind are left to processes of the version that knows it."""
    rows = await session.fetch("take_job", list(without), list(Operation))
    return rows[0] if rows else None


async def advance_job(session: Session, job_id: int, result: BatchResult) -> None:
    await session.fetch(
        "advance_job", job_id, _text(result.cursor), result.total, result.seen, result.changed, result.refused,
        _text(result.errors), JobState.DONE if result.done else JobState.RUNNING,
    )  # fmt: skip


async def end_job(session: Session, job_id: int, state: JobState, *, error: str | None = None) -> bool:
    """End a job early; returns whether it was running. error: why."""
    errors = [] if error is None else [JobError(id=None, reason=error)]
    return bool(await session.fetch("end_job", job_id, state, _text(errors)))


def _text(value: Any) -> str:
    return msgspec.json.encode(value).decode("utf-8")


def job_of(row: asyncpg.Record) -> Job:
    errors = read(JobError, msgspec.json.decode(row["errors"]))
    return view_of(Job, row, state=JobState(row["state"]), params=msgspec.json.decode(row["params"]), errors=errors)
