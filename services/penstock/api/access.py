"""Who may ask for what: API keys where they are needed; without, programs on this machine but not a browser's pages."""

from dataclasses import dataclass, field
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request

from penstock.api.http_limits import ADMITTED
from penstock.api.keys import KeyCache
from penstock.api.rates import Rates
from penstock.api.table import method_of
from penstock.protocol.api_key import ALL_PERMISSIONS, Permission, digest_of
from penstock.protocol.errors import AccessDenied
from penstock.protocol.method import Scope
from penstock.settings.values import is_loopback

_HOW = "set PENSTOCK_API_KEYS, or PENSTOCK_API_REQUIRE_KEYS=true"


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


class Authenticator:
    """Checks the headers of a request. key_cache: None where no keys are asked for. rates: None for any rate."""

    def __init__(self, key_cache: KeyCache | None = None, rates: Rates | None = None) -> None:
        self._key_cache = key_cache
        self.asks_for_keys = key_cache is not None
        self.rates = rates

    def check_host(self, headers: Headers) -> None:
        """Without keys, refuse what came by another name than this machine's own. Raises AccessDenied, status 403.

        A page of the web can have its host name resolve to 127.0.0.1, or simply post to it from a form; the
        browser then sends that name as Host, or its own origin as Origin.
        """
        if self._key_cache is not None:
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
        if self._key_cache is None:
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
        key = None if self._key_cache is None else self._key_cache.find(digest)
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
