"""How a handler decides about its task: Retry and Fail are raised, Wait is returned."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal

from penstock.worker.handlers.parameters import is_number

OnTimeout = Literal["retry", "fail"]


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


@dataclass(frozen=True, slots=True)
class Wait:
    """Made by ``ctx.wait(...)`` and returned by the handler: the task is suspended until ``token`` is answered.

    timeout: seconds, None for PENSTOCK_WAIT_TIMEOUT_SECONDS. on_timeout: "retry", a failed attempt; "fail", the last.
    attempt: the task and the claim that it was made for.
    """

    token: str
    timeout: float | None = None
    on_timeout: OnTimeout = "retry"
    attempt: tuple[int, int] = field(default=(0, 0), repr=False)
