"""Credentials, projects and jobs, what they have in common, and how all requests are read and answered."""

import asyncio
import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from enum import IntEnum
from time import monotonic
from typing import Any, ClassVar, Generic, TypeVar

import msgspec
from msgspec.structs import replace
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response

from penstock.api.audit import Declined
from penstock.compat.scheduler0 import jobs
from penstock.compat.scheduler0.jobs import BadJob, Instant, Job, JobGiven
from penstock.compat.scheduler0.store import Credential, Project, archive_credential, create_credential, is_secret
from penstock.db.pool import PATIENT_SECONDS, Store
from penstock.db.session import Session
from penstock.protocol.errors import Refused, ScheduleNotFound
from penstock.protocol.task import State
from penstock.runtime.logs import log
from penstock.runtime.periodic import is_set_within
from penstock.schedules.cron import CronError, timing
from penstock.schedules.methods import update_schedule
from penstock.schedules.policy import JOB_PREFIX, run_name
from penstock.schedules.robfig import is_shifted
from penstock.schedules.store import read_schedule, rewrite_schedule, start_import
from penstock.settings.model import Settings

PAGE_LIMIT = 50_000  # rows of a page; ``limit`` of a longer one's answer is this
NAME_MAX_CHARS = 500
LOOK_SECONDS = 0.25
LONGEST_SECONDS = 25.0  # of a long poll, less than most proxies wait
WAITS_LIMIT = 200  # at once; further requests are answered without waiting
_BIGINT = 2**63 - 1
_NUMBER = re.compile(r"[+-]?[0-9]{1,30}", re.ASCII)
_HEADERS = {"Access-Control-Allow-Origin": "*", "Cache-Control": "no-store"}  # the server adds X-Frame-Options
_AT_A_STRETCH = 100
_COUNTED = 10_000  # a larger total is given as this
_LIVE = tuple(state.value for state in State if not state.final)
_FAILED = (State.CRITICAL_ERROR.value, State.CANCELLED.value)
_TOO_EARLY = 503, "the job is still being made: ask again when its async task is done"
_STATES = {"scheduled": _LIVE, "success": (State.SUCCESS.value,), "failed": _FAILED}  # of executions -> of tasks
_CREDENTIAL_NOT_FOUND = "message: credential not found, code: 404"
Shape = TypeVar("Shape")
Record = TypeVar("Record", bound=msgspec.Struct)


class Problem(Declined):
    """A request that is answered with an error. data: of the envelope, in most cases a text."""

    def __init__(self, status: int, data: Any) -> None:
        super().__init__(str(data))
        self.status = status
        self.data = data


def answer(data: Any, status: int = 200, *, success: bool = True, headers: Mapping[str, str] | None = None) -> Response:
    body = msgspec.json.encode({"data": data, "success": success})
    return Response(body, status, {**_HEADERS, **(headers or {})}, media_type="application/json")


def number(text: str) -> int:
    """A number of a path or a query. Raises Problem, 400, with the text of Go's parser."""
    shown = msgspec.json.encode(text[:60]).decode()
    if not _NUMBER.fullmatch(text):
        raise Problem(400, f"strconv.Atoi: parsing {shown}: invalid syntax")
    if not -_BIGINT <= (value := int(text)) <= _BIGINT:
        raise Problem(400, f"strconv.Atoi: parsing {shown}: value out of range")
    return value


def path_id(request: Request) -> int:
    """Raises Problem, 400."""
    return number(request.path_params["id"])


def optional_number(query: QueryParams, name: str) -> int | None:
    """Raises Problem, 400."""
    text = query.get(name, "")
    return number(text) if text else None


def required_text(query: QueryParams, name: str) -> str:
    """Raises Problem, 400."""
    text = query.get(name, "")
    if not text:
        raise Problem(400, f"{name} is not provided")
    return text


def page(query: QueryParams) -> tuple[int, int]:
    """Limit and offset, both of them required. Raises Problem, 400."""
    limit, offset = map(number, [required_text(query, name) for name in ("limit", "offset")])
    for name, value in (("limit", limit), ("offset", offset)):
        if value < 0:
            raise Problem(400, f"{name} must not be negative, but is {value}")
    return min(limit, PAGE_LIMIT), offset


