"""Records of claims and attempts."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from penstock.protocol.task import Claimed, Position

Pair = tuple[int, int]  # (task id, claim)


class ClaimBatch(NamedTuple):
    """One claim. id: its token, by which the sending is confirmed. reached: the last position by priority."""

    id: int
    tasks: list[Claimed]
    reached: dict[int, Position]


@dataclass(frozen=True, slots=True)
class InFlight:
    """How many tasks are claimed and unsettled; ``aged`` of them were claimed before ``aged_before``."""

    count: int
    aged: int
    aged_before: datetime


class ActionThroughput(NamedTuple):
    """Recent attempts of one action. timed: those of known run time, ``seconds`` in total."""

    action: str
    ended: int
    timed: int
    seconds: float


class StaleTask(NamedTuple):
    """An ACQUIRED task without a recent heartbeat."""

    id: int
    claim: int
    action: str
    attempts: int
    max_attempts: int
    claimed_at: datetime
    taken: bool  # a worker has reported it
    suspect: bool  # it travelled alone
    held_seconds: float  # since its claim
    silent_seconds: float  # since its last heartbeat, or its claim
    route: str | None
    worker: str | None
    trace: str | None  # see ``read_carried``


def columns(pairs: Iterable[Pair]) -> tuple[list[int], list[int]]:
    listed = list(pairs)
    return [pair[0] for pair in listed], [pair[1] for pair in listed]
