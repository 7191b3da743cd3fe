"""Payloads and results as files, however large: ``GET /tasks/ID/payload`` and ``GET /tasks/ID/result``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
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
from penstock.payloads.codec import payload_aad, result_aad
from penstock.protocol import errors
from penstock.protocol.caller import bind, seen
from penstock.protocol.checks import read_id
from penstock.runtime.budget import in_hand

MayRead = Callable[[Request], Awaitable[bool | None]]
"""Whether a signed-in browser may read, to whose tenant the request is then bound; None without a browser's session."""

_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'; sandbox",
    "X-Content-Type-Options": "nosniff",
}


class Downloads:
    """One answer is one object, fetched and decrypted for callers who may read tasks."""

    def __init__(self, methods: Methods, authenticator: Authenticator, *, may_read: MayRead | None = None) -> None:
        self._methods = methods
        self._authenticator = authenticator
        self._may_read = may_read

    @property
    def routes(self) -> Sequence[BaseRoute]:
        return [Route(f"/tasks/{{id}}/{what}", self._answer(what), methods=["GET"]) for what in _AADS]

    def _answer(self, what: str) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            try:
                await self._admit(request)
                task_id = read_id(request.path_params["id"], "id")
                body = await self._read(task_id, what)
            except errors.AccessDenied as exc:
                return _problem(error_body(exc), exc.status)
            except errors.RateLimited as exc:
                return _problem(error_body(exc), 429)
            except errors.Overloaded as exc:
                status, headers = refusal(exc)
                return _problem(error_body(exc), status, headers)
            except errors.RpcError as exc:
                return _problem(error_body(exc), 404)
            except (errors.PayloadUnavailable, errors.PayloadLost) as exc:
                problem = msgspec.json.encode({"error": {"message": str(exc)}})
                return _problem(problem, 503 if isinstance(exc, errors.PayloadUnavailable) else 410)
            except Exception as exc:
                return _problem(error_body(masked(exc, "download")), 503)
            name = f'attachment; filename="task-{task_id}-{what}.json"'
            headers = {**_HEADERS, "Content-Disposition": name}
            return Response(body, media_type="application/json", headers=headers)

        return answer

    async def _admit(self, request: Request) -> None:
        """Raises AccessDenied, RateLimited."""
        self._authenticator.check_host(request.headers)
        bind(None)
        signed_in = None if self._may_read is None else await self._may_read(request)  # which binds
        if signed_in is None:
            caller = self._authenticator.admit(request.headers, address_of(request))
            caller.charge(1)
            bind(caller.tenant, caller.actions)
            signed_in = caller.may("status")
        if not signed_in:
            raise errors.AccessDenied(403, "this API key may not read tasks")

    async def _read(self, task_id: int, what: str) -> str:
        """Raises TaskNotFound, also for a task that has none, or of another tenant; PayloadUnavailable, PayloadLost."""
        async with self._methods.session() as session:
            rows = seen(await session.fetch("read_tasks", [task_id]))
            codec = session.codec
        if not rows or rows[0][f"{what}_gone"] or rows[0][what] is None:
            raise errors.TaskNotFound(task_id)
        aad = _AADS[what](rows[0])
        body = await codec.load(rows[0][what], aad)
        in_hand().hold(len(body))
        return body


_AADS: dict[str, Callable[[Any], str | TenantAad]] = {
    "payload": lambda row: payload_aad(row["action"], row["tenant"]),
    "result": lambda row: result_aad(row["id"]),
}


def _problem(body: bytes, status: int, headers: Mapping[str, str] | None = None) -> Response:
    return Response(body, status, {**_HEADERS, **(headers or {})}, media_type="application/json")
