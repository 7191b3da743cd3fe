# Generated from the api's structs by .ci/records.py: run `make clients`.
"""The answers of the api: dicts whose members are attributes too."""

from typing import Any, Literal

from penstock.client.record import Record

State = Literal["WAITING", "SCHEDULED", "ACQUIRED", "ERROR", "SUCCESS", "CRITICAL_ERROR", "CANCELLED"]
Cause = Literal[
    "settled",
    "running",
    "sent",
    "event",
    "steps",
    "ordering_key",
    "not_due",
    "expired",
    "unknown_action",
    "paused",
    "limit",
    "backlog",
    "no_scheduler",
]
JobState = Literal["RUNNING", "DONE", "FAILED", "CANCELLED"]
Missed = Literal["skip", "one", "all"]
Overlap = Literal["allow", "skip", "queue"]
WorkflowState = Literal["RUNNING", "FAILING", "SUCCESS", "FAILED", "CANCELLED"]
StepKind = Literal["task", "map", "join", "compensation"]


class Accepted(Record):
    id: int
    state: State
    duplicate: bool
    replaced: bool | None = None


class Task(Record):
    id: int
    action: str
    state: State
    attempts: int
    max_attempts: int
    priority: int
    run_at: str
    created_at: str
    updated_at: str
    progress: Any
    result: Any
    error: Any
    reason: str | None = None
    result_gone: bool = False
    tenant: str | None = None
    trace_id: str | None = None
    result_unread: str | None = None


class Failure(Record):
    attempt: int
    claim: int
    at: str
    error: Any
    worker: str | None


class WaitsFor(Record):
    token: str
    until: str


class FinishedStep(Record):
    name: str
    repetition: int
    result: Any
    error: Any
    began_at: str | None
    seconds: float | None
    tries: int
    recorded_at: str
    claim: int
    worker: str | None
    unread: str | None


class TaskDetail(Task):
    payload: Any
    unique_key: str | None
    ordering_key: str | None
    limit_key: str | None
    labels: Any
    expires_at: str | None
    timeout: float | None
    claim: int
    worker: str | None
    failures: list[Failure]
    claimed_at: str | None = None
    waits_for: WaitsFor | None = None
    steps: list[FinishedStep] | None = None
    snoozes: int = 0
    payload_gone: bool = False
    payload_unread: str | None = None


class Changed(Record):
    id: int
    state: State


class TaskPage(Record):
    tasks: list[Task]
    cursor: str | None


class Rates(Record):
    enqueued_per_second: float
    succeeded_per_second: float
    failed_per_second: float


class Lag(Record):
    due: int
    oldest_due_seconds: float


class Statistics(Record):
    states: dict[State, int]
    actions: dict[str, dict[State, int]]
    rates: Rates
    lag: Lag


class TenantStatistics(Record):
    tenant: str
    states: dict[State, int]
    actions: dict[str, dict[State, int]]
    at_least: list[State]


class HeldKey(Record):
    key: str
    task_id: int
    action: str | None
    since: str | None
    waiting: int
    tenant: str | None = None


class HeldKeys(Record):
    cursor: str | None


class ReleasedKey(Record):
    key: str
    released: bool
    next: int | None


class Action(Record):
    action: str
    paused: bool
    max_in_flight: int | None
    rate: float | None
    burst: int | None
    key_max_in_flight: int | None
    key_rate: float | None
    key_burst: int | None
    in_flight: int
    updated_at: str | None
    held_until: str | None = None


class AnnouncedAction(Record):
    action: str
    workers: int
    versions: list[str]
    seen_at: str | None
    description: str | None
    params: Any
    result: Any
    waiting: int


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


class Tenant(Record):
    tenant: str
    paused: bool
    own: bool
    max_in_flight: int | None
    rate: float | None
    burst: int | None
    updated_at: str | None


class TenantDetail(Tenant):
    in_flight: int
    waiting: int


class Explanation(Record):
    id: int
    state: State
    cause: Cause
    reason: str
    task: int | None = None
    workflow: int | None = None
    task_state: State | None = None
    tenant: str | None = None


class BulkStarted(Record):
    job: int


class BulkPreview(Record):
    count: int
    exact: bool
    estimate: int
    sample: list[int]


class JobError(Record):
    id: int | None
    reason: str


class Job(Record):
    id: int
    kind: str
    params: Any
    state: JobState
    total: int | None
    total_is_exact: bool
    seen: int
    changed: int
    refused: int
    rate: float
    errors: list[JobError]
    created_at: str
    updated_at: str
    finished_at: str | None


class JobPage(Record):
    jobs: list[Job]
    cursor: str | None


class Answered(Record):
    id: int | None
    state: State | None
    kept: bool
    duplicate: bool


class Schedule(Record):
    id: int
    name: str
    state: Literal["ACTIVE", "PAUSED", "ENDED", "STOPPED"]
    expression: str
    timezone: str
    action: str
    next_at: str | None
    last_at: str | None
    last_task_id: int | None
    problem: str | None
    start_at: str | None
    end_at: str | None
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
    tenant: str | None
    created_at: str
    updated_at: str


class ScheduleDetail(Schedule):
    payload: Any
    upcoming: list[str]


class SchedulePage(Record):
    schedules: list[Schedule]
    cursor: str | None


class ScheduleDeleted(Record):
    id: int
    name: str
    deleted: bool = True


class ScheduleRun(Record):
    run: str
    scheduled_at: str
    fired_at: str
    outcome: State | Literal["SKIPPED", "MISSED", "CLEANED"]
    task_id: int | None
    manual: bool
    since: str | None
    instants: int


class SchedulePageOfRuns(Record):
    runs: list[ScheduleRun]
    cursor: str | None


class ImportStarted(Record):
    id: int
    total: int


class ImportStatus(Record):
    id: int
    state: Literal["RUNNING", "DONE"]
    total: int
    seen: int
    created: int
    replaced: int
    refused: int
    errors: list[Any]
    created_at: str
    updated_at: str
    finished_at: str | None


class WorkflowAccepted(Record):
    id: int
    state: WorkflowState
    duplicate: bool


class Workflow(Record):
    id: int
    key: str | None
    name: str
    state: WorkflowState
    steps: int
    open: int
    reason: str | None
    compensated: bool
    created_at: str
    updated_at: str
    finished_at: str | None
    tenant: str | None


class Step(Record):
    number: int
    name: str
    kind: StepKind
    state: State
    action: str | None = None
    task_id: int | None = None
    reason: str | None = None
    parent: str | None = None
    after: list[str] = []  # noqa: RUF012
    after_count: int = 0
    children: int = 0
    open_children: int = 0


class WorkflowDetail(Workflow):
    counts: dict[State, int]
    tree: list[Step]
    cursor: str | None


class WorkflowPage(Record):
    workflows: list[Workflow]
    cursor: str | None


class WorkflowChanged(Record):
    id: int
    state: WorkflowState
    restarted: int
