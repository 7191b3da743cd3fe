"""scheduler0's API in Postgres: credentials, projects, jobs, and the requests that make jobs."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import IntEnum
from typing import Any

import msgspec

from penstock.compat.scheduler0.jobs import NEVER, Job, execution_id, job_of
from penstock.db.session import Session
from penstock.protocol.api_key import digest_of
from penstock.protocol.errors import Refused
from penstock.protocol.task import State
from penstock.schedules.policy import run_name
from penstock.schedules.store import start_import

JOBS_A_STATEMENT = 5000
PART_ENTRIES = 500  # of an import, read and written by the supervisor in one transaction
COUNTED = 10_000
"""Executions are counted up to here; more are as many."""
_LIVE = tuple(state.value for state in (State.WAITING, State.SCHEDULED, State.ACQUIRED, State.ERROR))
_FAILED = (State.CRITICAL_ERROR.value, State.CANCELLED.value)


class Progress(IntEnum):
    """Where an async task stands."""

    NOT_STARTED = 0
    IN_PROGRESS = 1
    SUCCESS = 2
    FAILED = 3

    @property
    def is_final(self) -> bool:
        return self >= Progress.SUCCESS


EXECUTION_STATES = {"scheduled": _LIVE, "success": (State.SUCCESS.value,), "failed": _FAILED}
"""States of executions as callers name them, and the states of tasks that they stand for."""


@dataclass(frozen=True, slots=True)
class Credential:
    """``secret``: in clear, where it was kept so."""

    id: int
    api_key: str
    secret: str | None
    archived: bool
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Project:
    id: int
    name: str
    description: str
    created_at: datetime


@dataclass(frozen=True, slots=True)
class HeldJob:
    """A job whose row is held. is_being_made: the import that makes its schedule may not have come to it yet."""

    job: Job
    is_being_made: bool


@dataclass(frozen=True, slots=True)
class Request:
    """A request that made jobs. errors: of what could not be made, JSON objects."""

    id: int
    request_id: str
    input: str
    output: str
    created_at: datetime
    errors: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Execution:
    """A run of a job. state: 0 for one whose task is live, 1 for success, 2 for failure."""

    job_id: int
    task_id: int
    unique_id: str
    scheduled_at: datetime
    fired_at: datetime
    settled_at: datetime | None
    state: int
    timezone: str
    expression: str
    anchor: datetime


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which executions; None for any."""

    since: datetime | None
    until: datetime | None
    project_id: int | None
    job_id: int | None
    states: Sequence[str] | None


# Credentials


async def create_credential(session: Session, *, readable: bool) -> tuple[Credential, str]:
    """Make a credential; returns it and its secret, which is kept in clear if ``readable``."""
    api_key, secret = secrets.token_hex(24), secrets.token_hex(32)
    digest = digest_of(secret.encode("ascii"))
    rows = await session.fetch("create_credential", api_key, digest, secret if readable else None)
    return _credential(rows[0]), secret


async def find_credential(session: Session, api_key: str, secret: str) -> int | None:
    """The id of the credential, if it is in use and the secret is its own."""
    rows = await session.fetch("find_credential", api_key)
    if rows and hmac.compare_digest(bytes(rows[0]["secret_hash"]), digest_of(secret.encode("utf-8"))):
        return int(rows[0]["id"])
    return None


async def list_credentials(session: Session, *, limit: int, offset: int) -> tuple[int, list[Credential]]:
    """How many there are, archived ones included, and a page, newest first."""
    rows = await session.fetch("list_credentials", limit, offset)
    return await session.value("count_credentials"), [_credential(row) for row in rows]


async def read_credential(session: Session, credential_id: int) -> Credential | None:
    rows = await session.fetch("read_credential", credential_id)
    return _credential(rows[0]) if rows else None


async def is_credential(session: Session, credential_id: int, api_key: str, secret: str | None) -> bool | None:
    """Whether a credential has that key and, unless it is None, that secret; None when there is no such credential."""
    rows = await session.fetch("read_credential", credential_id)
    if not rows:
        return None
    if secret is not None and not hmac.compare_digest(bytes(rows[0]["secret_hash"]), digest_of(secret.encode("utf-8"))):
        return False
    return bool(rows[0]["api_key"] == api_key)


