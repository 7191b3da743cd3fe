"""A task: its states, whose transitions docs/states.md has, and the records passed between modules."""

from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Literal, NamedTuple

import msgspec

MAX_ATTEMPTS_LIMIT = 1000
PRIORITY_MIN, PRIORITY_MAX = -32768, 32767
ACTION_MAX_CHARS = 200
KEY_MAX_CHARS = 500
MAX_ACTIONS_SHOWN = 500  # with a name of their own in metrics and counts: a caller who may enqueue can invent names
OTHER_ACTIONS = "other"  # all further ones
MAX_LABELS = 16
LABEL_NAME_MAX_CHARS, LABEL_VALUE_MAX_CHARS = 60, 200
REASON_MAX_CHARS = 500
TOKEN_MAX_CHARS = 200  # of what a task waits for
ANNOUNCE_SECONDS = 60.0  # between two announcements of a worker's actions
ANNOUNCED_SECONDS = 200.0  # for which one holds
EXPIRED = "expired"  # the reason of a task that was not started by its expires_at

OnDuplicate = Literal["return", "replace", "error"]

# Deliveries: actions that workers run without a handler of the user's, where PENSTOCK_DELIVERIES names them.
BUILT_IN_ACTIONS = frozenset(
    ("amqp.publish", "http.request", "kafka.publish", "sqs.send", "sql.execute", "scheduler0.callback")
)


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


# As people read them, in tables and on pages; the wire has the values.
SHOWN_STATES: dict[str, str] = {State.ERROR: "retrying", State.CRITICAL_ERROR: "failed"}
FINAL_STATES = frozenset({State.SUCCESS, State.CRITICAL_ERROR, State.CANCELLED})


class NewTask(msgspec.Struct, frozen=True):
    """A task to enqueue, checked. payload: JSON text of an object or array. labels: JSON text of text by text.

    run_at: not before this instant; delay_seconds: the same, from the database's clock; never both. expires_at: not
    started from then on; expires_in_seconds: the same, from the database's clock; never both. timeout_seconds: of one
    attempt; None: the default of the action or worker. limit_key: selects one of the action's limits by key.
    unique: until when another task keeps the unique key: "retained", until its record is deleted; "live", until it
    settles; or seconds from when it took the key. on_duplicate: what happens if the key is taken;
    replaces_priority: "replace" also replaces the priority. tenant: whose task it is; its unique and ordering keys are
    that tenant's own. trace: text of a TraceContext. offered: a payload that a client has sealed.
    """

    action: str
    payload: str = "{}"
    run_at: datetime | None = None
    delay_seconds: float | None = None
    priority: int = 0
    unique_key: str | None = None
    ordering_key: str | None = None
    max_attempts: int = 10
    timeout_seconds: float | None = None
    labels: str | None = None
    expires_at: datetime | None = None
    expires_in_seconds: float | None = None
    limit_key: str | None = None
    unique: Literal["retained", "live"] | float = "retained"
    on_duplicate: OnDuplicate = "return"
    replaces_priority: bool = False
    tenant: str | None = None
    trace: str | None = None
    offered: str | None = None

    @property
    def is_plain(self) -> bool:
        """Without keys, labels, expiry and tenant, as most are."""
        return (
            self.unique_key is None
            and self.ordering_key is None
            and self.labels is None
            and self.expires_at is None
            and self.expires_in_seconds is None
            and self.limit_key is None
            and self.tenant is None
        )


class Claimed(NamedTuple):
    """A claimed task. waited_seconds: from due to claimed. route: None: the outbound queue.

    suspect: a worker stopped heartbeating while running it, so it is isolated. trace: see ``read_carried``.
    journal: JSON text of its finished durable steps.
    """

    id: int
    claim: int
    action: str
    payload: str
    timeout_seconds: float | None
    waited_seconds: float
    suspect: bool
    route: str | None = None
    tenant: str | None = None
    trace: str | None = None
    journal: str | None = None


class Position(NamedTuple):
    """In the order of due tasks, within one priority."""

    run_at: datetime
    id: int


BEGINNING = Position(datetime(1, 1, 2, tzinfo=UTC), 0)  # before every task of a priority


class Stretch(NamedTuple):
    """The due tasks with priorities from ``low`` to ``high``, after a position if the two are one priority."""

    low: int
    high: int
    after: Position


EVERYTHING = (Stretch(PRIORITY_MIN, PRIORITY_MAX, BEGINNING),)


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed attempt. error: JSON text. delay_seconds: None: CRITICAL_ERROR. suspect: isolated from now on."""

    id: int
    claim: int
    error: str
    delay_seconds: float | None
    suspect: bool = False
    worker: str | None = None
