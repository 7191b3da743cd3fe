"""Credentials: created, listed, archived, deleted."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.compat.scheduler0.http.messages import Problem, answer, decode, nothing, path_id
from penstock.compat.scheduler0.http.resource import Resource
from penstock.compat.scheduler0.store import Credential, archive_credential, create_credential, is_secret

_NOT_FOUND = "message: credential not found, code: 404"


class _Change(msgspec.Struct, rename="camel"):
    archived: bool | None = None
    api_key: str | None = None
    api_secret: str | None = None


_decode_any = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_change = msgspec.json.Decoder(_Change).decode


class Credentials(Resource[Credential]):
    record = Credential
    plural = "credentials"
    unknown = 400, _NOT_FOUND
    none = "there no credentials"
    read_statement, list_statement, count_statement = "read_credential", "list_credentials", "count_credentials"

    async def create(self, request: Request, body: bytes) -> Response:
        decode(body, _decode_any)
        async with self._store.session() as session:
            created = await create_credential(session, readable=self._settings.scheduler0_readable_secrets)
        return answer(created, 201)

    async def update(self, request: Request, body: bytes) -> Response:
        """Change ``archived``. A request that does not fit is answered with 200 and no success."""
        credential_id, given = path_id(request), decode(body, _decode_change)
        # A client that cannot read the secret again cannot send it again.
        checks_secret = bool(given.api_secret) or self._settings.scheduler0_readable_secrets
        async with self._store.transaction() as session:
            rows = await session.fetch("read_credential_digest", credential_id)
            if not rows:
                raise Problem(200, _NOT_FOUND)
            if (given.api_key or "") != rows[0]["api_key"] or (
                checks_secret and not is_secret(given.api_secret or "", rows[0]["secret_hash"])
            ):
                raise Problem(200, "apiKey and apiSecret must be those of the credential: only archived changes")
            changed = await archive_credential(session, credential_id, bool(given.archived))
        if changed is None:
            raise Problem(200, _NOT_FOUND)
        return answer(changed)

    async def archive(self, request: Request, body: bytes) -> Response:
        """A request of newer clients."""
        async with self._store.session() as session:
            if await archive_credential(session, path_id(request)) is None:
                raise Problem(404, _NOT_FOUND)
        return nothing()

    async def delete(self, request: Request, body: bytes) -> Response:
        async with self._store.session() as session:
            await session.fetch("delete_credential", path_id(request))
        return nothing()
