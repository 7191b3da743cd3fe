"""Limits on tasks in flight and on starts per second, of an action or a limit key; without I/O."""

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

BUSY_SECONDS = 0.05  # until a limit of tasks in flight is looked at again; settling wakes no scheduler


@dataclass(frozen=True, slots=True)
class Allowance:
    """Tasks that may start now. retry_seconds: until the next check if none may. tokens: left of the rate, if any."""

    tasks: int
    retry_seconds: float
    tokens: float | None

    def spent(self, tasks: int) -> float | None:
        return None if self.tokens is None else self.tokens - tasks


def allowance(row: Any, in_flight: int, room: int) -> Allowance:
    """What a limited action, tenant or gate leaves of ``room``. at: now, by the clock that wrote ``refilled_at``."""
    tasks, retry = room, BUSY_SECONDS
    if row["max_in_flight"] is not None:
        tasks = min(tasks, max(0, row["max_in_flight"] - in_flight))
    left: float | None = None
    if (rate := row["rate"]) is not None:
        left = full = float(row["burst"] or max(1, math.ceil(rate)))
        if row["tokens"] is not None and row["refilled_at"] is not None:
            left = min(full, row["tokens"] + max(0.0, (row["at"] - row["refilled_at"]).total_seconds()) * rate)
        tasks = min(tasks, int(left))
        if left < 1:
            retry = max(retry, (1 - left) / rate)
    return Allowance(tasks, retry, left)


def share_out(room: int, gates: Mapping[str, Allowance]) -> dict[str, int]:
    """Share ``room`` among the gates, as evenly as their allowances permit; returns the shares above 0 by name."""
    shares: dict[str, int] = {}
    open_gates = [(name, one.tasks) for name, one in gates.items() if one.tasks]
    # Drawn by lot: where some get more, or there is room for some alone, it would be the same ones each time.
    open_gates = sorted(random.sample(open_gates, min(room, len(open_gates))), key=itemgetter(1))
    for position, (name, most) in enumerate(open_gates):
        # The smallest allowance first: the others share what it leaves. An even share is rounded up.
        shares[name] = share = min(most, math.ceil(room / (len(open_gates) - position)))
        room -= share
    return shares
