"""Records of schedules, the parameters of their methods, and the checks of these; without I/O."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from penstock.protocol.answers import Missed, Overlap
from penstock.protocol.checks import ACTION, ID, LIMIT, NUMBERED, Checked, check_chars, check_labels, read_instant
from penstock.protocol.errors import InvalidParams
from penstock.protocol.task import NewTask
from penstock.protocol.tenant import TENANT, check_stored, own_key
from penstock.protocol.views import CURSOR, about
from penstock.schedules.cron import CronError, timing
from penstock.schedules.policy import JOB_PREFIX, MAX_MISSED_LIMIT, Rule, render

NAME_MAX_CHARS = 200
IMPORT_LIMIT = 50_000
_EARLIEST = datetime(1970, 1, 1, tzinfo=UTC)
_LATEST = datetime(9000, 1, 1, tzinfo=UTC)

GivenInstant = str | int
Labels = dict[str, str]

check_name = partial(check_chars, max_chars=NAME_MAX_CHARS)
check_stored_name = partial(check_stored, check=check_name)  # of an existing schedule
_check_labels = partial(check_labels, most=32, name_chars=100, value_chars=500)


# Parameters, by method. The field order is the order of positional parameters.


class ScheduleCreateParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: Annotated[str, about(f"The schedule's name; 1 to {NAME_MAX_CHARS} characters.")]
    expression: Annotated[
        str, about('As "*/5 * * * *", or with seconds first "0 */5 * * * *"; @daily and the like; or "@every 90s".')
    ]
    action: Annotated[str, about("The action of its tasks, which a handler carries out.")]
    payload: Annotated[
        msgspec.Raw,
        about("As of enqueue, with {{scheduled_time}}, {{schedule}} and {{run}} filled in inside its string values."),
    ] = msgspec.Raw(b"{}")
    timezone: Annotated[str, about("IANA zone, by whose wall clock the expression is read.")] = "UTC"
    start_at: Annotated[
        GivenInstant | None, about("No instant before this one: RFC 3339 with a zone, or epoch milliseconds.")
    ] = None
    end_at: Annotated[GivenInstant | None, about("No instant after this one.")] = None
    jitter: Annotated[
        float, about("Delay each run at random by up to so many seconds, always the same for the same instant.")
    ] = 0.0
    missed: Annotated[
        Missed,
        about("Which missed runs to make up: none (skip), the newest (one), or all."),
    ] = Missed.ONE
    max_missed: Annotated[int, about(f"With missed all: at most so many, the newest; 1 to {MAX_MISSED_LIMIT}.")] = 100
    max_lateness: Annotated[float | None, about("Never run later than so many seconds after the instant.")] = None
    overlap: Annotated[
        Overlap,
        about("While the previous task has not settled: allow, skip (recorded), or queue (one after the other)."),
    ] = Overlap.ALLOW
    priority: Annotated[int, about("As of enqueue.")] = 0
    max_attempts: Annotated[int | None, about("Attempts before a task fails, as of enqueue.")] = None
    timeout: Annotated[float | None, about("Seconds that one attempt may take, as of enqueue.")] = None
    ordering_key: Annotated[str | None, about("As of enqueue; with overlap queue instead of the schedule's own.")] = (
        None
    )
    labels: Annotated[Labels, about("Labels, text by text, to list schedules by.")] = {}
    paused: Annotated[
        bool | None, about("It waits for schedule.resume; null: unchanged, which is false for a new schedule.")
    ] = None
    replace: Annotated[bool, about("One of that name becomes this one; otherwise that is an error.")] = False
    tenant: Annotated[str | None, about("The tenant of its tasks.")] = None


ScheduleUpdateParams = msgspec.defstruct(
    "ScheduleUpdateParams",
    [
        (field.name, field.type) if field.name == "name" else (field.name, field.type | UnsetType, UNSET)
        for field in msgspec.structs.fields(ScheduleCreateParams)
        if field.name not in ("paused", "replace")
    ],
    frozen=True,
    forbid_unknown_fields=True,
)
"""Parameters of schedule.create of which all but the name may be left out."""


class ScheduleName(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: Annotated[str, about("The schedule."), Checked(check_stored_name)]


class ScheduleListParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    labels: Annotated[Labels | None, about("Only those that have each of these labels."), Checked(_check_labels)] = None
    action: Annotated[str | None, about("Only those of this action."), ACTION] = None
    paused: Annotated[bool | None, about("Only those that are paused, or only those that are not.")] = None
    limit: Annotated[int, about("Maximum number of schedules; 1 to 1000."), LIMIT] = 50
    cursor: Annotated[str | None, CURSOR, NUMBERED] = None
    tenant: Annotated[str | None, about("Only those of this tenant."), TENANT] = None


class ScheduleRunsParams(ScheduleName, frozen=True, forbid_unknown_fields=True):
    limit: Annotated[int, about("Maximum number of runs; 1 to 1000."), LIMIT] = 50
    cursor: Annotated[str | None, CURSOR, NUMBERED] = None


class ScheduleCreateManyParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    schedules: Annotated[
        list[msgspec.Raw],
        about(f"Objects, each the parameters of schedule.create but for replace; 1 to {IMPORT_LIMIT}."),
    ]
    replace: Annotated[bool, about("Those that exist become these; otherwise they are refused.")] = False

    def __post_init__(self) -> None:
        if not 1 <= len(self.schedules) <= IMPORT_LIMIT:
            raise InvalidParams("schedules", f"must hold 1 to {IMPORT_LIMIT} schedules, not {len(self.schedules)}")


class ScheduleImportStatusParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: Annotated[int | str, about("From schedule.create_many."), ID]


# Results

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


# Records


class NewSchedule(msgspec.Struct, frozen=True, kw_only=True):
    """A checked schedule, by the names of the parameters of `schedule.create`."""

    name: str
    expression: str
    timezone: str
    start_at: datetime | None
    end_at: datetime | None
    jitter: float
    missed: Missed
    max_missed: int
    max_lateness: float | None
    overlap: Overlap
    action: str
    payload: str
    priority: int
    max_attempts: int | None  # None for the setting's at the time of each fire
    timeout: float | None
    ordering_key: str | None
    labels: Labels
    paused: bool | None  # None to keep it, false for a new one
    tenant: str | None

    @property
    def own_name(self) -> str:
        """The name as its tenant knows it."""
        return own_key(self.name)

    def rule(self, anchor: datetime) -> Rule:
        """When and how it fires. anchor: creation time, from which ``@every`` counts without a start."""
        instants = timing(self.expression, self.timezone, self.start_at or anchor.replace(microsecond=0))
        return Rule(
            self.name, instants, self.start_at, self.end_at, self.jitter, self.missed, self.max_missed,
            self.max_lateness,
        )  # fmt: skip

    @property
    def timing_key(self) -> tuple[Any, ...]:
        """What decides when it fires; while it is unchanged, the clock goes on."""
        return self.expression, self.timezone, self.start_at, self.end_at, self.jitter, self.paused

    def params(self) -> dict[str, Any]:
        """The parameters of `schedule.create` that make it."""
        members = {name: getattr(self, name) for name in NewSchedule.__struct_fields__}
        return members | {"name": self.own_name, "payload": msgspec.Raw(self.payload.encode("utf-8"))}


class ScheduleRecord(NewSchedule, frozen=True, kw_only=True):
    """A stored schedule and its clock. next_at: None if it is paused, has ended, or has a ``problem``."""

    id: int
    state: Standing
    next_at: datetime | None
    due_at: datetime | None
    last_at: datetime | None
    last_task_id: int | None
    problem: str | None
    created_at: datetime
    updated_at: datetime

    def task(self, instant: datetime, max_attempts: int) -> NewTask:
        """The task of a fire. max_attempts: the setting's."""
        in_line = f"schedule:{self.id}" if self.overlap is Overlap.QUEUE else None
        # No run_at: a past one sorts before the position that claims have reached.
        return NewTask(
            action=self.action,
            payload=render(self.payload, self.own_name, self.id, instant),
            priority=self.priority,
            ordering_key=self.ordering_key or in_line,
            max_attempts=self.max_attempts or max_attempts,
            timeout_seconds=self.timeout,
            tenant=self.tenant,
        )


