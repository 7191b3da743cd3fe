"""The answers of the api, as its methods make them and as the clients return them."""

from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Literal

from penstock.protocol.record import Record
from penstock.protocol.task import MAX_ACTIONS_SHOWN, OTHER_ACTIONS, State
from penstock.protocol.views import NEXT_CURSOR, Instant, about

TENANT_LOOKED_AT = 50_000  # of live tasks, and of the records of each final state


class Cause(StrEnum):
    SETTLED = "settled"
    RUNNING = "running"
    SENT = "sent"
    EVENT = "event"
    STEPS = "steps"
    ORDERING_KEY = "ordering_key"
    NOT_DUE = "not_due"
    EXPIRED = "expired"
    UNKNOWN_ACTION = "unknown_action"
    PAUSED = "paused"
    LIMIT = "limit"
    BACKLOG = "backlog"
    NO_SCHEDULER = "no_scheduler"


class JobState(StrEnum):
    RUNNING = "RUNNING"
    DONE = "DONE"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


class Missed(StrEnum):
    """Which instants are made up for if nothing could be fired at them: none, the newest, or all."""

    SKIP = "skip"
    ONE = "one"
    ALL = "all"


class Overlap(StrEnum):
    """What a fire does while the task before it is not settled: go on, record a skip, or wait in line."""

    ALLOW = "allow"
    SKIP = "skip"
    QUEUE = "queue"


class WorkflowState(StrEnum):
    """FAILING: a step has failed; those that run come to their end, and what is to be undone is undone."""

    RUNNING = "RUNNING"
    FAILING = "FAILING"
    SUCCESS = "SUCCESS"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def final(self) -> bool:
        return self not in (WorkflowState.RUNNING, WorkflowState.FAILING)


class StepKind(StrEnum):
    """map: makes a child for each item of a list. join: no task, done when its predecessors are. compensation: undoes
    another step."""

    TASK = "task"
    MAP = "map"
    JOIN = "join"
    COMPENSATION = "compensation"


if TYPE_CHECKING:  # what a client reads is the text that the wire has
    StateName = State | Literal["WAITING", "SCHEDULED", "ACQUIRED", "ERROR", "SUCCESS", "CRITICAL_ERROR", "CANCELLED"]
    CauseName = (
        Cause
        | Literal["settled", "running", "sent", "event", "steps", "ordering_key", "not_due", "expired"]
        | Literal["unknown_action", "paused", "limit", "backlog", "no_scheduler"]
    )
    JobStateName = JobState | Literal["RUNNING", "DONE", "FAILED", "CANCELLED"]
    MissedName = Missed | Literal["skip", "one", "all"]
    OverlapName = Overlap | Literal["allow", "skip", "queue"]
    WorkflowStateName = WorkflowState | Literal["RUNNING", "FAILING", "SUCCESS", "FAILED", "CANCELLED"]
    StepKindName = StepKind | Literal["task", "map", "join", "compensation"]
    RunOutcome = StateName | Literal["SKIPPED", "MISSED", "CLEANED"]
else:
    StateName, CauseName, JobStateName, MissedName, OverlapName = State, Cause, JobState, Missed, Overlap
    WorkflowStateName, StepKindName = WorkflowState, StepKind
    RunOutcome = Literal[*(state.value for state in State), "SKIPPED", "MISSED", "CLEANED"]

CountsByAction = Annotated[
    dict[str, dict[StateName, int]],
    about(
        f"The same by action; states without a task are left out. Beyond {MAX_ACTIONS_SHOWN} actions, those with the "
        f"fewest tasks are counted together as `{OTHER_ACTIONS}`."
    ),
]


class Accepted(Record):
    id: int
    state: StateName
    duplicate: Annotated[
        bool, about("True: a task with this unique key was there already, and this is its id; nothing was added.")
    ]
    replaced: Annotated[
        bool | None, about("With on_duplicate replace: whether the first task waited and took what this one asks.")
    ] = None


class Changed(Record):
    id: int
    state: StateName


class Failure(Record):
    """One failed attempt."""

    attempt: int
    claim: int
    at: Instant
    error: Annotated[Any, about("The JSON-RPC error object that the worker sent.")]
    worker: Annotated[
        str | None,
        about("The worker that sent it, or that ran the task when it stopped heartbeating; null: not reported."),
    ]


