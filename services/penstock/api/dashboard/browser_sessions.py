"""Sessions of browsers: signed in by an API key or a load balancer where keys are required, else open to this machine.

The token of every form is derived from the cookie, which no other origin can read. An Application Load Balancer names
its user in the header ``x-amzn-oidc-data``.
"""

import hashlib
import hmac
import re
import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode
from dataclasses import dataclass
from functools import partial
from time import time
from typing import Any, Literal

import httpx
import msgspec
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from penstock.api.access import Authenticator, Caller, Lookups, address_of, is_of_another_origin
from penstock.api.server import ADMITTED
from penstock.db.session import OpenSession
from penstock.protocol.api_key import Permission, digest_of, implied
from penstock.protocol.errors import AccessDenied, Unavailable, needing
from penstock.runtime.logs import printable
from penstock.settings.model import Settings

SESSION_COOKIE = "penstock_session"
FLASH_COOKIE = "penstock_flash"
_FLASH_CHARS = 500  # of up to six bytes as JSON: browsers keep no cookie of more than 4096, in base64
_TOKEN = re.compile(r"[\w-]{43}", re.ASCII)
Outcome = Literal["done", "failed"]
SIGNED_OUT = Caller("", frozenset(), None)
# Of a load balancer
USER_HEADER = "x-amzn-oidc-data"
_KEY_SECONDS, _KEY_BYTES, _KEYS_KEPT = 5.0, 16 * 1024, 16
_KEY_ID = re.compile(r"[\w-]{1,100}", re.ASCII)


@dataclass(frozen=True, slots=True)
class BrowserSession:
    caller: Caller  # SIGNED_OUT before the sign-in
    token: str  # of the cookie
    address: str
    signs_in: bool  # whether keys are required
    by_proxy: bool = False  # a load balancer has signed the user in, with each request

    @property
    def csrf(self) -> str:
        """The token that each form of this browser carries."""
        return _digest(b"form", self.token).hex()

    @property
    def is_signed_in(self) -> bool:
        return self.caller is not SIGNED_OUT

    def may(self, method: str) -> bool:
        return self.caller.may(method)


class LoadBalancerUsers:
    """Verifies the header of one load balancer. Raises SettingsError without the library."""

    def __init__(self, settings: Settings, arn: str) -> None:
        with needing("PENSTOCK_DASHBOARD_ALB_ARN", "encryption"):
            import cryptography  # noqa: F401  that PyJWT takes for ES256
            import jwt
        self._jwt = jwt
        self._settings = settings
        region = arn.split(":")[3]
        self._keys_url = settings.dashboard_alb_keys_url or f"https://public-keys.auth.elb.{region}.amazonaws.com"
        self._keys: dict[str, str] = {}
        self._lookups = Lookups()

    async def identify(self, token: str, address: str) -> tuple[str, frozenset[Permission]]:
        """The user and what the groups permit. Raises AccessDenied, Unavailable without the public key, RateLimited."""
        claims = await self._verify(token, address)
        user = printable(str(claims.get("email") or claims.get("sub") or ""))[:100]
        claim, known = self._settings.dashboard_alb_groups_claim, self._settings.dashboard_alb_groups
        permissions = implied(known[group] for group in _groups(claims.get(claim)) if group in known)
        if not user or not permissions:
            who = user or "a user without email and sub"
            reason = f"whose claim {claim!r} has no group of PENSTOCK_DASHBOARD_ALB_GROUPS"
            raise AccessDenied(403, f"The load balancer signed in {who}, {reason}")
        return user, permissions

    async def _verify(self, token: str, address: str) -> dict[str, Any]:
        """The claims of a token that this load balancer signed and that has not expired."""
        try:
            header = self._jwt.get_unverified_header(token)
            signer, client, kid = header.get("signer"), header.get("client"), header.get("kid")
            if header.get("alg") != "ES256":
                raise _refusal(f"its algorithm is {header.get('alg')!r}, not 'ES256'")
            if signer != self._settings.dashboard_alb_arn:
                raise _refusal(f"its signer is {signer!r}, not that of PENSTOCK_DASHBOARD_ALB_ARN")
            if self._settings.dashboard_alb_client not in (None, client):
                raise _refusal(f"its client is {client!r}, not that of PENSTOCK_DASHBOARD_ALB_CLIENT")
            if not isinstance(kid, str) or _KEY_ID.fullmatch(kid) is None:
                raise _refusal(f"its key id is {kid!r}")
            key = await self._lookups.find(kid.encode("ascii"), address, partial(self._look, kid))
            if key is None:
                raise _refusal(f"{self._keys_url} has no key {kid!r}")
            claims: dict[str, Any] = self._jwt.decode(
                token, key, algorithms=["ES256"], options={"verify_aud": False, "verify_iat": False}
            )
        except self._jwt.PyJWTError as exc:
            raise _refusal(str(exc)) from None
        # The load balancer has the time in the header, which is signed as the claims are.
        expires = header.get("exp", claims.get("exp"))
        if not isinstance(expires, int | float) or expires <= time():
            raise _refusal(f"it expired at {expires!r}")
        return claims

    async def _look(self, kid: str) -> str | None:
        """The public key, as PEM; None for an unknown one."""
        if kid in self._keys:
            return self._keys[kid]
        try:
            async with httpx.AsyncClient(timeout=_KEY_SECONDS) as client:
                answer = await client.get(f"{self._keys_url}/{kid}")
        except httpx.HTTPError as exc:
            raise Unavailable(f"the load balancer's public key cannot be fetched: {type(exc).__name__}") from None
        if answer.status_code >= 500:
            raise Unavailable(f"the load balancer's public key cannot be fetched: HTTP {answer.status_code}")
        if answer.status_code != 200 or len(answer.content) > _KEY_BYTES:
            return None
        if len(self._keys) >= _KEYS_KEPT:
            del self._keys[next(iter(self._keys))]
        self._keys[kid] = answer.text
        return answer.text


