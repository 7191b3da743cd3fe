"""scheduler0's jobs: what callers send, its checks, the schedule that fires a job, what a callback carries. Pure."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from penstock.schedules.cron import ROBFIG, CronError, every_seconds, read_zone, timing
from penstock.schedules.policy import JOB_PREFIX
from penstock.schedules.robfig import is_shifted

ACTION = "scheduler0.callback"
HTTP = "http"
LATEST_SECONDS = 10
"""How late a run may be. After downtime scheduler0 skips the runs that it missed; this is what load may delay."""
JOBS_LIMIT = 50_000
URL_MAX_CHARS = 8192
NEVER = datetime(1, 1, 1, tzinfo=UTC)
"""How an instant that is not set is written: never left out."""
_BIGINT = 2**63 - 1
_URL = re.compile(r"https?://[^\s/?#]+[^\s]*", re.IGNORECASE)
_BRACE_BEFORE_BRACE = re.compile(rb"\{(?=\{)")

Number = Annotated[int, Meta(ge=0, le=_BIGINT)]
Instant = Annotated[datetime, Meta(tz=True)]


class JobGiven(msgspec.Struct, rename="camel", frozen=True):
    """A job as a caller sends it. What is unknown is passed over; null is as good as nothing."""

    project_id: Number | None = None
    spec: str | None = None
    callback_url: str | None = None
    data: str | None = None
    execution_type: str | None = None
    start_date: Instant | None = None
    end_date: Instant | None = None
    timezone: str | None = None
    timezone_offset: Annotated[int, Meta(ge=-_BIGINT, le=_BIGINT)] | None = None


_CAMEL = {
    name: f.encode_name
    for name, f in zip(JobGiven.__struct_fields__, msgspec.structs.fields(JobGiven), strict=True)
    if name != f.encode_name
}
_SNAKE = re.compile("|".join(f'"{name}"' for name in _CAMEL).encode())


def read_jobs(body: bytes) -> list[JobGiven]:
    """Jobs as callers send them: members in camelCase, or in snake_case as on the first page of the original's
    documentation. Raises msgspec.DecodeError."""
    if not _SNAKE.search(body):
        return msgspec.json.decode(body, type=list[JobGiven])
    given = msgspec.json.decode(body, type=list[dict[str, Any]])
    return msgspec.convert([_in_camel(job) for job in given], list[JobGiven])


def read_job(body: bytes) -> JobGiven:
    """As :func:`read_jobs`, of one."""
    if not _SNAKE.search(body):
        return msgspec.json.decode(body, type=JobGiven)
    return msgspec.convert(_in_camel(msgspec.json.decode(body, type=dict[str, Any])), JobGiven)


def _in_camel(job: dict[str, Any]) -> dict[str, Any]:
    """A member that is given in both forms counts in camelCase."""
    return {_CAMEL.get(name, name): value for name, value in job.items()} | {
        name: job[name] for name in _CAMEL.values() if name in job
    }


class Job(msgspec.Struct, rename="camel", omit_defaults=True, kw_only=True):
    """A job as callers and callbacks see it: zeros and empty texts are left out, instants never."""

    id: int = 0
    project_id: int = 0
    spec: str = ""
    callback_url: str = ""
    data: str = ""
    execution_type: str = ""
    start_date: datetime
    end_date: datetime
    last_execution_date: datetime
    timezone: str = ""
    timezone_offset: int = 0
    execution_id: str = ""
    date_created: datetime


class Callback(msgspec.Struct, frozen=True):
    """The payload of a task that calls back. run: one name for each job and due time; at: that time, RFC 3339."""

    url: str
    job: dict[str, Any]
    run: str
    at: str


@dataclass(frozen=True, slots=True)
class Limits:
    """payload_bytes: of a task's payload. max_attempts: of each callback."""

    payload_bytes: int
    max_attempts: int


class BadJob(ValueError):
    """One of the jobs is wrong, so none of them is taken."""


def check_jobs(given: Sequence[JobGiven]) -> None:
    """The checks of the original, in its order, each over all jobs; then those of what could never be delivered.

    Whether the projects exist is for the caller to find out, between the two. Raises BadJob.
    """
    _check_specs([job.spec or "" for job in given])
    for timezone in dict.fromkeys(job.timezone or "" for job in given):
        if not _is_zone(timezone):
            raise BadJob(f"job timezone is not valid, provided timezone is {timezone}")


def check_deliverable(given: Sequence[JobGiven]) -> None:
    """Raises BadJob for a callback that nobody could send."""
    for job in given:
        if "\0" in (job.data or "") or "\0" in (job.execution_type or ""):
            raise BadJob("job data and executionType must not hold the character NUL")
        if (job.execution_type or HTTP) == HTTP:
            check_url(job.callback_url or "")


