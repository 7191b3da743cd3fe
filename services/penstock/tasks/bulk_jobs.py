"""Bulk jobs: work on many records, in batches that commit with the next cursor, so that a kill repeats nothing."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

import msgspec

from penstock.db.session import Session
from penstock.protocol.errors import JobNotFound

MAX_ERRORS = 20


class JobState(StrEnum):
    RUNNING = "RUNNING"
    DONE = "DONE"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


@dataclass(frozen=True, slots=True)
class BulkJob:
    id: int
    kind: str
    params: Mapping[str, Any]
    state: JobState
    cursor: Mapping[str, Any] | None  # the position, as defined by its kind; None before the first batch
    total: int | None  # how many records match
    seen: int  # records looked at
    changed: int
    refused: int  # those that could not be changed; the first of them are in ``errors``
    errors: Sequence[Mapping[str, Any]]
    created_at: datetime
    updated_at: datetime
    finished_at: datetime | None


@dataclass(frozen=True, slots=True)
class BatchResult:
    cursor: Mapping[str, Any]  # where the next one begins
    seen: int = 0
    changed: int = 0
    refused: int = 0
    errors: Sequence[Mapping[str, Any]] = ()
    total: int | None = None  # how many records match, if it has counted
    done: bool = False
    rest_seconds: float = 0.0  # until the next batch, because another transaction holds the records


Batch = Callable[[Session, BulkJob], Awaitable[BatchResult]]  # inside a transaction that its caller commits


async def create_job(session: Session, kind: str, params: bytes) -> BulkJob:
    """Make a job of the tasks that exist now; ``params`` is a JSON object."""
    return _job((await session.fetch("create_job", kind, params.decode("utf-8")))[0])


async def read_job(session: Session, job_id: int) -> BulkJob:
    """Raises JobNotFound."""
    rows = await session.fetch("read_job", job_id)
    if not rows:
        raise JobNotFound(job_id)
    return _job(rows[0])


async def list_jobs(session: Session, *, before: int | None, limit: int, tenant: str | None = None) -> list[BulkJob]:
    """Newest first, from after the id ``before``. tenant: only jobs of its tasks alone."""
    return [_job(row) for row in await session.fetch("list_jobs", before, limit, tenant)]


async def take_job(session: Session, *, without: Sequence[int]) -> BulkJob | None:
    """The running job that has waited longest, locked until the transaction ends; None when there is none."""
    rows = await session.fetch("take_job", list(without))
    return _job(rows[0]) if rows else None


async def advance_job(session: Session, job: BulkJob, result: BatchResult) -> None:
    errors = [*job.errors, *result.errors][:MAX_ERRORS]
    await session.fetch(
        "advance_job", job.id, _text(result.cursor), result.total, result.seen, result.changed, result.refused,
        _text(errors), JobState.DONE if result.done else JobState.RUNNING,
    )  # fmt: skip


async def end_job(session: Session, job_id: int, state: JobState, *, error: str | None = None) -> bool:
    """End a job early; returns whether it was running. error: why."""
    errors = [] if error is None else [{"id": None, "reason": error}]
    return bool(await session.fetch("end_job", job_id, state, _text(errors)))


def _text(value: Any) -> str:
    return msgspec.json.encode(value).decode("utf-8")


def _job(row: Any) -> BulkJob:
    values = {name: row[name] for name in BulkJob.__slots__}
    for name in ("params", "cursor", "errors"):
        values[name] = None if values[name] is None else msgspec.json.decode(values[name])
    return BulkJob(**values | {"state": JobState(row["state"])})
