"""Who may ask for what, and how often: API keys, or without any, programs on this machine but no browser's pages."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import TypeVar
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request

from penstock.api.keys import KeyCache
from penstock.api.server import ADMITTED
from penstock.api.table import method_of
from penstock.protocol.api_key import ALL_PERMISSIONS, Permission, digest_of
from penstock.protocol.errors import AccessDenied, RateLimited
from penstock.protocol.method import Scope
from penstock.settings.values import is_loopback

_HOW = "set PENSTOCK_API_KEYS, or PENSTOCK_API_REQUIRE_KEYS=true"
_BUCKETS_KEPT = 10_000
_REMEMBERED = 10_000
_MISSES_AT_ONCE = 100.0
Found = TypeVar("Found")


class Rates:
    """Buckets by caller in this process, each of them one number: the instant at which it will be full.

    More requests than a bucket holds, in a large batch, are taken from a full one, which is then in debt; so no batch
    is impossible, and the rate holds in the long run.
    """

    def __init__(self, per_second: float, burst: float, *, clock: Callable[[], float] = monotonic) -> None:
        self._per_second = per_second
        self._burst = max(1.0, burst)
        self._clock = clock
        self._full_at: dict[str, float] = {}

    def charge(self, caller: str, requests: int) -> None:
        """Take tokens for so many requests, all or none. Raises RateLimited."""
        start = self.check(caller, requests)
        if len(self._full_at) >= _BUCKETS_KEPT and caller not in self._full_at:
            # Full buckets say nothing; where none is full, the one that will be first goes.
            now = self._clock()
            self._full_at = {caller: full_at for caller, full_at in self._full_at.items() if full_at > now}
            if len(self._full_at) >= _BUCKETS_KEPT:
                del self._full_at[min(self._full_at, key=self._full_at.__getitem__)]
        self._full_at[caller] = start + requests / self._per_second

    def check(self, caller: str, requests: int = 1) -> float:
        """Refuse a caller whose bucket has too few tokens; returns when it is full, or now. Raises RateLimited."""
        now = self._clock()
        start = max(now, self._full_at.get(caller, now))
        lacking = min(requests, self._burst) - (self._burst - (start - now) * self._per_second)
        if lacking > 1e-9:
            raise RateLimited(lacking / self._per_second)
        return start


class Lookups:
    """Secrets that were found once are looked up as often as they are shown; others a few at once, and each address
    has a rate of those that are not found."""

    def __init__(self) -> None:
        self._turns = asyncio.Semaphore(2)  # which leaves connections to all others
        self._misses = Rates(per_second=10.0, burst=_MISSES_AT_ONCE)
        self._known: dict[bytes, None] = {}

    async def find(self, digest: bytes, address: str, look: Callable[[], Awaitable[Found | None]]) -> Found | None:
        """digest: of the secret. Raises RateLimited, and what ``look`` raises."""
        if digest in self._known:
            return await look()
        self._misses.check(address)
        async with self._turns:
            found = await look()
        if found is None:
            self._misses.charge(address, 1)
        else:
            if len(self._known) >= _REMEMBERED:
                del self._known[next(iter(self._known))]
            self._known[digest] = None
        return found


@dataclass(frozen=True, slots=True)
class Caller:
    name: str  # by which the rate is counted: of the key, or the address
    permissions: frozenset[Permission]
    rates: Rates | None  # None for any rate
    key: str = ""  # its name, empty without one
    tenant: str | None = None  # to which the key is bound
    actions: tuple[str, ...] | None = None  # patterns of those that it may enqueue; None: the default
    digest: bytes = field(default=b"", repr=False)

    def check_method(self, method: str) -> None:
        """Raises AccessDenied, with the permission that is missing, or because the key is bound to a tenant."""
        found = method_of(method)
        if found is not None:  # an unknown one is answered as such
            reason = f"{method} concerns the whole installation: use a key that is bound to none"
            self.check(found.permission, reason if found.scope is Scope.CLOSED else None)

    def check(self, needed: Permission, reason: str | None = "this is about all") -> None:
        """reason: why no key of a tenant will do; None: it will. Raises AccessDenied."""
        if needed not in self.permissions:
            raise AccessDenied(403, f"Not permitted: this API key may not {needed}", {"needs": needed})
        if self.tenant is not None and reason is not None:
            raise AccessDenied(
                403, f"Not permitted: this API key is bound to the tenant {self.tenant!r}, and {reason}",
                {"tenant": self.tenant},
            )  # fmt: skip

    def may(self, method: str) -> bool:
        found = method_of(method)
        if found is None or (self.tenant is not None and found.scope is Scope.CLOSED):
            return False
        return found.permission in self.permissions

    def charge(self, requests: int) -> None:
        """Count requests of this caller. Raises RateLimited when they are too many."""
        if self.rates is not None:
            self.rates.charge(self.name, requests)


@dataclass(slots=True)
class Authenticator:
    """Checks the headers of a request. key_cache: None where no keys are asked for. rates: None for any rate."""

    key_cache: KeyCache | None = None
    rates: Rates | None = None

    def check_host(self, headers: Headers) -> None:
        """Without keys, refuse what came by another name than this machine's own. Raises AccessDenied, status 403.

        A page of the web can have its host name resolve to 127.0.0.1, or simply post to it from a form; the
        browser then sends that name as Host, or its own origin as Origin.
        """
        if self.key_cache is not None:
            return
        host = headers.get("host", "")
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            name = ""
        if not is_loopback(name):
            raise AccessDenied(403, f"Only loopback hosts are served without API keys: {_HOW}")
        if is_of_another_origin(headers):
            raise AccessDenied(403, f"Requests from another origin are refused without API keys: {_HOW}")

    def admit(self, headers: Headers, address: str) -> Caller:
        """The sender of the request. Raises AccessDenied, status 401; Unavailable while keys cannot be checked."""
        if self.key_cache is None:
            return Caller(address, ALL_PERMISSIONS, self.rates)
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = headers.get("x-api-key") or (bearer.strip() if scheme.lower() == "bearer" else "")
        caller = self.admit_digest(digest_of(given.encode("latin-1"))) if given else None
        if caller is None:
            raise AccessDenied(401, "A valid API key is needed: send Authorization: Bearer KEY, or X-API-Key: KEY")
        return caller

    def admit_request(self, request: Request) -> Caller:
        """Check the host of a request and find its sender. Raises AccessDenied, Unavailable."""
        self.check_host(request.headers)
        caller = self.admit(request.headers, address_of(request))
        request.scope[ADMITTED] = True
        return caller

    def admit_digest(self, digest: bytes) -> Caller | None:
        """Who has the key of this digest; None for no key that is accepted. Raises Unavailable."""
        key = None if self.key_cache is None else self.key_cache.find(digest)
        if key is None:
            return None
        name = f"{key.id or ''}:{key.name}"
        return Caller(name, key.permissions, self.rates, key.name, key.tenant, key.actions, key.digest)


def is_of_another_origin(headers: Headers) -> bool:
    """Whether a browser says that a page of another origin sends the request."""
    origin, host = headers.get("origin"), headers.get("host", "")
    return origin is not None and origin.lower() not in (f"http://{host}".lower(), f"https://{host}".lower())


def address_of(request: Request) -> str:
    """The address of the client, empty on a Unix socket."""
    return request.client.host if request.client else ""