def optional_instant(query: QueryParams, name: str) -> datetime | None:
    """RFC 3339 with a zone. Raises Problem, 400."""
    text = query.get(name, "")
    try:
        return msgspec.convert(text, Instant) if text else None
    except msgspec.ValidationError:
        raise Problem(400, f"{name} must be RFC 3339 such as 2030-01-31T08:00:00Z, not {text[:60]!r}") from None


def decode(
    body: bytes, shape: type[Shape], *, status: int = 422, read: Callable[..., Any] = msgspec.json.decode
) -> Shape:
    """Decode a body. Raises Problem: 400 without a body, ``status`` for an invalid one."""
    if not body.strip():
        raise Problem(400, "request body required")
    try:
        body.decode()  # msgspec skips unknown members unchecked
        decoded: Shape = read(body, type=shape)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise Problem(status, f"the body cannot be read: {exc}") from None
    return decoded


class Records(Generic[Record]):
    record: type[Record]
    plural: ClassVar[str]  # the member of a page
    unknown: ClassVar[tuple[int, str]]  # status and text for an unknown id
    none: ClassVar[str | None] = None  # text of the 404 when there are no records at all; None: an empty page
    read_statement: ClassVar[str]
    list_statement: ClassVar[str]  # it has the arguments of ``scope`` first, as has the next
    count_statement: ClassVar[str]
    clamps_offset: ClassVar[bool] = False  # an offset past the end becomes the total

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store = store
        self._settings = settings

    def scope(self, query: QueryParams) -> tuple[int, ...]:
        """What a page is limited to."""
        return ()

    async def list(self, request: Request, body: bytes) -> Response:
        scope = self.scope(request.query_params)
        limit, offset = page(request.query_params)
        async with self._store.session() as session:
            total = await session.value(self.count_statement, *scope)
            if not total and self.none is not None:
                raise Problem(404, self.none)
            if self.clamps_offset:
                offset = min(offset, total)
            rows = await session.fetch(self.list_statement, *scope, limit, offset)
        members = {"total": total, "offset": offset, "limit": limit, self.plural: [self.record(**row) for row in rows]}
        return answer({name: value for name, value in members.items() if value})  # empty members are left out

    async def get(self, request: Request, body: bytes) -> Response:
        return answer(self.one(await self._store.fetch(self.read_statement, path_id(request))))

    def one(self, rows: Sequence[Any]) -> Record:
        """The record that a statement returned. Raises Problem if it returned none."""
        if not rows:
            raise Problem(*self.unknown)
        return self.record(**rows[0])


class _CredentialGiven(msgspec.Struct, rename="camel"):
    archived: bool | None = None
    api_key: str | None = None
    api_secret: str | None = None


class Credentials(Records[Credential]):
    record = Credential
    plural = "credentials"
    unknown = 400, _CREDENTIAL_NOT_FOUND
    none = "there no credentials"
    read_statement, list_statement, count_statement = "read_credential", "list_credentials", "count_credentials"

    async def create(self, request: Request, body: bytes) -> Response:
        decode(body, dict[str, msgspec.Raw])
        return answer(await create_credential(self._store, readable=self._settings.scheduler0_readable_secrets), 201)

    async def update(self, request: Request, body: bytes) -> Response:
        """Change ``archived``. A request that does not fit is answered with 200 and no success."""
        credential_id, given = path_id(request), decode(body, _CredentialGiven)
        # A client that cannot read the secret again cannot send it again.
        checks_secret = bool(given.api_secret) or self._settings.scheduler0_readable_secrets
        async with self._store.transaction() as session:
            for row in await session.fetch("read_credential_digest", credential_id):
                is_key = given.api_key == row["api_key"]
                if not is_key or (checks_secret and not is_secret(given.api_secret or "", row["secret_hash"])):
                    raise Problem(200, "apiKey and apiSecret must be those of the credential: only archived changes")
            changed = await archive_credential(session, credential_id, bool(given.archived))
        if changed is None:
            raise Problem(200, _CREDENTIAL_NOT_FOUND)
        return answer(changed)

    async def archive(self, request: Request, body: bytes) -> Response:
        """A request of newer clients."""
        if await archive_credential(self._store, path_id(request)) is None:
            raise Problem(404, _CREDENTIAL_NOT_FOUND)
        return Response(status_code=204, headers=_HEADERS)

    async def delete(self, request: Request, body: bytes) -> Response:
        await self._store.fetch("delete_credential", path_id(request))
        return Response(status_code=204, headers=_HEADERS)


