"""When a long poll for a result is sent again, and when it is given up; without I/O."""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic
from typing import Any

from penstock.protocol.errors import PenstockError, RateLimited, ResultTimeout, TooManyWaits, Unavailable
from penstock.runtime.backoff import Pauses

POLL_SECONDS = 20.0  # of one long poll; load balancers close what is silent for 60
_FIRST_PAUSE_SECONDS = 0.2
_LONGEST_PAUSE_SECONDS = 2.0


def settled(outcome: Mapping[str, Any]) -> bool:
    """Whether an answer of ``result`` is final; one that is not says how to ask again."""
    return "again" not in outcome


class LongPoll:
    """Deadline and retry pauses of a long poll.

    timeout: seconds; None: unlimited. outage_seconds: after a longer outage of the api its error is raised.
    """

    def __init__(self, timeout: float | None, outage_seconds: float) -> None:
        self._timeout = timeout
        self._outage_seconds = outage_seconds
        self._deadline = None if timeout is None else monotonic() + timeout
        self._answered_at: float | None = None
        self._pauses = Pauses(_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS)

    def next_wait(self) -> float:
        """Return the timeout of the next poll in seconds: the time until the deadline, up to POLL_SECONDS."""
        if self._deadline is None:
            return POLL_SECONDS
        return round(max(0.0, min(POLL_SECONDS, self._deadline - monotonic())), 3)

    def answered(self) -> None:
        """Record an answer of the api."""
        self._answered_at = monotonic()
        self._pauses.reset()

    def pause_after(self, exc: PenstockError) -> float:
        """Return the seconds until the next try; raises the error if there is none.

        An api that has never answered is not tried again, as its URL may be wrong.
        """
        if isinstance(exc, RateLimited | TooManyWaits):
            pause = float(exc.data["retry_after"])
        elif isinstance(exc, Unavailable) and self._answered_at is not None:
            if monotonic() - self._answered_at > self._outage_seconds + POLL_SECONDS:
                raise exc
            pause = self._pauses.next_seconds()
        else:
            raise exc
        if self._deadline is not None and monotonic() + pause > self._deadline:
            raise exc
        return pause

    def check(self, task_id: int, state: str) -> None:
        """Raises ResultTimeout after the deadline."""
        if self._timeout is not None and self._deadline is not None and monotonic() >= self._deadline:
            raise ResultTimeout(task_id, state, self._timeout)
