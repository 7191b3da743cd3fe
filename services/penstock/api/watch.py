"""A watch for all requests that wait: it looks at each wake-up, and at least once a second (decision 016)."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from time import monotonic

from penstock.db.notify import CHANNEL, Listener
from penstock.db.pool import Store
from penstock.protocol.errors import Unavailable
from penstock.runtime.logs import log
from penstock.runtime.periodic import is_set_within

_LOOK_SECONDS = 1.0
_FOLLOWING_SECONDS = 0.1
_SHORTEST_REST_SECONDS = 0.01
_LONGEST_REST_SECONDS = 1.0
_REST_SHARE = 9.0
_IDLE_SECONDS = 60.0  # the connection that hears wake-ups is kept so long after the last request that waited


class Watch:
    """look: at all that is waited for; it raises Unavailable. is_needed: whether any request waits.

    channels: of wake-ups. follows: the looks are at a replica, which may show what has woken them a moment later.
    """

    def __init__(
        self, store: Store, look: Callable[[], Awaitable[object]], is_needed: Callable[[], bool],
        channels: Sequence[str] = (CHANNEL,), *, follows: bool = False,
    ) -> None:  # fmt: skip
        self._listener = Listener(store, *channels, hold="hold_results_lock")  # so that resulters wake it
        self._look = look
        self._is_needed = is_needed
        self._follows = follows
        self._begun = asyncio.Event()

    def begin(self) -> None:
        """A request waits from now on."""
        self._begun.set()

    async def run(self) -> None:
        """A side task. It is connected while a request waits."""
        while True:
            await self._begun.wait()
            listening = asyncio.create_task(self._listener.run(), name="listen")
            try:
                await self._watch()
            finally:
                listening.cancel()
                await asyncio.wait((listening,))

    async def _watch(self) -> None:
        used_at = monotonic()
        woken = False
        while monotonic() - used_at < _IDLE_SECONDS:
            seconds = _FOLLOWING_SECONDS if woken and self._follows else _LOOK_SECONDS
            woken = await is_set_within(self._listener.event, seconds)
            self._listener.event.clear()
            if not self._is_needed():
                continue
            started = monotonic()
            try:
                await self._look()
            except Unavailable as exc:
                log.debug("not_looked", reason=str(exc))  # the next look may find it back
            used_at = monotonic()
            rest = _REST_SHARE * (used_at - started)
            await asyncio.sleep(min(_LONGEST_REST_SECONDS, max(_SHORTEST_REST_SECONDS, rest)))
        if not self._is_needed():
            self._begun.clear()