async def archive_credential(session: Session, credential_id: int, archived: bool = True) -> Credential | None:
    """Archive a credential, which is refused from now on, or take it back into use."""
    rows = await session.fetch("archive_credential", credential_id, archived)
    return _credential(rows[0]) if rows else None


async def delete_credential(session: Session, credential_id: int) -> None:
    await session.fetch("delete_credential", credential_id)


# Projects


async def create_project(session: Session, name: str, description: str) -> Project | None:
    """None when the name is taken."""
    rows = await session.fetch("create_project", name, description)
    return _project(rows[0]) if rows else None


async def list_projects(session: Session, *, limit: int, offset: int) -> tuple[int, list[Project]]:
    """How many there are, and a page, oldest first."""
    rows = await session.fetch("list_projects", limit, offset)
    return await session.value("count_projects"), [_project(row) for row in rows]


async def read_project(session: Session, project_id: int) -> Project | None:
    rows = await session.fetch("read_project", project_id)
    return _project(rows[0]) if rows else None


async def missing_projects(session: Session, ids: Iterable[int]) -> list[int]:
    """Those of the ids that are no project's."""
    wanted = set(ids)
    found = {row["id"] for row in await session.fetch("find_projects", list(wanted))}
    return sorted(wanted - found)


async def update_project(session: Session, project_id: int, name: str, description: str | None) -> Project | None:
    """None when there is no such project. Raises Refused when the name is another's."""
    rows = await session.fetch("update_project", project_id, name, description)
    return _project(rows[0]) if rows else None


async def delete_project(session: Session, project_id: int) -> bool:
    """False when it has jobs."""
    try:
        async with session.savepoint():
            await session.fetch("delete_project", project_id)
    except Refused:
        return False
    return True


# Jobs


async def reserve_job_ids(session: Session, count: int) -> tuple[list[int], datetime]:
    """Ascending ids, and the present instant."""
    rows = await session.fetch("reserve_job_ids", count)
    return [row["id"] for row in rows], rows[0]["now"]


async def add_jobs(
    session: Session, jobs: Sequence[Job], entries: Sequence[bytes], *, request_id: str, given: str, output: str
) -> int:
    """Keep jobs, and have their schedules made; returns the id of the request.

    entries: parameters of schedule.create as JSON, one a job. given: the body. output: the jobs as JSON.
    Raises Refused for values that Postgres cannot keep, and when a project is gone.
    """
    starts = range(0, len(entries), PART_ENTRIES)
    parts = ((start, f"[{b','.join(entries[start : start + PART_ENTRIES]).decode()}]") for start in starts)
    import_id = await start_import(session, parts, total=len(entries), replaces=False)
    for start in range(0, len(jobs), JOBS_A_STATEMENT):
        part = jobs[start : start + JOBS_A_STATEMENT]
        await session.fetch(
            "insert_jobs", import_id, part[0].date_created,
            [job.id for job in part], [job.project_id for job in part], [job.spec for job in part],
            [job.timezone for job in part], [job.timezone_offset for job in part], [job.callback_url for job in part],
            [job.data for job in part], [job.execution_type for job in part],
            [_set(job.start_date) for job in part], [_set(job.end_date) for job in part],
        )  # fmt: skip
    created: int = await session.value("create_request", request_id, import_id, given, output)
    return created


async def count_jobs(session: Session, project_id: int) -> int:
    count: int = await session.value("count_jobs", project_id)
    return count


async def list_jobs(session: Session, project_id: int, *, limit: int, offset: int) -> list[Job]:
    """A page, oldest first."""
    return [_job(row) for row in await session.fetch("list_jobs_of_project", project_id, limit, offset)]


async def read_job(session: Session, job_id: int) -> Job | None:
    rows = await session.fetch("read_callback_job", job_id)
    return _job(rows[0]) if rows else None


