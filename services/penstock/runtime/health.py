"""/metrics, /healthz (the event loop turns) and /readyz (the last pass succeeded), served beside the event loop."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any

from prometheus_client.exposition import choose_encoder

from penstock.protocol.errors import SettingsError
from penstock.runtime import metrics

DEFAULT_PORT = 9464
SATURATED = "ok, but saturated: "  # begins what /readyz says of a process that is ready and has too much to do
_STALLED_AFTER_SECONDS = 30.0
_REQUESTS_AT_ONCE = 16  # a thread each; a connection more is closed


@dataclass
class Health:
    """What a process knows of its own state. ends_stalls: whether it sees itself to what keeps the event loop now."""

    process: str
    saturation: Callable[[], str | None] = lambda: None
    ends_stalls: Callable[[], bool] = lambda: False
    _problem: str | None = field(init=False, default="starting")
    _last_turn: float = field(init=False, default_factory=time.monotonic)

    def __post_init__(self) -> None:
        metrics.READY.labels(self.process).set(0)

    def succeeded(self) -> None:
        if self._problem is not None:
            self._problem = None
            metrics.READY.labels(self.process).set(1)

    def failed(self, reason: str) -> None:
        self._problem = reason
        metrics.READY.labels(self.process).set(0)

    async def pulse(self) -> None:
        observe = metrics.LOOP_LAG_SECONDS.labels(self.process).observe
        while True:
            self._last_turn = time.monotonic()
            await asyncio.sleep(1)
            observe(max(0.0, time.monotonic() - self._last_turn - 1))

    def alive(self) -> tuple[bool, str]:
        quiet = time.monotonic() - self._last_turn
        if quiet <= _STALLED_AFTER_SECONDS or self.ends_stalls():
            return True, "ok"
        return False, f"event loop stalled for {quiet:.0f} s"

    def ready(self) -> tuple[bool, str]:
        if self._problem is not None:
            return False, self._problem
        saturation = self.saturation()
        return True, "ok" if saturation is None else f"{SATURATED}{saturation}"


def ready(each: Sequence[Health]) -> tuple[bool, str]:
    """Of several services in one process: good if each is; a problem is named with its service."""
    if len(each) == 1:
        return each[0].ready()
    states = [(health.process, *health.ready()) for health in each]
    notes = [f"{process}: {text}" for process, _, text in states if text != "ok"]
    return all(good for _, good, _ in states), "; ".join(notes) or "ok"


class HealthServer(ThreadingTCPServer):
    """The running server; ``url`` is its base, such as ``http://127.0.0.1:9464``. Raises OSError for a taken port."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, each: Sequence[Health], host: str, port: int) -> None:
        self.each = each
        self._free_threads = threading.BoundedSemaphore(_REQUESTS_AT_ONCE)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, name="health", daemon=True).start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        # A moment's wait lets a burst of probes pass; the connections behind it wait in the backlog.
        if not self._free_threads.acquire(timeout=0.5):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._free_threads.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free_threads.release()


class _Handler(BaseHTTPRequestHandler):
    server: HealthServer
    timeout = 10  # each request has a thread, which one that never comes must not keep

    def handle(self) -> None:
        with suppress(OSError):  # too slow, or gone: no one to answer, and not worth a traceback
            super().handle()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        status, content_type, body = 404, "text/plain; charset=utf-8", b"here are /metrics, /healthz and /readyz\n"
        if path == "/metrics":
            try:  # only OpenMetrics, which Prometheus asks for, has exemplars
                encode, content_type = choose_encoder(self.headers.get("Accept", ""))
            except Exception:  # a version that is no number
                encode, content_type = choose_encoder("")
            status, body = 200, encode(metrics.REGISTRY)
        elif path in ("/healthz", "/readyz"):
            each = self.server.each  # which share the event loop
            good, text = each[0].alive() if path == "/healthz" else ready(each)
            status, body = 200 if good else 503, text.encode() + b"\n"
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET

    def version_string(self) -> str:
        return "penstock"

    def log_message(self, *_: Any) -> None:
        return None


def serve_health(each: Sequence[Health], host: str, port: int | None) -> HealthServer:
    """Start the server; ``port`` None means 9464 or, if that is taken, a free one. Raises SettingsError."""
    for candidate in (DEFAULT_PORT, 0) if port is None else (port,):
        try:
            return HealthServer(each, host, candidate)
        except OSError as exc:
            problem = exc
    remedy = "set PENSTOCK_METRICS_PORT to a free port, or PENSTOCK_METRICS_HOST to an address of this machine"
    raise SettingsError(f"cannot listen on {host}:{candidate} for metrics ({problem.strerror}): {remedy}")
