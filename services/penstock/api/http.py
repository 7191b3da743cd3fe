"""The HTTP side of the api: two routes, who may ask, how large a body may be; every answer is JSON."""

from __future__ import annotations

from time import perf_counter

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from penstock import __version__, metrics
from penstock.api.access import Guard
from penstock.api.rpc import Dispatcher, error_body, masked
from penstock.errors import AccessDenied, TooLarge

RPC_PATH = "/rpc"
_JSON = "application/json"


def make_app(dispatcher: Dispatcher, guard: Guard, *, request_limit_bytes: int) -> Starlette:
    """The ASGI application: ``POST /rpc``, and ``GET /`` for those who look what is here."""
    card = msgspec.json.encode(
        {"name": "penstock", "version": __version__, "rpc": RPC_PATH, "discover": "rpc.discover"}
    )

    async def index(request: Request) -> Response:
        try:
            guard.check_host(request.headers)
        except AccessDenied as exc:
            return _denied(exc)
        return Response(card, media_type=_JSON)

    async def rpc(request: Request) -> Response:
        started = perf_counter()
        try:
            guard.check_host(request.headers)
            guard.check_key(request.headers)
            status, body = await dispatcher.answer(await _read(request, request_limit_bytes))
        except AccessDenied as exc:
            return _denied(exc)
        except TooLarge as exc:
            return Response(error_body(exc), 413, media_type=_JSON)
        except ClientDisconnect:
            return Response(status_code=400)  # nobody is there to read it
        except Exception as exc:
            return _failed(exc)
        metrics.REQUEST_SECONDS.observe(perf_counter() - started)
        return Response(status_code=status) if body is None else Response(body, status, media_type=_JSON)

    return Starlette(
        routes=[Route("/", index, methods=["GET"]), Route(RPC_PATH, rpc, methods=["POST"])],
        exception_handlers={HTTPException: _http_error},
    )


async def _read(request: Request, limit: int) -> bytes:
    """The body, of which no more than the limit is ever held. Raises TooLarge."""
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > limit:
        raise TooLarge("the request", int(declared[:20]), limit)
    chunks = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise TooLarge("the request", size, limit)
        chunks.append(chunk)
    return b"".join(chunks)


def _denied(exc: AccessDenied) -> Response:
    headers = {"WWW-Authenticate": "Bearer"} if exc.status == 401 else None
    return Response(error_body(exc), exc.status, headers, media_type=_JSON)


def _failed(exc: Exception) -> Response:
    return Response(error_body(masked(exc, "unknown")), 500, media_type=_JSON)


async def _http_error(_request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    problem = {"error": exc.detail, "rpc": f"POST {RPC_PATH}"}
    return Response(msgspec.json.encode(problem), exc.status_code, exc.headers, media_type=_JSON)
