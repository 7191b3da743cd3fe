"""scheduler0's API, served beside JSON-RPC under ``/v1`` and ``/api/v1``: access and routes."""

import base64
import hashlib
import hmac
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Mount, Route

from penstock.api.access import Authenticator, Lookups, address_of
from penstock.api.audit import Audit, set_actor
from penstock.api.http import read_body, refusal
from penstock.api.server import ADMITTED, Part
from penstock.compat.scheduler0.http.records import AsyncTasks, Credentials, Jobs, Problem, Projects, answer
from penstock.compat.scheduler0.jobs import BadJob
from penstock.compat.scheduler0.store import find_credential
from penstock.db.pool import Store
from penstock.protocol.errors import AccessDenied, InvalidParams, Refused, RpcError, TooSlow, Unavailable
from penstock.runtime.logs import log
from penstock.settings.model import Settings

UNAUTHORIZED = "unauthorized requests"
_MAX_CHARS = 512  # of a key or a secret that is looked up
Handle = Callable[[Request, bytes], Awaitable[Response]]
# Members of a body that the audit shows: no secret, and no data or URL of a job, which may hold a token.
_AUDITED = ("name", "archived", "projectId", "spec", "executionType")


class Scheduler0(Part):
    """Without routes unless the settings enable it."""

    def __init__(self, store: Store, settings: Settings, authenticator: Authenticator, audit: Audit) -> None:
        self._store, self._settings, self._audit = store, settings, audit
        self._rates, self._lookups = authenticator.rates, Lookups()
        self._peer: bytes | None = None
        if (password := settings.scheduler0_auth_password) is not None:  # and so is the name
            peer = f"{settings.scheduler0_auth_username}:{password.get_secret_value()}"
            self._peer = base64.b64encode(peer.encode())
        self._tasks = tasks = AsyncTasks(store)
        credentials, projects, jobs = Credentials(store, settings), Projects(store, settings), Jobs(store, settings)
        routes = [
            self._route("/credentials", GET=credentials.list, POST=credentials.create),
            self._route("/credentials/{id}", GET=credentials.get, PUT=credentials.update, DELETE=credentials.delete),
            self._route("/credentials/{id}/archive", POST=credentials.archive),
            self._route("/projects", GET=projects.list, POST=projects.create),
            self._route("/projects/{id}", GET=projects.get, PUT=projects.update, DELETE=projects.delete),
            self._route("/jobs", GET=jobs.list, POST=jobs.create),
            self._route("/jobs/{id}", GET=jobs.get, PUT=jobs.update, DELETE=jobs.delete),
            self._route("/async-tasks/{id}", GET=tasks.get),
            self._route("/executions", GET=jobs.executions),
            self._route("/healthcheck", is_open=True, GET=self._health),
            self._route("/start-jobs", changes=False, POST=_accept),
            self._route("/stop-jobs", changes=False, POST=_accept),
            self._route("/peer-handshake", GET=self._health),
            self._route("/execution-logs", GET=_accept),
        ]  # fmt: skip
        app = Starlette(routes=routes, exception_handlers={HTTPException: _http_error})
        # Both prefixes are used by scheduler0's clients.
        self.routes = [Mount("/v1", app=app), Mount("/api/v1", app=app)] if settings.scheduler0 else []

    def stop(self) -> None:
        self._tasks.stop()

    async def _admit(self, headers: Headers, address: str) -> str:
        """``scheduler0:`` and the number of the caller's credential, or ``peer``. Raises AccessDenied, RateLimited."""
        name: str | None = None
        api_key = headers.get("x-api-key", "")
        secret = headers.get("x-secret-key") or headers.get("x-api-secret", "")
        if api_key and secret:
            if max(len(api_key), len(secret)) <= _MAX_CHARS and "\0" not in api_key:
                digest = hashlib.sha256(f"{api_key}\0{secret}".encode()).digest()
                # In Postgres, so that an archived one is refused at once.
                look = partial(find_credential, self._store, api_key, secret)
                found = await self._lookups.find(digest, address, look)
                name = None if found is None else f"scheduler0:{found}"
        elif self._peer is not None and headers.get("x-peer") in ("cmd", "peer"):  # the command line's peer mode
            scheme, _, given = headers.get("authorization", "").partition(" ")
            if scheme.lower() == "basic" and hmac.compare_digest(given.strip().encode(), self._peer):
                name = "scheduler0:peer"
        if name is None:
            raise AccessDenied(401, UNAUTHORIZED)
        if self._rates is not None:
            self._rates.charge(name, 1)
        return name

    async def _health(self, request: Request, body: bytes) -> Response:
        """Every api is the leader of a cluster without peers. Raises Unavailable."""
        await self._store.ping()
        address = f"{request.url.scheme}://{request.url.netloc}"
        stats = {"state": "Leader", "num_peers": "0", "backend": "postgres"}
        return answer({"leaderAddress": address, "leaderId": "1", "raftStats": stats})

    def _route(self, path: str, *, is_open: bool = False, changes: bool = True, **by_method: Handle) -> Route:
        async def endpoint(request: Request) -> Response:
            try:
                if not is_open:
                    address = address_of(request)
                    set_actor(await self._admit(request.headers, address), address, "scheduler0")
                    request.scope[ADMITTED] = True
                limit = 0 if is_open else self._settings.request_limit_bytes
                body = await read_body(request, limit, self._settings.request_timeout_seconds)
                handle = by_method["GET" if request.method == "HEAD" else request.method]
                if not changes or request.method in ("GET", "HEAD"):
                    return await handle(request, body)
                async with self._audit.recording(f"{request.method} {path}", _shown(request.path_params, body)):
                    return await handle(request, body)
            except Exception as exc:
                return _failed(exc)

        return Route(path, endpoint, methods=list(by_method))


async def _accept(request: Request, body: bytes) -> Response:
    """Requests to a node have no effect: supervisors fire the jobs."""
    return answer(None, 202)


def _shown(path_params: Mapping[str, Any], body: bytes) -> bytes:
    """Parameters of a request for the audit, as JSON; of a list of jobs or an invalid body the size alone."""
    shown: dict[str, Any] = {**path_params, "body": f"({len(body)} bytes)"}
    with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        given = msgspec.json.decode(body, type=dict[str, Any])
        shown |= {name: given[name] for name in _AUDITED if given.get(name) is not None}
    return msgspec.json.encode(shown)


def _failed(exc: Exception) -> Response:
    """The answer to a failed request, without internal details."""
    match exc:
        case Problem():
            return answer(exc.data, exc.status, success=False)
        case ClientDisconnect():
            return Response(status_code=400)  # sent to no one
        case AccessDenied():
            refusal(exc)
            return answer(UNAUTHORIZED, 401, success=False)
        case InvalidParams() | BadJob():
            return answer(exc.message, 400, success=False)
        case RpcError():
            status, headers = refusal(exc)
            return answer(exc.message, status, success=False, headers=headers)
        case Refused():
            return answer(f"the values cannot be kept: {exc}", 400, success=False)
        case TooSlow():
            return answer("the request takes too long: ask for less at once", 503, success=False)
        case Unavailable():
            return answer("peer cannot accept requests", 503, success=False)
    log.exception("request_failed", api="scheduler0", error=type(exc).__name__)
    return answer("internal error", 500, success=False)


async def _http_error(_request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    return answer(exc.detail, exc.status_code, success=False, headers=exc.headers)