class _ProjectGiven(msgspec.Struct):
    name: str | None = None
    description: str | None = None


class Projects(Records[Project]):
    record = Project
    plural = "projects"
    unknown = 404, "project does not exist"
    read_statement, list_statement, count_statement = "read_project", "list_projects", "count_projects"

    async def create(self, request: Request, body: bytes) -> Response:
        given = decode(body, _ProjectGiven, status=400)
        problem = _problem("name", given.name) or _problem("description", given.description)
        if problem is None:
            rows = await self._store.fetch("create_project", given.name, given.description)
            if rows:
                return answer(Project(**rows[0]), 201)
            problem = f"another project exists with the same name {given.name}"
        raise Problem(400, {"Message": problem, "Type": 400})  # this request alone is answered in this form

    async def update(self, request: Request, body: bytes) -> Response:
        project_id, given = path_id(request), decode(body, _ProjectGiven)
        problem = _problem("name", given.name) or _problem("description", given.description, required=False)
        if problem is not None:
            raise Problem(400, problem)
        try:
            rows = await self._store.fetch("update_project", project_id, given.name, given.description or None)
        except Refused:
            raise Problem(400, f"another project exists with the same name {given.name}") from None
        return answer(self.one(rows))

    async def delete(self, request: Request, body: bytes) -> Response:
        try:
            await self._store.fetch("delete_project", path_id(request))
        except Refused:
            raise Problem(400, "cannot delete project with jobs") from None
        return Response(status_code=204, headers=_HEADERS)


def _problem(field: str, text: str | None, *, required: bool = True) -> str | None:
    if not text:
        return f"project {field} is required" if required else None
    if "\0" in text:
        return f"project {field} holds the character NUL"
    if field == "name" and len(text) > NAME_MAX_CHARS:
        return f"project name has {len(text)} characters; the limit is {NAME_MAX_CHARS}"
    return None


