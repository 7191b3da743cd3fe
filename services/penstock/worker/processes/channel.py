"""Frames between worker, fork server and children over a socket, a length, then MessagePack; and how children end."""

import asyncio
import json
import signal
import socket
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from penstock.protocol.json_text import replace_unstorable

_LENGTH = struct.Struct("!I")
# To the fork server: a child to kill by its process id, or 0 to fork one for a given socket.
ORDER = struct.Struct("!q")


def frame(message: Any) -> bytes:
    """Raises ValueError for a message of 4 GiB or more."""
    body = msgspec.msgpack.encode(message)
    if len(body) >> 32:
        raise ValueError(f"a message of {len(body)} bytes is too large for a child process")
    return _LENGTH.pack(len(body)) + body


async def read(reader: asyncio.StreamReader) -> Any:
    """The next message; None at the end."""
    try:
        (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return msgspec.msgpack.decode(await reader.readexactly(size))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


class Channel:
    """The blocking end of a channel, in a child; messages are sent from any thread."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._reader = connection.makefile("rb")
        self._lock = threading.Lock()

    def send(self, *message: Any) -> None:
        """Send texts, numbers, also of numpy, lists and None. Half a surrogate pair becomes U+FFFD."""
        try:
            framed = frame(message)
        except (UnicodeEncodeError, TypeError):
            framed = frame(json.loads(replace_unstorable(json.dumps(message))))
        with self._lock:
            self._connection.sendall(framed)

    def read(self) -> Any:
        """The next message; None at the end."""
        head = self._reader.read(_LENGTH.size)
        if len(head) < _LENGTH.size:
            return None
        return msgspec.msgpack.decode(self._reader.read(_LENGTH.unpack(head)[0]))


@dataclass(frozen=True, slots=True)
class Ended:
    """How a child ended. code: as of ``subprocess``, negative for a signal; None: unknown, as its server ended too."""

    code: int | None = None
    peak_bytes: int = 0

    @property
    def signal(self) -> str | None:
        if self.code is None or self.code >= 0:
            return None
        with suppress(ValueError):
            return signal.Signals(-self.code).name
        return f"SIG{-self.code}"

    @property
    def data(self) -> dict[str, Any]:
        """For the error of a task."""
        exit_code = None if self.signal is not None else self.code
        return {"signal": self.signal, "exit_code": exit_code, "peak_rss_bytes": self.peak_bytes or None}

    @property
    def text(self) -> str:
        how = "its exit code is unknown" if self.code is None else self.signal or f"exit code {self.code}"
        return f"{how}, peak RSS {self.peak_bytes / 2**20:.0f} MiB" if self.peak_bytes else how


@dataclass(slots=True, eq=False)
class Child:
    """A child; forked, it has pid, reader and writer. reason: of its end. is_ready: its lifespans are open."""

    connection: socket.socket
    ended: asyncio.Future[Ended]
    pid: int = 0
    calls: int = 0
    reason: str | None = None
    is_ready: bool = False
    reader: asyncio.StreamReader = field(init=False)
    writer: asyncio.StreamWriter = field(init=False)

    def send(self, *message: Any) -> None:
        self.writer.write(frame(message))
