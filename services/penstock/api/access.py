"""Who may ask: API keys where there are any; without keys, programs on this machine but not a browser's pages."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from urllib.parse import urlsplit

from pydantic import SecretStr
from starlette.datastructures import Headers

from penstock.errors import AccessDenied
from penstock.settings import is_loopback


class Guard:
    """Checks the headers of a request."""

    def __init__(self, keys: Sequence[SecretStr]) -> None:
        self._keys = [key.get_secret_value().encode("utf-8") for key in keys]

    def check_host(self, headers: Headers) -> None:
        """Without keys, refuse what came by another name than this machine's own. Raises AccessDenied, status 403.

        A page of the web can have its host name resolve to 127.0.0.1, or simply post to it from a form; the
        browser then sends that name as Host, or its own origin as Origin.
        """
        if self._keys:
            return
        host = headers.get("host", "")
        if not is_loopback(_name_of(host)):
            raise AccessDenied(403, "Only loopback hosts are served without API keys: set PENSTOCK_API_KEYS")
        origin = headers.get("origin")
        if origin is not None and origin.lower() not in (f"http://{host}".lower(), f"https://{host}".lower()):
            raise AccessDenied(403, "Requests from another origin are refused without API keys: set PENSTOCK_API_KEYS")

    def check_key(self, headers: Headers) -> None:
        """Refuse a request without one of the keys, where there are any. Raises AccessDenied, status 401."""
        if not self._keys:
            return
        given = (headers.get("x-api-key") or _bearer(headers.get("authorization", ""))).encode("latin-1")
        # Every key is compared, in constant time each, so that the time taken tells nothing about any.
        matches = [hmac.compare_digest(given, key) for key in self._keys]
        if not any(matches):
            raise AccessDenied(401, "An API key is needed: send Authorization: Bearer KEY, or X-API-Key: KEY")


def _name_of(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _bearer(authorization: str) -> str:
    scheme, _, key = authorization.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""
