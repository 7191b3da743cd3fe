"""Credentials: made, listed, archived, deleted."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.compat.scheduler0 import store as stored
from penstock.compat.scheduler0.http.answers import CredentialPage, Problem, answer, credential, nothing
from penstock.compat.scheduler0.http.requests import decode, page, path_id
from penstock.db.pool import Store
from penstock.settings.model import Settings

_NOT_FOUND = "message: credential not found, code: 404"


class _Change(msgspec.Struct, rename="camel"):
    archived: bool | None = None
    api_key: str | None = None
    api_secret: str | None = None


_decode_any = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_change = msgspec.json.Decoder(_Change).decode


class Credentials:
    def __init__(self, store: Store, settings: Settings) -> None:
        self._store = store
        self._readable = settings.scheduler0_readable_secrets

    async def create(self, request: Request, body: bytes) -> Response:
        decode(body, _decode_any)
        async with self._store.session() as session:
            made, secret = await stored.create_credential(session, readable=self._readable)
        return answer(credential(made, secret), 201)

    async def list(self, request: Request, body: bytes) -> Response:
        limit, offset = page(request.query_params)
        async with self._store.session() as session:
            total, found = await stored.list_credentials(session, limit=limit, offset=offset)
        if not total:
            raise Problem(404, "there no credentials")
        return answer(CredentialPage(total, offset, limit, [credential(one) for one in found]))

    async def get(self, request: Request, body: bytes) -> Response:
        async with self._store.session() as session:
            found = await stored.read_credential(session, path_id(request))
        if found is None:
            raise Problem(400, _NOT_FOUND)
        return answer(credential(found))

    async def update(self, request: Request, body: bytes) -> Response:
        """``archived`` alone changes. What does not fit is 200 all the same, and not a success."""
        credential_id, given = path_id(request), decode(body, _decode_change)
        # A secret that nobody can read again cannot be sent again either.
        secret = None if not given.api_secret and not self._readable else given.api_secret or ""
        async with self._store.transaction() as session:
            fits = await stored.is_credential(session, credential_id, given.api_key or "", secret)
            if fits is None:
                raise Problem(200, _NOT_FOUND)
            if not fits:
                raise Problem(200, "apiKey and apiSecret must be those of the credential: only archived changes")
            changed = await stored.archive_credential(session, credential_id, bool(given.archived))
        if changed is None:
            raise Problem(200, _NOT_FOUND)
        return answer(credential(changed))

    async def archive(self, request: Request, body: bytes) -> Response:
        """Of a newer server."""
        async with self._store.session() as session:
            if await stored.archive_credential(session, path_id(request)) is None:
                raise Problem(404, _NOT_FOUND)
        return nothing()

    async def delete(self, request: Request, body: bytes) -> Response:
        async with self._store.session() as session:
            await stored.delete_credential(session, path_id(request))
        return nothing()