class Task(Record):
    id: int
    action: str
    state: StateName
    attempts: Annotated[int, about("Attempts begun so far.")]
    max_attempts: int
    priority: int
    run_at: Annotated[str, about("Not before this instant; after a failure, the next attempt's.")]
    created_at: Instant
    updated_at: Instant
    progress: Annotated[Any, about("`percent` and `note` as the worker last reported them, or null.")]
    result: Annotated[Any, about("What the handler returned; null unless the state is SUCCESS.")]
    error: Annotated[Any, about("The error object of the last failed attempt; null after a SUCCESS.")]
    reason: Annotated[str | None, about("Why it was cancelled; omitted if no reason was given.")] = None
    result_gone: Annotated[bool, about("True: there was a result, and retention has emptied it.")] = False
    tenant: Annotated[str | None, about("Its tenant; omitted if it has none.")] = None
    trace_id: Annotated[str | None, about("OpenTelemetry trace of its enqueue; only there where it has one.")] = None
    result_unread: Annotated[
        str | None,
        about("Why the result is null: it is large, or cannot be had now; in a full answer the error too."),
    ] = None


class WaitsFor(Record):
    """The outside event that a WAITING task waits for."""

    token: Annotated[str, about("For task.complete and task.fail.")]
    until: Instant


class FinishedStep(Record):
    """One durable step of a handler."""

    name: str
    repetition: Annotated[int, about("How many steps of this name came before it.")]
    result: Annotated[Any, about("What the step gave; null for a failed one.")]
    error: Annotated[Any, about("The error object of its final failure, or null.")]
    began_at: Annotated[str | None, about("By the worker's clock; null: not reported.")]
    seconds: Annotated[float | None, about("How long it took; null: not reported.")]
    tries: Annotated[int, about("How often its function was called.")]
    recorded_at: Instant
    claim: Annotated[int, about("Token of the claim whose attempt ran it.")]
    worker: Annotated[str | None, about("The worker that ran it; null: not reported.")]
    unread: Annotated[str | None, about("Why result or error is null: it is large, or cannot be had now.")]


class TaskDetail(Task):
    payload: Any
    unique_key: str | None
    ordering_key: str | None
    limit_key: str | None
    labels: Annotated[Any, about("Object of text by text.")]
    expires_at: Annotated[str | None, about("Not started from then on.")]
    timeout: Annotated[float | None, about("Seconds that one attempt may take; null: the action's or worker's own.")]
    claim: Annotated[int, about("Token of the newest claim; 0 before the first.")]
    worker: Annotated[str | None, about("The worker of the newest claim; null: not reported.")]
    failures: Annotated[list[Failure], about("Every failed attempt, oldest first.")]
    claimed_at: Annotated[
        str | None,
        about("When the running attempt, or the last one of a settled task, was claimed; omitted otherwise."),
    ] = None
    waits_for: Annotated[WaitsFor | None, about("Only there while it waits for an outside event.")] = None
    steps: Annotated[list[FinishedStep] | None, about("Its finished durable steps; omitted if it has none.")] = None
    snoozes: Annotated[int, about("How often a handler put it off without spending an attempt; omitted if never.")] = 0
    payload_gone: Annotated[bool, about("True: retention has emptied the payload.")] = False
    payload_unread: Annotated[
        str | None,
        about("Why the payload is null: it is large, or cannot be had now; in a full answer failures are empty."),
    ] = None


class Outcome(Record):
    """The outcome of a task."""

    id: int
    state: Annotated[StateName | None, about("Null: there is no such task.")]
    result: Annotated[Any, about("What the handler returned; null unless the state is SUCCESS.")]
    error: Annotated[Any, about("The error object of the last failed attempt; null after a SUCCESS.")]
    reason: Annotated[str | None, about("Why it was cancelled; omitted if no reason was given.")] = None
    result_gone: Annotated[bool, about("True: there was a result, and retention has emptied it.")] = False
    result_unread: Annotated[str | None, about("Why the result is null: it is large, or cannot be had now.")] = None
    again: Annotated[str | None, about("Only there where this is not the last word: how to ask again.")] = None


class TaskPage(Record):
    tasks: list[Task]
    cursor: Annotated[
        str | None,
        about("Pass it on for the next page; null at the end. With a filter a page may hold fewer than asked for."),
    ]


class Rates(Record):
    """Events a second over the last minute."""

    enqueued_per_second: float
    succeeded_per_second: float
    failed_per_second: Annotated[float, about("Failed attempts.")]


class Lag(Record):
    due: Annotated[int, about("Tasks that may run now and are not claimed.")]
    oldest_due_seconds: Annotated[float, about("How long the oldest of them has waited.")]


class Statistics(Record):
    states: Annotated[dict[StateName, int], about("Tasks kept, by state; every state is there.")]
    actions: CountsByAction
    rates: Rates
    lag: Lag


