"""Access to scheduler0's API: by its credentials, and by the command line's peer mode."""

import base64
import hashlib
import hmac

from starlette.datastructures import Headers

from penstock.api.process import Parts
from penstock.api.rates import Lookups
from penstock.compat.scheduler0.store import find_credential
from penstock.protocol.errors import AccessDenied

UNAUTHORIZED = "unauthorized requests"
_PEERS = frozenset({"cmd", "peer"})
_MAX_CHARS = 512  # of a key or a secret that is looked up


class CredentialAuthenticator:
    """Checks the headers of a request in Postgres, so that an archived credential is refused at once."""

    def __init__(self, parts: Parts) -> None:
        self._store, self._rates, settings = parts.store, parts.rates, parts.settings
        self._lookups = Lookups()
        self._peer: bytes | None = None
        password = settings.scheduler0_auth_password
        if settings.scheduler0_auth_username is not None and password is not None:
            peer = f"{settings.scheduler0_auth_username}:{password.get_secret_value()}"
            self._peer = base64.b64encode(peer.encode())

    async def admit(self, headers: Headers, address: str) -> str:
        """The name of the caller: ``scheduler0:`` and the number of its credential, or ``peer``.

        Raises AccessDenied with the status 401, RateLimited, Unavailable.
        """
        name = await self._name_of(headers, address)
        if name is None:
            raise AccessDenied(401, UNAUTHORIZED)
        if self._rates is not None:
            self._rates.charge(name, 1)
        return name

    async def _name_of(self, headers: Headers, address: str) -> str | None:
        api_key = headers.get("x-api-key", "")
        secret = headers.get("x-secret-key") or headers.get("x-api-secret", "")
        if api_key and secret:
            if max(len(api_key), len(secret)) > _MAX_CHARS or "\0" in api_key:
                return None
            digest = hashlib.sha256(f"{api_key}\0{secret}".encode()).digest()

            async def find() -> int | None:
                async with self._store.session() as session:
                    return await find_credential(session, api_key, secret)

            found = await self._lookups.find(digest, address, find)
            return None if found is None else f"scheduler0:{found}"
        if self._peer is not None and headers.get("x-peer") in _PEERS:
            scheme, _, given = headers.get("authorization", "").partition(" ")
            if scheme.lower() == "basic" and hmac.compare_digest(given.strip().encode(), self._peer):
                return "scheduler0:peer"
        return None
