"""Whether any action is limited and any route is set, as this scheduler knows it.

Where there are none, nothing is spent on them: the plain claim itself finds nothing once there are, and this looks
again.
"""

from __future__ import annotations

import json
from time import monotonic

from penstock.db.pool import Store

_FRESH_SECONDS = 1.0


class RulesCache:
    """limited: any action is limited or paused. gates: any gate is there. routes: (name, queue) of each."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._read_at = float("-inf")
        self.limited = False
        self.gates = False
        self.routes: list[tuple[str, str]] = []

    @property
    def apply(self) -> bool:
        """Whether claims have to go by them."""
        return self.limited or bool(self.routes)

    async def refresh(self, *, at_once: bool = False) -> bool:
        """Read them when they are not fresh, or at once; returns whether claims go by them now and did not before."""
        if not at_once and monotonic() - self._read_at < _FRESH_SECONDS:
            return False
        applied = self.apply
        async with self._store.session() as session:
            (found,) = await session.fetch("read_rules")
        self._read_at = monotonic()
        self.limited, self.gates = found["limits"], found["gates"]
        self.routes = [(name, queue) for name, queue in json.loads(found["routes"])]
        return self.apply and not applied
