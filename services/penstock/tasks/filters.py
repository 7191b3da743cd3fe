"""Filters and changes of bulk operations, stored as the parameters of a bulk job. Pure."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

import msgspec

from penstock.protocol.checks import like_pattern
from penstock.protocol.task import State


class Operation(StrEnum):
    """The kinds of bulk jobs; each value is the method's name."""

    CANCEL = "bulk.cancel"
    RETRY = "bulk.retry"
    DELETE = "bulk.delete"
    RESCHEDULE = "bulk.reschedule"

    @property
    def states(self) -> tuple[State, ...]:
        """The states it may select; all are live, or all are final."""
        return _STATES[self]


_STATES = {
    Operation.CANCEL: (State.WAITING, State.SCHEDULED, State.ACQUIRED, State.ERROR),
    Operation.RETRY: (State.CRITICAL_ERROR, State.CANCELLED),
    Operation.DELETE: (State.SUCCESS, State.CRITICAL_ERROR, State.CANCELLED),
    Operation.RESCHEDULE: (State.WAITING, State.SCHEDULED, State.ERROR),
}


class Selection(msgspec.Struct, frozen=True, omit_defaults=True):
    """A filter whose conditions must all match.

    action: exact, or a pattern with ``*``. labels: among the task's. older_than, newer_than: seconds from the task's
    creation to the job's. ids_from, ids_to: inclusive.
    """

    states: tuple[State, ...]
    action: str | None = None
    labels: dict[str, str] | None = None
    older_than: float | None = None
    newer_than: float | None = None
    ids_from: int | None = None
    ids_to: int | None = None
    tenant: str | None = None

    @property
    def action_like(self) -> str | None:
        """The action as a pattern of LIKE."""
        return None if self.action is None else like_pattern(self.action)


class NewTimes(msgspec.Struct, frozen=True, omit_defaults=True):
    """When tasks are to run: at run_at or after delay, in seconds from the job's creation; neither keeps their time.

    spread: seconds over which they are spread. priority: None keeps it.
    """

    run_at: datetime | None = None
    delay: float | None = None
    spread: float = 0.0
    priority: int | None = None


class BulkWork(msgspec.Struct, frozen=True, omit_defaults=True):
    """The parameters of a bulk job. top: the highest task id, noted when the job is made."""

    select: Selection
    reschedule: NewTimes | None = None
    top: int = 0
