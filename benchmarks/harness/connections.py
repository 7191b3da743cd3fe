"""A lean HTTP client for load: kept connections, one request at a time on each, no more of HTTP than the api speaks.

A general client costs more CPU a request than the api that it is to measure, on the same two cores.
"""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType
from typing import Any, cast
from urllib.parse import urlsplit

import msgspec

from penstock.protocol.errors import StackError

_HEAD_END = b"\r\n\r\n"


class Connections:
    """So many connections to the api; ``call`` takes a free one, or waits for it. Use it with ``async with``."""

    def __init__(self, api_url: str, count: int) -> None:
        parts = urlsplit(api_url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._head = (
            f"POST /rpc HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\nContent-Length: "
        ).encode()
        self._count = count
        self._all: list[_Connection] = []
        self._free: deque[_Connection] = deque()
        self._waiting: deque[asyncio.Future[_Connection]] = deque()

    async def __aenter__(self) -> Connections:
        loop = asyncio.get_running_loop()
        for _ in range(self._count):
            _, connection = await loop.create_connection(_Connection, self._host, self._port)
            self._all.append(connection)
        self._free.extend(self._all)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection in self._all:
            connection.close()

    async def post(self, body: bytes) -> bytes:
        """Send a body and return that of the answer. Raises StackError unless it is a 200."""
        if self._free:
            connection = self._free.popleft()
        else:
            waiting: asyncio.Future[_Connection] = asyncio.get_running_loop().create_future()
            self._waiting.append(waiting)
            connection = await waiting
        try:
            return await connection.exchange(self._head + b"%d\r\n\r\n" % len(body) + body)
        finally:
            while self._waiting:
                waiting = self._waiting.popleft()
                if not waiting.done():
                    waiting.set_result(connection)
                    break
            else:
                self._free.append(connection)

    async def call(self, method: str, params: Any) -> Any:
        """Call a method and return its result. Raises StackError for an error."""
        request = {"jsonrpc": "2.0", "method": method, "id": 1, "params": params}
        answer = msgspec.json.decode(await self.post(msgspec.json.encode(request)))
        if "error" in answer:
            raise StackError(f"the api refused {method} of the benchmark: {answer['error']}")
        return answer["result"]

    async def enqueue_batch(self, body: bytes, count: int) -> None:
        """Post a JSON-RPC batch of ``count`` enqueues. Raises StackError unless all were accepted."""
        answers = msgspec.json.decode(await self.post(body))
        refused = [answer for answer in answers if "error" in answer] if isinstance(answers, list) else [answers]
        if refused or len(answers) != count:
            raise StackError(f"the api refused tasks of the benchmark, first {refused[:1]} of {count}")


class _Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[bytes] | None = None
        self._received = bytearray()
        self._body_at = -1
        self._end = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance

    async def exchange(self, request: bytes) -> bytes:
        if self._transport is None:
            raise StackError("the api has closed a connection of the benchmark")
        self._received.clear()
        self._body_at = -1
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._answer

    def data_received(self, data: bytes) -> None:
        self._received += data
        answer = self._answer
        if answer is None or answer.done():
            return
        if self._body_at < 0:
            head_end = self._received.find(_HEAD_END)
            if head_end < 0:
                return
            head = bytes(self._received[:head_end]).lower()
            length = head.partition(b"content-length:")[2].partition(b"\r\n")[0].strip()
            if not head.startswith(b"http/1.1 200") or not length.isdigit():
                answer.set_exception(StackError(f"the api answered the benchmark with {head[:200]!r}"))
                return
            self._body_at = head_end + len(_HEAD_END)
            self._end = self._body_at + int(length)
        if len(self._received) >= self._end:
            answer.set_result(bytes(self._received[self._body_at : self._end]))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(StackError("the api closed a connection in the middle of a benchmark"))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
