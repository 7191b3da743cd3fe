"""Limits: how many tasks of an action may be in flight and how many may go a second, for all of it and for each limit
key. Pure: the scheduler reads and writes the rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

BUSY_SECONDS = 0.05  # until a limit of tasks in flight is looked at again; nobody tells when one settles


@dataclass(frozen=True, slots=True)
class Limits:
    """What is asked of an action. None: no limit.

    rate: tasks a second. burst: how many may go at once after a rest, None for what the rate gives in a second, at
    least one. key_*: the same for each limit key by itself.
    """

    paused: bool = False
    max_in_flight: int | None = None
    rate: float | None = None
    burst: int | None = None
    key_max_in_flight: int | None = None
    key_rate: float | None = None
    key_burst: int | None = None

    @property
    def is_free(self) -> bool:
        """Whether it limits nothing."""
        return self == Limits()


@dataclass(frozen=True, slots=True)
class Allowance:
    """How many tasks may go now, and when it is worth asking again if none may.

    tokens: what is left of the rate, None without one.
    """

    tasks: int
    retry_seconds: float
    tokens: float | None

    def spent(self, tasks: int) -> float | None:
        """The tokens left when so many went."""
        return None if self.tokens is None else self.tokens - tasks


@dataclass(frozen=True, slots=True)
class Gate:
    """A gate and what may go through it."""

    name: str
    allowance: Allowance


def allowance(
    *,
    max_in_flight: int | None,
    rate: float | None,
    burst: int | None,
    in_flight: int,
    tokens: float | None,
    refilled_at: datetime | None,
    now: datetime,
    room: int,
) -> Allowance:
    """What a limit leaves of ``room``, by the clock ``now`` that also wrote ``refilled_at``."""
    tasks, retry = room, BUSY_SECONDS
    if max_in_flight is not None:
        tasks = min(tasks, max(0, max_in_flight - in_flight))
    left: float | None = None
    if rate is not None:
        left = _refilled(rate, burst, tokens, refilled_at, now)
        tasks = min(tasks, int(left))
        if left < 1:
            retry = max(retry, (1 - left) / rate)
    return Allowance(tasks, retry, left)


def share_out(room: int, gates: Sequence[Gate]) -> dict[str, int]:
    """How many of ``room`` go to each gate: as evenly as their allowances let them; those with none are left out."""
    shares: dict[str, int] = {}
    open_gates = sorted((gate for gate in gates if gate.allowance.tasks), key=lambda gate: gate.allowance.tasks)
    for position, gate in enumerate(open_gates):
        # The narrowest first: what they cannot use is left for the wider ones. An even share is rounded up, so that a
        # room smaller than the gates are many still goes to some of them.
        share = min(gate.allowance.tasks, math.ceil(room / (len(open_gates) - position)))
        if share:
            shares[gate.name] = share
            room -= share
    return shares


def _refilled(
    rate: float, burst: int | None, tokens: float | None, refilled_at: datetime | None, now: datetime
) -> float:
    full = float(burst or max(1, math.ceil(rate)))
    if tokens is None or refilled_at is None:
        return full
    return min(full, tokens + max(0.0, (now - refilled_at).total_seconds()) * rate)
