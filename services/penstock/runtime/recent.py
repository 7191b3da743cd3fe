"""Answers that are expensive to make, each kept for a second for all who ask for it."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Any

KEPT_SECONDS = 1.0
_KEPT = 1000  # of one kind


class Recent:
    """Answers by kind and key. Of one kind, one at a time is made."""

    def __init__(self) -> None:
        self._making: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._kept: defaultdict[str, dict[str, tuple[float, Any]]] = defaultdict(dict)

    async def get(self, kind: str, key: str, make: Callable[[], Awaitable[Any]]) -> Any:
        """An answer that is at most a second old."""
        async with self._making[kind]:
            kept = self._kept[kind]
            at, answer = kept.get(key, (float("-inf"), None))
            if monotonic() - at >= KEPT_SECONDS:
                answer = await make()
                kept.pop(key, None)
                kept[key] = monotonic(), answer
                if len(kept) > _KEPT:
                    del kept[next(iter(kept))]
            return answer
