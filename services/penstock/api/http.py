"""The HTTP side of the api: its paths, who may ask, what a request must look like; every answer is JSON."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from time import perf_counter

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.api import audit
from penstock.api.access import Authenticator, Caller, address_of
from penstock.api.long_polls import HAS_WAITED, request_in_hand
from penstock.api.rpc import Dispatcher, error_body, masked
from penstock.api.scaling import Scaling
from penstock.protocol import errors
from penstock.protocol.api_key import Permission, bind
from penstock.protocol.version import __version__
from penstock.runtime import metrics
from penstock.runtime.budget import in_hand
from penstock.runtime.tracing import active
from penstock.settings.model import Settings

RPC_PATH = "/rpc"
MCP_PATH = "/mcp"
SCALING_PATH = "/scaling"
AGE_HEADER = "Penstock-Age"  # seconds; of an answer that a replica has given a part of
_JSON = "application/json"
_MEDIA_TYPES = {_JSON, "application/json-rpc", "application/jsonrequest"}
# An answer is for the one who asked, and is no page: nothing in it may be run, framed or kept.
_HEADERS = [
    (b"cache-control", b"no-store"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
]


class _Refusal(errors.InvalidRequest):
    """A request that is refused for its form; ``reason`` is its label in the metrics."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"Invalid Request: {message}")
        self.status = status
        self.reason = reason


Answer = Callable[[bytes, Caller, Request], Awaitable[tuple[int, bytes | None]]]
"""Answers the body of an admitted request: HTTP status and body, None for none. Raises as ``Dispatcher.answer``."""

_STATUSES: dict[type[Exception], int] = {
    errors.RateLimited: 429, errors.Overloaded: 503, errors.TooManyWaits: 503, errors.TooLarge: 413,
    errors.InvalidParams: 400, errors.NotFound: 404, errors.PayloadLost: 410, errors.Unavailable: 503,
}  # fmt: skip


def make_app(
    dispatcher: Dispatcher,
    authenticator: Authenticator,
    settings: Settings,
    *,
    scaling: Scaling,
    home: Callable[[Request], Awaitable[Response]] | None = None,
    mcp: Answer | None = None,
    more: Sequence[BaseRoute] = (),
) -> ASGIApp:
    """The ASGI application. home: what browsers are shown at ``/``. mcp: of ``/mcp``. more: further routes."""
    card = {"name": "penstock", "version": __version__, "rpc": RPC_PATH, "discover": "rpc.discover"}

    async def index(request: Request) -> Response:
        accepted = request.headers.get("accept", "")
        if home is not None and ("text/html" in accepted or "text/event-stream" in accepted):
            return await home(request)
        try:
            authenticator.check_host(request.headers)
        except errors.AccessDenied as exc:
            return _refused(exc)
        return _json(msgspec.json.encode(card))

    def posted(path: str, source: str, answer: Answer) -> Callable[[Request], Awaitable[Response]]:
        """The endpoint of bodies to be answered; lets no exception out. source: the API, as the audit names it."""

        async def endpoint(request: Request) -> Response:
            started = perf_counter()
            try:
                caller = authenticator.admit_request(request)
                if caller.rates is not None:
                    caller.rates.check(caller.name)
                audit.set_actor(caller.key, address_of(request), source)
                bind(caller.tenant, caller.actions)
                in_hand().caller = caller.name if caller.key else None
                _check_media_type(request)
                body = await read_body(request, settings.largest_request_bytes, settings.request_timeout_seconds)
                request_in_hand.set(request)
                spans = active.active()
                if spans is None:
                    status, content = await answer(body, caller, request)
                else:
                    with spans.serving(path, request.headers) as span:
                        status, content = await answer(body, caller, request)
                        spans.answered(span, status)
                if HAS_WAITED in request.scope:
                    authenticator.admit_request(request)  # its key may have been revoked meanwhile
            except errors.RpcError as exc:
                return _refused(exc, by_own_code=path == RPC_PATH)
            except ClientDisconnect:
                return Response(status_code=400)  # no one is there to read it
            except Exception as exc:
                return _json(error_body(masked(exc, "unknown")), status_of(exc))
            if HAS_WAITED not in request.scope:
                metrics.REQUEST_SECONDS.observe(perf_counter() - started)
            age = in_hand().age_seconds
            headers = None if age is None else {AGE_HEADER: f"{age:.1f}"}
            return Response(status_code=status) if content is None else _json(content, status, headers)

        return endpoint

    async def figures(request: Request) -> Response:
        started = perf_counter()
        try:
            try:
                caller = authenticator.admit_request(request)
                caller.charge(1)
            except errors.RpcError as exc:
                return _refused(exc)
            caller.check(Permission.SCALING)
            answer = await scaling.answer(request.path_params.get("route"), request.query_params)
        except Exception as exc:
            return _json(error_body(masked(exc, "scaling")), status_of(exc))
        metrics.REQUEST_SECONDS.observe(perf_counter() - started)
        return _json(answer)

    rpc_endpoint = posted(RPC_PATH, "http", lambda body, caller, _: dispatcher.answer(body, caller))
    routed = Starlette(
        routes=[
            Route("/", index, methods=["GET"]),
            Route(RPC_PATH, rpc_endpoint, methods=["POST"]),
            *(() if mcp is None else (Route(MCP_PATH, posted(MCP_PATH, "mcp", mcp), methods=["POST"]),)),
            Route(SCALING_PATH, figures, methods=["GET"]),
            Route(f"{SCALING_PATH}/{{route}}", figures, methods=["GET"]),
            *more,
        ],
        exception_handlers={HTTPException: _http_error},
    )

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        # Nearly all that is asked: the framework's way to its endpoint is a tenth of the time of a single enqueue.
        if scope["type"] == "http" and scope["path"] == RPC_PATH and scope["method"] == "POST":
            response = await rpc_endpoint(Request(scope, receive))
            await response(scope, receive, send)
        else:
            await routed(scope, receive, send)

    return app


