"""Exceptions by which a handler decides about its task: Retry and Fail."""

from __future__ import annotations

import math
from datetime import timedelta

from penstock.worker.handlers.parameters import is_number


class Retry(Exception):
    """Raised by a handler: this attempt failed, try again after ``delay`` (seconds or a timedelta; None: the usual
    backoff).

    The attempt counts like any other. Raises ValueError for a delay that is no number of seconds.
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