def check_url(url: str) -> None:
    """Raises BadJob."""
    try:
        parts = urlsplit(url)
        can_be_called = bool(_URL.fullmatch(url)) and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none, a bracket that is not closed
        can_be_called = False
    if not can_be_called or len(url) > URL_MAX_CHARS:
        raise BadJob(f"job callbackUrl is not valid {url[:200]!r}: it must be http(s)://host[:port]/path")
    if "@" in parts.netloc:
        raise BadJob("job callbackUrl holds a user or a password, which would be shown in answers and errors")


def shifted_specs(given: Sequence[JobGiven]) -> list[str]:
    """Specs of five fields, which a crontab would read otherwise."""
    return [spec for spec in dict.fromkeys(job.spec or "" for job in given) if is_shifted(spec)]


def make_job(given: JobGiven, job_id: int, now: datetime) -> Job:
    """The job that a caller gets for what was sent. Raises BadJob for a date beyond the calendar."""
    return Job(
        id=job_id,
        project_id=given.project_id or 0,
        spec=given.spec or "",
        callback_url=given.callback_url or "",
        data=given.data or "",
        execution_type=given.execution_type or HTTP,
        start_date=_in_utc(given.start_date),
        end_date=_in_utc(given.end_date),
        last_execution_date=NEVER,
        timezone=given.timezone or "",
        timezone_offset=given.timezone_offset or 0,
        date_created=now,
    )


def schedule_name(job_id: int) -> str:
    """Of the schedule that fires a job."""
    return f"{JOB_PREFIX}{job_id}"


def job_of(name: str) -> int | None:
    """The job that a schedule of this name fires, None for another schedule."""
    digits = name.removeprefix(JOB_PREFIX)
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= 18):
        return None
    return int(digits) if name == schedule_name(int(digits)) else None


def payload_of(job: Job) -> bytes:
    """The payload that each fire of a job's schedule fills in. A template in a job's own texts stays as it is."""
    told = msgspec.json.encode({"url": job.callback_url, "job": job})
    # Two braces side by side occur inside texts alone; \u007b is the same brace, and begins no template.
    told = _BRACE_BEFORE_BRACE.sub(rb"\\u007b", told)
    return told[:-1] + b',"run":"{{run}}","at":"{{scheduled_time}}"}'


def schedule_of(job: Job, limits: Limits) -> dict[str, Any]:
    """Parameters of schedule.create. All jobs of one call tick together, from when they were taken on.

    Raises BadJob when its callback would be too large.
    """
    payload = payload_of(job)
    if len(payload) + 100 > limits.payload_bytes:  # the templates grow as they are filled in
        raise BadJob(
            f"job data of {len(job.data)} characters is too large for a callback of {limits.payload_bytes} bytes"
        )
    expression = ROBFIG + job.spec
    given: dict[str, Any] = {
        "name": schedule_name(job.id),
        "expression": expression,
        "action": ACTION,
        "payload": msgspec.Raw(payload),
        "timezone": job.timezone,
        "missed": "all",
        "max_missed": 1,
        "max_lateness": LATEST_SECONDS,
        "max_attempts": limits.max_attempts,
    }
    interval = every_seconds(expression)
    if interval is not None:
        given["start_at"] = job.date_created.replace(microsecond=0) + timedelta(seconds=interval)
    if job.execution_type != HTTP:
        given["paused"] = True
    return given


def execution_id(run: str) -> str:
    """208 hexadecimal digits, the same for one job and one due time, however often it is called back."""
    return hashlib.shake_256(run.encode("utf-8")).hexdigest(104)


def job_told(callback: Callback) -> dict[str, Any]:
    """The object that a callback sends of a job."""
    return callback.job | {"lastExecutionDate": callback.at, "executionId": execution_id(callback.run)}


def _in_utc(instant: datetime | None) -> datetime:
    try:
        return NEVER if instant is None else instant.astimezone(UTC)
    except OverflowError:
        raise BadJob(f"job startDate and endDate must be between the years 1 and 9999, not {instant}") from None


def _check_specs(specs: Sequence[str]) -> None:
    for spec in dict.fromkeys(specs):
        try:
            timing(ROBFIG + spec, "UTC", NEVER)
        except CronError:
            raise BadJob(f"job spec is not valid {spec}") from None


def _is_zone(timezone: str) -> bool:
    if timezone in ("", "Local"):
        return False
    try:
        read_zone(timezone)
    except CronError:
        return False
    return True
