"""Live pages: server-sent events with the part of a page that has changed."""

from collections.abc import AsyncIterator, Awaitable, Callable
from time import perf_counter

import msgspec

from penstock.api.streams import PING, PING_SECONDS, Streams
from penstock.runtime.budget import in_hand
from penstock.runtime.periodic import is_set_within

EVERY_SECONDS = 2.0
SHARE_OF_TIME = 0.1  # a page that is expensive to render is rendered less often


class Expired(Exception):
    """The request that began a stream no longer identifies its user; a new one may."""


async def follow(streams: Streams, name: str, render: Callable[[], Awaitable[str | None]]) -> AsyncIterator[bytes]:
    """Events with each new result of ``render``; ends when it returns None, or when streams stop.

    Also when it raises Expired: the browser then asks again.
    """
    with streams.counted(name):
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
