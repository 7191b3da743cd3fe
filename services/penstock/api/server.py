"""What is served, and uvicorn in a loop of ours: it is given a socket, leaves signals alone and stops when asked.

It bounds neither the size of a request's head nor the time that one takes: ``LimitedProtocol`` does.
"""

import asyncio
import logging
import math
import os
import re
import socket
import ssl
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from penstock.protocol.errors import SettingsError
from penstock.runtime import metrics
from penstock.runtime.logs import log
from penstock.runtime.loop import SideTask
from penstock.runtime.periodic import is_set_within, repeat
from penstock.settings.model import Settings
from penstock.settings.values import PREFIX

HEAD_SECONDS = 10.0  # for a request's first line and headers, and for what is left of a body that was refused
HEAD_BYTES = 32 * 1024
ADMITTED = "penstock.admitted"  # in the scope of a request whose caller was let in
STALLED_SECONDS = 60.0  # with an answer that the client does not read,
SLOWEST_BYTES = 1024 * 1024  # or of which it reads less than this in that time
CLOSING_SECONDS = 1.0  # for a client to agree to the end of an idle connection over TLS
_LEFTOVER_BYTES = 8 * 1024 * 1024
# The parser drops the body of a request that offers HTTP/2, as Java's HttpClient does. The name that replaces it is as
# long, so that the rest of a body that was refused keeps its length.
_UPGRADE = re.compile(rb"\r\nUpgrade:", re.IGNORECASE)
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_BACKLOG = 2048
CERTIFICATE_LOOK_SECONDS = 10.0
# On every answer, those included that uvicorn gives itself.
_HEADERS = [
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
]

if TYPE_CHECKING or not find_spec("httptools"):
    from uvicorn.protocols.http.h11_impl import H11Protocol as _Protocol
else:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as _Protocol


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
        try:
            self._seen = self._state()
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


class LimitedProtocol(_Protocol):
    """One connection. What comes while no request is under way is a head, or the rest of a body that was refused."""

    wire_limit_bytes = 64 * 1024 * 1024  # of one body, as it is sent

    _awaited_bytes = 0
    _body_bytes = 0
    _quiet_since = 0.0
    _admitted = False
    _timer: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._quiet_since = self.loop.time()
        limit = self.limit_concurrency
        if limit is not None and len(self.connections) >= limit:
            metrics.REFUSED.labels("connections").inc()
            self._make_room()
        self._timer = self.loop.call_later(HEAD_SECONDS, self._give_up)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        if self._stalled is not None:
            self._stalled.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._quiet_since = self.loop.time()
        before = self.cycle
        in_body = before is not None and before.more_body and not before.response_complete
        if not in_body:
            data = _UPGRADE.sub(b"\r\nIgnored:", data, 1)
        super().data_received(data)
        if self.cycle is not before:  # a head has come whole
            self._admitted = self._admitted or (before is not None and ADMITTED in before.scope)
            self._awaited_bytes = self._body_bytes = 0
            self._disarm()
        elif in_body:
            self._body_bytes += len(data)
            # The application counts the bytes of the body; this is about what it does not see: chunk sizes, trailers.
            if self._body_bytes > self.wire_limit_bytes:
                self._refuse()
        else:
            self._awaited_bytes += len(data)
            refused = before is not None and before.response_complete and before.more_body
            if self._awaited_bytes > (_LEFTOVER_BYTES if refused else HEAD_BYTES):
                self._refuse()
            elif self._timer is None and (before is None or before.response_complete):
                self._timer = self.loop.call_later(HEAD_SECONDS, self._give_up)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stalled is None:
            self._watch_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _watch_reader(self, before: float = math.inf) -> None:
        """Cut off a client that has read too little since so many bytes were left, or look again later."""
        left = self.transport.get_write_buffer_size()
        if before - left < SLOWEST_BYTES:
            self.transport.abort()
        else:
            self._stalled = self.loop.call_later(STALLED_SECONDS, self._watch_reader, left)

    def _make_room(self) -> None:
        """Close the connection that was quiet longest, of those in no request; first of callers never let in."""
        idle = [
            one
            for one in self.connections
            if isinstance(one, LimitedProtocol)
            and one is not self
            and (one.cycle is None or one.cycle.response_complete)
            and not one.transport.is_closing()
        ]
        if idle:
            quietest = min(idle, key=lambda one: (one.admitted, one._quiet_since))
            quietest.transport.close()
            self.connections.discard(quietest)  # over TLS it is lost once its client, who may not read, has answered
            self.loop.call_later(CLOSING_SECONDS, quietest.transport.abort)

    @property
    def admitted(self) -> bool:
        """Whether a caller of this connection was let in."""
        return self._admitted or (self.cycle is not None and ADMITTED in self.cycle.scope)

    def _refuse(self) -> None:
        metrics.REFUSED.labels("head").inc()
        if not self.transport.is_closing():
            if self.cycle is None or self.cycle.response_complete:
                self.transport.write(_TOO_LARGE)
            self.transport.close()

    def _give_up(self) -> None:
        self._timer = None
        if self._awaited_bytes:
            metrics.REFUSED.labels("time").inc()
        self.transport.close()

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


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
        self._server = uvicorn.Server(config)
        # Signals belong to the process's own loop, which stops this server among other things.
        self._server.capture_signals = nullcontext  # type: ignore[method-assign,assignment]
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
