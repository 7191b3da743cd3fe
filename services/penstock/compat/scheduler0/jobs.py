"""scheduler0's jobs: their checks, the schedule that fires a job, and the payload of its callbacks. No I/O."""

import hashlib
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from penstock.protocol.errors import RpcError
from penstock.schedules.cron import ROBFIG, CronError, every_seconds, read_zone, timing
from penstock.schedules.policy import JOB_PREFIX
from penstock.settings.model import Settings

ACTION = "scheduler0.callback"
HTTP = "http"
LATEST_SECONDS = 10  # a later run is skipped, as scheduler0 does after downtime; load may delay one by so much
JOBS_LIMIT = 50_000
URL_MAX_CHARS = 8192
NEVER = datetime(1, 1, 1, tzinfo=UTC)  # written for an instant that is not set
_BIGINT = 2**63 - 1
_URL = re.compile(r"https?://[^\s/?#]+[^\s]*", re.IGNORECASE)
_BRACE_BEFORE_BRACE = re.compile(rb"\{(?=\{)")

Number = Annotated[int, Meta(ge=0, le=_BIGINT)]
Instant = Annotated[datetime, Meta(tz=True)]


class JobGiven(msgspec.Struct, rename="camel", frozen=True):
    """A job as a caller sends it; unknown members are ignored, and null is an absent member."""

    project_id: Number | None = None
    spec: str | None = None
    callback_url: str | None = None
    data: str | None = None
    execution_type: str | None = None
    start_date: Instant | None = None
    end_date: Instant | None = None
    timezone: str | None = None
    timezone_offset: Annotated[int, Meta(ge=-_BIGINT, le=_BIGINT)] | None = None


class Job(msgspec.Struct, rename="camel", omit_defaults=True, kw_only=True):
    """A job in answers and callbacks: zeros and empty texts are left out, instants never."""

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
    date_created: datetime


class Callback(msgspec.Struct, frozen=True):
    """The payload of a callback's task. run: unique for each job and due time; at: that time, RFC 3339."""

    url: str
    job: dict[str, Any]
    run: str
    at: str


class BadJob(RpcError):
    """One of the jobs is invalid, so all of them are refused."""


_CAMEL = {one.name: one.encode_name for one in msgspec.structs.fields(JobGiven) if one.name != one.encode_name}
_SNAKE = re.compile("|".join(f'"{name}"' for name in _CAMEL).encode())


def read(body: bytes, *, type: Any) -> Any:
    """Decode a job or jobs, in camelCase, or in snake_case as scheduler0's documentation has. Raises DecodeError."""
    if not _SNAKE.search(body):
        return msgspec.json.decode(body, type=type)
    given = msgspec.json.decode(body)
    return msgspec.convert([_in_camel(job) for job in given] if isinstance(given, list) else _in_camel(given), type)


def _in_camel(job: Any) -> Any:
    """A member in camelCase wins over the same in snake_case."""
    if not isinstance(job, dict):
        return job
    return {_CAMEL.get(name, name): value for name, value in job.items() if _CAMEL.get(name) not in job}


def check_jobs(given: Sequence[JobGiven]) -> None:
    """scheduler0's checks before that of the projects, in its order, each over all jobs. Raises BadJob."""
    for spec in dict.fromkeys(job.spec or "" for job in given):
        try:
            timing(ROBFIG + spec, "UTC", NEVER)
        except CronError:
            raise BadJob(f"job spec is not valid {spec}") from None
    for timezone in dict.fromkeys(job.timezone or "" for job in given):
        try:
            read_zone(timezone)
        except CronError:
            raise BadJob(f"job timezone is not valid, provided timezone is {timezone}") from None


def check_deliverable(given: Sequence[JobGiven | Job]) -> None:
    """Raises BadJob for a callback that cannot be sent."""
    for job in given:
        if "\0" in (job.data or "") or "\0" in (job.execution_type or ""):
            raise BadJob("job data and executionType must not hold the character NUL")
        if (job.execution_type or HTTP) != HTTP:
            continue
        url = job.callback_url or ""
        try:
            parts = urlsplit(url)
            is_callable = bool(_URL.fullmatch(url)) and bool(parts.hostname) and parts.port != 0
        except ValueError:  # an invalid port, an unclosed bracket
            is_callable = False
        if not is_callable or len(url) > URL_MAX_CHARS:
            raise BadJob(f"job callbackUrl is not valid {url[:200]!r}: it must be http(s)://host[:port]/path")
        if "@" in parts.netloc:
            raise BadJob("job callbackUrl holds a user or a password, which would be shown in answers and errors")


def make_job(given: JobGiven, job_id: int, now: datetime) -> Job:
    """Raises BadJob for a date outside the calendar."""
    members = {name: value for name, value in msgspec.structs.asdict(given).items() if value is not None}
    return Job(**members | {
        "id": job_id, "execution_type": given.execution_type or HTTP, "start_date": _in_utc(given.start_date),
        "end_date": _in_utc(given.end_date), "last_execution_date": NEVER, "date_created": now,
    })  # fmt: skip


def _in_utc(instant: datetime | None) -> datetime:
    try:
        return NEVER if instant is None else instant.astimezone(UTC)
    except OverflowError:
        raise BadJob(f"job startDate and endDate must be between the years 1 and 9999, not {instant}") from None


def payload_of(job: Job) -> bytes:
    """The template of a callback's payload; braces in the job's own texts begin no placeholder."""
    template = msgspec.json.encode({"url": job.callback_url, "job": job})
    # Two adjacent braces occur inside texts alone; \u007b is the same brace, and begins no placeholder.
    template = _BRACE_BEFORE_BRACE.sub(rb"\\u007b", template)
    return template[:-1] + b',"run":"{{run}}","at":"{{scheduled_time}}"}'


def schedule_of(job: Job, settings: Settings) -> dict[str, Any]:
    """Parameters of schedule.create; all jobs of one call fire together. Raises BadJob for a too large callback."""
    payload, limit = payload_of(job), settings.payload_limit_bytes
    if len(payload) + 100 > limit:  # placeholders grow when filled in
        raise BadJob(f"job data of {len(job.data)} characters is too large for a callback of {limit} bytes")
    expression = ROBFIG + job.spec
    given: dict[str, Any] = {
        "name": f"{JOB_PREFIX}{job.id}",
        "expression": expression,
        "action": ACTION,
        "payload": msgspec.Raw(payload),
        "timezone": job.timezone,
        "missed": "all",
        "max_missed": 1,
        "max_lateness": LATEST_SECONDS,
        "max_attempts": settings.scheduler0_retry_max + 1,
    }
    interval = every_seconds(expression)
    if interval is not None:
        given["start_at"] = job.date_created.replace(microsecond=0) + timedelta(seconds=interval)
    if job.execution_type != HTTP:
        given["paused"] = True
    return given


def execution_id(run: str) -> str:
    """208 hexadecimal digits, the same at every attempt of a run."""
    return hashlib.shake_256(run.encode("utf-8")).hexdigest(104)
