"""scheduler0's API, served beside JSON-RPC under ``/v1`` and ``/api/v1`` to those who have its credentials."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route

from penstock.api.audit import Audit, doing
from penstock.api.http import read_body, refusal
from penstock.api.http_limits import ADMITTED
from penstock.api.rates import Rates
from penstock.compat.scheduler0.http.access import UNAUTHORIZED, Doorkeeper
from penstock.compat.scheduler0.http.answers import Problem, answer
from penstock.compat.scheduler0.http.credentials import Credentials
from penstock.compat.scheduler0.http.executions import Executions
from penstock.compat.scheduler0.http.jobs import Jobs
from penstock.compat.scheduler0.http.node import Node
from penstock.compat.scheduler0.http.projects import Projects
from penstock.compat.scheduler0.http.tasks import AsyncTasks
from penstock.db.pool import Store
from penstock.protocol.errors import AccessDenied, Refused, RpcError, TooSlow, Unavailable
from penstock.runtime.logs import get_logger
from penstock.settings.model import Settings

__all__ = ["Scheduler0"]

NOT_READY = "peer cannot accept requests"
Handle = Callable[[Request, bytes], Awaitable[Response]]
_CHANGES = frozenset({"POST", "PUT", "DELETE"})

log = get_logger()


class _Noted(msgspec.Struct, rename="camel", omit_defaults=True):
    """What the audit shows of a body: no secret, no data of a job and no URL, which may hold a token."""

    name: Any = None
    archived: Any = None
    project_id: Any = None
    spec: Any = None
    execution_type: Any = None


class Scheduler0:
    """The routes and what stands behind them. rates: None for any rate."""

    def __init__(self, store: Store, settings: Settings, rates: Rates | None, audit: Audit) -> None:
        self._settings = settings
        self._audit = audit
        self._doorkeeper = Doorkeeper(store, settings, rates)
        self._tasks = AsyncTasks(store)
        credentials, projects, jobs = Credentials(store, settings), Projects(store), Jobs(store, settings)
        executions, node = Executions(store), Node(store)
        routes = [
            self._route("/credentials", GET=credentials.list, POST=credentials.create),
            self._route(
                "/credentials/{id}", GET=credentials.get, PUT=credentials.update, DELETE=credentials.delete
            ),
            self._route("/credentials/{id}/archive", POST=credentials.archive),
            self._route("/projects", GET=projects.list, POST=projects.create),
            self._route("/projects/{id}", GET=projects.get, PUT=projects.update, DELETE=projects.delete),
            self._route("/jobs", GET=jobs.list, POST=jobs.create),
            self._route("/jobs/{id}", GET=jobs.get, PUT=jobs.update, DELETE=jobs.delete),
            self._route("/async-tasks/{id}", GET=self._tasks.get),
            self._route("/executions", GET=executions.list),
            self._route("/healthcheck", is_open=True, GET=node.health),
            self._route("/start-jobs", changes=False, POST=node.accepted),
            self._route("/stop-jobs", changes=False, POST=node.accepted),
            self._route("/peer-handshake", GET=node.health),
            self._route("/execution-logs", GET=node.accepted),
        ]  # fmt: skip
        self._app = Starlette(routes=routes, exception_handlers={HTTPException: _http_error})

    @property
    def routes(self) -> list[BaseRoute]:
        """Where it is served: as the original's server, its README and its clients have it."""
        return [Mount("/v1", app=self._app), Mount("/api/v1", app=self._app)]

    def stop(self) -> None:
        """Answer those who wait for an async task."""
        self._tasks.stop()

    def _route(self, path: str, *, is_open: bool = False, changes: bool = True, **by_method: Handle) -> Route:
        async def endpoint(request: Request) -> Response:
            try:
                if not is_open:
                    address = request.client.host if request.client else ""
                    doing(await self._doorkeeper.admit(request.headers, address), address, "scheduler0")
                    request.scope[ADMITTED] = True
                limit = 0 if is_open else self._settings.request_limit_bytes
                body = await read_body(request, limit, self._settings.request_timeout_seconds)
                handle = by_method["GET" if request.method == "HEAD" else request.method]
                if not changes or request.method not in _CHANGES:
                    return await handle(request, body)
                async with self._audit.noting(f"{request.method} {path}", _shown(request.path_params, body)):
                    return await handle(request, body)
            except Problem as exc:
                return answer(exc.data, exc.status, success=False)
            except ClientDisconnect:
                return Response(status_code=400)  # nobody is there to read it
            except Exception as exc:
                return _failed(exc)

        return Route(path, endpoint, methods=list(by_method))


def _shown(path_params: Mapping[str, Any], body: bytes) -> bytes:
    """Parameters of a request as they are noted, as JSON."""
    shown: dict[str, Any] = {**path_params, "body": f"({len(body)} bytes)"}
    try:
        shown |= msgspec.to_builtins(msgspec.json.decode(body, type=_Noted))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass  # of a list of jobs its size; what cannot be read is refused
    return msgspec.json.encode(shown)


def _failed(exc: Exception) -> Response:
    """The answer when a request could not be carried out, with no more than its sender should know."""
    match exc:
        case AccessDenied():
            refusal(exc)
            return answer(UNAUTHORIZED, 401, success=False)
        case RpcError():
            status, headers = refusal(exc)
            return answer(exc.message, status, success=False, headers=headers)
        case Refused():
            return answer(f"the values cannot be kept: {exc}", 400, success=False)
        case TooSlow():
            return answer("the request takes too long: ask for less at once", 503, success=False)
        case Unavailable():
            return answer(NOT_READY, 503, success=False)
    log.exception("request_failed", api="scheduler0", error=type(exc).__name__)
    return answer("internal error", 500, success=False)


async def _http_error(_request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    return answer(exc.detail, exc.status_code, success=False, headers=exc.headers)