async def names_of_import(session: Session, import_id: int, names: Iterable[str]) -> set[str]:
    """Of names of schedules, those of jobs that came by this import."""
    by_job = {job: name for name in names if (job := job_of(name)) is not None}
    return {by_job[row["id"]] for row in await session.fetch("find_jobs_of_import", list(by_job), import_id)}


async def lock_job(session: Session, job_id: int) -> HeldJob | None:
    """Hold a job's row, so that nobody else changes it meanwhile."""
    rows = await session.fetch("lock_callback_job", job_id)
    return HeldJob(_job(rows[0]), rows[0]["making"]) if rows else None


async def update_job(session: Session, job: Job) -> None:
    """Write what may change of a job."""
    await session.fetch("update_callback_job", job.id, job.callback_url, job.data, job.execution_type)


async def delete_job(session: Session, job_id: int) -> None:
    await session.fetch("delete_callback_job", job_id)


# Requests


async def progress_of(session: Session, request_id: str) -> Progress | None:
    """None when there is no such request. An import that is cleaned had come to its end."""
    rows = await session.fetch("find_request", request_id)
    if not rows:
        return None
    row = rows[0]
    if not row["known"]:
        return Progress.SUCCESS
    if row["finished"]:
        return Progress.FAILED if row["refused"] else Progress.SUCCESS
    return Progress.IN_PROGRESS if row["seen"] else Progress.NOT_STARTED


async def read_request(session: Session, request_id: str) -> Request | None:
    rows = await session.fetch("read_request", request_id)
    if not rows:
        return None
    row = rows[0]
    errors = msgspec.json.decode(row["errors"]) if row["errors"] else []
    return Request(row["id"], row["request_id"], row["input"], row["output"], row["created_at"], errors)


async def find_request_name(session: Session, request: int) -> str | None:
    """The name of a request by its id."""
    name: str | None = await session.value("find_request_name", request)
    return name


# Executions


async def list_executions(session: Session, wanted: Wanted, *, limit: int, offset: int) -> tuple[int, list[Execution]]:
    """How many there are, counted up to COUNTED, and a page, newest first."""
    which = (wanted.since, wanted.until, wanted.project_id, wanted.states)
    of_job = wanted.job_id is not None
    if of_job:
        rows = await session.fetch("list_executions_of_job", *which, limit, offset, wanted.job_id)
    else:
        rows = await session.fetch("list_executions", *which, limit, offset)
    found = [_execution(row) for row in rows]
    if len(found) < limit and (found or not offset):
        return offset + len(found), found
    if of_job:
        total: int = await session.value("count_executions_of_job", *which, COUNTED, wanted.job_id)
    else:
        total = await session.value("count_executions", *which, COUNTED)
    return max(total, offset + len(found) if found else 0), found


def _credential(row: Any) -> Credential:
    return Credential(row["id"], row["api_key"], row["secret"], row["archived"], row["created_at"])


def _project(row: Any) -> Project:
    return Project(row["id"], row["name"], row["description"], row["created_at"])


def _job(row: Any) -> Job:
    return Job(
        id=row["id"],
        project_id=row["project_id"],
        spec=row["spec"],
        callback_url=row["callback_url"],
        data=row["data"],
        execution_type=row["execution_type"],
        start_date=row["start_date"] or NEVER,
        end_date=row["end_date"] or NEVER,
        last_execution_date=row.get("last_at") or NEVER,
        timezone=row["timezone"],
        timezone_offset=row["timezone_offset"],
        date_created=row["created_at"],
    )


def _execution(row: Any) -> Execution:
    is_settled = row["state"] not in _LIVE
    return Execution(
        job_id=row["job_id"],
        task_id=row["task_id"],
        unique_id=execution_id(run_name(row["schedule_id"], row["scheduled_at"])),
        scheduled_at=row["scheduled_at"],
        fired_at=row["fired_at"],
        settled_at=row["updated_at"] if is_settled else None,
        state=0 if not is_settled else 2 if row["state"] in _FAILED else 1,
        timezone=row["timezone"],
        expression=row["expression"],
        anchor=row["anchor"],
    )


def _set(instant: datetime) -> datetime | None:
    return None if instant == NEVER else instant
