"""Waiting for a result over one long poll after the other: how long, and what is worth another try. Pure."""

from __future__ import annotations

import random
from collections.abc import Mapping
from time import monotonic
from typing import Any

from penstock.protocol.errors import PenstockError, RateLimited, ResultTimeout, TooManyWaits, Unavailable

POLL_SECONDS = 20.0  # of one long poll; load balancers close what is silent for 60
_FIRST_PAUSE_SECONDS = 0.2
_LONGEST_PAUSE_SECONDS = 2.0


def settled(outcome: Mapping[str, Any]) -> bool:
    """Whether an answer of ``result`` is the last word: else it says how to ask again."""
    return "again" not in outcome


class Patience:
    """The time of one who waits. timeout: seconds, None for ever. away_seconds: an api away for longer is given up."""

    def __init__(self, timeout: float | None, away_seconds: float) -> None:
        self._timeout = timeout
        self._away_seconds = away_seconds
        self._deadline = None if timeout is None else monotonic() + timeout
        self._heard_at: float | None = None
        self._failures = 0

    def left(self) -> float:
        """Seconds until the deadline, 0 behind it, POLL_SECONDS at the most."""
        return POLL_SECONDS if self._deadline is None else max(0.0, min(POLL_SECONDS, self._deadline - monotonic()))

    def next_wait(self) -> float:
        """How long the next poll may wait."""
        return round(self.left(), 3)

    def heard(self) -> None:
        """The api has answered."""
        self._heard_at = monotonic()
        self._failures = 0

    def pause_after(self, exc: PenstockError) -> float:
        """Seconds until the same is tried again; raises the error where that is of no use.

        An api that was never heard is not waited for: its URL may be wrong. One that was may be on its way back.
        """
        self._failures += 1
        if isinstance(exc, RateLimited | TooManyWaits):
            pause = float(exc.data["retry_after"])
        elif isinstance(exc, Unavailable) and self._heard_at is not None:
            if monotonic() - self._heard_at > self._away_seconds + POLL_SECONDS:
                raise exc
            longest = min(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2 ** min(self._failures - 1, 8))
            pause = random.uniform(longest / 2, longest)
        else:
            raise exc
        if self._deadline is not None and monotonic() + pause > self._deadline:
            raise exc
        return pause

    def check(self, task_id: int, state: str) -> None:
        """Raises ResultTimeout when the time is up."""
        if self._timeout is not None and self._deadline is not None and monotonic() >= self._deadline:
            raise ResultTimeout(task_id, state, self._timeout)
