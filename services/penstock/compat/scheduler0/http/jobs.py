"""Jobs: made by the thousand in one call, by an import of their schedules; listed, changed, deleted."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from datetime import datetime

import msgspec
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from penstock.compat.scheduler0 import store as stored
from penstock.compat.scheduler0.http.answers import JobPage, Problem, answer, nothing
from penstock.compat.scheduler0.http.requests import decode, page, path_id, wanted_number
from penstock.compat.scheduler0.jobs import (
    HTTP,
    JOBS_LIMIT,
    BadJob,
    Job,
    JobGiven,
    Limits,
    check_deliverable,
    check_jobs,
    make_job,
    payload_of,
    read_job,
    read_jobs,
    schedule_name,
    schedule_of,
    shifted_specs,
)
from penstock.db.pool import Store
from penstock.db.session import Session
from penstock.methods.reading import read_command
from penstock.protocol.errors import Refused, ScheduleNotFound
from penstock.runtime.logs import get_logger
from penstock.schedules.store import pause_schedule, update_schedule
from penstock.settings.model import Settings

log = get_logger()
_NOT_FOUND = "job cannot be found"
_encode = msgspec.json.Encoder().encode


class Jobs:
    def __init__(self, store: Store, settings: Settings) -> None:
        self._store = store
        self._settings = settings
        self._limits = Limits(settings.payload_limit_bytes, settings.scheduler0_retry_max + 1)

    async def create(self, request: Request, body: bytes) -> Response:
        """202 once the jobs are kept; the supervisor makes their schedules."""
        given = decode(body, read_jobs)
        if not given:
            return answer(None, 202)
        if len(given) > JOBS_LIMIT:
            raise Problem(400, f"{len(given)} jobs are too many for one request, which takes {JOBS_LIMIT}")
        try:
            await asyncio.to_thread(check_jobs, given)
            await self._check_projects(given)
            await asyncio.to_thread(check_deliverable, given)
            request_id, task_id = await self._add(given, body)
        except BadJob as exc:
            raise Problem(400, str(exc)) from None
        headers = {"Location": f"/async-tasks/{request_id}"}
        shifted = shifted_specs(given)
        if shifted:
            log.warning("scheduler0_spec_shifted", specs=len(shifted), spec=shifted[0][:60], hint="seconds come first")
            headers["Warning"] = '299 penstock "a spec of five fields begins with the seconds, not with the minutes"'
        return answer([task_id], 202, headers=headers)

    async def _check_projects(self, given: Sequence[JobGiven]) -> None:
        async with self._store.session() as session:
            missing = await stored.missing_projects(session, {job.project_id or 0 for job in given})
        if missing:
            raise BadJob(f"project does not exist, provided projectId is {missing[0]}")

    async def _add(self, given: Sequence[JobGiven], body: bytes) -> tuple[str, int]:
        async with self._store.session() as session:
            ids, now = await stored.reserve_job_ids(session, len(given))
        jobs, entries, output = await asyncio.to_thread(self._prepare, given, ids, now)
        request_id = str(uuid.uuid4())
        try:
            async with self._store.transaction() as session:
                task_id = await stored.add_jobs(
                    session, jobs, entries, request_id=request_id, given=body.decode(), output=output
                )
        except Refused as exc:
            raise BadJob(f"the jobs cannot be kept: {exc}") from None
        return request_id, task_id

    def _prepare(
        self, given: Sequence[JobGiven], ids: Sequence[int], now: datetime
    ) -> tuple[list[Job], list[bytes], str]:
        """The jobs, the parameters of their schedules, and the jobs as the async task will tell them. Raises BadJob."""
        jobs = [make_job(one, job_id, now) for one, job_id in zip(given, ids, strict=True)]
        return jobs, [_encode(schedule_of(job, self._limits)) for job in jobs], _encode(jobs).decode()

    async def list(self, request: Request, body: bytes) -> Response:
        project_id = wanted_number(request.query_params, "projectId")
        limit, offset = page(request.query_params)
        async with self._store.session() as session:
            total = await stored.count_jobs(session, project_id)
            offset = min(offset, total)
            found = await stored.list_jobs(session, project_id, limit=limit, offset=offset)
        return answer(JobPage(total, offset, limit, found))

    async def get(self, request: Request, body: bytes) -> Response:
        async with self._store.session() as session:
            found = await stored.read_job(session, path_id(request))
        if found is None:
            raise Problem(404, _NOT_FOUND)
        return answer(found)

    async def update(self, request: Request, body: bytes) -> Response:
        """data, callbackUrl and executionType change, an empty text leaving them; all else is passed over."""
        job_id, given = path_id(request), decode(body, read_job, status=400)
        async with self._store.transaction() as session:
            held = await stored.lock_job(session, job_id)
            if held is None:
                raise Problem(404, _NOT_FOUND)
            before = held.job
            job = replace(
                before,
                data=given.data or before.data,
                callback_url=given.callback_url or before.callback_url,
                execution_type=given.execution_type or before.execution_type,
            )
            try:
                check_deliverable([given_of(job)])
                schedule_of(job, self._limits)
            except BadJob as exc:
                raise Problem(400, str(exc)) from None
            await stored.update_job(session, job)
            await self._change(session, before, job, held.is_being_made)
        return await self.get(request, b"")

    async def _change(self, session: Session, before: Job, job: Job, is_being_made: bool) -> None:
        """Have the schedule do what the job says now."""
        name = schedule_name(job.id)
        # None is made with a tenant; one that has one was made by another caller before the name was kept from them.
        standing = await session.fetch("lock_schedules", [name])
        if standing and standing[0]["tenant"] is not None:
            raise Problem(409, f"the schedule {name} is for a tenant: delete it, then delete and create the job")
        params = {"name": name, "payload": msgspec.Raw(payload_of(job))}
        try:
            await update_schedule(session, read_command("schedule.update", _encode(params), self._settings))
            if (job.execution_type == HTTP) != (before.execution_type == HTTP):
                await pause_schedule(session, name, paused=job.execution_type != HTTP)
        except ScheduleNotFound:
            if is_being_made:
                raise _too_early() from None

    async def delete(self, request: Request, body: bytes) -> Response:
        job_id = path_id(request)
        async with self._store.transaction() as session:
            # Whether the import is at work is asked first: what it has finished is there for all that comes after.
            held = await stored.lock_job(session, job_id)
            if held is None:
                raise Problem(404, _NOT_FOUND)
            gone = await session.fetch("delete_schedules", [schedule_name(job_id)])
            if not gone and held.is_being_made:
                raise _too_early()
            await stored.delete_job(session, job_id)
        return nothing()


def given_of(job: Job) -> JobGiven:
    """What is checked of a job that is there."""
    return JobGiven(data=job.data, execution_type=job.execution_type, callback_url=job.callback_url)


def _too_early() -> Problem:
    return Problem(503, "the job is still being made: ask again when its async task is done")
