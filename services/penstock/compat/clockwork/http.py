"""clockwork's API: POST /schedule and DELETE /schedule, answered as clockwork does, in plain text and with 400.

Access is as for every other request, without API keys this machine alone, with them a key that may enqueue; clients in
PENSTOCK_CLOCKWORK_NETWORKS need none.
"""

from __future__ import annotations

import ipaddress
from time import perf_counter

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from penstock.api.access import Guard
from penstock.api.http import read_body, refusal
from penstock.api.http_limits import ADMITTED
from penstock.compat.clockwork.schedules import (
    SOURCE,
    BadRequest,
    IllegalArgument,
    delayed_record_of,
    read_cancel,
    read_schedule,
)
from penstock.compat.clockwork.store import cancel_schedule, create_schedules
from penstock.compat.delayed_records import DelayedRecord, instant_of
from penstock.db.notify import Notifier
from penstock.db.pool import Store
from penstock.protocol.api_key import Permission
from penstock.protocol.errors import Refused, RpcError
from penstock.runtime import metrics
from penstock.runtime.logs import get_logger
from penstock.settings.model import Settings

PATH = "/schedule"
_ILLEGAL = "Illegal argument provided"
_UNKNOWN = "Unknown exception"

log = get_logger()


class Clockwork:
    """The two requests. notifier: of the channel by which supervisors hear of new delayed records."""

    def __init__(self, *, store: Store, notifier: Notifier, guard: Guard, settings: Settings) -> None:
        self._store = store
        self._notifier = notifier
        self._guard = guard
        self._settings = settings
        self._networks = [ipaddress.ip_network(network) for network in settings.clockwork_networks]

    @property
    def routes(self) -> list[Route]:
        return [Route(PATH, self.answer, methods=["POST", "DELETE"])]

    def app(self) -> Starlette:
        """An application of these routes alone, for a port of their own."""
        return Starlette(routes=self.routes)

    async def answer(self, request: Request) -> Response:
        """Every failure is 400, as clockwork's clients know it; who may not ask is told so as anywhere in Penstock."""
        started = perf_counter()
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            return PlainTextResponse("send Content-Type: application/json", 415)
        try:
            body = await self._admit(request)
            text = await (self._cancel(body) if request.method == "DELETE" else self._create(body, started))
        except RpcError as exc:
            status, headers = refusal(exc)
            return PlainTextResponse(exc.message, status, headers)
        except ClientDisconnect:
            return Response(status_code=400)
        except BadRequest as exc:
            log.info("clockwork_refused", method=request.method, reason=str(exc))
            return self._told(request, 400, "", started)
        except (IllegalArgument, Refused) as exc:
            log.info("clockwork_refused", method=request.method, reason=str(exc))
            return self._told(request, 400, _ILLEGAL, started)
        except Exception as exc:
            log.exception("clockwork_failed", method=request.method, error=type(exc).__name__)
            return self._told(request, 400, _UNKNOWN, started)
        return self._told(request, 200, text, started)

    async def _admit(self, request: Request) -> bytes:
        address = request.client.host if request.client else ""
        if not self._needs_no_key(request.headers, address):
            self._guard.check_host(request.headers)
            caller = self._guard.admit(request.headers, address)
            caller.check(Permission.ENQUEUE)
            caller.charge(1)
        request.scope[ADMITTED] = True
        settings = self._settings
        return await read_body(request, settings.request_limit_bytes, settings.request_timeout_seconds)

    def _needs_no_key(self, headers: Headers, address: str) -> bool:
        """Whether the request comes from a network that is allowed, and not from a page in a browser there."""
        if not self._networks or not self._guard.asks_for_keys or "origin" in headers:
            return False
        try:
            client = ipaddress.ip_address(address)
        except ValueError:  # a Unix socket has no address
            return False
        return any(client in network for network in self._networks)

    async def _create(self, body: bytes, started: float) -> str:
        request = read_schedule(body)
        delayed: DelayedRecord = delayed_record_of(request, self._settings)
        async with self._store.transaction() as session:
            (is_stored,) = await create_schedules(session, [delayed], same_key=self._settings.clockwork_same_key)
        if not is_stored:
            raise IllegalArgument("the pair of clientId and scheduleKey has a schedule with other contents")
        self._notifier.wake()
        metrics.CREATION_LATENCY_SECONDS.labels(SOURCE).observe(perf_counter() - started)
        log.debug("clockwork_record_stored", due_at=instant_of(request.schedule_time).isoformat())
        return request.ordering_key

    async def _cancel(self, body: bytes) -> str:
        request = read_cancel(body)
        async with self._store.transaction() as session:
            found = await cancel_schedule(session, request)
        if not found:
            raise IllegalArgument("the pair of clientId and scheduleKey has no schedule")
        return request.schedule_key

    def _told(self, request: Request, status: int, text: str, started: float) -> Response:
        metrics.REQUESTS.labels(f"clockwork.{request.method.lower()}", "ok" if status == 200 else str(status)).inc()
        metrics.REQUEST_SECONDS.observe(perf_counter() - started)
        return PlainTextResponse(text, status, {"Cache-Control": "no-store"})
