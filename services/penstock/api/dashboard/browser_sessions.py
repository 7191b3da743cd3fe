"""Who looks at the dashboard: signed in by an API key where keys are asked for, else whoever is on this machine.

A browser holds one cookie, a random token. With keys, Postgres knows the digest of the token and of the key that was
shown for it, so every api process knows the browser, a key that is revoked ends its sessions, and neither the cookie
nor the database leads back to the key. The token of every form is derived from the cookie, which no other origin can
read.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import Literal
from urllib.parse import urlsplit

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.api.access import Caller, Guard
from penstock.api.http_limits import ADMITTED
from penstock.api.lookups import Lookups
from penstock.db.session import Session
from penstock.protocol.errors import AccessDenied

SESSION_COOKIE = "penstock_session"
FLASH_COOKIE = "penstock_flash"
_FLASH_SECONDS = 60
_FLASH_CHARS = 1000


class Flash(msgspec.Struct, frozen=True):
    """What came of the last action, shown once."""

    text: str
    kind: Literal["done", "failed"] = "done"


@dataclass(frozen=True, slots=True)
class Visitor:
    """A browser. caller: what it may do, None before it has signed in. token: of its cookie."""

    caller: Caller | None
    token: str
    address: str
    signs_in: bool

    @property
    def csrf(self) -> str:
        """What a form of this browser must carry."""
        return _digest(b"form", self.token).hex()

    @property
    def name(self) -> str:
        return self.caller.key if self.caller is not None else ""

    @property
    def tenant(self) -> str | None:
        """To which the key is bound."""
        return None if self.caller is None else self.caller.tenant

    @property
    def actions(self) -> tuple[str, ...] | None:
        """Patterns of the actions that the key may enqueue."""
        return None if self.caller is None else self.caller.actions

    def may(self, method: str) -> bool:
        return self.caller is not None and self.caller.may(method)


class Visitors:
    """Tells browsers apart, lets them in and out. session: opens one."""

    def __init__(
        self, guard: Guard, session: Callable[[], AbstractAsyncContextManager[Session]], *, session_seconds: float
    ) -> None:
        self._guard = guard
        self._session = session
        self._session_seconds = session_seconds
        self._lookups = Lookups()

    async def who(self, request: Request) -> Visitor:
        """Raises AccessDenied for a foreign host, RateLimited, Unavailable."""
        self._guard.check_host(request.headers)
        address = request.client.host if request.client else ""
        token = request.cookies.get(SESSION_COOKIE, "")
        if not _is_token(token):
            token = secrets.token_urlsafe(32)
        elif self._guard.asks_for_keys:
            digest = await self._lookups.find(_digest(b"session", token), address, partial(self._key_of, token))
            caller = None if digest is None else self._guard.admit_digest(bytes(digest))
            return self._charged(request, Visitor(caller, token, address, True))
        caller = None if self._guard.asks_for_keys else self._guard.admit(request.headers, address)
        return self._charged(request, Visitor(caller, token, address, self._guard.asks_for_keys))

    async def _key_of(self, token: str) -> bytes | None:
        async with self._session() as session:
            found: bytes | None = await session.value("read_session", _digest(b"session", token))
        return found

    @staticmethod
    def _charged(request: Request, visitor: Visitor) -> Visitor:
        if visitor.caller is not None:
            request.scope[ADMITTED] = True
            visitor.caller.charge(1)
        return visitor

    async def sign_in(self, secret: str) -> tuple[Caller, str] | None:
        """The caller and the token of a new session; None for a key that is not accepted. Raises Unavailable."""
        admitted = self._guard.admit_secret(secret)
        if admitted is None:
            return None
        caller, key_digest = admitted
        token = secrets.token_urlsafe(32)  # never one that was there before: somebody else may have set it
        async with self._session() as session:
            await session.fetch("begin_session", _digest(b"session", token), key_digest, self._session_seconds)
        return caller, token

    async def sign_out(self, visitor: Visitor) -> None:
        async with self._session() as session:
            await session.fetch("end_session", _digest(b"session", visitor.token))


def check_form(request: Request, visitor: Visitor, given: str) -> None:
    """Refuse a form that no page of ours has sent. Raises AccessDenied, status 403."""
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc.lower() != request.headers.get("host", "").lower():
        raise AccessDenied(403, "This form comes from another origin, or its origin is hidden: open the page itself")
    if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        raise AccessDenied(403, "This form comes from another site: open the page itself")
    if not hmac.compare_digest(given.encode("utf-8"), visitor.csrf.encode("ascii")):
        raise AccessDenied(403, "This form is out of date: open the page again, and send it from there")


def set_cookie(request: Request, response: Response, token: str, seconds: float | None) -> None:
    """Have the browser keep its token; None: until it is closed."""
    response.set_cookie(
        SESSION_COOKIE, token, max_age=None if seconds is None else int(seconds), httponly=True, samesite="lax",
        # Behind a proxy that speaks TLS only the browser knows, and says so with every form.
        secure=request.headers.get("origin", "").startswith("https://"),
    )  # fmt: skip


def set_flash(response: Response, flash: Flash) -> None:
    short = msgspec.structs.replace(flash, text=flash.text[:_FLASH_CHARS])
    value = urlsafe_b64encode(msgspec.json.encode(short)).decode("ascii")
    response.set_cookie(FLASH_COOKIE, value, max_age=_FLASH_SECONDS, httponly=True, samesite="lax")


def flash_of(request: Request) -> Flash | None:
    try:
        return msgspec.json.decode(urlsafe_b64decode(request.cookies[FLASH_COOKIE]), type=Flash)
    except (KeyError, ValueError, msgspec.MsgspecError):
        return None


def local_path(given: str) -> str:
    """Where a form asks to go next, as far as that is a page of ours."""
    fine = given.startswith("/") and not given.startswith(("//", "/\\")) and given.isprintable() and "\\" not in given
    return given if fine and given.isascii() and len(given) < 4000 else "/"


def _is_token(token: str) -> bool:
    return len(token) == 43 and all(char.isalnum() or char in "-_" for char in token) and token.isascii()


def _digest(use: bytes, token: str) -> bytes:
    return hashlib.sha256(b"penstock dashboard " + use + b"\0" + token.encode("ascii")).digest()
