"""Credentials and projects, what they have in common with jobs, and how all requests are read and answered."""

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, ClassVar, Generic, TypeVar

import msgspec
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response

from penstock.api.audit import Declined
from penstock.compat.scheduler0.jobs import Instant
from penstock.compat.scheduler0.store import Credential, Project, archive_credential, create_credential, is_secret
from penstock.db.pool import Store
from penstock.protocol.errors import Refused
from penstock.settings.model import Settings

PAGE_LIMIT = 50_000  # rows of a page; ``limit`` of a longer one's answer is this
_BIGINT = 2**63 - 1
_NUMBER = re.compile(r"[+-]?[0-9]{1,30}", re.ASCII)
_HEADERS = {"Access-Control-Allow-Origin": "*", "Cache-Control": "no-store"}  # the server adds X-Frame-Options
Shape = TypeVar("Shape")


class Problem(Declined):
    """A request that is answered with an error. data: of the envelope, in most cases a text."""

    def __init__(self, status: int, data: Any) -> None:
        super().__init__(str(data))
        self.status = status
        self.data = data


def answer(data: Any, status: int = 200, *, success: bool = True, headers: Mapping[str, str] | None = None) -> Response:
    body = msgspec.json.encode({"data": data, "success": success})
    return Response(body, status, {**_HEADERS, **(headers or {})}, media_type="application/json")


def nothing() -> Response:
    return Response(status_code=204, headers=_HEADERS)


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


NAME_MAX_CHARS = 500
_CREDENTIAL_NOT_FOUND = "message: credential not found, code: 404"
Record = TypeVar("Record", bound=msgspec.Struct)


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
        created = await create_credential(self._store, readable=self._settings.scheduler0_readable_secrets)
        return answer(created, 201)

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
        return nothing()

    async def delete(self, request: Request, body: bytes) -> Response:
        await self._store.fetch("delete_credential", path_id(request))
        return nothing()


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
        problem = _project_problem("name", given.name) or _project_problem("description", given.description)
        if problem is None:
            rows = await self._store.fetch("create_project", given.name, given.description)
            if rows:
                return answer(Project(**rows[0]), 201)
            problem = f"another project exists with the same name {given.name}"
        raise Problem(400, {"Message": problem, "Type": 400})  # this request alone is answered in this form

    async def update(self, request: Request, body: bytes) -> Response:
        project_id, given = path_id(request), decode(body, _ProjectGiven)
        problem = _project_problem("name", given.name)
        if problem is None and given.description:
            problem = _project_problem("description", given.description)
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
        return nothing()


def _project_problem(field: str, text: str | None) -> str | None:
    if not text:
        return f"project {field} is required"
    if "\0" in text:
        return f"project {field} holds the character NUL"
    if field == "name" and len(text) > NAME_MAX_CHARS:
        return f"project name has {len(text)} characters; the limit is {NAME_MAX_CHARS}"
    return None
