"""Payloads and results as files, however large: ``GET /tasks/ID/payload`` and ``GET /tasks/ID/result``."""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from penstock.api.access import Authenticator, address_of
from penstock.api.dispatch import Methods
from penstock.api.http import refusal
from penstock.api.rpc import error_body, masked
from penstock.payloads.cipher import TenantAad
from penstock.payloads.codec import aad_of, payload_aad
from penstock.protocol import errors
from penstock.protocol.caller import bind, seen
from penstock.protocol.checks import read_id
from penstock.runtime.budget import in_hand

MayRead = Callable[[Request], Awaitable[bool | None]]
"""Whether a signed-in browser may read, to whose tenant the request is then bound; None without a browser's session."""

HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'; sandbox",
    "X-Content-Type-Options": "nosniff",
}
_STATUSES = {errors.RateLimited: 429, errors.TooManyWaits: 503}


_AADS: dict[str, Callable[[Any], str | TenantAad]] = {
    "payload": lambda row: payload_aad(row["action"], row["tenant"]),
    "result": lambda row: aad_of("result", row["id"]),
}


class Readers:
    """Callers who may read tasks, by an API key or a browser's session. may_read: None without a dashboard."""

    def __init__(self, authenticator: Authenticator, may_read: MayRead | None = None) -> None:
        self._authenticator = authenticator
        self._may_read = may_read

    async def admit(self, request: Request) -> str:
        """Bind the request to its caller's tenant; returns the name of the key. Raises AccessDenied, RateLimited."""
        self._authenticator.check_host(request.headers)
        bind(None)
        name = ""
        may_read = None if self._may_read is None else await self._may_read(request)  # which binds
        if may_read is None:
            caller = self._authenticator.admit(request.headers, address_of(request))
            caller.charge(1)
            bind(caller.tenant, caller.actions)
            name, may_read = caller.key, caller.may("status")
        if not may_read:
            raise errors.AccessDenied(403, "this API key may not read tasks")
        return name

    def route(self, path: str, answer: Callable[[Request, int, str], Awaitable[Response]]) -> BaseRoute:
        """A route below ``/tasks/ID``. answer: called with the task's id and the name of the caller's key."""

        async def guarded(request: Request) -> Response:
            headers: dict[str, str] | None = None
            try:
                name = await self.admit(request)
                return await answer(request, read_id(request.path_params["id"], "id"), name)
            except errors.Overloaded as exc:
                status, headers = refusal(exc)
                body = error_body(exc)
            except errors.RpcError as exc:
                body = error_body(exc)
                status = _STATUSES.get(type(exc), getattr(exc, "status", 404))
            except (errors.PayloadUnavailable, errors.PayloadLost) as exc:
                body = msgspec.json.encode({"error": {"message": str(exc)}})
                status = 503 if isinstance(exc, errors.PayloadUnavailable) else 410
            except Exception as exc:
                body, status = error_body(masked(exc, "download")), 503
            return Response(body, status, {**HEADERS, **(headers or {})}, media_type="application/json")

        return Route(f"/tasks/{{id}}/{path}", guarded, methods=["GET"])


def download_routes(methods: Methods, readers: Readers) -> Sequence[BaseRoute]:
    """One answer is one object, fetched and decrypted for callers who may read tasks."""

    async def answer(what: str, request: Request, task_id: int, name: str) -> Response:
        body = await _read(methods, task_id, what)
        headers = {**HEADERS, "Content-Disposition": f'attachment; filename="task-{task_id}-{what}.json"'}
        return Response(body, 200, headers, media_type="application/json")

    return [readers.route(what, partial(answer, what)) for what in _AADS]


async def _read(methods: Methods, task_id: int, what: str) -> str:
    """Raises TaskNotFound, also for a task that has none, or of another tenant; PayloadUnavailable, PayloadLost."""
    async with methods.session() as session:
        rows = seen(await session.fetch("read_tasks", [task_id]))
        codec = session.codec
    if not rows or rows[0][f"{what}_gone"] or rows[0][what] is None:
        raise errors.TaskNotFound(task_id)
    body = await codec.load(rows[0][what], _AADS[what](rows[0]))
    in_hand().hold(len(body))
    return body