class Jobs(Records[Job]):
    record = Job
    plural = "jobs"
    unknown = 404, "job cannot be found"
    read_statement, list_statement, count_statement = "read_callback_job", "list_jobs_of_project", "count_jobs"
    clamps_offset = True

    def scope(self, query: QueryParams) -> tuple[int, ...]:
        return (number(required_text(query, "projectId")),)

    async def create(self, request: Request, body: bytes) -> Response:
        """Answer 202 once the jobs are stored; the supervisor creates their schedules."""
        given = decode(body, list[JobGiven], read=jobs.read)
        if not given:
            return answer(None, 202)
        if len(given) > jobs.JOBS_LIMIT:
            raise Problem(400, f"{len(given)} jobs are too many for one request, which takes {jobs.JOBS_LIMIT}")
        try:
            await asyncio.to_thread(jobs.check_jobs, given)
            projects = {job.project_id or 0 for job in given}
            missing = projects - {row["id"] for row in await self._store.fetch("find_projects", [*projects])}
            if missing:
                raise BadJob(f"project does not exist, provided projectId is {min(missing)}")
            await asyncio.to_thread(jobs.check_deliverable, given)
            request_id, task_id = await self._add(given, body)
        except Refused as exc:
            raise Problem(400, f"the jobs cannot be kept: {exc}") from None
        headers = {"Location": f"/async-tasks/{request_id}"}
        shifted = [spec for spec in dict.fromkeys(job.spec or "" for job in given) if is_shifted(spec)]
        if shifted:
            log.warning("scheduler0_spec_shifted", specs=len(shifted), spec=shifted[0][:60], hint="seconds come first")
            headers["Warning"] = '299 penstock "a spec of five fields begins with the seconds, not with the minutes"'
        return answer([task_id], 202, headers=headers)

    async def _add(self, given: Sequence[JobGiven], body: bytes) -> tuple[str, int]:
        """Returns the id and the number of the request that creates the jobs. Raises BadJob, Refused."""
        reserved = await self._store.fetch("reserve_job_ids", len(given))
        entries, output = await asyncio.to_thread(_prepare, given, reserved, self._settings)
        request_id = str(uuid.uuid4())
        async with self._store.transaction() as session:
            await session.lift_timeout()  # tens of thousands of jobs take seconds, and each has its project looked up
            import_id = await start_import(session, entries, replaces=False)
            return request_id, await session.value("create_request", request_id, import_id, body.decode(), output)

    async def update(self, request: Request, body: bytes) -> Response:
        """Change data, callbackUrl and executionType, unless empty; the rest of the body is ignored."""
        job_id, given = path_id(request), decode(body, JobGiven, status=400, read=jobs.read)
        async with self._store.transaction(lock_wait_seconds=PATIENT_SECONDS) as session:
            before, is_importing = await self._lock(session, job_id)
            changeable = ("data", "callback_url", "execution_type")
            job = replace(before, **{name: value for name in changeable if (value := getattr(given, name))})
            jobs.check_deliverable([job])
            jobs.schedule_of(job, self._settings)
            await session.fetch("update_callback_job", job.id, job.callback_url, job.data, job.execution_type)
            payload = {"payload": msgspec.Raw(jobs.payload_of(job))}
            try:
                standing = await read_schedule(session, f"{JOB_PREFIX}{job.id}", lock=True)
                standing = await update_schedule(session, standing, payload, self._settings)
                if (job.execution_type == jobs.HTTP) != (before.execution_type == jobs.HTTP):
                    await rewrite_schedule(session, standing, paused=job.execution_type != jobs.HTTP)
            except ScheduleNotFound:
                if is_importing:
                    raise Problem(*_TOO_EARLY) from None
        return await self.get(request, b"")

    async def _lock(self, session: Session, job_id: int) -> tuple[Job, bool]:
        """Lock a job; returns it and whether the import of its schedule is still at work. Raises Problem, 404."""
        rows = [dict(row) for row in await session.fetch("lock_callback_job", job_id)]
        is_importing = any(row.pop("making") for row in rows)
        return self.one([row | {"last_execution_date": jobs.NEVER} for row in rows]), is_importing

    async def delete(self, request: Request, body: bytes) -> Response:
        job_id = path_id(request)
        async with self._store.transaction(lock_wait_seconds=PATIENT_SECONDS) as session:
            # The state of the import is read first: what it has finished by then, the next statements see.
            _, is_importing = await self._lock(session, job_id)
            deleted = await session.fetch("delete_schedules", [f"{JOB_PREFIX}{job_id}"])
            if not deleted and is_importing:
                raise Problem(*_TOO_EARLY)
            await session.fetch("delete_callback_job", job_id)
        return Response(status_code=204, headers=_HEADERS)

    async def executions(self, request: Request, body: bytes) -> Response:
        """List runs of jobs with their outcomes, as newer servers do."""
        query = request.query_params
        limit, offset = page(query)
        state = query.get("state", "")
        if state and state not in _STATES:
            raise Problem(400, f"state must be {', '.join(_STATES)}, not {state[:60]!r}")
        since, until = [optional_instant(query, name) for name in ("startDate", "endDate")]
        wanted = since, until, optional_number(query, "projectId"), _STATES.get(state)
        job_id = optional_number(query, "jobId")
        select, count, of_job = "list_executions", "count_executions", []
        if job_id is not None:
            select, count, of_job = "list_executions_of_job", "count_executions_of_job", [job_id]
        async with self._store.session() as session:
            rows = await session.fetch(select, *wanted, limit, offset, *of_job)
            total = offset + len(rows) if rows else 0
            if len(rows) == limit or (offset and not rows):  # not the last page
                total = max(total, await session.value(count, *wanted, _COUNTED, *of_job))
        # A newer client names its account, which is sent back; there is one account here.
        account = request.headers.get("x-account-id", "")
        account_id = int(account) if re.fullmatch(r"[0-9]{1,18}", account, re.ASCII) else 0
        runs: list[dict[str, Any]] = []
        for row in rows:
            if len(runs) % _AT_A_STRETCH == 0:
                await asyncio.sleep(0)  # other requests: to find what comes next takes long
            runs.append({"accountId": account_id, **_execution(row)})
        return answer({"total": total, "offset": offset, "limit": limit, "executions": runs})


