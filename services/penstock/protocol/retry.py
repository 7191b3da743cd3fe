"""How long a failed task waits before its next attempt. Pure arithmetic, no clock."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from penstock.protocol.errors import SettingsError


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential delay with jitter; the delay after attempt n is ``base * factor**(n-1)``, at most ``cap``.

    base_seconds: delay after the first failed attempt.
    factor: growth from one delay to the next, at least 1.
    cap_seconds: no delay is longer than this.
    jitter: share of the delay that is random, 0..1; the result lies in ``[(1-jitter)*delay, delay]``, so that
        the cap holds and, with jitter below ``1 - 1/factor``, later delays are always longer until the cap.
    Raises SettingsError for values outside these ranges.
    """

    base_seconds: float = 5.0
    factor: float = 2.0
    cap_seconds: float = 3600.0
    jitter: float = 0.2

    def __post_init__(self) -> None:
        if not 0 < self.base_seconds < float("inf"):
            raise SettingsError(f"backoff base must be above 0 seconds, not {self.base_seconds}")
        if not 1 <= self.factor < float("inf"):
            raise SettingsError(f"backoff factor must be at least 1, not {self.factor}")
        if not self.base_seconds <= self.cap_seconds < float("inf"):
            raise SettingsError(
                f"backoff cap must be at least the base of {self.base_seconds} seconds, not {self.cap_seconds}"
            )
        if not 0 <= self.jitter <= 1:
            raise SettingsError(f"backoff jitter must be between 0 and 1, not {self.jitter}")

    def delay_seconds(self, attempt: int, *, rand: Callable[[], float] = random.random) -> float:
        """Return the seconds to wait after the failed attempt number ``attempt`` (the first is 1)."""
        if attempt < 1:
            raise ValueError(f"attempts are counted from 1, not {attempt}")
        try:
            delay = min(self.cap_seconds, self.base_seconds * self.factor ** (attempt - 1))
        except OverflowError:  # 2.0 ** 1024; the cap is what it would have been
            delay = self.cap_seconds
        return delay * (1 - self.jitter * rand())