class TenantStatistics(Record):
    tenant: str
    states: Annotated[dict[StateName, int], about("Its tasks kept, by state; every state is there.")]
    actions: CountsByAction
    at_least: Annotated[
        list[StateName],
        about(f"States whose counts are of the newest {TENANT_LOOKED_AT} records, of all tenants: there are more."),
    ]


class Explanation(Record):
    """Why a task does not run, or where it is."""

    id: int
    state: StateName
    cause: CauseName
    reason: Annotated[str, about("One sentence for a person; its wording may change.")]
    task: Annotated[int | None, about("The task that this one waits for, with cause ordering_key.")] = None
    workflow: Annotated[int | None, about("The workflow, with cause steps.")] = None
    task_state: Annotated[StateName | None, about("The state of `task`; null: its record is deleted.")] = None
    tenant: Annotated[str | None, about("The tenant whose pause or limit is the cause; null: the action's is.")] = None


class HeldKey(Record, omits=False):
    """An ordering key that a task in CRITICAL_ERROR holds."""

    key: str
    task_id: Annotated[int, about("The task that failed.")]
    action: str | None
    since: Annotated[str | None, about("When it failed.")]
    waiting: Annotated[int, about("Tasks that wait behind it, counted up to 10000.")]
    tenant: Annotated[str | None, about("Whose key it is.")] = None


class HeldKeys(Record):
    keys: list[HeldKey]  # type: ignore[assignment]  # a method of dicts
    cursor: Annotated[str | None, NEXT_CURSOR]


class ReleasedKey(Record):
    key: str
    released: Annotated[bool, about("False: it was not held, and nothing was changed.")]
    next: Annotated[int | None, about("The task that waited longest and may run now; null when none did.")]


class JobError(Record):
    id: Annotated[int | None, about("The task; null where the job itself failed.")]
    reason: str


class Job(Record):
    id: int
    kind: Annotated[str, about("The method that made it.")]
    params: Annotated[Any, about("What it was made with, and `top`, the highest id of a task that it is about.")]
    state: JobStateName
    total: Annotated[int | None, about("Tasks that it is about, as counted before it began; null before that.")]
    total_is_exact: Annotated[bool, about("False: estimated.")]
    seen: Annotated[int, about("Records looked at so far.")]
    changed: int
    refused: Annotated[int, about("Tasks that the filter fits, and that could not be changed.")]
    rate: Annotated[float, about("Tasks changed or refused a second.")]
    errors: Annotated[list[JobError], about("Of the first 20 that were refused, or why the job failed.")]
    created_at: Instant
    updated_at: Instant
    finished_at: Instant | None


class BulkPreview(Record):
    """With `dry_run`: what a job would be about."""

    count: Annotated[int, about("Tasks found.")]
    exact: Annotated[bool, about("False: there were too many records to look at them all, and there may be more.")]
    estimate: Annotated[int, about("How many there may be in all; the count where that is exact.")]
    sample: Annotated[list[int], about("The lowest ids of them.")]


class BulkStarted(Record):
    job: Annotated[int, about("Of the job that does it; see job.get.")]


class JobPage(Record):
    jobs: list[Job]
    cursor: Annotated[str | None, NEXT_CURSOR]


class Answered(Record):
    id: Annotated[int | None, about("The task that waited; null for an answer that is kept.")]
    state: Annotated[StateName | None, about("Its state now.")]
    kept: Annotated[bool, about("True: no task waits for it yet; the first one to do so within a day gets it.")]
    duplicate: Annotated[bool, about("True: the same answer came before, and this one changed nothing.")]


class Action(Record):
    action: str
    paused: Annotated[bool, about("Its tasks are taken and none is sent.")]
    max_in_flight: int | None
    rate: Annotated[float | None, about("Tasks a second.")]
    burst: int | None
    key_max_in_flight: int | None
    key_rate: float | None
    key_burst: int | None
    in_flight: Annotated[int, about("Claimed and not settled; counted while it is limited.")]
    updated_at: Annotated[str | None, about("When its limits were last changed; null when it has none.")]
    held_until: Annotated[str | None, about("No task is sent before: a handler met a rate limit.")] = None


class Actions(Record):
    actions: Annotated[list[Action], about("Those that are limited or paused.")]


class AnnouncedAction(Record):
    """An action that workers say they run, or for which tasks wait."""

    action: str
    workers: Annotated[int, about("Workers that run it now; 0: none.")]
    versions: Annotated[list[str], about("Of their code, as they announce it.")]
    seen_at: Annotated[str | None, about("The last announcement; null: there was none.")]
    description: str | None
    params: Annotated[Any, about("JSON Schema of the payload, or null.")]
    result: Annotated[Any, about("JSON Schema of the result, or null.")]
    waiting: Annotated[
        int, about("Tasks that workers without it gave back, and that wait for one with it; up to 10,000.")
    ]