def _prepare(given: Sequence[JobGiven], reserved: Sequence[Any], settings: Settings) -> tuple[list[msgspec.Raw], str]:
    """The entries of the import of the jobs' schedules, and the output of the async task. Raises BadJob."""
    made = [jobs.make_job(one, row["id"], row["now"]) for one, row in zip(given, reserved, strict=True)]
    entries = [msgspec.Raw(msgspec.json.encode(jobs.schedule_of(job, settings))) for job in made]
    return entries, msgspec.json.encode(made).decode()


def _execution(row: Any) -> dict[str, Any]:
    """A run of a job. id: of its task. state: 0 for a live task, 1 for success, 2 for failure."""
    scheduled_at, is_live = row["scheduled_at"], row["state"] in _LIVE
    try:
        following = timing(row["expression"], row["timezone"], row["anchor"]).next_after(scheduled_at)
    except CronError:  # a time zone that is unknown by now
        following = None
    return {
        "id": row["task_id"],
        "uniqueId": jobs.execution_id(run_name(row["schedule_id"], scheduled_at)),
        "state": 0 if is_live else 2 if row["state"] in _FAILED else 1,
        "nodeId": 1,
        "jobId": row["job_id"],
        "lastExecutionDatetime": scheduled_at,
        "nextExecutionDatetime": following or jobs.NEVER,
        "jobQueueVersion": 1,
        "executionVersion": int(scheduled_at.timestamp()),  # grows with each run
        "dateCreated": row["fired_at"],
        "dateModified": None if is_live else row["updated_at"],
    }


class Progress(IntEnum):
    NOT_STARTED = 0
    IN_PROGRESS = 1
    SUCCESS = 2
    FAILED = 3


class AsyncTasks:
    """The requests that create jobs, with long polls for their progress."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._stopping = asyncio.Event()
        self._waits = asyncio.Semaphore(WAITS_LIMIT)

    def stop(self) -> None:
        self._stopping.set()

    async def get(self, request: Request, body: bytes) -> Response:
        """Answer at once if it has succeeded or failed, else at its next change."""
        name = request.path_params["id"].replace("\0", "")
        progress = await self._wait(request, name)
        row = await self._row("read_request", name)
        output = ""
        if progress is Progress.SUCCESS:
            output = row["output"]
        elif progress is Progress.FAILED:
            errors = msgspec.json.decode(row["errors"]) if row["errors"] else []
            what = "; ".join(f"{one.get('name')}: {one.get('field')} {one.get('problem')}" for one in errors[:5])
            output = json.dumps({"Message": f"failed to create jobs: {what or 'see the log'}", "Type": 500})
        return answer({
            "id": row["id"], "requestId": row["request_id"], "input": row["input"], "output": output,
            "service": "create_job", "state": progress, "dateCreated": row["created_at"],
        })  # fmt: skip

    async def _row(self, statement: str, name: str) -> Any:
        """The row of a request. Raises Problem, 404."""
        rows = await self._store.fetch(statement, name)
        if not rows:
            raise Problem(404, "message: task doesn't exist, code: 404")
        return rows[0]

    async def _wait(self, request: Request, name: str) -> Progress:
        began, first = monotonic(), await self._look(name)
        if first >= Progress.SUCCESS or self._waits.locked():
            return first
        async with self._waits:
            while not self._stopping.is_set() and monotonic() - began < LONGEST_SECONDS:
                await is_set_within(self._stopping, LOOK_SECONDS)
                now = await self._look(name)
                if now != first or await request.is_disconnected():
                    return now
        return first

    async def _look(self, name: str) -> Progress:
        return Progress((await self._row("find_request", name))["progress"])
