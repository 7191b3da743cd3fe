"""HTTP servers on loopback: one that keeps what it is sent, and ones that mean harm, written by hand."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass
class Request:
    """As a server has it. headers: names in lower case."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Server:
    """port: of loopback. requests: those it got, the newest last. connections: how many were made to it."""

    port: int = 0
    requests: list[Request] = field(default_factory=list)
    connections: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


# Given a request, the bytes to write; a callable writes for itself and may take its time.
Answer = bytes | Callable[[asyncio.StreamWriter], Awaitable[None]]


def answer(status: int = 200, body: bytes = b"", **headers: str) -> bytes:
    """The bytes of an answer; underscores in headers' names stand for dashes."""
    lines = [f"HTTP/1.1 {status} Whatever", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@asynccontextmanager
async def serving(
    answers: Sequence[Answer] | Callable[[Request], Answer], *, context: ssl.SSLContext | None = None
) -> AsyncIterator[Server]:
    """A server that answers in turn, the last of the answers to all further requests, or as a function says."""
    server = Server()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server.connections += 1
        try:
            while (request := await _read(reader)) is not None:
                server.requests.append(request)
                number = len(server.requests)
                given = answers(request) if callable(answers) else answers[min(number, len(answers)) - 1]
                if isinstance(given, bytes):
                    writer.write(given)
                    await writer.drain()
                else:
                    await given(writer)
                    return
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    server.port = listening.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listening.close()


async def _read(reader: asyncio.StreamReader) -> Request | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.decode("latin-1").split("\r\n")
    method, target, _ = first.split(" ", 2)
    pairs = (line.split(":", 1) for line in lines if line)
    headers = {name.lower(): value.strip() for name, value in pairs}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Request(method, target, headers, body)
