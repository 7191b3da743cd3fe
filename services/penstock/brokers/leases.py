"""Holds that end by time, for brokers that end them with the connection alone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Generic, TypeVar

_LOOK_SECONDS = 0.2

T = TypeVar("T")


class Holds(Generic[T]):
    """What is held by receipt, and until when.

    ended: called with what was neither let go nor extended in time.
    """

    def __init__(self, ended: Callable[[list[T]], Awaitable[None]]) -> None:
        self._ended = ended
        self._held: dict[str, tuple[T, float]] = {}
        self._watching: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, receipt: str, what: T, seconds: float) -> None:
        """From now on it is held, for so many seconds."""
        self._held[receipt] = (what, monotonic() + seconds)
        if self._watching is None:
            self._watching = asyncio.get_running_loop().create_task(self._watch(), name="end holds")

    def extend(self, receipt: str, seconds: float) -> bool:
        """Hold for so many seconds from now; False for what is not held any more."""
        found = self._held.get(receipt)
        if found is None:
            return False
        self._held[receipt] = (found[0], monotonic() + seconds)
        return True

    def let_go(self, receipt: str) -> T | None:
        """It is held no more; None for what was not."""
        found = self._held.pop(receipt, None)
        return None if found is None else found[0]

    def drop(self, of: Callable[[T], bool]) -> int:
        """Those of which it is true are held no more, and nobody is told; returns how many they are."""
        lost = [receipt for receipt, (what, _) in self._held.items() if of(what)]
        for receipt in lost:
            del self._held[receipt]
        return len(lost)

    async def _watch(self) -> None:
        try:
            while self._held:
                await asyncio.sleep(_LOOK_SECONDS)
                now = monotonic()
                over = [receipt for receipt, (_, until) in self._held.items() if until <= now]
                if over:
                    await self._ended([self._held.pop(receipt)[0] for receipt in over])
        finally:
            self._watching = None

    def close(self) -> None:
        """Stop watching."""
        self._held.clear()
        if self._watching is not None:
            self._watching.cancel()
