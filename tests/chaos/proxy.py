"""An SQS endpoint's evil twin: an HTTP proxy before it that delays, errs, duplicates, loses and refuses on demand.

`python -m tests.chaos.proxy UPSTREAM HOST PORT`. What it does is set by `PUT /_chaos` with the members of
:class:`Weather` as JSON, at any time; `GET /_chaos` answers how often it has done each.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import Counter, defaultdict, deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

CONTROL = "/_chaos"
_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "content-encoding", "date", "server"}
_LONGEST_DUPLICATE_DELAY_SECONDS = 2.0


@dataclass(frozen=True)
class Weather:
    """What goes wrong; chances are 0 to 1 a call, but for ``partial`` (an entry) and ``duplicate`` (see below).

    refuse: every connection is cut. error: 503 or throttling, nothing done. lose_reply: done, then the connection is
    cut. duplicate: a send is done twice (two messages), or a received message is delivered again up to 2 s later.
    partial: an entry of a batch is not done and reported failed. delay: the call first waits up to delay_seconds.
    """

    refuse: bool = False
    error: float = 0
    lose_reply: float = 0
    duplicate: float = 0
    partial: float = 0
    delay: float = 0
    delay_seconds: float = 0.5


class Proxy:
    def __init__(self, upstream: str) -> None:
        self._upstream = upstream.rstrip("/")
        self._weather = Weather()
        self._done: Counter[str] = Counter()
        self._again: dict[str, deque[tuple[float, dict[str, Any]]]] = defaultdict(deque)
        self._client: aiohttp.ClientSession | None = None

    async def serve(self, host: str, port: int) -> None:
        """Serve until cancelled."""
        app = web.Application(client_max_size=16 * 1024 * 1024)
        app.router.add_get(CONTROL, self._tell)
        app.router.add_put(CONTROL, self._set)
        app.router.add_route("*", "/{path:.*}", self._pass)
        connector = aiohttp.TCPConnector(limit=0)
        # A caller that is killed in a long poll must end the poll behind, or messages would be lost.
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as self._client:
            await runner.setup()
            try:
                await web.TCPSite(runner, host, port).start()
                await asyncio.Event().wait()
            finally:
                await runner.cleanup()

    async def _tell(self, request: web.Request) -> web.Response:
        return web.json_response(dict(self._done))

    async def _set(self, request: web.Request) -> web.Response:
        self._weather = msgspec.json.decode(await request.read(), type=Weather)
        return web.json_response(dict(self._done))

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        operation = request.headers.get("X-Amz-Target", "").rpartition(".")[2]
        weather = self._weather
        if weather.refuse:
            return self._cut(request, "refused")
        if self._strikes("delayed", weather.delay):
            await asyncio.sleep(random.uniform(0, weather.delay_seconds))
        if self._strikes("erred", weather.error):
            return _error()
        asked = json.loads(body) if body and operation else {}
        failed = self._fail_entries(operation, asked)
        status, headers, answer = 200, {"Content-Type": "application/x-amz-json-1.0"}, b"{}"
        if not failed or asked["Entries"]:
            sent = json.dumps(asked).encode() if failed else body
            status, headers, answer = await self._forward(request, sent)
            if operation.startswith("SendMessage") and self._strikes("sent twice", weather.duplicate):
                await self._forward(request, sent)
        if self._weather.refuse or self._strikes("reply lost", weather.lose_reply):
            return self._cut(request, "refused" if self._weather.refuse else None)
        if status == 200 and operation == "ReceiveMessage":
            answer = self._duplicated(asked, answer)
        if failed:
            told = json.loads(answer)
            told["Failed"] = [*told.get("Failed", ()), *failed]
            answer = json.dumps(told).encode()
        return web.Response(status=status, headers=headers, body=answer)

    async def _forward(self, request: web.Request, body: bytes) -> tuple[int, dict[str, str], bytes]:
        assert self._client is not None
        sent = {name: value for name, value in request.headers.items() if name.lower() != "content-length"}
        url = self._upstream + request.raw_path
        async with self._client.request(request.method, url, data=body, headers=sent) as reply:
            answer = await reply.read()
            headers = {name: value for name, value in reply.headers.items() if name.lower() not in _HOP_BY_HOP}
            return reply.status, headers, answer

    def _fail_entries(self, operation: str, asked: dict[str, Any]) -> list[dict[str, Any]]:
        """Take entries out of a batch call; returns the answers for them."""
        if not operation.endswith("Batch") or not self._weather.partial:
            return []
        failing = [entry for entry in asked["Entries"] if self._strikes("entry failed", self._weather.partial)]
        asked["Entries"] = [entry for entry in asked["Entries"] if entry not in failing]
        return [
            {"Id": entry["Id"], "SenderFault": False, "Code": "InternalError", "Message": "chaos"} for entry in failing
        ]

    def _duplicated(self, asked: dict[str, Any], answer: bytes) -> bytes:
        """The answer to a receive with some of its messages noted for a second delivery, and with those now due."""
        noted = self._again[asked.get("QueueUrl", "")]
        told = json.loads(answer)
        messages = told.get("Messages", [])
        now = time.monotonic()
        due: list[dict[str, Any]] = []
        while noted and noted[0][0] <= now and len(messages) + len(due) < asked.get("MaxNumberOfMessages", 1):
            due.append(noted.popleft()[1])
        for message in messages:
            if self._strikes("delivered twice", self._weather.duplicate):
                noted.append((now + random.uniform(0, _LONGEST_DUPLICATE_DELAY_SECONDS), message))
        return json.dumps({**told, "Messages": messages + due}).encode() if due else answer

    def _strikes(self, what: str, chance: float) -> bool:
        if random.random() >= chance:
            return False
        self._done[what] += 1
        return True

    def _cut(self, request: web.Request, what: str | None) -> web.Response:
        if what is not None:
            self._done[what] += 1
        if request.transport is not None:
            request.transport.abort()
        return web.Response()


def _error() -> web.Response:
    kind, status = random.choice([("ServiceUnavailable", 503), ("InternalError", 500), ("RequestThrottled", 400)])
    body = {"__type": f"com.amazonaws.sqs#{kind}", "message": "chaos"}
    return web.json_response(body, status=status, content_type="application/x-amz-json-1.0")


def command(upstream: str, host: str, port: int) -> list[str]:
    """How to run it as a process."""
    return [sys.executable, "-m", "tests.chaos.proxy", upstream, host, str(port)]


ROOT = Path(__file__).resolve().parents[2]

if __name__ == "__main__":
    asyncio.run(Proxy(sys.argv[1]).serve(sys.argv[2], int(sys.argv[3])))
