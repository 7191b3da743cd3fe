"""What a request means: JSON-RPC methods and their raw parameters to checked commands. Pure.

The api and the submitter share this, so a method means the same over HTTP and through the inbound queue.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from penstock.errors import HANDLER_ERROR, InvalidParams, MethodNotFound, TooLarge
from penstock.firing import render
from penstock.keys import Permission, check_name
from penstock.rules import RULE_PARAMS, RuleCommand, read_rule
from penstock.schedules import (
    SCHEDULE_PARAMS,
    CreateSchedule,
    DeleteSchedule,
    GetSchedule,
    ListRuns,
    ListSchedules,
    NewSchedule,
    PauseSchedule,
    ReadImport,
    ResumeSchedule,
    RunSchedule,
    ScheduleCommand,
    ScheduleCreateManyParams,
    ScheduleCreateParams,
    ScheduleDeleteParams,
    ScheduleGetParams,
    ScheduleImportStatusParams,
    ScheduleListParams,
    SchedulePauseParams,
    ScheduleResumeParams,
    ScheduleRunNowParams,
    ScheduleRunsParams,
    ScheduleUpdateParams,
    new_schedule,
    read_import,
    read_labels,
    read_name,
    read_update,
)
from penstock.selection import BulkWork, NewTimes, Operation, Selection
from penstock.settings import Settings
from penstock.tasks import (
    ACTION_MAX_CHARS,
    BEGINNING,
    KEY_MAX_CHARS,
    LABEL_NAME_MAX_CHARS,
    LABEL_VALUE_MAX_CHARS,
    MAX_ATTEMPTS_LIMIT,
    MAX_LABELS,
    PRIORITY_MAX,
    PRIORITY_MIN,
    REASON_MAX_CHARS,
    NewTask,
    OnDuplicate,
    State,
)
from penstock.tenant_rules import TENANT_PARAMS, TenantCommand, read_tenant_rule
from penstock.tenants import kept_key, own_key, read_tenant, tenant_of_key
from penstock.wire import (
    ClaimId,
    Reference,
    check_json,
    check_payload,
    check_token,
    decode_sealed,
    digest_of,
    escape_for_sqs,
    parse_claim_id,
    utf8_size,
)
from penstock.workflows import (
    WORKFLOW_PARAMS,
    CancelWorkflow,
    ChildParams,
    GetWorkflow,
    ListWorkflows,
    RetryWorkflow,
    WorkflowCancelParams,
    WorkflowCommand,
    WorkflowCreateParams,
    WorkflowListParams,
    WorkflowStatusParams,
    read_create,
    read_which,
)

SUBMIT_PREFIX = "submit:"
MAX_IDS = 1000
MAX_LIST = 1000
MESSAGE_ID_MAX_CHARS = 100
LONGEST_DELAY_SECONDS = 100 * 366 * 86_400.0
LONGEST_WAIT_SECONDS = 60.0  # load balancers close a connection that is silent for longer
LONGEST_TIMEOUT_SECONDS = 43_200.0  # SQS hides a message no longer

TaskId = int | str
QueueName = Literal["inbound", "outbound", "results"]
Source = Literal["inbound", "results"]
_INT8_MAX = 2**63 - 1
_INT4_MAX = 2**31 - 1
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


# Parameters, by method. The field order is the order of positional parameters.


class EnqueueParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    action: str
    payload: msgspec.Raw = msgspec.Raw(b"{}")
    run_at: str | int | None = None
    delay: float | None = None
    priority: int | None = None
    unique_key: str | None = None
    ordering_key: str | None = None
    max_attempts: int | None = None
    timeout: float | None = None
    labels: dict[str, str] | None = None
    expires_at: str | int | None = None
    expires_in: float | None = None
    limit_key: str | None = None
    unique: Literal["retained", "live"] | float = "retained"
    on_duplicate: OnDuplicate = "return"
    tenant: str | None = None
    sealed_payload: str | None = None


class StatusParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: TaskId | None = None
    ids: list[TaskId] | None = None
    detail: bool = False


class ResultParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: TaskId | None = None
    ids: list[TaskId] | None = None
    timeout: float = 20.0
    wait: Literal["all", "any"] = "all"


class CancelParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: TaskId
    reason: str | None = None


class RetryParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: TaskId


class RescheduleParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: TaskId
    run_at: str | int | None = None
    delay: float | None = None
    priority: int | None = None


class ListParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    state: State | None = None
    action: str | None = None
    limit: int = 50
    cursor: str | None = None
    labels: dict[str, str] | None = None
    key: str | None = None
    since: str | int | None = None
    until: str | int | None = None
    tenant: str | None = None


class StatsParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tenant: str | None = None


class RejectedListParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    limit: int = 50
    cursor: str | None = None
    source: Source | None = None


class RejectedShowParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: TaskId


class RejectedRetryParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    ids: list[TaskId] | None = None
    limit: int | None = None
    cursor: str | None = None
    source: Source | None = None


class RejectedPurgeParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    ids: list[TaskId] | None = None
    limit: int | None = None
    cursor: str | None = None
    source: Source | None = None


class DlqStatsParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class DlqListParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    queue: QueueName
    limit: int = 50


class DlqShowParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    queue: QueueName
    id: str


class DlqReplayParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    queue: QueueName
    ids: list[str] | None = None
    limit: int | None = None
    force: bool = False


class DlqPurgeParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    queue: QueueName
    ids: list[str] | None = None
    limit: int | None = None


class KeysCreateParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    permissions: list[Permission]
    expires_in: float | None = None
    tenant: str | None = None


class KeysListParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    limit: int = 50
    cursor: str | None = None
    revoked: bool = False


class KeysRevokeParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: TaskId


# Bulk operations and jobs: every bulk method takes a filter.


class BulkCancelParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    action: str | None = None
    states: list[State] | None = None
    labels: dict[str, str] | None = None
    older_than: float | None = None
    newer_than: float | None = None
    ids_from: TaskId | None = None
    ids_to: TaskId | None = None
    all: bool = False
    dry_run: bool = False
    tenant: str | None = None


class BulkRetryParams(BulkCancelParams, frozen=True, forbid_unknown_fields=True):
    pass


class BulkDeleteParams(BulkCancelParams, frozen=True, forbid_unknown_fields=True):
    pass


class BulkRescheduleParams(BulkCancelParams, frozen=True, forbid_unknown_fields=True):
    run_at: str | int | None = None
    delay: float | None = None
    spread: float = 0.0
    priority: int | None = None
    tenant: str | None = None  # once more, for the last position is that of what came last


class JobGetParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: TaskId


class JobListParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    limit: int = 50
    cursor: str | None = None


class OrderingListParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    limit: int = 50
    cursor: str | None = None


class AuditListParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    limit: int = 50
    cursor: str | None = None


class JobCancelParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: TaskId


class OrderingReleaseParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    key: str
    tenant: str | None = None


class ClaimsCheckParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    claims: list[str]


class TaskCompleteParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    token: str
    result: msgspec.Raw = msgspec.Raw(b"null")


class TaskFailParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    token: str
    error: str | dict[str, Any]
    final: bool = False
    retry_after: float | None = None


class DiscoverParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


PARAMS: dict[str, type[msgspec.Struct]] = {
    "enqueue": EnqueueParams,
    "status": StatusParams,
    "result": ResultParams,
    "cancel": CancelParams,
    "retry": RetryParams,
    "reschedule": RescheduleParams,
    "list": ListParams,
    "stats": StatsParams,
    "rejected.list": RejectedListParams,
    "rejected.show": RejectedShowParams,
    "rejected.retry": RejectedRetryParams,
    "rejected.purge": RejectedPurgeParams,
    "dlq.stats": DlqStatsParams,
    "dlq.list": DlqListParams,
    "dlq.show": DlqShowParams,
    "dlq.replay": DlqReplayParams,
    "dlq.purge": DlqPurgeParams,
    "keys.create": KeysCreateParams,
    "keys.list": KeysListParams,
    "keys.revoke": KeysRevokeParams,
    **RULE_PARAMS,
    **TENANT_PARAMS,
    "bulk.cancel": BulkCancelParams,
    "bulk.retry": BulkRetryParams,
    "bulk.delete": BulkDeleteParams,
    "bulk.reschedule": BulkRescheduleParams,
    "job.get": JobGetParams,
    "job.list": JobListParams,
    "job.cancel": JobCancelParams,
    "audit.list": AuditListParams,
    "ordering.list": OrderingListParams,
    "ordering.release": OrderingReleaseParams,
    "claims.check": ClaimsCheckParams,
    "task.complete": TaskCompleteParams,
    "task.fail": TaskFailParams,
    **SCHEDULE_PARAMS,
    **WORKFLOW_PARAMS,
    "rpc.discover": DiscoverParams,
}

# Commands: parameters that have been checked


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
class StartBulk:
    """Make a job of that kind; its parameters are ``work``."""

    operation: Operation
    work: BulkWork


@dataclass(frozen=True, slots=True)
class PreviewBulk:
    """The same with ``dry_run``: only tell what it would be about."""

    operation: Operation
    work: BulkWork


@dataclass(frozen=True, slots=True)
class GetJob:
    id: int


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
class CancelJob:
    id: int


@dataclass(frozen=True, slots=True)
class ListHeldKeys:
    """By key; ``after`` is the key that the page begins behind."""

    limit: int
    after: str | None


@dataclass(frozen=True, slots=True)
class ReleaseKey:
    """An ordering key, to be held no more."""

    key: str


@dataclass(frozen=True, slots=True)
class CheckClaims:
    claims: list[ClaimId]


@dataclass(frozen=True, slots=True)
class AnswerWait:
    """What a task waits for has come. answer: a member of a JSON-RPC response, result or error, as a worker gives it.

    digest: tells one answer from another. settings: by which it is recorded.
    """

    token: str
    answer: str
    digest: bytes
    settings: Settings = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Discover:
    pass


JobChange = StartBulk | CancelJob
JobCommand = JobChange | PreviewBulk | GetJob | ListJobs
Change = Cancel | Restart | Reschedule | JobChange | AnswerWait
RejectedCommand = ListRejected | ShowRejected | RetryRejected | PurgeRejected
DeadCommand = CountDead | ListDead | ShowDead | ReplayDead | PurgeDead
KeyCommand = CreateKey | ListKeys | RevokeKey
OrderingCommand = ListHeldKeys | ReleaseKey
Command = (
    Enqueue | Status | AwaitResults | Change | ListTasks | Stats | RejectedCommand | DeadCommand | KeyCommand
    | OrderingCommand | ListAudit | CheckClaims | JobCommand | RuleCommand | TenantCommand | ScheduleCommand
    | WorkflowCommand | Discover
)  # fmt: skip


def read_command(method: str, params: msgspec.Raw | bytes, settings: Settings) -> Command:
    """Check a method and its raw parameters. Raises MethodNotFound, InvalidParams, TooLarge."""
    raw = bytes(params)
    if method.startswith(SUBMIT_PREFIX):
        return Enqueue(_submitted(method.removeprefix(SUBMIT_PREFIX), raw or b"{}", settings))
    kind = PARAMS.get(method)
    if kind is None:
        raise MethodNotFound("Method not found", {"method": method[:200]})
    values: Any = _decode(kind, raw or b"{}")
    if method in RULE_PARAMS:
        return read_rule(values, _action)
    if method in TENANT_PARAMS:
        return read_tenant_rule(values)
    match values:
        case EnqueueParams():
            return Enqueue(_new_task(values, settings, large=True))
        case StatusParams():
            return _status(values)
        case ResultParams():
            return _await_results(values)
        case CancelParams():
            return Cancel(_id(values.id, "id"), _reason(values.reason))
        case RetryParams():
            return Restart(_id(values.id, "id"))
        case RescheduleParams():
            return _reschedule(values)
        case ListParams():
            return _list_tasks(values)
        case AuditListParams():
            return ListAudit(_limit(values.limit), _cursor(values.cursor))
        case RejectedListParams():
            return ListRejected(_limit(values.limit), _cursor(values.cursor), values.source)
        case RejectedShowParams():
            return ShowRejected(_id(values.id, "id"))
        case RejectedRetryParams():
            return RetryRejected(_which_rejected(values))
        case RejectedPurgeParams():
            return PurgeRejected(_which_rejected(values))
        case DlqStatsParams():
            return CountDead()
        case DlqListParams():
            return ListDead(values.queue, _limit(values.limit))
        case DlqShowParams():
            return ShowDead(values.queue, _message_id(values.id, "id"))
        case DlqReplayParams():
            return ReplayDead(values.queue, _which_dead(values), values.force)
        case DlqPurgeParams():
            return PurgeDead(values.queue, _which_dead(values))
        case KeysCreateParams():
            return _create_key(values)
        case KeysListParams():
            return ListKeys(_limit(values.limit), _cursor(values.cursor), values.revoked)
        case KeysRevokeParams():
            return RevokeKey(_id(values.id, "id"))
        case BulkCancelParams():  # and those that take more than a filter
            return _bulk(Operation(method), values)
        case JobGetParams():
            return GetJob(_id(values.id, "id"))
        case JobListParams():
            return ListJobs(_limit(values.limit), _cursor(values.cursor))
        case JobCancelParams():
            return CancelJob(_id(values.id, "id"))
        case OrderingListParams():
            return ListHeldKeys(_limit(values.limit), _kept_cursor(values.cursor))
        case OrderingReleaseParams():
            return ReleaseKey(kept_key(read_tenant(values.tenant), _key(values.key, "key") or ""))
        case TaskCompleteParams():
            return _completed(values, settings)
        case TaskFailParams():
            return _failed(values, settings)
        case ClaimsCheckParams():
            return CheckClaims(_claims(values.claims))
        case StatsParams():
            return Stats(read_tenant(values.tenant))
    if method in SCHEDULE_PARAMS:
        return _schedule_command(values, settings)
    if method in WORKFLOW_PARAMS:
        return _workflow_command(values, settings)
    return Discover()


_decoders: dict[type, msgspec.json.Decoder[Any]] = {kind: msgspec.json.Decoder(kind) for kind in PARAMS.values()}
_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
_FIELD = re.compile(r" - at `\$\.?(.*)`$")
_QUOTED = re.compile(r"`([^`]*)`")


def _decode(kind: type[msgspec.Struct], raw: bytes) -> Any:
    names = kind.__struct_fields__
    try:
        if raw.startswith(b"["):
            given = _decode_list(raw)
            if len(given) > len(names):
                raise InvalidParams("params", f"has {len(given)} positions; at most {len(names)}: {', '.join(names)}")
            pairs = (b'"%s":%s' % (n.encode(), bytes(v)) for n, v in zip(names, given, strict=False))
            raw = b"{" + b",".join(pairs) + b"}"
        return _decoders[kind].decode(raw)
    except msgspec.ValidationError as exc:
        raise _mistake(str(exc), names) from None
    except (ValueError, RecursionError) as exc:
        raise InvalidParams("params", f"cannot be read: {str(exc)[:200]}") from None


def _mistake(text: str, names: Iterable[str]) -> InvalidParams:
    quoted = _QUOTED.findall(text)
    if "unknown field" in text and quoted:
        near = difflib.get_close_matches(quoted[0], names, n=1)
        return InvalidParams(quoted[0][:100], "is unknown" + (f"; did you mean {near[0]}?" if near else ""))
    if "missing required field" in text and quoted:
        return InvalidParams(quoted[0], "is missing")
    at = _FIELD.search(text)
    return InvalidParams((at[1] if at else "") or "params", f"is wrong: {_FIELD.sub('', text)}")


def _list_tasks(given: ListParams) -> ListTasks:
    for name, value in (given.labels or {}).items():
        if _CONTROL.search(name) or _CONTROL.search(value):
            raise InvalidParams("labels", f"hold a control character at {name[:60]!r}")
    since, until = _instant(given.since, "since"), _instant(given.until, "until")
    if since is not None and until is not None and until <= since:
        raise InvalidParams("until", f"must be later than since, {since.isoformat()}, not {until.isoformat()}")
    return ListTasks(
        given.state, given.action, _limit(given.limit), _cursor(given.cursor), given.labels or None,
        _key(given.key, "key"), since, until, read_tenant(given.tenant),
    )  # fmt: skip


def _new_task(given: EnqueueParams, settings: Settings, *, large: bool = False) -> NewTask:
    """large: its payload may become an object."""
    payload = bytes(given.payload).decode("utf-8")
    _check_payload(payload, settings, large=large)
    offered = None if given.sealed_payload is None else _offered(given, settings)
    run_at = _start(given)
    max_attempts = settings.max_attempts if given.max_attempts is None else given.max_attempts
    if not 1 <= max_attempts <= MAX_ATTEMPTS_LIMIT:
        raise InvalidParams("max_attempts", f"must be between 1 and {MAX_ATTEMPTS_LIMIT}, not {max_attempts}")
    if given.timeout is not None and not 0 < given.timeout <= LONGEST_TIMEOUT_SECONDS:
        raise InvalidParams(
            "timeout", f"must be above 0 and at most {LONGEST_TIMEOUT_SECONDS:.0f} seconds, not {given.timeout}"
        )
    return NewTask(
        action=_action(given.action),
        payload=payload,
        run_at=run_at,
        delay_seconds=given.delay,
        priority=given.priority or 0,
        unique_key=_key(given.unique_key, "unique_key"),
        ordering_key=_key(given.ordering_key, "ordering_key"),
        max_attempts=max_attempts,
        timeout_seconds=given.timeout,
        labels=_labels(given.labels),
        expires_at=_expiry(given),
        expires_in_seconds=given.expires_in,
        limit_key=_key(given.limit_key, "limit_key"),
        unique=_unique(given),
        on_duplicate=given.on_duplicate,
        replaces_priority=given.on_duplicate == "replace" and given.priority is not None,
        tenant=read_tenant(given.tenant),
        offered=offered,
    )


def _offered(given: EnqueueParams, settings: Settings) -> str:
    """A payload that a client has sealed, as the text that stands for it; see intake.take_in."""
    text = json.dumps(given.sealed_payload)
    try:
        found = decode_sealed(text)
    except ValueError:
        found = ""
    if isinstance(found, str) or (isinstance(found, Reference) and not found.is_offered):
        raise InvalidParams("sealed_payload", "is nothing that a client of Penstock has sealed")
    if bytes(given.payload) != b"{}":
        raise InvalidParams("sealed_payload", "and payload exclude each other; give one")
    if isinstance(found, Reference):
        if settings.payload_bucket is None:
            raise InvalidParams("sealed_payload", "is an object, and this process has no PENSTOCK_PAYLOAD_BUCKET")
        if found.size > settings.payload_max_bytes:
            raise TooLarge("sealed_payload", found.size, settings.payload_max_bytes)
    elif not settings.payload_keys:
        raise InvalidParams("sealed_payload", "is encrypted, and this process has no PENSTOCK_PAYLOAD_KEYS")
    return text


def _start(given: EnqueueParams | RescheduleParams) -> datetime | None:
    """Check run_at, delay and priority; returns the first of them."""
    if given.run_at is not None and given.delay is not None:
        raise InvalidParams("delay", "and run_at exclude each other; give one")
    if given.delay is not None and not 0 <= given.delay <= LONGEST_DELAY_SECONDS:
        raise InvalidParams("delay", f"must be between 0 and {LONGEST_DELAY_SECONDS:.0f} seconds, not {given.delay}")
    if given.priority is not None and not PRIORITY_MIN <= given.priority <= PRIORITY_MAX:
        raise InvalidParams("priority", f"must be between {PRIORITY_MIN} and {PRIORITY_MAX}, not {given.priority}")
    return _instant(given.run_at)


def _expiry(given: EnqueueParams) -> datetime | None:
    if given.expires_at is not None and given.expires_in is not None:
        raise InvalidParams("expires_in", "and expires_at exclude each other; give one")
    _check_seconds(given.expires_in, "expires_in")
    return _instant(given.expires_at, "expires_at")


def _unique(given: EnqueueParams) -> Literal["retained", "live"] | float:
    if given.unique_key is None:
        for name, usual in (("unique", "retained"), ("on_duplicate", "return")):
            if getattr(given, name) != usual:
                raise InvalidParams(name, "goes with unique_key")
    if not isinstance(given.unique, str):
        _check_seconds(given.unique, "unique")
    return given.unique


def _check_seconds(seconds: float | None, name: str) -> None:
    if seconds is not None and not 0 < seconds <= LONGEST_DELAY_SECONDS:
        raise InvalidParams(name, f"must be above 0 and at most {LONGEST_DELAY_SECONDS:.0f} seconds, not {seconds}")


def _labels(labels: dict[str, str] | None) -> str | None:
    """Labels as JSON text; none at all are None."""
    if not labels:
        return None
    if len(labels) > MAX_LABELS:
        raise InvalidParams("labels", f"are {len(labels)}; the limit is {MAX_LABELS}")
    for name, value in labels.items():
        if not 1 <= len(name) <= LABEL_NAME_MAX_CHARS or _CONTROL.search(name):
            raise InvalidParams(
                "labels", f"need names of 1 to {LABEL_NAME_MAX_CHARS} characters, none of them a control character"
            )
        if len(value) > LABEL_VALUE_MAX_CHARS or _CONTROL.search(value):
            raise InvalidParams(
                f"labels.{name}",
                f"must have at most {LABEL_VALUE_MAX_CHARS} characters, none of them a control character",
            )
    return msgspec.json.encode(labels).decode("utf-8")


def _reason(reason: str | None) -> str | None:
    if reason is not None and (not 1 <= len(reason) <= REASON_MAX_CHARS or _CONTROL.search(reason)):
        raise InvalidParams("reason", f"must have 1 to {REASON_MAX_CHARS} characters, none of them a control character")
    return reason


def _reschedule(given: RescheduleParams) -> Reschedule:
    run_at = _start(given)
    if run_at is None and given.delay is None and given.priority is None:
        raise InvalidParams("run_at", "or delay or priority must be given")
    return Reschedule(_id(given.id, "id"), run_at, given.delay, given.priority)


def _claims(given: list[str]) -> list[ClaimId]:
    if not 1 <= len(given) <= MAX_IDS:
        raise InvalidParams("claims", f"must hold 1 to {MAX_IDS} claims, not {len(given)}")
    claims = []
    for position, text in enumerate(given):
        claim = parse_claim_id(text)
        if claim is None:
            raise InvalidParams(f"claims[{position}]", f"must be <task id>:<claim>, not {text[:60]!r}")
        claims.append(claim)
    return claims


def _completed(given: TaskCompleteParams, settings: Settings) -> AnswerWait:
    return _answer(given.token, "result", bytes(given.result).decode("utf-8"), settings)


def _failed(given: TaskFailParams, settings: Settings) -> AnswerWait:
    """The error as that of a worker, its hints among the data."""
    error = {"message": given.error} if isinstance(given.error, str) else dict(given.error)
    for name in error.keys() - {"code", "message", "data"}:
        raise InvalidParams(f"error.{name[:60]}", "is no member of an error; these are code, message and data")
    if not isinstance(error.get("message"), str) or not error["message"]:
        raise InvalidParams("error", "must be a text that is not empty, or an object with one as its message")
    code = error.get("code", HANDLER_ERROR)
    if isinstance(code, bool) or not isinstance(code, int):
        raise InvalidParams("error.code", f"must be an integer, not {str(code)[:60]!r}")
    data: Any = error.get("data", {})
    if not isinstance(data, dict):
        raise InvalidParams("error.data", "must be an object")
    _check_span(given.retry_after, "retry_after")
    hints = {"final": given.final or None, "retry_after": given.retry_after}
    data = {**data, **{name: value for name, value in hints.items() if value is not None}}
    whole = {"code": code, "message": error["message"]} | ({"data": data} if data else {})
    return _answer(given.token, "error", msgspec.json.encode(whole).decode("utf-8"), settings)


def _answer(token: str, member: str, text: str, settings: Settings) -> AnswerWait:
    try:
        check_token(token)
    except ValueError as exc:
        raise InvalidParams("token", f"is wrong: {exc}") from None
    size = utf8_size(text)
    if size > settings.result_limit_bytes:
        raise TooLarge(member, size, settings.result_limit_bytes)
    check_json(text, member)
    answer = f'"{member}":{text}'
    return AnswerWait(token, answer, digest_of(answer), settings)


def _submitted(action: str, raw: bytes, settings: Settings) -> NewTask:
    payload = raw.decode("utf-8")
    value = _check_payload(payload, settings, field="params", large=True)
    unique_key = None
    if isinstance(value, dict) and value.get("objectID") is not None:
        object_id = value["objectID"]
        if isinstance(object_id, bool) or not isinstance(object_id, str | int | float):
            raise InvalidParams("objectID", "must be a string or a number")
        # 23 and "23" are one object: the older convention sends either.
        unique_key = _key(str(object_id), "objectID")
    return NewTask(_action(action), payload, unique_key=unique_key, max_attempts=settings.max_attempts)


def _check_payload(payload: str, settings: Settings, *, field: str = "payload", large: bool = False) -> Any:
    size = utf8_size(escape_for_sqs(payload))  # as it will travel
    limit = settings.largest_payload_bytes if large else settings.payload_limit_bytes
    if size > limit:
        raise TooLarge(field, size, limit)
    return check_payload(payload, field)


def _action(action: str) -> str:
    if not action:
        raise InvalidParams("action", "is empty")
    if len(action) > ACTION_MAX_CHARS:
        raise InvalidParams("action", f"is {len(action)} characters long; the limit is {ACTION_MAX_CHARS}")
    if _CONTROL.search(action):
        raise InvalidParams("action", "holds a control character")
    if action.startswith("rpc."):
        raise InvalidParams("action", "must not begin with rpc., which JSON-RPC reserves")
    return action


def _key(key: str | None, name: str) -> str | None:
    if key is None:
        return None
    if not 1 <= len(key) <= KEY_MAX_CHARS:
        raise InvalidParams(name, f"must have 1 to {KEY_MAX_CHARS} characters, not {len(key)}")
    if _CONTROL.search(key):
        raise InvalidParams(name, "holds a control character")
    return key


def _kept_cursor(cursor: str | None) -> str | None:
    """An ordering key as it is kept, behind the name of its tenant if it has one."""
    if cursor is None:
        return None
    tenant, key = tenant_of_key(cursor), _key(own_key(cursor), "cursor")
    return kept_key(read_tenant(tenant, "cursor"), key or "")


def _instant(value: str | int | None, name: str = "run_at") -> datetime | None:
    if value is None:
        return None
    try:
        instant = (
            datetime.fromtimestamp(value / 1000, UTC) if isinstance(value, int) else msgspec.convert(value, datetime)
        )
    except (ValueError, OverflowError, OSError):
        raise InvalidParams(
            name, f"must be RFC 3339 such as 2030-01-31T08:00:00Z, or epoch milliseconds, not {str(value)[:60]!r}"
        ) from None
    if instant.tzinfo is None:
        raise InvalidParams(name, f"needs a zone, such as Z or +01:00: {value!r}")
    try:
        instant = instant.astimezone(UTC)
    except (OverflowError, ValueError):
        raise InvalidParams(name, f"is out of range: {value!r}") from None
    if instant < BEGINNING.run_at:
        # The driver writes the first instant of year 1 as minus infinity, before which no claim can begin to look.
        raise InvalidParams(name, f"is out of range: {value!r}")
    return instant


def _id(value: TaskId, name: str) -> int:
    if isinstance(value, str):
        if not value.isascii() or not value.isdigit() or len(value) > 19:
            raise InvalidParams(name, f"must be a task's number, not {value[:60]!r}")
        value = int(value)
    if not 0 <= value <= _INT8_MAX:
        raise InvalidParams(name, f"must be between 0 and {_INT8_MAX}")
    return value


def _ids(values: list[TaskId]) -> list[int]:
    if not 1 <= len(values) <= MAX_IDS:
        raise InvalidParams("ids", f"must hold 1 to {MAX_IDS} ids, not {len(values)}")
    return [_id(value, f"ids[{position}]") for position, value in enumerate(values)]


def _status(given: StatusParams) -> Status:
    return Status(_id_or_ids(given), given.ids is not None, given.detail)


def _await_results(given: ResultParams) -> AwaitResults:
    if not 0 <= given.timeout <= LONGEST_WAIT_SECONDS:
        raise InvalidParams("timeout", f"must be between 0 and {LONGEST_WAIT_SECONDS:.0f} seconds, not {given.timeout}")
    return AwaitResults(_id_or_ids(given), given.ids is not None, given.timeout, given.wait == "any")


def _id_or_ids(given: StatusParams | ResultParams) -> list[int]:
    if (given.id is None) == (given.ids is None):
        raise InvalidParams("id", "or ids must be given, not both")
    if given.ids is not None:
        return _ids(given.ids)
    assert given.id is not None
    return [_id(given.id, "id")]


def _schedule_command(values: Any, settings: Settings) -> ScheduleCommand:
    match values:
        case ScheduleCreateParams():
            return CreateSchedule(new_schedule(values, _template(values, settings)), values.replace)
        case ScheduleUpdateParams():
            return read_update(values, lambda members: _whole_schedule(members, settings))
        case ScheduleListParams():
            labels = None if values.labels is None else read_labels(values.labels)
            return ListSchedules(
                labels, values.action, values.paused, _limit(values.limit), _cursor(values.cursor),
                read_tenant(values.tenant),
            )  # fmt: skip
        case ScheduleRunsParams():
            return ListRuns(read_name(values.name), _limit(values.limit), _cursor(values.cursor))
        case ScheduleCreateManyParams():
            return read_import(values)
        case ScheduleImportStatusParams():
            return ReadImport(_id(values.id, "id"))
        case ScheduleRunNowParams():
            return RunSchedule(read_name(values.name), settings.max_attempts)
    return _OF_A_NAME[type(values)](read_name(values.name))


_OF_A_NAME: dict[type, Callable[[str], ScheduleCommand]] = {
    ScheduleGetParams: GetSchedule,
    ScheduleDeleteParams: DeleteSchedule,
    SchedulePauseParams: PauseSchedule,
    ScheduleResumeParams: ResumeSchedule,
}


def _workflow_command(values: Any, settings: Settings) -> WorkflowCommand:
    if isinstance(values, WorkflowCreateParams):
        return read_create(values, lambda step: step_task(step, settings))
    if isinstance(values, WorkflowListParams):
        return ListWorkflows(values.state, _limit(values.limit), _cursor(values.cursor), read_tenant(values.tenant))
    which = read_which(None if values.id is None else _id(values.id, "id"), values.key, values.tenant)
    if isinstance(values, WorkflowStatusParams):
        after = _cursor(values.cursor)
        if after is not None and after > _INT4_MAX:
            raise InvalidParams("cursor", f"must be that of a page before, not {values.cursor!r}")
        return GetWorkflow(which, _limit(values.limit), -1 if after is None else after)
    if isinstance(values, WorkflowCancelParams):
        return CancelWorkflow(which, _reason(values.reason))
    return RetryWorkflow(which)


def step_task(given: ChildParams, settings: Settings) -> NewTask:
    """The task of a step of a workflow, or of a spawned child. Raises InvalidParams, TooLarge."""
    members = {name: getattr(given, name) for name in _OF_A_STEP}
    return _new_task(EnqueueParams(**members), settings)


_OF_A_STEP = tuple(name for name in EnqueueParams.__struct_fields__ if name in ChildParams.__struct_fields__)


def _whole_schedule(members: Mapping[str, Any], settings: Settings) -> NewSchedule:
    given = _decode(ScheduleCreateParams, msgspec.json.encode(members))
    return new_schedule(given, _template(given, settings))


def _template(given: ScheduleCreateParams, settings: Settings) -> NewTask:
    """The task that each fire makes, but for what is filled into its payload, which must have room too."""
    task = _new_task(
        EnqueueParams(
            given.action,
            given.payload,
            priority=given.priority,
            ordering_key=given.ordering_key,
            max_attempts=given.max_attempts,
            timeout=given.timeout,
            tenant=given.tenant,
        ),
        settings,
    )
    _check_payload(render(task.payload, given.name, _INT8_MAX, BEGINNING.run_at), settings)
    return task


def _create_key(given: KeysCreateParams) -> CreateKey:
    try:
        name = check_name(given.name)
    except ValueError as exc:
        raise InvalidParams("name", str(exc)) from None
    if not given.permissions:
        raise InvalidParams("permissions", f"must hold at least one of {', '.join(Permission)}")
    _check_seconds(given.expires_in, "expires_in")
    return CreateKey(name, given.permissions, given.expires_in, read_tenant(given.tenant))


def _bulk(operation: Operation, given: BulkCancelParams) -> StartBulk | PreviewBulk:
    how = _new_times(given) if isinstance(given, BulkRescheduleParams) else None
    work = BulkWork(_selection(operation, given), how)
    return PreviewBulk(operation, work) if given.dry_run else StartBulk(operation, work)


def _selection(operation: Operation, given: BulkCancelParams) -> Selection:
    filters = ("action", "states", "labels", "older_than", "newer_than", "ids_from", "ids_to", "tenant")
    used = [name for name in filters if getattr(given, name) is not None]
    if given.all and used:
        raise InvalidParams("all", f"means every task, so it goes without {', '.join(used)}")
    if not given.all and not used:
        raise InvalidParams("all", f"must be true where no task is left out; else give any of {', '.join(filters)}")
    for name in ("states", "labels"):
        if getattr(given, name) is not None and not getattr(given, name):
            raise InvalidParams(name, "is empty; leave it out, or say what must fit")
    for name in ("older_than", "newer_than"):
        _check_span(getattr(given, name), name)
    if given.older_than is not None and given.newer_than is not None and given.newer_than <= given.older_than:
        raise InvalidParams("newer_than", f"must be above older_than, {given.older_than}, not {given.newer_than}")
    first = None if given.ids_from is None else _id(given.ids_from, "ids_from")
    last = None if given.ids_to is None else _id(given.ids_to, "ids_to")
    if first is not None and last is not None and last < first:
        raise InvalidParams("ids_to", f"must be at least ids_from, {first}, not {last}")
    for place, state in enumerate(given.states or ()):
        if state not in operation.states:
            raise InvalidParams(f"states[{place}]", f"is {state}; {operation} is about {', '.join(operation.states)}")
    for name, value in (given.labels or {}).items():
        if _CONTROL.search(name) or _CONTROL.search(value):
            raise InvalidParams("labels", f"hold a control character at {name[:60]!r}")
    return Selection(
        states=operation.states if given.states is None else tuple(dict.fromkeys(given.states)),
        action=None if given.action is None else _action(given.action),
        labels=given.labels,
        older_than=given.older_than,
        newer_than=given.newer_than,
        ids_from=first,
        ids_to=last,
        tenant=read_tenant(given.tenant),
    )


def _new_times(given: BulkRescheduleParams) -> NewTimes:
    if given.run_at is not None and given.delay is not None:
        raise InvalidParams("delay", "and run_at exclude each other; give one")
    if given.run_at is None and given.delay is None:
        if given.priority is None:
            raise InvalidParams("run_at", "or delay or priority must be given, or nothing would change")
        if given.spread:
            raise InvalidParams("spread", f"needs run_at or delay to begin at, not {given.spread} alone")
    _check_span(given.delay, "delay")
    _check_span(given.spread, "spread")
    if given.priority is not None and not PRIORITY_MIN <= given.priority <= PRIORITY_MAX:
        raise InvalidParams("priority", f"must be between {PRIORITY_MIN} and {PRIORITY_MAX}, not {given.priority}")
    run_at = _instant(given.run_at)
    if run_at is not None and given.spread and run_at.year > 9000:
        raise InvalidParams("run_at", f"is out of range for a spread: {given.run_at!r}")
    return NewTimes(run_at, given.delay, given.spread, given.priority)


def _check_span(seconds: float | None, name: str) -> None:
    if seconds is not None and not 0 <= seconds <= LONGEST_DELAY_SECONDS:
        raise InvalidParams(name, f"must be between 0 and {LONGEST_DELAY_SECONDS:.0f} seconds, not {seconds}")


def _which_rejected(given: RejectedRetryParams | RejectedPurgeParams) -> list[int] | ListRejected:
    if (given.ids is None) == (given.limit is None):
        raise InvalidParams("ids", "or limit must be given, not both")
    if given.ids is None:
        assert given.limit is not None
        return ListRejected(_limit(given.limit), _cursor(given.cursor), given.source)
    for name in ("cursor", "source"):
        if getattr(given, name) is not None:
            raise InvalidParams(name, "goes with limit, not with ids")
    return _ids(given.ids)


def _which_dead(given: DlqReplayParams | DlqPurgeParams) -> list[str] | int:
    if (given.ids is None) == (given.limit is None):
        raise InvalidParams("ids", "or limit must be given, not both")
    if given.ids is None:
        assert given.limit is not None
        return _limit(given.limit)
    if not 1 <= len(given.ids) <= MAX_IDS:
        raise InvalidParams("ids", f"must hold 1 to {MAX_IDS} ids, not {len(given.ids)}")
    return [_message_id(value, f"ids[{position}]") for position, value in enumerate(given.ids)]


def _message_id(value: str, name: str) -> str:
    if not 1 <= len(value) <= MESSAGE_ID_MAX_CHARS or _CONTROL.search(value):
        raise InvalidParams(name, f"must be a message's id, of 1 to {MESSAGE_ID_MAX_CHARS} characters")
    return value


def _limit(limit: int) -> int:
    if not 1 <= limit <= MAX_LIST:
        raise InvalidParams("limit", f"must be between 1 and {MAX_LIST}, not {limit}")
    return limit


def _cursor(cursor: str | None) -> int | None:
    return None if cursor is None else _id(cursor, "cursor")