def _refusal(reason: str) -> AccessDenied:
    return AccessDenied(401, f"The header {USER_HEADER} is refused: {printable(reason)[:300]}")


def _groups(value: Any) -> list[str]:
    """Names of groups: a list, or text such as ``ops, dev`` or ``[ops, dev]``."""
    if isinstance(value, str):
        return [part.strip(' "') for part in value.strip(" []").split(",")]
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []


class BrowserSessions:
    """Identifies browsers, signs them in and out. session: opens a database session."""

    def __init__(self, authenticator: Authenticator, session: OpenSession, settings: Settings) -> None:
        self._authenticator = authenticator
        self._session = session
        self._session_seconds = settings.dashboard_session_seconds
        self._lookups = Lookups()
        arn = settings.dashboard_alb_arn
        self._users = None if arn is None else LoadBalancerUsers(settings, arn)

    async def identify(self, request: Request) -> BrowserSession:
        """Raises AccessDenied for a foreign host or user, RateLimited for unknown cookies, Unavailable."""
        self._authenticator.check_host(request.headers)
        address = address_of(request)
        token = request.cookies.get(SESSION_COOKIE, "")
        is_known = _TOKEN.fullmatch(token) is not None
        if not is_known:
            token = secrets.token_urlsafe(32)
        caller: Caller | None = None
        signed = None if self._users is None else request.headers.get(USER_HEADER)
        if self._users is not None and signed is not None:
            user, permissions = await self._users.identify(signed, address)
            caller = Caller(f"alb:{user}", permissions, self._authenticator.rates, f"alb:{user}")
        elif self._authenticator.key_cache is None:
            caller = self._authenticator.admit(request.headers, address)
        elif is_known:
            digest = await self._lookups.find(
                _digest(b"session", token), address, partial(self._value, "read_session", token)
            )
            caller = None if digest is None else self._authenticator.admit_digest(bytes(digest))
        if caller is not None:
            request.scope[ADMITTED] = True
        signs_in = self._authenticator.key_cache is not None
        return BrowserSession(caller or SIGNED_OUT, token, address, signs_in, signed is not None)

    async def sign_in(self, secret: str) -> tuple[Caller, str] | None:
        """The caller and the token of a new session; None for a key that is not accepted. Raises Unavailable."""
        key_digest = digest_of(secret.encode())
        caller = self._authenticator.admit_digest(key_digest)
        if caller is None:
            return None
        token = secrets.token_urlsafe(32)  # always new: a token from before the sign-in may be known to others
        await self._value("begin_session", token, key_digest, self._session_seconds)
        return caller, token

    async def sign_out(self, browser: BrowserSession) -> None:
        await self._value("end_session", browser.token)

    async def _value(self, statement: str, token: str, *args: Any) -> Any:
        async with self._session() as session:
            return await session.value(statement, _digest(b"session", token), *args)


def check_form(request: Request, browser: BrowserSession, token: str) -> None:
    """Refuse a form that no page of the dashboard has sent. Raises AccessDenied, status 403."""
    if is_of_another_origin(request.headers):
        raise AccessDenied(403, "This form comes from another origin, or its origin is hidden: open the page itself")
    if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        raise AccessDenied(403, "This form comes from another site: open the page itself")
    if not hmac.compare_digest(token.encode("utf-8"), browser.csrf.encode("ascii")):
        raise AccessDenied(403, "This form is out of date: open the page again, and send it from there")


def set_cookie(request: Request, response: Response, token: str, seconds: float | None) -> None:
    """seconds: None: until the browser is closed."""
    response.set_cookie(
        SESSION_COOKIE, token, max_age=None if seconds is None else int(seconds), httponly=True, samesite="lax",
        # Behind a proxy that terminates TLS only the browser knows its scheme, and sends it with every form.
        secure=request.headers.get("origin", "").startswith("https://"),
    )  # fmt: skip


def flashed(path: str, text: str, outcome: Outcome) -> Response:
    """Redirect to a page that shows a text once."""
    response = RedirectResponse(path, 303)
    value = urlsafe_b64encode(msgspec.json.encode((text[:_FLASH_CHARS], outcome))).decode("ascii")
    response.set_cookie(FLASH_COOKIE, value, max_age=60, httponly=True, samesite="lax")
    return response


def flash_of(request: Request) -> tuple[str, Outcome] | None:
    """What the page that redirected here has to say, and whether the form was carried out."""
    try:
        return msgspec.json.decode(urlsafe_b64decode(request.cookies[FLASH_COOKIE]), type=tuple[str, Outcome])
    except (KeyError, ValueError, msgspec.MsgspecError):
        return None


def local_path(path: str) -> str:
    """The path a form names as its next page; ``/`` unless it is one of the dashboard's own."""
    is_local = path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable() and "\\" not in path
    return path if is_local and path.isascii() and len(path) < 4000 else "/"


def _digest(use: bytes, token: str) -> bytes:
    return hashlib.sha256(b"penstock dashboard " + use + b"\0" + token.encode("ascii")).digest()
