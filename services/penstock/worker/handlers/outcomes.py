"""How a handler, or a step of it, ends an attempt on purpose: Retry, Fail, Snooze."""

import sys
from datetime import timedelta

from penstock.protocol.errors import RateLimited


class Retry(Exception):
    """Raised by a handler: this attempt failed, and counts like any other; try again after ``delay``.

    delay: seconds or a timedelta, None for the usual backoff. Raises ValueError for a delay that is neither.
    """

    def __init__(self, delay: float | timedelta | None = None, reason: str = "") -> None:
        super().__init__(reason or "the handler asked to be tried again")
        self.delay = None if delay is None else seconds_of(delay, "Retry(delay=...) takes seconds, 0 or more")


class Snooze(Exception):
    """Raised by a handler: run the task again later; this attempt does not count.

    A task is put off so at most PENSTOCK_SNOOZE_LIMIT times, then it has failed. delay: seconds or a timedelta.
    Raises ValueError for a delay that is neither.
    """

    def __init__(self, delay: float | timedelta, reason: str = "") -> None:
        super().__init__(reason or "the handler asked to run later")
        self.delay = seconds_of(delay, "Snooze(delay=...) takes seconds, 0 or more")


class Fail(Exception):
    """Raised by a handler: no attempt will succeed, so the task becomes CRITICAL_ERROR now."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason or "the handler gave up")


ASKED = (Retry, Snooze, RateLimited)
"""By which a handler asks for another run."""


def seconds_of(given: float | timedelta, rule: str, *, longest: float = sys.float_info.max) -> float:
    """A time from 0 to ``longest`` in seconds. Raises ValueError, which says the rule."""
    seconds = given.total_seconds() if isinstance(given, timedelta) else given
    if not (is_number(seconds) and 0 <= seconds <= longest):
        raise ValueError(f"{rule}, not {given!r}")
    return seconds


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
