"""What the resources of the API have in common: a page, and one record by its id."""

from __future__ import annotations

from typing import Any, ClassVar, Generic, TypeVar

import msgspec
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response

from penstock.compat.scheduler0.http.messages import Problem, answer, page, path_id
from penstock.db.pool import Store
from penstock.db.session import Session
from penstock.settings.model import Settings

Record = TypeVar("Record", bound=msgspec.Struct)


class Resource(Generic[Record]):
    """A kind of record.

    plural: the member of a page. unknown: status and text for an unknown id. none: text of the 404 when there are no
    records at all, None: an empty page. list_statement, count_statement: have the arguments of ``scope`` first.
    clamps_offset: an offset past the end becomes the total.
    """

    record: type[Record]
    plural: ClassVar[str]
    unknown: ClassVar[tuple[int, str]]
    none: ClassVar[str | None] = None
    read_statement: ClassVar[str]
    list_statement: ClassVar[str]
    count_statement: ClassVar[str]
    clamps_offset: ClassVar[bool] = False

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
        async with self._store.session() as session:
            return answer(await self.one(session, self.read_statement, path_id(request)))

    async def one(self, session: Session, statement: str, *args: Any) -> Record:
        """The record that a statement returns. Raises Problem if it returns none."""
        rows = await session.fetch(statement, *args)
        if not rows:
            raise Problem(*self.unknown)
        return self.record(**rows[0])
