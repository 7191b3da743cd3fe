"""The options of calls from Python, which the parameters of the api's methods describe; an absent one is not sent."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Literal, TypedDict

from penstock.protocol.task import OnDuplicate

Instant = datetime | str | int
"""A datetime with a zone, RFC 3339 text or epoch milliseconds."""
Seconds = float | timedelta
Labels = Mapping[str, str]
Per = Literal["second", "minute", "hour"]


class TaskOptions(TypedDict, total=False):
    """Options of every new task, None being as good as absent."""

    run_at: Instant | None
    delay: Seconds | None
    priority: int | None
    ordering_key: str | None
    max_attempts: int | None
    timeout: Seconds | None
    labels: Labels | None
    expires_at: Instant | None
    expires_in: Seconds | None
    limit_key: str | None


class EnqueueOptions(TaskOptions, total=False):
    """Options of a task to enqueue; the method ``enqueue`` describes them."""

    unique_key: str | None
    unique: Literal["retained", "live"] | Seconds | None
    on_duplicate: OnDuplicate | None
    tenant: str | None


class StepOptions(TaskOptions, total=False):
    """Options of a workflow's step."""

    on_failure: Literal["fail", "continue", "compensate"] | Mapping[str, str]
    compensate: str | None
    results_as: str | None
    errors_as: str | None


class TenantLimitOptions(TypedDict, total=False):
    """Limits of a tenant; None removes one."""

    max_in_flight: int | None
    rate: float | None
    burst: int | None
    per: Per


class LimitOptions(TenantLimitOptions, total=False):
    """Limits of an action; those by limit key have ``key_`` before."""

    key_max_in_flight: int | None
    key_rate: float | None
    key_burst: int | None


class BulkOptions(TypedDict, total=False):
    """Which tasks a bulk job is about."""

    action: str
    states: Sequence[str]
    labels: Labels
    older_than: Seconds
    newer_than: Seconds
    ids_from: int
    ids_to: int
    all: bool
    dry_run: bool
    tenant: str


class BulkRescheduleOptions(BulkOptions, total=False):
    """The same, and the new times."""

    run_at: Instant
    delay: Seconds
    spread: Seconds
    priority: int


class ScheduleOptions(TypedDict, total=False):
    """Options of a schedule and its tasks."""

    timezone: str
    start_at: Instant | None
    end_at: Instant | None
    jitter: Seconds
    missed: Literal["skip", "one", "all"]
    max_missed: int
    max_lateness: Seconds | None
    overlap: Literal["allow", "skip", "queue"]
    priority: int
    max_attempts: int | None
    timeout: Seconds | None
    ordering_key: str | None
    labels: Labels
    paused: bool | None
    tenant: str | None


class ScheduleUpdates(ScheduleOptions, total=False):
    """Members of a schedule that change; None removes one."""

    expression: str
    action: str
    payload: Any
