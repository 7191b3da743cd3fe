"""Payloads and results as files, however large: ``GET /tasks/ID/payload`` and ``GET /tasks/ID/result``."""

from __future__ import annotations

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


_AADS: dict[str, Callable[[Any], str | TenantAad]] = {
    "payload": lambda row: payload_aad(row["action"], row["tenant"]),
    "result": lambda row: result_aad(row["id"]),
}


def download_routes(
    methods: Methods, authenticator: Authenticator, *, may_read: MayRead | None = None
) -> Sequence[BaseRoute]:
    """One answer is one object, fetched and decrypted for callers who may read tasks."""

    async def answer(what: str, request: Request) -> Response:
        headers: dict[str, str] | None = None
        try:
            authenticator.check_host(request.headers)
            bind(None)
            signed_in = None if may_read is None else await may_read(request)  # which binds
            if signed_in is None:
                caller = authenticator.admit(request.headers, address_of(request))
                caller.charge(1)
                bind(caller.tenant, caller.actions)
                signed_in = caller.may("status")
            if not signed_in:
                raise errors.AccessDenied(403, "this API key may not read tasks")
            task_id = read_id(request.path_params["id"], "id")
            body: str | bytes = await _read(methods, task_id, what)
            status = 200
            headers = {"Content-Disposition": f'attachment; filename="task-{task_id}-{what}.json"'}
        except errors.Overloaded as exc:
            status, headers = refusal(exc)
            body = error_body(exc)
        except errors.RpcError as exc:
            body = error_body(exc)
            status = 429 if isinstance(exc, errors.RateLimited) else getattr(exc, "status", 404)
        except (errors.PayloadUnavailable, errors.PayloadLost) as exc:
            body = msgspec.json.encode({"error": {"message": str(exc)}})
            status = 503 if isinstance(exc, errors.PayloadUnavailable) else 410
        except Exception as exc:
            body, status = error_body(masked(exc, "download")), 503
        return Response(body, status, {**_HEADERS, **(headers or {})}, media_type="application/json")

    return [Route(f"/tasks/{{id}}/{what}", partial(answer, what), methods=["GET"]) for what in _AADS]


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
