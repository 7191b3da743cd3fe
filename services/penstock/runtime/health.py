"""/metrics, /healthz and /readyz on a port of their own, served from a thread so that a stuck loop cannot hide.

healthz: 200 while the event loop turns. readyz: 200 while the last pass succeeded; the body says why not.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client.exposition import choose_encoder

from penstock.protocol.errors import SettingsError
from penstock.runtime import metrics

DEFAULT_PORT = 9464
_STALLED_AFTER_SECONDS = 30.0
_REQUESTS_AT_ONCE = 16  # a thread each; a connection more is closed
_WAIT_SECONDS = 0.5
_REQUEST_SECONDS = 10  # each request has a thread, which one that never comes must not keep

# Wsgiref would name itself and its Python as the server.
_HEADERS = [("Server", "penstock"), ("X-Content-Type-Options", "nosniff"), ("Cache-Control", "no-store")]


class Health:
    """What a process knows of its own state."""

    def __init__(self, process: str) -> None:
        self._process = process
        self._problem: str | None = "starting"
        self._last_turn = time.monotonic()
        metrics.READY.labels(process).set(0)

    def succeeded(self) -> None:
        if self._problem is not None:
            self._problem = None
            metrics.READY.labels(self._process).set(1)

    def failed(self, reason: str) -> None:
        self._problem = reason
        metrics.READY.labels(self._process).set(0)

    async def pulse(self) -> None:
        """Note that the event loop turns; runs beside the passes."""
        while True:
            self._last_turn = time.monotonic()
            await asyncio.sleep(1)

    def alive(self) -> tuple[bool, str]:
        quiet = time.monotonic() - self._last_turn
        return (False, f"event loop stalled for {quiet:.0f} s") if quiet > _STALLED_AFTER_SECONDS else (True, "ok")

    def ready(self) -> tuple[bool, str]:
        return (True, "ok") if self._problem is None else (False, self._problem)


class HealthServer:
    """The running server; ``url`` is its base, such as ``http://127.0.0.1:9464``."""

    def __init__(self, server: WSGIServer, host: str) -> None:
        self._server = server
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{server.server_port}"
        threading.Thread(target=server.serve_forever, name="health", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, *args: Any, **more: Any) -> None:
        self._free_threads = threading.BoundedSemaphore(_REQUESTS_AT_ONCE)
        super().__init__(*args, **more)

    def process_request(self, request: Any, client_address: Any) -> None:
        # A moment's wait lets a burst of probes pass; the connections behind it wait in the backlog.
        if self._free_threads.acquire(timeout=_WAIT_SECONDS):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free_threads.release()

    def server_bind(self) -> None:
        # WSGIServer looks up its own host name here, which stalls for seconds where DNS does not answer.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Quiet(WSGIRequestHandler):
    timeout = _REQUEST_SECONDS

    def handle(self) -> None:
        with suppress(OSError):  # too slow, or gone: no one to answer, and not worth a traceback
            super().handle()

    def log_message(self, *_: Any) -> None:
        return None

    def address_string(self) -> str:
        return str(self.client_address[0])


def serve_health(health: Health, host: str, port: int | None) -> HealthServer:
    """Start the server; ``port`` None means 9464 or, if that is taken, a free one. Raises SettingsError."""
    kind = _Server6 if ":" in host else _Server
    for candidate in (DEFAULT_PORT, 0) if port is None else (port,):
        try:
            server = make_server(host, candidate, _application(health), server_class=kind, handler_class=_Quiet)
        except OSError as exc:
            problem = exc
        else:
            return HealthServer(server, host)
    raise SettingsError(
        f"cannot listen on {host}:{port} for metrics ({problem.strerror}): set PENSTOCK_METRICS_PORT to a free port"
    )


def _application(health: Health) -> Callable[..., Iterable[bytes]]:
    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if path == "/metrics":
            # Only OpenMetrics, which Prometheus asks for, has exemplars.
            encode, content_type = choose_encoder(environ.get("HTTP_ACCEPT", ""))
            start_response("200 OK", [("Content-Type", content_type), *_HEADERS])
            return [encode(metrics.REGISTRY)]
        if path in ("/healthz", "/readyz"):
            good, text = health.alive() if path == "/healthz" else health.ready()
            status = "200 OK" if good else "503 Service Unavailable"
            start_response(status, [("Content-Type", "text/plain; charset=utf-8"), *_HEADERS])
            return [text.encode() + b"\n"]
        start_response("404 Not Found", [("Content-Type", "text/plain; charset=utf-8"), *_HEADERS])
        return [b"here are /metrics, /healthz and /readyz\n"]

    return application
