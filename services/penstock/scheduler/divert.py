"""Divert due tasks to their route or limit gate while the window of the outbound queue is full.

A claim diverts such tasks as it meets them. Without claims, tasks of a route would wait behind unrelated ones; so the
due tasks are scanned from the front, batch by batch, until there is room again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from time import monotonic

from penstock.db.pool import Store
from penstock.protocol.errors import Refused
from penstock.protocol.task import BEGINNING, Position, Stretch
from penstock.tasks import claim

_LEVELS = 1000  # priorities looked through
_PAUSE_SECONDS = 0.05  # between two looks
_REST_SECONDS = 1.0  # between two rounds


class Diverter:
    """Scans the due tasks, at_once of them in one look.

    give_up: called with what Postgres refused, how many tasks, and their stretches; fails those to blame and returns
    how many.
    """

    def __init__(
        self, *, store: Store, at_once: int, give_up: Callable[[Refused, int, Sequence[Stretch]], Awaitable[int]]
    ) -> None:
        self._store = store
        self._at_once = at_once
        self._give_up = give_up
        self._looking = asyncio.Lock()
        self._levels: list[int] = []
        self._after: Position = BEGINNING
        self._next_at = float("-inf")

    async def run_once(self) -> int:
        """Continue where the last look ended, unless it is too soon; returns how many tasks were diverted."""
        if self._looking.locked() or monotonic() < self._next_at:
            return 0
        async with self._looking:
            try:
                return await self._look()
            except Refused as exc:
                level = self._levels[0]
                return await self._give_up(exc, self._at_once, [Stretch(level, level, self._after)])

    async def _look(self) -> int:
        async with self._store.session() as session:
            if not self._levels:
                self._levels = await claim.read_priorities(session, _LEVELS)
                self._after = BEGINNING
            pause = _REST_SECONDS
            diverted = 0
            if self._levels:
                looked, diverted, last = await claim.put_aside(session, self._at_once, self._levels[0], self._after)
                if looked < self._at_once or last is None:
                    del self._levels[0]
                    self._after = BEGINNING
                else:
                    self._after = last
                if self._levels:
                    pause = _PAUSE_SECONDS
            self._next_at = monotonic() + pause
        return diverted
