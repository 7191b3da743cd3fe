"""Leases of messages that end by time, for brokers whose own end with the connection only."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Generic, TypeVar

_LOOK_SECONDS = 0.2

T = TypeVar("T")


class MessageLeases(Generic[T]):
    """Leased messages by receipt.

    ended: called with the messages whose lease was neither removed nor extended in time.
    """

    def __init__(self, ended: Callable[[list[T]], Awaitable[None]]) -> None:
        self._ended = ended
        self._leases: dict[str, tuple[T, float]] = {}
        self._watching: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._leases)

    def add(self, receipt: str, message: T, seconds: float) -> None:
        """Lease a message for so many seconds."""
        self._leases[receipt] = (message, monotonic() + seconds)
        if self._watching is None:
            self._watching = asyncio.get_running_loop().create_task(self._watch(), name="end leases")

    def extend(self, receipt: str, seconds: float) -> bool:
        """Lease for so many seconds from now; False once the lease has ended."""
        found = self._leases.get(receipt)
        if found is None:
            return False
        self._leases[receipt] = (found[0], monotonic() + seconds)
        return True

    def remove(self, receipt: str) -> T | None:
        """End a lease, and return its message; None once it has ended."""
        found = self._leases.pop(receipt, None)
        return None if found is None else found[0]

    def drop(self, of: Callable[[T], bool]) -> int:
        """End the leases of matching messages without a call of ``ended``; returns their number."""
        lost = [receipt for receipt, (message, _) in self._leases.items() if of(message)]
        for receipt in lost:
            del self._leases[receipt]
        return len(lost)

    async def _watch(self) -> None:
        try:
            while self._leases:
                await asyncio.sleep(_LOOK_SECONDS)
                now = monotonic()
                over = [receipt for receipt, (_, until) in self._leases.items() if until <= now]
                if over:
                    await self._ended([self._leases.pop(receipt)[0] for receipt in over])
        finally:
            self._watching = None

    def close(self) -> None:
        """Stop watching."""
        self._leases.clear()
        if self._watching is not None:
            self._watching.cancel()
