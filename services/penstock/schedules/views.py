"""What results about schedules look like; see views for the style."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec

from penstock.protocol.views import Instant, about, raw, timestamp
from penstock.schedules.names import shown_name
from penstock.schedules.policy import Missed, Overlap, run_name
from penstock.schedules.store import RunRecord, ScheduleRecord

Standing = Literal["ACTIVE", "PAUSED", "ENDED", "STOPPED"]
RunOutcome = Literal[
    "WAITING",
    "SCHEDULED",
    "ACQUIRED",
    "ERROR",
    "SUCCESS",
    "CRITICAL_ERROR",
    "CANCELLED",
    "SKIPPED",
    "MISSED",
    "CLEANED",
]


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    id: int
    name: str
    state: Annotated[Standing, about("ENDED: nothing is to come; STOPPED: it cannot be fired, `problem` says why.")]
    expression: str
    timezone: str
    action: str
    next_at: Annotated[str | None, about("The instant to be fired next; null unless the state is ACTIVE.")]
    last_at: Annotated[str | None, about("The last instant that was dealt with.")]
    last_task_id: int | None
    problem: str | None
    start_at: Instant | None
    end_at: Instant | None
    jitter: float
    missed: Missed
    max_missed: int
    max_lateness: float | None
    overlap: Overlap
    priority: int
    max_attempts: int | None
    timeout: float | None
    ordering_key: str | None
    labels: dict[str, str]
    paused: bool
    tenant: Annotated[str | None, about("For whom its tasks are.")]
    created_at: Instant
    updated_at: Instant


class ScheduleDetail(Schedule, frozen=True, kw_only=True):
    payload: Any
    upcoming: Annotated[list[str], about("The next few instants; of one that is paused, those if it were resumed now.")]


class SchedulePage(msgspec.Struct, frozen=True):
    schedules: list[Schedule]
    cursor: Annotated[str | None, about("Pass it on for the next page; null at the end.")]


class ScheduleDeleted(msgspec.Struct, frozen=True):
    id: int
    name: str
    deleted: bool = True


class ScheduleRun(msgspec.Struct, frozen=True, kw_only=True):
    run: Annotated[str, about("What `{{run}}` in the payload became.")]
    scheduled_at: Instant
    fired_at: Instant
    outcome: Annotated[
        RunOutcome,
        about(
            "The task's state; SKIPPED: the task before it was not settled; MISSED: too late; "
            "CLEANED: the task's record is gone."
        ),
    ]
    task_id: int | None
    manual: Annotated[bool, about("By schedule.run_now.")]
    since: Annotated[str | None, about("MISSED: the row stands for every instant from this one.")]
    instants: Annotated[int, about("How many instants the row stands for; 10000 stands for more, too.")]


class SchedulePageOfRuns(msgspec.Struct, frozen=True):
    runs: list[ScheduleRun]
    cursor: Annotated[str | None, about("Pass it on for the next page; null at the end.")]


class ImportStarted(msgspec.Struct, frozen=True):
    id: Annotated[int, about("For schedule.import_status.")]
    total: int


class ImportStatus(msgspec.Struct, frozen=True, kw_only=True):
    id: int
    state: Literal["RUNNING", "DONE"]
    total: int
    seen: int
    created: int
    replaced: int
    refused: int
    errors: Annotated[list[Any], about("Of the first that were refused: `index`, `name`, `field`, `problem`.")]
    created_at: Instant
    updated_at: Instant
    finished_at: Instant | None


def schedule(record: ScheduleRecord) -> Schedule:
    """A record without its payload."""
    return Schedule(**_members(record))


def schedule_detail(record: ScheduleRecord, upcoming: list[datetime]) -> ScheduleDetail:
    """The same with the payload and the next instants."""
    return ScheduleDetail(
        **_members(record), payload=raw(record.schedule.payload), upcoming=[timestamp(instant) for instant in upcoming]
    )


def run(record: RunRecord) -> ScheduleRun:
    """What became of an instant."""
    outcome: Any = record.outcome
    if record.outcome == "FIRED":
        outcome = "CLEANED" if record.state is None else record.state.value
    return ScheduleRun(
        run=run_name(record.schedule_id, record.scheduled_at),
        scheduled_at=timestamp(record.scheduled_at),
        fired_at=timestamp(record.fired_at),
        outcome=outcome,
        task_id=record.task_id,
        manual=record.manual,
        since=None if record.since is None else timestamp(record.since),
        instants=record.instants,
    )


def import_status(row: Any) -> ImportStatus:
    """A row of the statement ``read_import``."""
    return ImportStatus(
        id=row["id"],
        state="RUNNING" if row["finished_at"] is None else "DONE",
        total=row["total"],
        seen=row["seen"],
        created=row["created"],
        replaced=row["replaced"],
        refused=row["refused"],
        errors=msgspec.json.decode(row["errors"]),
        created_at=timestamp(row["created_at"]),
        updated_at=timestamp(row["updated_at"]),
        finished_at=row["finished_at"] and timestamp(row["finished_at"]),
    )


def _members(record: ScheduleRecord) -> dict[str, Any]:
    given = record.schedule
    state: Standing = "ACTIVE"
    if record.problem is not None:
        state = "STOPPED"
    elif given.paused:
        state = "PAUSED"
    elif record.next_at is None:
        state = "ENDED"
    return {
        "id": record.id,
        "name": shown_name(given.name),
        "state": state,
        "expression": given.expression,
        "timezone": given.timezone,
        "action": given.action,
        "next_at": record.next_at and timestamp(record.next_at),
        "last_at": record.last_at and timestamp(record.last_at),
        "last_task_id": record.last_task_id,
        "problem": record.problem,
        "start_at": given.start_at and timestamp(given.start_at),
        "end_at": given.end_at and timestamp(given.end_at),
        "jitter": given.jitter_seconds,
        "missed": given.missed,
        "max_missed": given.max_missed,
        "max_lateness": given.max_lateness_seconds,
        "overlap": given.overlap,
        "priority": given.priority,
        "max_attempts": given.max_attempts,
        "timeout": given.timeout_seconds,
        "ordering_key": given.ordering_key,
        "labels": given.labels,
        "paused": bool(given.paused),
        "tenant": given.tenant,
        "created_at": timestamp(record.created_at),
        "updated_at": timestamp(record.updated_at),
    }
