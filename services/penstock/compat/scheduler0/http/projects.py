"""Projects: each job belongs to one."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.compat.scheduler0.http.messages import Problem, answer, decode, nothing, path_id
from penstock.compat.scheduler0.http.resource import Resource
from penstock.compat.scheduler0.store import Project
from penstock.protocol.errors import Refused

NAME_MAX_CHARS = 500


class _Given(msgspec.Struct):
    name: str | None = None
    description: str | None = None


_decode_given = msgspec.json.Decoder(_Given).decode


class Projects(Resource[Project]):
    record = Project
    plural = "projects"
    unknown = 404, "project does not exist"
    read_statement, list_statement, count_statement = "read_project", "list_projects", "count_projects"

    async def create(self, request: Request, body: bytes) -> Response:
        given = decode(body, _decode_given, status=400)
        problem = _problem("name", given.name) or _problem("description", given.description)
        if problem is None:
            async with self._store.session() as session:
                rows = await session.fetch("create_project", given.name, given.description)
            if rows:
                return answer(Project(**rows[0]), 201)
            problem = f"another project exists with the same name {given.name}"
        raise Problem(400, {"Message": problem, "Type": 400})  # this request alone is answered in this form

    async def update(self, request: Request, body: bytes) -> Response:
        project_id, given = path_id(request), decode(body, _decode_given)
        problem = _problem("name", given.name)
        if problem is None and given.description:
            problem = _problem("description", given.description)
        if problem is not None:
            raise Problem(400, problem)
        values = given.name, given.description or None
        try:
            async with self._store.session() as session:
                return answer(await self.one(session, "update_project", project_id, *values))
        except Refused:
            raise Problem(400, f"another project exists with the same name {given.name}") from None

    async def delete(self, request: Request, body: bytes) -> Response:
        try:
            async with self._store.transaction() as session:
                await session.fetch("delete_project", path_id(request))
        except Refused:
            raise Problem(400, "cannot delete project with jobs") from None
        return nothing()


def _problem(field: str, text: str | None) -> str | None:
    if not text:
        return f"project {field} is required"
    if "\0" in text:
        return f"project {field} holds the character NUL"
    if field == "name" and len(text) > NAME_MAX_CHARS:
        return f"project name has {len(text)} characters; the limit is {NAME_MAX_CHARS}"
    return None
