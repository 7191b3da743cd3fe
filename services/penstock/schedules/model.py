"""The methods about schedules: their parameters, and the commands that they become. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType

from penstock.protocol.checks import CONTROL, check_labels, read_instant
from penstock.protocol.errors import InvalidParams
from penstock.protocol.task import NewTask
from penstock.protocol.tenant import own_key, read_kept
from penstock.protocol.views import CURSOR, about
from penstock.schedules.cron import CronError, timing
from penstock.schedules.policy import JOB_PREFIX, MAX_MISSED_LIMIT, Missed, Overlap, Rule

NAME_MAX_CHARS = 200
LABELS_MAX = 32
LABEL_NAME_MAX_CHARS = 100
LABEL_MAX_CHARS = 500
JITTER_MAX_SECONDS = 86_400.0
LATENESS_MAX_SECONDS = 100 * 366 * 86_400.0
IMPORT_LIMIT = 50_000
_EARLIEST = datetime(1970, 1, 1, tzinfo=UTC)
_LATEST = datetime(9000, 1, 1, tzinfo=UTC)

AS_OF_ENQUEUE = about("As of enqueue.")

Instant = str | int
Labels = dict[str, str]


# Parameters, by method. The field order is the order of positional parameters.


class ScheduleCreateParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: Annotated[str, about(f"Its own; 1 to {NAME_MAX_CHARS} characters.")]
    expression: Annotated[
        str, about("Five fields, or six with the seconds first; or @hourly and the like; or @every 1h30m.")
    ]
    action: Annotated[str, AS_OF_ENQUEUE]
    payload: Annotated[
        msgspec.Raw,
        about("As of enqueue, with {{scheduled_time}}, {{schedule}} and {{run}} filled in inside its string values."),
    ] = msgspec.Raw(b"{}")
    timezone: Annotated[str, about("A name of the IANA database, by whose wall clock the expression is read.")] = "UTC"
    start_at: Annotated[
        Instant | None, about("No instant before this one: RFC 3339 with a zone, or epoch milliseconds.")
    ] = None
    end_at: Annotated[Instant | None, about("No instant after this one.")] = None
    jitter: Annotated[
        float, about("Each fire is delayed by up to so many seconds, always the same for the same instant.")
    ] = 0.0
    missed: Annotated[
        Missed,
        about("What becomes of instants at which nothing could be fired: skip, one (the newest runs), or all."),
    ] = Missed.ONE
    max_missed: Annotated[int, about(f"With all: so many of the newest run; 1 to {MAX_MISSED_LIMIT}.")] = 100
    max_lateness: Annotated[float | None, about("What is later than so many seconds never runs; null for any.")] = None
    overlap: Annotated[
        Overlap,
        about("While the task before is not settled: allow, skip (recorded), or queue (one after the other)."),
    ] = Overlap.ALLOW
    priority: Annotated[int, AS_OF_ENQUEUE] = 0
    max_attempts: Annotated[int | None, AS_OF_ENQUEUE] = None
    timeout: Annotated[float | None, AS_OF_ENQUEUE] = None
    ordering_key: Annotated[str | None, about("As of enqueue; with overlap queue in place of the schedule's own.")] = (
        None
    )
    labels: Annotated[Labels, about("An object of text by text, to list schedules by.")] = {}
    paused: Annotated[
        bool | None, about("It waits for schedule.resume; null for as it is, which for a new one is false.")
    ] = None
    replace: Annotated[bool, about("One of that name becomes this one; otherwise that is an error.")] = False
    tenant: Annotated[str | None, about("For whom its tasks are; null for nobody.")] = None


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
    name: Annotated[str, about("The schedule.")]


class ScheduleListParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    labels: Annotated[Labels | None, about("Only those that have each of these labels.")] = None
    action: Annotated[str | None, about("Only those of this action.")] = None
    paused: Annotated[bool | None, about("Only those that are paused, or only those that are not.")] = None
    limit: Annotated[int, about("Schedules at the most; 1 to 1000.")] = 50
    cursor: Annotated[str | None, CURSOR] = None
    tenant: Annotated[str | None, about("Only those of this tenant.")] = None


class ScheduleRunsParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: Annotated[str, about("The schedule.")]
    limit: Annotated[int, about("Runs at the most; 1 to 1000.")] = 50
    cursor: Annotated[str | None, CURSOR] = None


class ScheduleCreateManyParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    schedules: Annotated[
        list[msgspec.Raw],
        about(f"Objects, each the parameters of schedule.create but for replace; 1 to {IMPORT_LIMIT}."),
    ]
    replace: Annotated[bool, about("Those that exist become these; otherwise they are refused.")] = False


class ScheduleImportStatusParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: Annotated[int | str, about("From schedule.create_many.")]


# Commands


@dataclass(frozen=True, slots=True)
class NewSchedule:
    """A schedule as a caller asks for it, checked.

    max_attempts: None for the setting's at the time of each fire. paused: None for what it is, a new one not being so.
    """

    name: str
    expression: str
    timezone: str
    start_at: datetime | None
    end_at: datetime | None
    jitter_seconds: float
    missed: Missed
    max_missed: int
    max_lateness_seconds: float | None
    overlap: Overlap
    action: str
    payload: str
    priority: int
    max_attempts: int | None
    timeout_seconds: float | None
    ordering_key: str | None
    labels: Labels
    paused: bool | None
    tenant: str | None = None

    @property
    def own_name(self) -> str:
        """The name as its tenant knows it."""
        return own_key(self.name)

    def rule(self, anchor: datetime) -> Rule:
        """When and how it fires; anchor: when it was made, from where ``@every`` counts when there is no start."""
        return Rule(
            self.name,
            timing(self.expression, self.timezone, self.start_at or anchor.replace(microsecond=0)),
            self.start_at,
            self.end_at,
            self.jitter_seconds,
            self.missed,
            self.max_missed,
            self.max_lateness_seconds,
        )

    @property
    def clockwork(self) -> tuple[Any, ...]:
        """What decides when it fires: while this is the same, its clock goes on."""
        return self.expression, self.timezone, self.start_at, self.end_at, self.jitter_seconds, self.paused


@dataclass(frozen=True, slots=True)
class CreateSchedule:
    """``replace``: one of that name is made what this one says, and keeps its id and its runs."""

    schedule: NewSchedule
    replace: bool


@dataclass(frozen=True, slots=True)
class UpdateSchedule:
    """``given``: members of ScheduleCreateParams as JSON; check: makes a schedule of all members, or raises
    InvalidParams. They are checked together with what stays as it is."""

    name: str
    given: dict[str, msgspec.Raw]
    check: Callable[[Mapping[str, Any]], NewSchedule] = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class ListSchedules:
    """Newest first; ``before`` is the id that the page begins behind. labels: each of them, or None."""

    labels: Labels | None
    action: str | None
    paused: bool | None
    limit: int
    before: int | None
    tenant: str | None = None


@dataclass(frozen=True, slots=True)
class ListRuns:
    """Newest first; ``before`` is the instant that the page begins behind, in microseconds of the epoch."""

    name: str
    limit: int
    before: int | None


def new_schedule(given: ScheduleCreateParams, task: NewTask) -> NewSchedule:
    """Check all that is no part of a task; ``task``: what was checked as one. Raises InvalidParams."""
    start_at, end_at = _instant(given.start_at, "start_at"), _instant(given.end_at, "end_at")
    if start_at is not None and end_at is not None and end_at < start_at:
        raise InvalidParams("end_at", f"must not be before start_at, {given.start_at}, but is {given.end_at}")
    _between("jitter", given.jitter, 0, JITTER_MAX_SECONDS, "seconds")
    _between("max_missed", given.max_missed, 1, MAX_MISSED_LIMIT, "instants")
    if given.max_lateness is not None:
        # A fire is never made in the very instant: what is due is looked for each second.
        _between("max_lateness", given.max_lateness, 1, LATENESS_MAX_SECONDS, "seconds")
    schedule = NewSchedule(
        name=read_name(given.name),
        expression=given.expression.strip(),
        timezone=given.timezone,
        start_at=start_at,
        end_at=end_at,
        jitter_seconds=given.jitter,
        missed=given.missed,
        max_missed=given.max_missed,
        max_lateness_seconds=given.max_lateness,
        overlap=given.overlap,
        action=task.action,
        payload=task.payload,
        priority=task.priority,
        max_attempts=given.max_attempts,
        timeout_seconds=task.timeout_seconds,
        ordering_key=task.ordering_key,
        labels=read_labels(given.labels),
        paused=given.paused,
        tenant=task.tenant,
    )
    try:
        schedule.rule(_EARLIEST)
    except CronError as exc:
        raise InvalidParams(exc.field, exc.problem) from None
    return schedule


def members_of(schedule: NewSchedule) -> dict[str, Any]:
    """A schedule as the parameters of schedule.create that make it; its name as its tenant knows it."""
    return {
        "name": schedule.own_name,
        "expression": schedule.expression,
        "action": schedule.action,
        "payload": msgspec.Raw(schedule.payload.encode("utf-8")),
        "timezone": schedule.timezone,
        "start_at": schedule.start_at,
        "end_at": schedule.end_at,
        "jitter": schedule.jitter_seconds,
        "missed": schedule.missed,
        "max_missed": schedule.max_missed,
        "max_lateness": schedule.max_lateness_seconds,
        "overlap": schedule.overlap,
        "priority": schedule.priority,
        "max_attempts": schedule.max_attempts,
        "timeout": schedule.timeout_seconds,
        "ordering_key": schedule.ordering_key,
        "labels": schedule.labels,
        "paused": schedule.paused,
        "tenant": schedule.tenant,
    }


def read_update(given: msgspec.Struct, check: Callable[[Mapping[str, Any]], NewSchedule]) -> UpdateSchedule:
    """Raises InvalidParams when it changes nothing."""
    members = msgspec.json.decode(msgspec.json.encode(given), type=dict[str, msgspec.Raw])
    name: str = msgspec.json.decode(members.pop("name"))
    if not members:
        raise InvalidParams("name", "is given alone: name what is to change, too")
    return UpdateSchedule(read_kept_name(name), members, check)


def read_name(name: str) -> str:
    """A schedule's name. Raises InvalidParams."""
    if not 1 <= len(name) <= NAME_MAX_CHARS:
        raise InvalidParams("name", f"must have 1 to {NAME_MAX_CHARS} characters, not {len(name)}")
    if CONTROL.search(name):
        raise InvalidParams("name", "holds a control character")
    return name


