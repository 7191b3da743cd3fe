"""What a task is: its states, the legal transitions between them, and the records that travel between modules."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import NamedTuple

DEFAULT_MAX_ATTEMPTS = 10
MAX_ATTEMPTS_LIMIT = 1000
PRIORITY_MIN, PRIORITY_MAX = -32768, 32767
ACTION_MAX_CHARS = 200
KEY_MAX_CHARS = 500


class State(StrEnum):
    WAITING = "WAITING"
    SCHEDULED = "SCHEDULED"
    ACQUIRED = "ACQUIRED"
    ERROR = "ERROR"
    SUCCESS = "SUCCESS"
    CRITICAL_ERROR = "CRITICAL_ERROR"
    CANCELLED = "CANCELLED"

    @property
    def final(self) -> bool:
        return self in FINAL_STATES


FINAL_STATES = frozenset({State.SUCCESS, State.CRITICAL_ERROR, State.CANCELLED})
READY_STATES = frozenset({State.SCHEDULED, State.ERROR})

# Every legal transition; docs/states.md draws it, each edge is one SQL statement.
TRANSITIONS: frozenset[tuple[State, State]] = frozenset(
    {
        (State.WAITING, State.SCHEDULED),  # its predecessor settled
        (State.SCHEDULED, State.ACQUIRED),  # claim
        (State.ERROR, State.ACQUIRED),  # claim
        (State.ACQUIRED, State.SUCCESS),  # result
        (State.ACQUIRED, State.ERROR),  # error result, or repair
        (State.ACQUIRED, State.CRITICAL_ERROR),  # error at the cap, or final failure
        (State.ACQUIRED, State.SCHEDULED),  # release: never delivered, first attempt given back
        (State.WAITING, State.CANCELLED),
        (State.SCHEDULED, State.CANCELLED),
        (State.ACQUIRED, State.CANCELLED),
        (State.ERROR, State.CANCELLED),
        (State.CRITICAL_ERROR, State.SCHEDULED),  # retry
        (State.CANCELLED, State.SCHEDULED),  # retry
        (State.CRITICAL_ERROR, State.WAITING),  # retry behind a live task of the same ordering key
        (State.CANCELLED, State.WAITING),
    }
)


def is_legal(before: State, after: State) -> bool:
    return (before, after) in TRANSITIONS


@dataclass(frozen=True, slots=True)
class NewTask:
    """A task as a producer asks for it; ``payload`` is valid JSON text (an object or array), already checked.

    run_at: not before this instant; delay_seconds: the same, counted from the database's clock; never both.
    timeout_seconds: the worker gives up on one attempt after this long; None = the action's or worker's default.
    """

    action: str
    payload: str = "{}"
    run_at: datetime | None = None
    delay_seconds: float | None = None
    priority: int = 0
    unique_key: str | None = None
    ordering_key: str | None = None
    max_attempts: int = DEFAULT_MAX_ATTEMPTS
    timeout_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Enqueued:
    """What became of a NewTask: the id it has, or the id of the first one with its unique key."""

    id: int
    state: State
    duplicate: bool


class Claimed(NamedTuple):
    """A task that a scheduler has claimed and must now send or release.

    waited_seconds: from due to claimed. suspect: a worker fell silent with it, so it must travel alone. route: the one
    that it goes by, None for the outbound queue.
    """

    id: int
    claim: int
    action: str
    payload: str
    timeout_seconds: float | None
    waited_seconds: float
    suspect: bool
    route: str | None = None


class Position(NamedTuple):
    """A place in the order of the tasks that are due, within one priority."""

    run_at: datetime
    id: int


BEGINNING = Position(datetime(1, 1, 2, tzinfo=UTC), 0)  # of a priority: every task stands behind it


class Stretch(NamedTuple):
    """A part of the order of the tasks that are due: the priorities from ``low`` to ``high``, behind a position.

    The position counts only where the two are one priority.
    """

    low: int
    high: int
    after: Position


EVERYTHING = (Stretch(PRIORITY_MIN, PRIORITY_MAX, BEGINNING),)


@dataclass(frozen=True, slots=True)
class Failure:
    """One failed attempt, decided: what is recorded and when the task may run again.

    delay_seconds: None = no more attempts, the task becomes CRITICAL_ERROR.
    error: JSON text of the error object. suspect: a worker fell silent with it; it travels alone from now on.
    """

    id: int
    claim: int
    error: str
    delay_seconds: float | None
    suspect: bool = False
