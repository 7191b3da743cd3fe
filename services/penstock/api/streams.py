"""Streams of server-sent events: how many are open, and their end when the api stops taking requests."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from time import perf_counter

import msgspec
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from penstock.protocol.errors import TooManyWaits
from penstock.runtime.budget import in_hand
from penstock.runtime.periodic import is_set_within

STREAMS = 100  # at once
STREAMS_OF_ONE = 20  # of one caller, so that one key leaves streams to the others
PING_SECONDS = 15.0
PING = b": still here\n\n"
EVERY_SECONDS = 2.0  # between two renderings of a page
SHARE_OF_TIME = 0.1  # a page that is expensive to render is rendered less often


class Streams:
    """stopping: set when every stream is to end."""

    def __init__(self) -> None:
        self.stopping = asyncio.Event()
        self._open: list[str] = []  # the name of each one's caller

    def admit(self, name: str) -> ExitStack:
        """Count a stream until what is returned is closed. name: of the key, empty without one. Raises TooManyWaits."""
        if name and self._open.count(name) >= STREAMS_OF_ONE:
            raise TooManyWaits("streams", STREAMS_OF_ONE)
        if len(self._open) >= STREAMS or self.stopping.is_set():
            raise TooManyWaits("streams", STREAMS)
        self._open.append(name)
        counted = ExitStack()
        counted.callback(self._open.remove, name)
        return counted


class EventStream(StreamingResponse):
    """Server-sent events. counted: closed at their end."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], counted: ExitStack) -> None:
        super().__init__(events, headers={"X-Accel-Buffering": "no"})  # nginx would hold events back
        self._counted = counted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._counted:
            if scope["method"] == "HEAD":  # no one reads events, and the connection may stay
                await Response(None, self.status_code, self.headers)(scope, receive, send)
            else:
                await super().__call__(scope, receive, send)


class Expired(Exception):
    """The request that began a stream no longer identifies its user; a new one may."""


async def follow(streams: Streams, render: Callable[[], Awaitable[str | None]]) -> AsyncIterator[bytes]:
    """Events with each new result of ``render``, until it returns None or raises Expired, or streams stop."""
    sent: str | None = None
    quiet_since = perf_counter()
    yield b"retry: 2000\n\n"
    while not streams.stopping.is_set():
        started = perf_counter()
        in_hand().renew()
        try:
            rendered = await render()
        except Expired:
            return
        if rendered is None:
            yield b"event: over\ndata: {}\n\n"
            return
        now = perf_counter()
        if rendered != sent:
            sent, quiet_since = rendered, now
            yield b"data: " + msgspec.json.encode({"html": rendered}) + b"\n\n"
        elif now - quiet_since > PING_SECONDS:
            quiet_since = now
            yield PING
        pause = max(EVERY_SECONDS, (now - started) / SHARE_OF_TIME)
        await is_set_within(streams.stopping, pause)
