"""Streams of server-sent events: how many are open, and their end when the api stops.

sse-starlette would add its own pings and shutdown; these streams end when the api stops taking requests.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

STREAMS = 100  # at once
STREAMS_OF_ONE = 20  # of one caller, so that one key leaves streams to the others
PING_SECONDS = 15.0
PING = b": still here\n\n"


class Streams:
    """stopping: set when every stream is to end."""

    def __init__(self) -> None:
        self.stopping = asyncio.Event()
        self._open: Counter[str] = Counter()

    def stop(self) -> None:
        self.stopping.set()

    def full(self, name: str) -> bool:
        """name: of the caller's key; empty without keys, when only the total is limited."""
        of_one = bool(name) and self._open[name] >= STREAMS_OF_ONE
        return of_one or self._open.total() >= STREAMS or self.stopping.is_set()

    @contextmanager
    def counted(self, name: str) -> Iterator[None]:
        self._open[name] += 1
        try:
            yield
        finally:
            self._open[name] -= 1
            self._open += Counter()  # drops names without streams
