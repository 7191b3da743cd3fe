"""Commands: parameters that have been checked."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from penstock.protocol.api_key import Permission
from penstock.protocol.task import NewTask, State
from penstock.settings.model import Settings
from penstock.tasks.filters import BulkWork


@dataclass(frozen=True, slots=True)
class Enqueue:
    task: NewTask


@dataclass(frozen=True, slots=True)
class Status:
    """``many``: the answer is a list. ``detail``: with payload, keys and every failed attempt."""

    ids: list[int]
    many: bool
    detail: bool


@dataclass(frozen=True, slots=True)
class AwaitResults:
    """``many``: the answer is a list. ``any_will_do``: one that settles is enough; else all are waited for."""

    ids: list[int]
    many: bool
    timeout_seconds: float
    any_will_do: bool


@dataclass(frozen=True, slots=True)
class Cancel:
    id: int
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Restart:
    """The method ``retry``: a CRITICAL_ERROR or CANCELLED task starts anew."""

    id: int


@dataclass(frozen=True, slots=True)
class Reschedule:
    """What is None stays."""

    id: int
    run_at: datetime | None
    delay_seconds: float | None
    priority: int | None


@dataclass(frozen=True, slots=True)
class ListTasks:
    """Newest first; ``before`` is the id that the page begins behind.

    labels: among the task's. key: its unique key or its ordering key. since, until: when it was created, without until.
    """

    state: State | None
    action: str | None
    limit: int
    before: int | None
    labels: dict[str, str] | None = None
    key: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    tenant: str | None = None

    @property
    def is_search(self) -> bool:
        """Whether it asks for more than a state and an action."""
        return any(value is not None for value in (self.labels, self.key, self.since, self.until, self.tenant))


@dataclass(frozen=True, slots=True)
class Stats:
    """Of one tenant, or of all."""

    tenant: str | None = None


@dataclass(frozen=True, slots=True)
class ListRejected:
    """Newest first; ``before`` is the id that the page begins behind, ``source`` a queue or None for both."""

    limit: int
    before: int | None
    source: str | None


@dataclass(frozen=True, slots=True)
class ShowRejected:
    id: int


@dataclass(frozen=True, slots=True)
class RetryRejected:
    """Of these records, or of those of a page."""

    which: list[int] | ListRejected


@dataclass(frozen=True, slots=True)
class PurgeRejected:
    """As RetryRejected."""

    which: list[int] | ListRejected


@dataclass(frozen=True, slots=True)
class CountDead:
    pass


@dataclass(frozen=True, slots=True)
class ListDead:
    queue: str
    limit: int


@dataclass(frozen=True, slots=True)
class ShowDead:
    queue: str
    id: str


@dataclass(frozen=True, slots=True)
class ReplayDead:
    """``which``: ids of messages, or how many at the most. ``force``: those too, whose first fate is not known."""

    queue: str
    which: list[str] | int
    force: bool


@dataclass(frozen=True, slots=True)
class PurgeDead:
    """``which`` as in ReplayDead."""

    queue: str
    which: list[str] | int


@dataclass(frozen=True, slots=True)
class CreateKey:
    name: str
    permissions: list[Permission]
    expires_in_seconds: float | None
    tenant: str | None = None
    actions: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class ListKeys:
    """Newest first; ``before`` is the id that the page begins behind."""

    limit: int
    before: int | None
    revoked: bool


@dataclass(frozen=True, slots=True)
class RevokeKey:
    id: int


@dataclass(frozen=True, slots=True)
class Bulk:
    """Work on tasks by a filter. dry_run: only count them."""

    work: BulkWork
    dry_run: bool


@dataclass(frozen=True, slots=True)
class ListJobs:
    """Newest first; ``before`` is the id that the page begins behind."""

    limit: int
    before: int | None


@dataclass(frozen=True, slots=True)
class ListAudit:
    """What was changed by hand, newest first; ``before`` is the id that the page begins behind."""

    limit: int
    before: int | None


@dataclass(frozen=True, slots=True)
class ListHeldKeys:
    """By key; ``after`` is the key that the page begins behind."""

    limit: int
    after: str | None


@dataclass(frozen=True, slots=True)
class AnswerWait:
    """What a task waits for has come. answer: a member of a JSON-RPC response, result or error, as a worker gives it.

    digest: tells one answer from another. settings: by which it is recorded. tenant: of the task, None for none and
    for a token that Penstock made.
    """

    token: str
    answer: str
    digest: bytes
    settings: Settings = field(repr=False, compare=False)
    tenant: str | None = None


@dataclass(frozen=True, slots=True)
class Discover:
    pass


Change = Cancel | Restart | Reschedule | AnswerWait