class AnnouncedActions(Record):
    actions: Annotated[list[AnnouncedAction], about("By name.")]


class RouteChanged(Record):
    name: str
    deleted: bool


class Route(Record):
    name: str
    queue: str
    actions: list[str]
    labels: dict[str, str]
    position: int
    in_flight: int


class Routes(Record):
    routes: Annotated[list[Route], about("In the order in which they are tried.")]


class Tenant(Record):
    tenant: str
    paused: Annotated[bool, about("Its tasks are taken and none is sent.")]
    own: Annotated[bool, about("Its limits are its own; false: those of *, the default.")]
    max_in_flight: int | None
    rate: Annotated[float | None, about("Tasks a second.")]
    burst: int | None
    updated_at: Annotated[str | None, about("When its own rule was last changed; null when it has none.")]


class TenantDetail(Tenant):
    in_flight: Annotated[int, about("Claimed and not settled; counted while it is limited.")]
    waiting: Annotated[int, about("Of its tasks, those that a limit or a pause keeps waiting.")]


class TenantPage(Record):
    tenants: list[Tenant]
    cursor: Annotated[str | None, NEXT_CURSOR]


class Schedule(Record):
    id: int
    name: str
    state: Annotated[
        Literal["ACTIVE", "PAUSED", "ENDED", "STOPPED"],
        about("ENDED: nothing is to come; STOPPED: it cannot be fired, `problem` says why."),
    ]
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
    missed: MissedName
    max_missed: int
    max_lateness: float | None
    overlap: OverlapName
    priority: int
    max_attempts: int | None
    timeout: float | None
    ordering_key: str | None
    labels: dict[str, str]
    paused: bool
    tenant: Annotated[str | None, about("For whom its tasks are.")]
    created_at: Instant
    updated_at: Instant


class ScheduleDetail(Schedule):
    payload: Any
    upcoming: Annotated[list[str], about("The next few instants; of one that is paused, those if it were resumed now.")]


class SchedulePage(Record):
    schedules: list[Schedule]
    cursor: Annotated[str | None, NEXT_CURSOR]


class ScheduleDeleted(Record):
    id: int
    name: str
    deleted: bool = True


class ScheduleRun(Record):
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
    instants: Annotated[
        int, about("How many instants the row stands for; of a cron expression some 500, with all 10000, may be more.")
    ]


class SchedulePageOfRuns(Record):
    runs: list[ScheduleRun]
    cursor: Annotated[str | None, NEXT_CURSOR]


class ImportStarted(Record):
    id: Annotated[int, about("For schedule.import_status.")]
    total: int


class ImportStatus(Record):
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


class WorkflowAccepted(Record):
    id: int
    state: WorkflowStateName
    duplicate: Annotated[bool, about("True: this key was used before with this definition; nothing was added.")]


class Workflow(Record):
    id: int
    key: str | None
    name: str
    state: WorkflowStateName
    steps: Annotated[int, about("How many there are, children and compensations included.")]
    open: Annotated[int, about("How many have not come to their end.")]
    reason: Annotated[str | None, about("Which step it failed by, or why it was cancelled.")]
    compensated: Annotated[bool, about("What had succeeded is being undone, or was.")]
    created_at: Instant
    updated_at: Instant
    finished_at: Instant | None
    tenant: Annotated[str | None, about("For whom its steps are.")]


class Step(Record):
    number: int
    name: str
    kind: StepKindName
    state: Annotated[StateName, about("Of its task; of a step without one, SUCCESS as soon as its children are made.")]
    action: str | None = None
    task_id: int | None = None
    reason: str | None = None
    parent: Annotated[str | None, about("The step that made it; of a compensation, the one that it undoes.")] = None
    after: Annotated[list[str], about("Its predecessors, the first 20 of them.")] = []  # noqa: RUF012
    after_count: Annotated[int, about("How many predecessors it has.")] = 0
    children: Annotated[int, about("How many steps it has made.")] = 0
    open_children: Annotated[int, about("How many of these have not come to their end.")] = 0


class WorkflowDetail(Workflow):
    counts: Annotated[Mapping[StateName, int], about("Steps by state; SCHEDULED: released and not settled.")]
    tree: Annotated[list[Step], about("A page of its steps, by number.")]
    cursor: Annotated[str | None, NEXT_CURSOR]


class WorkflowPage(Record):
    workflows: list[Workflow]
    cursor: Annotated[str | None, NEXT_CURSOR]


class WorkflowChanged(Record):
    id: int
    state: WorkflowStateName
    restarted: Annotated[int, about("How many steps begin again.")]
