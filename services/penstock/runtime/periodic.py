"""A loop beside the passes of a process, of a duty that has a rhythm of its own."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

from penstock.protocol.errors import Unavailable
from penstock.runtime.logs import get_logger

_FIRST_PAUSE_SECONDS = 0.2
_LONGEST_PAUSE_SECONDS = 10.0

log = get_logger()


async def repeat(what: str, work: Callable[[], Awaitable[float]]) -> None:
    """Do it again and again, after as many seconds as it says; longer and longer while it fails."""
    failures = 0
    while True:
        try:
            pause = await work()
        except Exception as exc:
            # A mistake of ours must not become a crash loop of the process; it stays loud.
            if failures % 10 == 0:
                if isinstance(exc, Unavailable):
                    log.warning("backing_off", duty=what, reason=str(exc), failures=failures + 1)
                else:
                    log.exception("duty_failed", duty=what, error=type(exc).__name__, failures=failures + 1)
            longest = min(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2 ** min(failures, 16))
            failures += 1
            pause = random.uniform(longest / 2, longest)
        else:
            failures = 0
        await asyncio.sleep(pause)
