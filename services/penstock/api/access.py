"""Who may ask for what: API keys where they are needed; without, programs on this machine but not a browser's pages."""

from __future__ import annotations

from typing import Protocol
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from penstock.api.keyring import Keyring
from penstock.api.rates import Rates
from penstock.commands import PARAMS, SUBMIT_PREFIX
from penstock.errors import AccessDenied
from penstock.keys import ALL_PERMISSIONS, Permission
from penstock.rules import READING as READING_RULES
from penstock.schedules import READING as READING_SCHEDULES
from penstock.settings import is_loopback
from penstock.workflows import READING as READING_WORKFLOWS

# Methods that change nothing but what can be asked for again
_READING = {
    *READING_RULES, *READING_SCHEDULES, *READING_WORKFLOWS, "job.get", "job.list",
    "status", "result", "list", "stats", "rejected.list", "rejected.show", "dlq.stats", "dlq.list", "dlq.show",
    "ordering.list", "claims.check", "rpc.discover",
}  # fmt: skip
PERMISSION_OF: dict[str, Permission] = {
    name: Permission.READ if name in _READING else Permission.ADMIN for name in PARAMS
} | dict.fromkeys(("enqueue", "workflow.create", "task.complete", "task.fail"), Permission.ENQUEUE)
"""What a key needs for a method. A method that is new needs admin until somebody says otherwise here."""


def permission_of(method: str) -> Permission | None:
    """What a key needs for a method; None for one that there is not."""
    return Permission.ENQUEUE if method.startswith(SUBMIT_PREFIX) else PERMISSION_OF.get(method)


class Asking(Protocol):
    """What a dispatcher wants to know of whoever sent a body."""

    def check_method(self, method: str) -> None:
        """Raises AccessDenied."""

    def charge(self, requests: int) -> None:
        """Raises RateLimited."""


class Caller:
    """Whoever sent a request. ``name``: of the key, or the address, as the rate is counted."""

    __slots__ = ("_permissions", "_rates", "name")

    def __init__(self, name: str, permissions: frozenset[Permission], rates: Rates | None) -> None:
        self.name = name
        self._permissions = permissions
        self._rates = rates

    def check_method(self, method: str) -> None:
        """Raises AccessDenied, with the permission that is missing."""
        needed = permission_of(method)
        if needed is not None:
            self.check_permission(needed)

    def check_permission(self, needed: Permission) -> None:
        """Raises AccessDenied, with the permission that is missing."""
        if needed not in self._permissions:
            raise AccessDenied(403, f"Not permitted: this API key may not {needed}", {"needs": needed})

    def check_rate(self) -> None:
        """Raises RateLimited when not even one request may come now."""
        if self._rates is not None:
            self._rates.check(self.name)

    def charge(self, requests: int) -> None:
        """Count requests of this caller. Raises RateLimited when they are too many."""
        if self._rates is not None:
            self._rates.charge(self.name, requests)


class Guard:
    """Checks the headers of a request. keyring: None where no keys are asked for. rates: None for any rate."""

    def __init__(self, keyring: Keyring | None = None, rates: Rates | None = None) -> None:
        self._keyring = keyring
        self._rates = rates

    def check_host(self, headers: Headers) -> None:
        """Without keys, refuse what came by another name than this machine's own. Raises AccessDenied, status 403.

        A page of the web can have its host name resolve to 127.0.0.1, or simply post to it from a form; the
        browser then sends that name as Host, or its own origin as Origin.
        """
        if self._keyring is not None:
            return
        host = headers.get("host", "")
        if not is_loopback(_name_of(host)):
            raise AccessDenied(403, f"Only loopback hosts are served without API keys: {_HOW}")
        origin = headers.get("origin")
        if origin is not None and origin.lower() not in (f"http://{host}".lower(), f"https://{host}".lower()):
            raise AccessDenied(403, f"Requests from another origin are refused without API keys: {_HOW}")

    def admit(self, headers: Headers, address: str) -> Caller:
        """Who sends the request. Raises AccessDenied, status 401, and Unavailable when that cannot be told now."""
        if self._keyring is None:
            return Caller(address, ALL_PERMISSIONS, self._rates)
        given = (headers.get("x-api-key") or _bearer(headers.get("authorization", ""))).encode("latin-1")
        key = self._keyring.find(given) if given else None
        if key is None:
            raise AccessDenied(401, "A valid API key is needed: send Authorization: Bearer KEY, or X-API-Key: KEY")
        return Caller(f"{key.id or ''}:{key.name}", key.permissions, self._rates)


_HOW = "set PENSTOCK_API_KEYS, or PENSTOCK_API_REQUIRE_KEYS=true"


def _name_of(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _bearer(authorization: str) -> str:
    scheme, _, key = authorization.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""
