"""Projects, which jobs belong to."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.compat.scheduler0 import store as stored
from penstock.compat.scheduler0.http.answers import Problem, ProjectPage, answer, nothing, project
from penstock.compat.scheduler0.http.requests import decode, page, path_id
from penstock.db.pool import Store
from penstock.protocol.errors import Refused

NAME_MAX_CHARS = 500
_NOT_FOUND = "project does not exist"


class _Given(msgspec.Struct):
    name: str | None = None
    description: str | None = None


_decode_given = msgspec.json.Decoder(_Given).decode


class Projects:
    def __init__(self, store: Store) -> None:
        self._store = store

    async def create(self, request: Request, body: bytes) -> Response:
        given = decode(body, _decode_given, status=400)
        problem = _problem("name", given.name) or _problem("description", given.description)
        if problem is not None:
            raise _refused(problem)
        async with self._store.session() as session:
            made = await stored.create_project(session, given.name or "", given.description or "")
        if made is None:
            raise _refused(f"another project exists with the same name {given.name}")
        return answer(project(made), 201)

    async def list(self, request: Request, body: bytes) -> Response:
        limit, offset = page(request.query_params)
        async with self._store.session() as session:
            total, found = await stored.list_projects(session, limit=limit, offset=offset)
        return answer(ProjectPage(total, offset, limit, [project(one) for one in found]))

    async def get(self, request: Request, body: bytes) -> Response:
        async with self._store.session() as session:
            found = await stored.read_project(session, path_id(request))
        if found is None:
            raise Problem(404, _NOT_FOUND)
        return answer(project(found))

    async def update(self, request: Request, body: bytes) -> Response:
        project_id, given = path_id(request), decode(body, _decode_given)
        problem = _problem("name", given.name)
        if problem is None and given.description:
            problem = _problem("description", given.description)
        if given.name is None or problem is not None:
            raise Problem(400, problem)
        try:
            async with self._store.session() as session:
                changed = await stored.update_project(session, project_id, given.name, given.description or None)
        except Refused:
            raise Problem(400, f"another project exists with the same name {given.name}") from None
        if changed is None:
            raise Problem(404, _NOT_FOUND)
        return answer(project(changed))

    async def delete(self, request: Request, body: bytes) -> Response:
        async with self._store.transaction() as session:
            if not await stored.delete_project(session, path_id(request)):
                raise Problem(400, "cannot delete project with jobs")
        return nothing()


def _problem(field: str, text: str | None) -> str | None:
    """What is wrong with a text of a project."""
    if not text:
        return f"project {field} is required"
    if "\0" in text:
        return f"project {field} holds the character NUL"
    if field == "name" and len(text) > NAME_MAX_CHARS:
        return f"project name has {len(text)} characters; the limit is {NAME_MAX_CHARS}"
    return None


def _refused(message: str) -> Problem:
    """A project that is not made is told in a form of its own."""
    return Problem(400, {"Message": message, "Type": 400})
