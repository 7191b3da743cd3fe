"""What is answered: everything in one envelope, ``{"data": ..., "success": ...}``, with scheduler0's own shapes."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import msgspec
from starlette.responses import Response

from penstock.api.audit import Declined
from penstock.compat.scheduler0.jobs import Job
from penstock.compat.scheduler0.store import Credential, Execution, Project

_HEADERS = {"Access-Control-Allow-Origin": "*", "Cache-Control": "no-store"}  # X-Frame-Options is on all that is served
_encode = msgspec.json.Encoder().encode


class Problem(Declined):
    """A request that is answered with an error. data: what the envelope carries, nearly always a text."""

    def __init__(self, status: int, data: Any) -> None:
        super().__init__(str(data))
        self.status = status
        self.data = data


class CredentialShown(msgspec.Struct, rename="camel", omit_defaults=True, kw_only=True):
    id: int = 0
    archived: bool = False
    api_key: str = ""
    api_secret: str = ""
    date_created: datetime


class ProjectShown(msgspec.Struct, rename="camel", omit_defaults=True, kw_only=True):
    id: int = 0
    name: str = ""
    description: str = ""
    date_created: datetime


class AsyncTaskShown(msgspec.Struct, rename="camel"):
    id: int
    request_id: str
    input: str
    output: str
    service: str
    state: int
    date_created: datetime


class ExecutionShown(msgspec.Struct, rename="camel"):
    id: int
    account_id: int
    unique_id: str
    state: int
    node_id: int
    job_id: int
    last_execution_datetime: datetime
    next_execution_datetime: datetime
    job_queue_version: int
    execution_version: int
    date_created: datetime
    date_modified: datetime | None


class CredentialPage(msgspec.Struct, omit_defaults=True):
    total: int = 0
    offset: int = 0
    limit: int = 0
    credentials: list[CredentialShown] = []


class ProjectPage(msgspec.Struct, omit_defaults=True):
    total: int = 0
    offset: int = 0
    limit: int = 0
    projects: list[ProjectShown] = []


class JobPage(msgspec.Struct, omit_defaults=True):
    total: int = 0
    offset: int = 0
    limit: int = 0
    jobs: list[Job] = []


class ExecutionPage(msgspec.Struct):
    """Of a newer server, which leaves nothing out."""

    total: int
    offset: int
    limit: int
    executions: list[ExecutionShown]


def answer(data: Any, status: int = 200, *, success: bool = True, headers: Mapping[str, str] | None = None) -> Response:
    """An answer in its envelope."""
    body = _encode({"data": data, "success": success})
    return Response(body, status, {**_HEADERS, **(headers or {})}, media_type="application/json")


def nothing() -> Response:
    """204, which has no body."""
    return Response(status_code=204, headers=_HEADERS)


def credential(found: Credential, secret: str | None = None) -> CredentialShown:
    """With the secret just made, or the one that was kept in clear."""
    return CredentialShown(
        id=found.id,
        archived=found.archived,
        api_key=found.api_key,
        api_secret=secret or found.secret or "",
        date_created=found.created_at,
    )


def project(found: Project) -> ProjectShown:
    return ProjectShown(
        id=found.id, name=found.name, description=found.description, date_created=found.created_at
    )  # fmt: skip


def execution(found: Execution, account_id: int, following: datetime) -> ExecutionShown:
    """``following``: the instant after this one."""
    return ExecutionShown(
        id=found.task_id,
        account_id=account_id,
        unique_id=found.unique_id,
        state=found.state,
        node_id=1,
        job_id=found.job_id,
        last_execution_datetime=found.scheduled_at,
        next_execution_datetime=following,
        job_queue_version=1,
        execution_version=int(found.scheduled_at.timestamp()),  # rises with each run
        date_created=found.fired_at,
        date_modified=found.settled_at,
    )
