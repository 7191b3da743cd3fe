"""clockwork's API: POST and DELETE /schedule, answered as by clockwork, in plain text and with 400 for errors.

Access is as for every request: this machine alone without API keys, else a key that may enqueue; clients in
PENSTOCK_CLOCKWORK_NETWORKS need none.
"""

import ipaddress
from time import perf_counter

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from penstock.api.access import Authenticator, address_of
from penstock.api.audit import Audit
from penstock.api.http import read_body, refusal
from penstock.api.server import ADMITTED, Part
from penstock.compat.clockwork import schedules
from penstock.compat.delayed_records import ACTION, cancel
from penstock.db.notify import DELAYED_RECORDS, Notifier
from penstock.db.pool import Store
from penstock.protocol.api_key import Permission, may_enqueue
from penstock.protocol.errors import AccessDenied, Refused, RpcError, Unavailable
from penstock.runtime import metrics
from penstock.runtime.logs import log
from penstock.settings.model import Settings


class Clockwork(Part):
    """As the settings enable it: beside the api's other routes, or on a port of its own."""

    def __init__(self, store: Store, settings: Settings, authenticator: Authenticator, _audit: Audit) -> None:
        self._store, self._settings, self._authenticator = store, settings, authenticator
        self._notifier = Notifier(store, DELAYED_RECORDS)  # wakes the supervisors for new delayed records
        self._networks = [ipaddress.ip_network(network) for network in settings.clockwork_networks]
        route, port = Route("/schedule", self._answer, methods=["POST", "DELETE"]), settings.clockwork_port
        self.routes = [route] if settings.clockwork_api else []
        self.apps = {} if port is None else {"clockwork": (port, Starlette(routes=[route]))}
        self.side_tasks = {"notify-delayed-records": self._notifier.run}

    async def _answer(self, request: Request) -> Response:
        """Every failure is 400, as clockwork's clients expect; refused access is answered as everywhere in Penstock."""
        started = perf_counter()
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            return PlainTextResponse("send Content-Type: application/json", 415)
        status, text = 400, ""
        try:
            body = await self._admit(request)
            text = await (self._cancel(body) if request.method == "DELETE" else self._create(body, started))
            status = 200
        except RpcError as exc:
            refused_status, headers = refusal(exc)
            return PlainTextResponse(exc.message, refused_status, headers)
        except ClientDisconnect:
            return Response(status_code=400)
        except (schedules.BadRequest, schedules.IllegalArgument, Refused) as exc:
            log.info("clockwork_refused", method=request.method, reason=str(exc))
            text = "" if isinstance(exc, schedules.BadRequest) else "Illegal argument provided"
        except Unavailable as exc:
            log.warning("clockwork_failed", method=request.method, reason=str(exc))
            text = "Unknown exception"
        except Exception as exc:
            log.exception("clockwork_failed", method=request.method, error=type(exc).__name__)
            text = "Unknown exception"
        metrics.REQUESTS.labels(f"clockwork.{request.method.lower()}", "ok" if status == 200 else str(status)).inc()
        metrics.REQUEST_SECONDS.observe(perf_counter() - started)
        return PlainTextResponse(text, status, {"Cache-Control": "no-store"})

    async def _admit(self, request: Request) -> bytes:
        if not self._needs_no_key(request.headers, address_of(request)):
            caller = self._authenticator.admit_request(request)
            caller.check(Permission.ENQUEUE)
            if not may_enqueue(ACTION, caller.actions, caller.tenant):
                raise AccessDenied(403, f"Not permitted: this API key may not enqueue {ACTION}", {"actions": [ACTION]})
            caller.charge(1)
        request.scope[ADMITTED] = True
        return await read_body(request, self._settings.request_limit_bytes, self._settings.request_timeout_seconds)

    def _needs_no_key(self, headers: Headers, address: str) -> bool:
        """Whether the request comes from an allowed network, and not from a page in a browser there."""
        if not self._networks or self._authenticator.key_cache is None or "origin" in headers:
            return False
        try:
            client = ipaddress.ip_address(address)
        except ValueError:  # a Unix socket has no address
            return False
        client = getattr(client, "ipv4_mapped", None) or client  # of IPv4, on a socket for both
        return any(client in network for network in self._networks)

    async def _create(self, body: bytes, started: float) -> str:
        request = schedules.read(body, schedules.ScheduleRequest)
        delayed = schedules.delayed_record_of(request, self._settings)
        async with self._store.transaction() as session:
            (is_stored,) = await schedules.create_schedules(session, [delayed], self._settings)
        if not is_stored:
            raise schedules.IllegalArgument(schedules.OTHER_CONTENTS)
        self._notifier.wake()
        metrics.CREATION_LATENCY_SECONDS.labels(schedules.SOURCE).observe(perf_counter() - started)
        log.debug("clockwork_record_stored", due_at=delayed.due_at.isoformat())
        return request.ordering_key

    async def _cancel(self, body: bytes) -> str:
        request = schedules.read(body, schedules.CancelRequest)
        async with self._store.transaction() as session:
            cancelled = await cancel(session, schedules.SOURCE, [schedules.identity_of(request)])
        if not cancelled:
            raise schedules.IllegalArgument("the pair of clientId and scheduleKey has no schedule")
        return request.schedule_key