def _json(body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    response = Response(body, status, headers, media_type=_JSON)
    response.raw_headers += _HEADERS
    return response


def _check_media_type(request: Request) -> None:
    """Refuse what a page of another origin can send without asking first: forms, plain text, nothing. Status 415."""
    given = request.headers.get("content-type", "")
    if given != _JSON and given.partition(";")[0].strip().lower() not in _MEDIA_TYPES:
        raise _Refusal(415, "media_type", f"send Content-Type: {_JSON}, not {given[:100]!r}")
    if "content-encoding" in request.headers:
        raise _Refusal(415, "media_type", "the body must not be compressed")


async def read_body(request: Request, limit: int, seconds: float) -> bytes:
    """The body, of which no more than the limit is ever held. Raises TooLarge, Overloaded, _Refusal."""
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > limit:
        raise errors.TooLarge("the request", int(declared[:20]), limit)
    chunks = []
    size = 0
    load = in_hand()
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.stream():
                size += len(chunk)
                if size > limit:
                    raise errors.TooLarge("the request", size, limit)
                load.hold(len(chunk))
                chunks.append(chunk)
    except TimeoutError:
        raise _Refusal(408, "time", f"the body did not arrive within {seconds:g} s") from None
    return b"".join(chunks)


def status_of(exc: Exception, otherwise: int = 500) -> int:
    """The HTTP status of an error. otherwise: of those that have none of their own."""
    if isinstance(exc, errors.AccessDenied | _Refusal):
        return exc.status
    return next((status for kind, status in _STATUSES.items() if isinstance(exc, kind)), otherwise)


def _refused(exc: errors.RpcError, *, by_own_code: bool = True) -> Response:
    """by_own_code: False where another protocol gives codes such as ours its own meanings."""
    status, headers = refusal(exc)
    return _json(error_body(exc if by_own_code else errors.RpcError(exc.message, exc.data)), status, headers)


def refusal(exc: errors.RpcError) -> tuple[int, dict[str, str] | None]:
    """Status and headers of the answer to a request that is refused before its turn; counts it. Raises what is none."""
    headers: dict[str, str] | None = None
    match exc:
        case errors.AccessDenied(status=401):
            reason, headers = "key", {"WWW-Authenticate": "Bearer"}
        case errors.AccessDenied():
            reason = "host"
        case errors.RateLimited() | errors.Overloaded():
            reason = "rate" if isinstance(exc, errors.RateLimited) else "memory"
            headers = {"Retry-After": str(max(1, math.ceil(exc.retry_after_seconds)))}
        case errors.TooLarge():
            reason = "size"
        case _Refusal(reason=reason):
            # What is left of a body that is late is not worth waiting for.
            headers = {"Connection": "close"} if exc.status == 408 else None
        case _:
            raise exc
    metrics.REFUSED.labels(reason).inc()
    return status_of(exc), headers


async def _http_error(_request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    problem = {"error": exc.detail, "rpc": f"POST {RPC_PATH}"}
    return _json(msgspec.json.encode(problem), exc.status_code, exc.headers)
