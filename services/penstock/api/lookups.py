"""Look-ups in Postgres of secrets that anyone may make up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from penstock.api.rates import Rates

_AT_ONCE = 2  # of secrets that were not found before; all others keep their connections
_MISSES_PER_SECOND = 10.0
_MISSES_AT_ONCE = 100.0
_REMEMBERED = 10_000
Found = TypeVar("Found")


class Lookups:
    """Secrets that were found once are looked up as often as they are shown; others a few at once, and each address
    has a rate of those that are not found."""

    def __init__(self) -> None:
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self._misses = Rates(_MISSES_PER_SECOND, _MISSES_AT_ONCE)
        self._known: dict[bytes, None] = {}

    async def find(self, digest: bytes, address: str, look: Callable[[], Awaitable[Found | None]]) -> Found | None:
        """digest: of the secret. Raises RateLimited, and what ``look`` raises."""
        if digest in self._known:
            return await look()
        self._misses.check(address)
        async with self._turns:
            found = await look()
        if found is None:
            self._misses.charge(address, 1)
        else:
            if len(self._known) >= _REMEMBERED:
                del self._known[next(iter(self._known))]
            self._known[digest] = None
        return found
