"""A pooler between the driver and Postgres, as the driver sees one."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

_READY = b"Z\x00\x00\x00\x05I"


@asynccontextmanager
async def pooler(
    database_url: str, *, drops: Collection[str] = (), refuses: str | None = None, by_transaction: bool = False
) -> AsyncIterator[str]:
    """The URL of a pooler before the database.

    drops: start-up parameters that it does not pass on. refuses: one at which it ends the connection.
    by_transaction: a server's connection is a client's for no longer than a transaction: once two are idle, they swap.
    """
    parts = urlsplit(database_url)
    links: list[_Link] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        startup = await _read_startup(reader)
        if refuses is not None and refuses.encode() in startup[8:].split(b"\0")[::2]:
            fields = f"SFATAL\0C08P01\0Munsupported startup parameter: {refuses}\0\0".encode()
            writer.write(b"E" + struct.pack("!I", len(fields) + 4) + fields)
            writer.close()
            return
        server = _Server(*await asyncio.open_connection(parts.hostname, parts.port))
        server.writer.write(_without(startup, drops))
        link = _Link(reader, writer, server)
        links.append(link)
        try:
            await asyncio.gather(link.read_client(links if by_transaction else []), server.read(links))
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            links.remove(link)
            for each in (writer, link.server.writer):
                each.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    login = parts.netloc.rpartition("@")[0]
    try:
        yield parts._replace(netloc=f"{login}@127.0.0.1:{port}", query="sslmode=disable").geturl()
    finally:
        listening.close()


async def _read_startup(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readexactly(4)
    return head + await reader.readexactly(struct.unpack("!I", head)[0] - 4)


def _without(startup: bytes, names: Collection[str]) -> bytes:
    words = startup[8:].rstrip(b"\0").split(b"\0")
    kept = [
        word + b"\0" + value + b"\0"
        for word, value in zip(words[::2], words[1::2], strict=True)
        if word.decode() not in names
    ]
    body = startup[4:8] + b"".join(kept) + b"\0"
    return struct.pack("!I", len(body) + 4) + body


class _Server:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.is_idle = False

    async def read(self, links: list[_Link]) -> None:
        while chunk := await self.reader.read(65_536):
            self.is_idle = chunk.endswith(_READY)
            for link in links:
                if link.server is self:
                    link.writer.write(chunk)
        raise ConnectionError


class _Link:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, server: _Server) -> None:
        self.reader = reader
        self.writer = writer
        self.server = server

    async def read_client(self, links: list[_Link]) -> None:
        while chunk := await self.reader.read(65_536):
            other = next((link for link in links if link is not self and link.server.is_idle), None)
            if other is not None and self.server.is_idle:
                self.server, other.server = other.server, self.server
            self.server.is_idle = False
            self.server.writer.write(chunk)
        raise ConnectionError
