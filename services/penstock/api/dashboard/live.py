"""Pages that keep up: server-sent events with the part of a page that has changed.

Plain Starlette serves: a stream is one generator, and what sse-starlette adds (pings, its own shutdown) we need
otherwise: a stream ends when the api stops taking requests, so that a stop never waits for somebody's open tab.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from time import perf_counter

import msgspec

from penstock.runtime.logs import get_logger

EVERY_SECONDS = 2.0
SHARE_OF_TIME = 0.1  # a page that is dear to make is made less often
STREAMS = 100  # at once; a browser over it shows its page as it was and asks again
STREAMS_OF_ONE = 20  # caller, so that one key leaves streams to the others
_SILENT_SECONDS = 15.0

log = get_logger()


class Streams:
    """The streams that are open."""

    def __init__(self) -> None:
        self._stopping = asyncio.Event()
        self._open: Counter[str] = Counter()

    def stop(self) -> None:
        """End every stream soon."""
        self._stopping.set()

    def full(self, name: str) -> bool:
        """For a caller; empty where callers are not told apart."""
        of_one = bool(name) and self._open[name] >= STREAMS_OF_ONE
        return of_one or self._open.total() >= STREAMS or self._stopping.is_set()

    async def follow(self, name: str, render: Callable[[], Awaitable[str | None]]) -> AsyncIterator[bytes]:
        """Events of what ``render`` gives, whenever that is new; ends when it gives None, or on ``stop``."""
        self._open[name] += 1
        try:
            shown: str | None = None
            quiet_since = perf_counter()
            yield b"retry: 2000\n\n"
            while not self._stopping.is_set():
                started = perf_counter()
                seen = await render()
                if seen is None:
                    yield b"event: over\ndata: {}\n\n"
                    return
                now = perf_counter()
                if seen != shown:
                    shown, quiet_since = seen, now
                    yield b"data: " + msgspec.json.encode({"html": seen}) + b"\n\n"
                elif now - quiet_since > _SILENT_SECONDS:
                    quiet_since = now
                    yield b": still here\n\n"
                pause = max(EVERY_SECONDS, (now - started) / SHARE_OF_TIME)
                try:
                    async with asyncio.timeout(pause):
                        await self._stopping.wait()
                except TimeoutError:
                    pass
        finally:
            self._open[name] -= 1
            self._open += Counter()  # without those that have none
