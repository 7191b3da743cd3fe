"""Growing pauses between tries of what failed."""

from __future__ import annotations

import random

_REPORTED_EVERY = 10


class Pauses:
    """Random pauses, each at least half of a bound that doubles from ``first_seconds`` to ``longest_seconds``.

    failures: how many pauses were given since the start, or since the last success.
    """

    def __init__(self, first_seconds: float = 0.2, longest_seconds: float = 10.0) -> None:
        self._first_seconds = first_seconds
        self._longest_seconds = longest_seconds
        self.failures = 0

    @property
    def is_reported(self) -> bool:
        """Whether to log the failure before the next pause: the first one, then every tenth."""
        return self.failures % _REPORTED_EVERY == 0

    def next_seconds(self) -> float:
        """Count a failure; returns the pause until the next try."""
        bound = bound_seconds(self.failures, self._first_seconds, self._longest_seconds)
        self.failures += 1
        return random.uniform(bound / 2, bound)

    def reset(self) -> None:
        self.failures = 0


def bound_seconds(failures: int, first_seconds: float, longest_seconds: float) -> float:
    """Longest pause after so many earlier failures: doubles from first_seconds to longest_seconds."""
    return min(longest_seconds, first_seconds * 2.0 ** min(failures, 16))
