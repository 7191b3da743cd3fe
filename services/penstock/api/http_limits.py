"""What a client may ask of a connection: uvicorn bounds neither the size of a request's head nor the time it takes."""

import asyncio
import re
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from penstock.runtime import metrics

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

if TYPE_CHECKING:
    from uvicorn.protocols.http.h11_impl import H11Protocol as _Protocol
elif find_spec("httptools"):
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as _Protocol
else:
    from uvicorn.protocols.http.h11_impl import H11Protocol as _Protocol


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

    def _watch_reader(self) -> None:
        left = self.transport.get_write_buffer_size()
        self._stalled = self.loop.call_later(STALLED_SECONDS, self._check_reader, left)

    def _check_reader(self, before: int) -> None:
        """Cut off a client that has read too little since so many bytes were left."""
        if before - self.transport.get_write_buffer_size() < SLOWEST_BYTES:
            self.transport.abort()
        else:
            self._watch_reader()

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
        if not self.transport.is_closing():
            self.transport.close()

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