class CreateSchedule(NamedTuple):
    """replace: an existing one of that name becomes this one, and keeps its id and its runs."""

    schedule: NewSchedule
    replace: bool


# Checks


def new_schedule(given: ScheduleCreateParams, task: NewTask) -> NewSchedule:
    """Check the parameters that are not part of a task. task: the checked task of each fire. Raises InvalidParams."""
    start_at, end_at = _instant(given.start_at, "start_at"), _instant(given.end_at, "end_at")
    if start_at is not None and end_at is not None and end_at < start_at:
        raise InvalidParams("end_at", f"must not be before start_at, {given.start_at}, but is {given.end_at}")
    _between("jitter", given.jitter, 0, 86_400, "seconds")
    _between("max_missed", given.max_missed, 1, MAX_MISSED_LIMIT, "instants")
    if given.max_lateness is not None:
        # Supervisors look for due schedules every second, so a fire is never on time to the instant.
        _between("max_lateness", given.max_lateness, 1, 100 * 366 * 86_400, "seconds")
    _check_labels(given.labels)
    members = {name: getattr(given, name) for name in NewSchedule.__struct_fields__}
    members |= {"expression": given.expression.strip(), "start_at": start_at, "end_at": end_at}
    members |= {"payload": task.payload, "priority": task.priority, "tenant": task.tenant}
    schedule = NewSchedule(**members)
    try:
        schedule.rule(_EARLIEST)
    except CronError as exc:
        raise InvalidParams(exc.field, exc.problem) from None
    return schedule


def check_not_a_jobs(name: str) -> None:
    """Raises InvalidParams for a name of a job's schedule: its first creator would receive the job's data."""
    if name.startswith(JOB_PREFIX):
        raise InvalidParams("name", f"must not begin with {JOB_PREFIX!r}, which is for jobs of scheduler0's API")


def _instant(value: GivenInstant | None, name: str) -> datetime | None:
    instant = read_instant(value, name)
    if instant is not None and not _EARLIEST <= instant <= _LATEST:
        raise InvalidParams(name, f"must be between the years 1970 and 9000, not {str(value)[:60]!r}")
    return instant


def _between(name: str, value: float, low: float, high: float, unit: str) -> None:
    if not low <= value <= high:
        raise InvalidParams(name, f"must be {low:g} to {high:.0f} {unit}, not {str(value)[:60]}")
