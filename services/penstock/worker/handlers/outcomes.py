"""How a handler, or a step of it, fails on purpose: Retry, Fail."""

from __future__ import annotations

import math
from datetime import timedelta


class Retry(Exception):
    """Raised by a handler: this attempt failed, and counts like any other; try again after ``delay``.

    delay: seconds or a timedelta, None for the usual backoff. Raises ValueError for a delay that is neither.
    """

    def __init__(self, delay: float | timedelta | None = None, reason: str = "") -> None:
        if isinstance(delay, timedelta):
            delay = delay.total_seconds()
        if delay is not None and not (is_number(delay) and 0 <= delay < math.inf):
            raise ValueError(f"Retry(delay=...) takes seconds, 0 or more, not {delay!r}")
        super().__init__(reason or "the handler asked to be tried again")
        self.delay = delay


class Fail(Exception):
    """Raised by a handler: no attempt will succeed, so the task becomes CRITICAL_ERROR now."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason or "the handler gave up")


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