def read_kept_name(name: str) -> str:
    """The name of a schedule that there may be: of one that a tenant's key made, behind the tenant's name. Raises
    InvalidParams."""
    return read_kept(name, read_name, "name")


def check_not_a_jobs(name: str) -> None:
    """Raises InvalidParams for the name of a schedule that scheduler0's API makes.

    A job's schedule is found by its name alone: one that a caller made first would be given that job's data.
    """
    if name.startswith(JOB_PREFIX):
        raise InvalidParams("name", f"must not begin with {JOB_PREFIX!r}, which is for jobs of scheduler0's API")


def read_labels(labels: Labels) -> Labels:
    """Labels of a schedule. Raises InvalidParams, which names the label."""
    check_labels(labels, most=LABELS_MAX, name_chars=LABEL_NAME_MAX_CHARS, value_chars=LABEL_MAX_CHARS)
    return labels


def _instant(value: Instant | None, name: str) -> datetime | None:
    """An instant within the years that a schedule can have. Raises InvalidParams."""
    instant = read_instant(value, name)
    if instant is not None and not _EARLIEST <= instant <= _LATEST:
        raise InvalidParams(name, f"must be between the years 1970 and 9000, not {str(value)[:60]!r}")
    return instant


def _between(name: str, value: float, low: float, high: float, unit: str) -> None:
    if not low <= value <= high:
        raise InvalidParams(name, f"must be {low:g} to {high:.0f} {unit}, not {value:g}")
