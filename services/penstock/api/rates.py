"""How many requests one caller may send, and how many unknown secrets one address may show; in this process."""

import asyncio
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import TypeVar

from penstock.protocol.errors import RateLimited

_BUCKETS_KEPT = 10_000
_LOOKUPS_AT_ONCE = 2  # of secrets that were not found before; all others keep their connections
_MISSES_PER_SECOND = 10.0
_MISSES_AT_ONCE = 100.0
_REMEMBERED = 10_000
Found = TypeVar("Found")


class Rates:
    """Buckets by caller, each of them one number: the instant at which it will be full.

    More requests than a bucket holds, in a large batch, are taken from a full one, which is then in debt; so no batch
    is impossible, and the rate holds in the long run.
    """

    def __init__(self, per_second: float, burst: float, *, clock: Callable[[], float] = monotonic) -> None:
        self._per_second = per_second
        self._burst = max(1.0, burst)
        self._clock = clock
        self._full_at: dict[str, float] = {}

    def charge(self, caller: str, requests: int) -> None:
        """Take tokens for so many requests, all or none. Raises RateLimited."""
        start = self.check(caller, requests)
        if len(self._full_at) >= _BUCKETS_KEPT and caller not in self._full_at:
            # Full buckets say nothing; where none is full, the one that will be first goes.
            now = self._clock()
            self._full_at = {caller: full_at for caller, full_at in self._full_at.items() if full_at > now}
            if len(self._full_at) >= _BUCKETS_KEPT:
                del self._full_at[min(self._full_at, key=self._full_at.__getitem__)]
        self._full_at[caller] = start + requests / self._per_second

    def check(self, caller: str, requests: int = 1) -> float:
        """Refuse a caller whose bucket has too few tokens; returns when it is full, or now. Raises RateLimited."""
        now = self._clock()
        start = max(now, self._full_at.get(caller, now))
        lacking = min(requests, self._burst) - (self._burst - (start - now) * self._per_second)
        if lacking > 1e-9:
            raise RateLimited(lacking / self._per_second)
        return start


class Lookups:
    """Secrets that were found once are looked up as often as they are shown; others a few at once, and each address
    has a rate of those that are not found."""

    def __init__(self) -> None:
        self._turns = asyncio.Semaphore(_LOOKUPS_AT_ONCE)
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
