"""Live pages: server-sent events with the part of a page that has changed.

sse-starlette would add its own pings and shutdown; these streams end when the api stops taking requests.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from time import perf_counter

import msgspec

from penstock.runtime.periodic import is_set_within

EVERY_SECONDS = 2.0
SHARE_OF_TIME = 0.1  # a page that is expensive to render is rendered less often
STREAMS = 100  # at once; further browsers show their page as it was loaded, and retry
STREAMS_OF_ONE = 20  # of one caller, so that one key leaves streams to the others
_PING_SECONDS = 15.0


class Streams:
    def __init__(self) -> None:
        self._stopping = asyncio.Event()
        self._open: Counter[str] = Counter()

    def stop(self) -> None:
        """End every stream within a rendering."""
        self._stopping.set()

    def full(self, name: str) -> bool:
        """name: of the caller's key; empty without keys, when only the total is limited."""
        of_one = bool(name) and self._open[name] >= STREAMS_OF_ONE
        return of_one or self._open.total() >= STREAMS or self._stopping.is_set()

    async def follow(self, name: str, render: Callable[[], Awaitable[str | None]]) -> AsyncIterator[bytes]:
        """Events with each new result of ``render``; ends when it returns None, or on ``stop``."""
        self._open[name] += 1
        try:
            sent: str | None = None
            quiet_since = perf_counter()
            yield b"retry: 2000\n\n"
            while not self._stopping.is_set():
                started = perf_counter()
                rendered = await render()
                if rendered is None:
                    yield b"event: over\ndata: {}\n\n"
                    return
                now = perf_counter()
                if rendered != sent:
                    sent, quiet_since = rendered, now
                    yield b"data: " + msgspec.json.encode({"html": rendered}) + b"\n\n"
                elif now - quiet_since > _PING_SECONDS:
                    quiet_since = now
                    yield b": still here\n\n"
                pause = max(EVERY_SECONDS, (now - started) / SHARE_OF_TIME)
                await is_set_within(self._stopping, pause)
        finally:
            self._open[name] -= 1
            self._open += Counter()  # drops names without streams
