"""What is served, and uvicorn in a loop of ours: it is given a socket, leaves signals alone and stops when asked."""

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from penstock.api.http_limits import HEAD_BYTES, LimitedProtocol
from penstock.protocol.errors import SettingsError
from penstock.runtime.logs import log
from penstock.runtime.loop import SideTask
from penstock.runtime.periodic import is_set_within, repeat
from penstock.settings.model import Settings
from penstock.settings.values import PREFIX

_BACKLOG = 2048
CERTIFICATE_LOOK_SECONDS = 10.0
# On every answer, those included that uvicorn gives itself.
_HEADERS = [
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
]


class Part:
    """A part of the api process that serves routes. apps: served on a port of their own, by name."""

    routes: Sequence[BaseRoute] = ()
    apps: Mapping[str, tuple[int, ASGIApp]] = {}
    side_tasks: Mapping[str, SideTask] = {}

    def stop(self) -> None:
        """Answer long-running requests now."""


class Certificate:
    """A context for servers that shows the newest pair of files which fit together. Raises SettingsError at first."""

    def __init__(self, cert: str, key: str) -> None:
        self._files = (cert, key)
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._seen = self._state()
        try:
            self.context.load_cert_chain(*self._files)
        except (OSError, ssl.SSLError) as exc:
            raise SettingsError(f"{PREFIX}HTTP_TLS_CERT and _KEY cannot be used: {exc}") from exc

    def _state(self) -> list[tuple[int, int, int]]:
        """Differs once a file is replaced, also by a link to another."""
        found = [os.stat(file) for file in self._files]
        return [(stat.st_ino, stat.st_mtime_ns, stat.st_size) for stat in found]

    async def look(self) -> float:
        """Take replaced files for new connections if they fit together; returns seconds until the next look."""
        try:
            if (state := self._state()) != self._seen:
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(*self._files)  # raises before anything changes
                self.context.load_cert_chain(*self._files)
                self._seen = state
                log.info("certificate_loaded", file=self._files[0])
        except (OSError, ssl.SSLError) as exc:
            log.warning("certificate_not_loaded", file=self._files[0], reason=str(exc))
        return CERTIFICATE_LOOK_SECONDS


class HttpServer:
    """Serves an ASGI application; ``bind`` and ``listen`` first, then ``run`` until ``stop``.

    One connection more than the settings allow closes the idlest, or, where none is idle, is answered 503.
    name: as in the setting of its port.
    """

    def __init__(self, app: Any, settings: Settings, port: int, *, name: str = "http") -> None:
        self._port_setting = f"{PREFIX}{name.upper()}_PORT"
        self._host = settings.http_host
        self._port = port
        self._socket: socket.socket | None = None
        # Its warnings about bad requests and refused connections can be caused by any client; they are counted instead.
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        # Chunk sizes and trailers take room too.
        wire_limit_bytes = 4 * settings.largest_request_bytes + HEAD_BYTES
        config = uvicorn.Config(
            app,
            http=type("Protocol", (LimitedProtocol,), {"wire_limit_bytes": wire_limit_bytes}),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            headers=_HEADERS,
            limit_concurrency=settings.http_connections + 1,  # uvicorn counts the one that asks too
            h11_max_incomplete_event_size=HEAD_BYTES,
            backlog=_BACKLOG,
            timeout_keep_alive=125,  # longer than the 120 s of examples/terraform-ecs, which would find it closed
            timeout_graceful_shutdown=max(1, int(settings.grace_seconds)),
        )
        self._certificate = None
        if settings.http_tls_cert is not None and settings.http_tls_key is not None:
            self._certificate = Certificate(settings.http_tls_cert, settings.http_tls_key)
            config.load()
            config.ssl = self._certificate.context
        self._server = _Server(config)
        self._ended = asyncio.Event()

    @property
    def url(self) -> str:
        """The base URL, with the port that was taken. Raises RuntimeError before ``bind``."""
        if self._socket is None:
            raise RuntimeError("the server is not bound yet")
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{'http' if self._certificate is None else 'https'}://{host}:{self._socket.getsockname()[1]}"

    def bind(self) -> None:
        """Take the port, once. Raises SettingsError when it cannot be had."""
        if self._socket is not None:
            return
        try:
            found = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            # A name may stand for both kinds of address; IPv4 is what clients try where they try one.
            family, kind, protocol, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
            made = socket.socket(family, kind, protocol)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(address)
        except OSError as exc:
            raise self._unusable(exc) from exc
        made.setblocking(False)
        self._socket = made

    def listen(self) -> None:
        """Let callers connect. Raises SettingsError when another program listens there."""
        assert self._socket is not None
        try:
            self._socket.listen(_BACKLOG)
        except OSError as exc:
            raise self._unusable(exc) from exc

    async def run(self) -> None:
        """Serve until ``stop``, then finish the requests in hand."""
        assert self._socket is not None
        looks = None
        if self._certificate is not None:
            looks = asyncio.create_task(repeat("certificate", self._certificate.look), name="certificate")
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            self._ended.set()
            if looks is not None:
                looks.cancel()

    def stop(self) -> None:
        self._server.should_exit = True

    async def wait_ended(self, seconds: float) -> bool:
        """Wait until the requests in hand are answered; False when the time ran out first."""
        self._server.force_exit = not await is_set_within(self._ended, seconds)
        return not self._server.force_exit

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def _unusable(self, exc: OSError) -> SettingsError:
        return SettingsError(
            f"the api cannot listen on {self._host}:{self._port} ({exc.strerror}): "
            f"set {self._port_setting} to a free port, or PENSTOCK_HTTP_HOST to an address of this machine"
        )


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Signals belong to the process's own loop, which stops this server among other things."""
        yield
