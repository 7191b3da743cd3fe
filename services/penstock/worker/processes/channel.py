"""Frames between worker, fork server and children over a socket: a length, then MessagePack."""

import asyncio
import socket
import struct
import threading
from typing import Any, NamedTuple

import msgspec

from penstock.settings.model import Settings

_LENGTH = struct.Struct("!I")
# To the fork server: a child to kill by its process id, or 0 to fork one for a given socket.
ORDER = struct.Struct("!q")


class Start(NamedTuple):
    """What the worker sends the fork server first, pickled. parent: the worker's process id."""

    settings: Settings
    apps: tuple[str, ...]
    parent: int


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
        with self._lock:
            self._connection.sendall(frame(message))

    def read(self) -> Any:
        """The next message; None at the end."""
        head = self._reader.read(_LENGTH.size)
        if len(head) < _LENGTH.size:
            return None
        return msgspec.msgpack.decode(self._reader.read(_LENGTH.unpack(head)[0]))
