"""The delay of a failed task before its next attempt."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from penstock.protocol.errors import SettingsError


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential delay with jitter; after attempt n it is ``base * factor**(n-1)``, at most ``cap``.

    jitter: random share of the delay, 0..1; the result lies in ``[(1-jitter)*delay, delay]``, so with jitter below
    ``1 - 1/factor`` each delay is longer than the one before, up to the cap. Raises SettingsError.
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
            least = f"the base of {self.base_seconds} seconds"
            raise SettingsError(f"backoff cap must be at least {least}, not {self.cap_seconds}")
        if not 0 <= self.jitter <= 1:
            raise SettingsError(f"backoff jitter must be between 0 and 1, not {self.jitter}")

    def delay_seconds(self, attempt: int, *, rand: Callable[[], float] = random.random) -> float:
        """attempt: the number of the failed one, from 1. Raises ValueError."""
        if attempt < 1:
            raise ValueError(f"attempts are counted from 1, not {attempt}")
        try:
            delay = min(self.cap_seconds, self.base_seconds * self.factor ** (attempt - 1))
        except OverflowError:  # such as 2.0 ** 1024, which is above every cap
            delay = self.cap_seconds
        return delay * (1 - self.jitter * rand())
