"""What results about bulk operations and jobs look like; see views for the style."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import msgspec

from penstock.protocol.views import Instant, about, view_of
from penstock.tasks.bulk_jobs import BulkJob, JobState


class BulkStarted(msgspec.Struct, frozen=True):
    job: Annotated[int, about("Of the job that does it; see job.get.")]


class BulkPreview(msgspec.Struct, frozen=True):
    """With `dry_run`: what a job would be about."""

    count: Annotated[int, about("Tasks found.")]
    exact: Annotated[bool, about("False: there were too many records to look at them all, and there may be more.")]
    estimate: Annotated[int, about("How many there may be in all; the count where that is exact.")]
    sample: Annotated[list[int], about("The lowest ids of them.")]


class JobError(msgspec.Struct, frozen=True):
    id: Annotated[int | None, about("The task; null where the job itself failed.")]
    reason: str


class Job(msgspec.Struct, frozen=True, kw_only=True):
    id: int
    kind: Annotated[str, about("The method that made it.")]
    params: Annotated[Any, about("What it was made with, and `top`, the highest id of a task that it is about.")]
    state: JobState
    total: Annotated[int | None, about("Tasks that it is about, as counted before it began; null before that.")]
    total_is_exact: Annotated[bool, about("False: estimated.")]
    seen: Annotated[int, about("Records looked at so far.")]
    changed: int
    refused: Annotated[int, about("Tasks that the filter fits, and that could not be changed.")]
    rate: Annotated[float, about("Tasks changed or refused a second.")]
    errors: Annotated[list[JobError], about("Of the first 20 that were refused, or why the job failed.")]
    created_at: Instant
    updated_at: Instant
    finished_at: Instant | None


class JobPage(msgspec.Struct, frozen=True):
    jobs: list[Job]
    cursor: Annotated[str | None, about("Pass it on for the next page; null at the end.")]


def job(record: BulkJob) -> Job:
    errors = [JobError(error["id"], error["reason"]) for error in record.errors]
    return view_of(Job, asdict(record), total_is_exact=record.total_is_exact, rate=round(record.rate, 1), errors=errors)
