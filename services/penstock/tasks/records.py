"""What the store answers with: records of claims, attempts and settled tasks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from penstock.protocol.task import Claimed, Position

Pair = tuple[int, int]  # (task id, claim)


@dataclass(frozen=True, slots=True)
class ClaimBatch:
    """One claim: its token, by which the outcome is confirmed, the tasks, and the last position by priority."""

    id: int
    tasks: list[Claimed]
    reached: dict[int, Position]


@dataclass(frozen=True, slots=True)
class InFlight:
    """How many tasks are claimed and unsettled; ``aged`` of them were claimed before ``aged_before``, a moment ago."""

    count: int
    aged: int
    aged_before: datetime


@dataclass(frozen=True, slots=True)
class ActionThroughput:
    """What attempts of one action did lately. ``timed``: those of known run time, which is ``seconds`` together."""

    action: str
    ended: int
    timed: int
    seconds: float


@dataclass(frozen=True, slots=True)
class SettledTask:
    """A task that has changed state. ``waited``: for an event, when it was cancelled."""

    id: int
    action: str
    waited: bool = False


@dataclass(frozen=True, slots=True)
class StaleTask:
    """An ACQUIRED task without a sign of life.

    held_seconds: since its claim. silent_seconds: since its last sign of life, or its claim. taken: a worker has
    reported it at least once. suspect: it travelled alone, after another silence. route: by which it was sent. worker:
    which one has reported it, where it told. trace: what its claim told; see wire.read_carried.
    """

    id: int
    claim: int
    action: str
    attempts: int
    max_attempts: int
    claimed_at: datetime
    taken: bool
    suspect: bool
    held_seconds: float
    silent_seconds: float
    route: str | None
    worker: str | None
    trace: str | None


def columns(pairs: Iterable[Pair]) -> tuple[list[int], list[int]]:
    """The arrays that a statement is given of pairs: the ids, and what stands beside them."""
    listed = list(pairs)
    return [pair[0] for pair in listed], [pair[1] for pair in listed]
