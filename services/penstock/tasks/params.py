"""Parameters of the methods about tasks, positional in the order of their fields, and the new tasks of `enqueue` and
`submit:<action>`."""

import json
from datetime import datetime
from functools import partial
from math import isfinite
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from penstock.protocol import checks, task
from penstock.protocol.checks import ID, KEY, LABELS, LIMIT, MAX_IDS, MAX_LIST, PRIORITY, SPAN, Checked, TaskId
from penstock.protocol.errors import InvalidParams, TooLarge
from penstock.protocol.json_text import check_payload, decode_any, escape_for_sqs
from penstock.protocol.sealed import Reference, decode_sealed
from penstock.protocol.task import NewTask, OnDuplicate, State
from penstock.protocol.tenant import TENANT, TENANT_MAX_CHARS, check_stored
from penstock.protocol.views import CURSOR, about

if TYPE_CHECKING:
    from penstock.settings.model import Settings

LONGEST_WAIT_SECONDS = 60.0  # load balancers close a connection that is silent for longer

_PRIORITIES = f"{task.PRIORITY_MIN} to {task.PRIORITY_MAX}"
_KEY_CHARS = f"1 to {task.KEY_MAX_CHARS} characters."
_Delay = Annotated[float | None, about("Not before so many seconds from now; excludes run_at."), SPAN]
_Start = Annotated[str | int | None, about("Not before this instant: RFC 3339 with a zone, or epoch milliseconds.")]
_Task = Annotated[TaskId, about("The task."), ID]
_Token = Annotated[str, about(f"What the task waits for, or will wait for; 1 to {task.TOKEN_MAX_CHARS} characters.")]
_WaitingTenant = Annotated[
    str | None,
    about("The task's tenant, needed if its handler chose the token; a bound key need not name it."),
    TENANT,
]


class EnqueueParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Schedules and steps of workflows are made of it too."""

    action: Annotated[
        str, about(f"The action, which a handler carries out; 1 to {task.ACTION_MAX_CHARS} characters."), checks.ACTION
    ]
    payload: Annotated[
        msgspec.Raw, about("The handler's parameters: an object (by name) or an array (by position).")
    ] = msgspec.Raw(b"{}")
    run_at: _Start = None
    delay: Annotated[
        float | None, about("Not before so many seconds from now, by the database's clock; excludes run_at."), SPAN
    ] = None
    priority: Annotated[int | None, about(f"Higher first; {_PRIORITIES}, null for 0."), PRIORITY] = None
    unique_key: Annotated[
        str | None,
        about(f"One task per action and key, see unique; a second enqueue gets the first's id. {_KEY_CHARS}"),
        KEY,
    ] = None
    ordering_key: Annotated[str | None, about(f"Tasks of one key run one at a time, in order. {_KEY_CHARS}"), KEY] = (
        None
    )
    max_attempts: Annotated[
        int | None,
        about(f"Attempts before the task fails; 1 to {task.MAX_ATTEMPTS_LIMIT}, by default the server's own."),
        checks.between(1, task.MAX_ATTEMPTS_LIMIT),
    ] = None
    timeout: Annotated[
        float | None,
        about("Seconds that one attempt may take; by default the action's or worker's own."),
        Checked(partial(checks.check_seconds, most=43_200.0)),  # SQS hides a message no longer
    ] = None
    labels: Annotated[
        dict[str, str] | None,
        about(
            f"Labels, text by text, to find it and to route it by; up to {task.MAX_LABELS}, names of 1 to "
            f"{task.LABEL_NAME_MAX_CHARS} and values of up to {task.LABEL_VALUE_MAX_CHARS} characters."
        ),
        LABELS,
    ] = None
    expires_at: Annotated[str | int | None, about("Cancelled unless started before this instant; as run_at.")] = None
    expires_in: Annotated[
        float | None,
        about("Cancelled unless started within so many seconds, by the database's clock; excludes expires_at."),
        checks.SECONDS,
    ] = None
    limit_key: Annotated[
        str | None, about(f"Which of its action's limits by key it counts against. {_KEY_CHARS}"), KEY
    ] = None
    unique: Annotated[
        Literal["retained", "live"] | float,
        about(
            "How long another task keeps the unique key from this one: retained (until its record is deleted), live "
            "(until it settles), or so many seconds since it took the key."
        ),
    ] = "retained"
    on_duplicate: Annotated[
        OnDuplicate,
        about(
            "If another task has the key: return its id; replace its payload, and its run_at, priority and expiry if "
            "given, while it waits; or error."
        ),
    ] = "return"
    tenant: Annotated[
        str | None,
        about(f"For whom it is; 1 to {TENANT_MAX_CHARS} characters. Its keys are that tenant's own."),
        TENANT,
    ] = None
    sealed_payload: Annotated[
        str | None, about("Instead of payload: a payload that a client has encrypted or stored in the bucket.")
    ] = None


class _OneOrMany(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: Annotated[TaskId | None, about("One task; the answer is an object."), ID] = None
    ids: Annotated[list[TaskId] | None, about(f"Up to {MAX_IDS} tasks; the answer is an array."), checks.IDS] = None

    def __post_init__(self) -> None:
        if (self.id is None) == (self.ids is None):
            raise InvalidParams("id", "or ids must be given, not both")

    @property
    def task_ids(self) -> list[int]:
        return [int(self.id)] if self.id is not None else list(map(int, self.ids or ()))


class StatusParams(_OneOrMany, frozen=True, forbid_unknown_fields=True):
    detail: Annotated[bool, about("With payload, keys, claim and every failed attempt.")] = False


class ResultParams(_OneOrMany, frozen=True, forbid_unknown_fields=True):
    timeout: Annotated[
        float,
        about(f"Seconds to wait, 0 to {LONGEST_WAIT_SECONDS:.0f}."),
        checks.between(0, LONGEST_WAIT_SECONDS, " seconds"),
    ] = 20.0
    wait: Annotated[
        Literal["all", "any"],
        about("With ids: until all have settled; or until any has, and only those that have are answered."),
    ] = "all"


class CancelParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: _Task
    reason: Annotated[
        str | None, about(f"Shown with the task; 1 to {task.REASON_MAX_CHARS} characters."), checks.REASON
    ] = None


class RetryParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: _Task
    from_step: Annotated[
        str | None,
        about(
            "Run this durable step and all later ones again, though they have finished; its name, with #2 for the "
            "second step of that name. Null: finished steps are kept."
        ),
    ] = None


class RescheduleParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: _Task
    run_at: Annotated[str | int | None, about("Not before this instant; null leaves it.")] = None
    delay: _Delay = None
    priority: Annotated[int | None, about("Null leaves it."), PRIORITY] = None

    def __post_init__(self) -> None:
        read_start(self)
        if self.run_at is None and self.delay is None and self.priority is None:
            raise InvalidParams("run_at", "or delay or priority must be given")


MAX_TEXT_CHARS = 200  # that are looked for


def _check_text(text: str, name: str) -> None:
    if not 1 <= len(text) <= MAX_TEXT_CHARS or "\0" in text:
        raise InvalidParams(name, f"must have 1 to {MAX_TEXT_CHARS} characters, none of them NUL")


class ListParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    state: Annotated[State | None, about("Only tasks in this state.")] = None
    action: Annotated[str | None, about("Only tasks of this action."), checks.ACTION] = None
    limit: Annotated[int, about(f"Maximum number of tasks; 1 to {MAX_LIST}."), LIMIT] = 50
    cursor: Annotated[str | None, CURSOR, Checked(checks.read_cursors)] = None
    labels: Annotated[dict[str, str] | None, about("Only tasks that have all of these labels."), LABELS] = None
    key: Annotated[str | None, about("Only tasks that have this unique key or ordering key."), KEY] = None
    since: Annotated[
        str | int | None, about("Only tasks created at this instant or later; RFC 3339, or epoch milliseconds.")
    ] = None
    until: Annotated[str | int | None, about("Only tasks created before this instant.")] = None
    tenant: Annotated[str | None, about("Only tasks of this tenant; with key, a key of its own."), TENANT] = None
    text: Annotated[
        str | None,
        about(
            "Only tasks whose payload or errors contain this text, in any case; a page covers 2,000 tasks. Payloads "
            "that are encrypted, or stored as objects, are not searched."
        ),
        Checked(_check_text),
    ] = None


class StatsParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tenant: Annotated[
        str | None, about("Only tasks of this tenant, among the newest records; without rates and lag."), TENANT
    ] = None


class TaskCompleteParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    token: _Token
    result: Annotated[msgspec.Raw, about("Any JSON, as a handler would return it.")] = msgspec.Raw(b"null")
    tenant: _WaitingTenant = None


class TaskFailParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    token: _Token
    error: Annotated[
        str | dict[str, Any], about("What went wrong, as text, or an object with message, code and data (an object).")
    ]
    final: Annotated[bool, about("No more attempts: CRITICAL_ERROR now.")] = False
    retry_after: Annotated[float | None, about("Seconds until the next attempt, instead of the usual delay."), SPAN] = (
        None
    )
    tenant: _WaitingTenant = None


class OrderingListParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    limit: Annotated[int, about(f"Maximum number of keys; 1 to {MAX_LIST}."), LIMIT] = 50
    cursor: Annotated[str | None, CURSOR, Checked(partial(check_stored, check=checks.read_key))] = None


class OrderingReleaseParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    key: Annotated[str, about("The ordering key, as ordering.list shows it."), KEY]
    tenant: Annotated[str | None, about("The tenant that owns the key."), TENANT] = None


class ClaimsCheckParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    claims: Annotated[list[str], about(f"Ids of outbound requests, <task id>:<claim>; 1 to {MAX_IDS}.")]


class BulkParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    action: Annotated[str | None, about("Tasks of this action; `*` stands for any characters."), checks.ACTION] = None
    states: Annotated[
        list[State] | None, about("Tasks in one of these states; null for all that the method is about.")
    ] = None
    labels: Annotated[dict[str, str] | None, about("Tasks that have all of these labels."), LABELS] = None
    older_than: Annotated[float | None, about("Tasks added at least so many seconds ago."), SPAN] = None
    newer_than: Annotated[float | None, about("Tasks added less than so many seconds ago."), SPAN] = None
    ids_from: Annotated[TaskId | None, about("Tasks with this id or a higher one."), ID] = None
    ids_to: Annotated[TaskId | None, about("Tasks with this id or a lower one."), ID] = None
    all: Annotated[bool, about("Instead of a filter: every task that exists now.")] = False
    dry_run: Annotated[bool, about("Only count the tasks and return some of their ids; nothing is changed.")] = False
    tenant: Annotated[str | None, about("Tasks of this tenant."), TENANT] = None


class BulkRescheduleParams(BulkParams, frozen=True, forbid_unknown_fields=True):
    run_at: _Start = None
    delay: _Delay = None
    spread: Annotated[float, about("Seconds from then on over which the tasks are spread evenly."), SPAN] = 0.0
    priority: Annotated[int | None, about(f"Higher first; {_PRIORITIES}, null to leave it."), PRIORITY] = None


class JobId(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: Annotated[TaskId, about("The job."), ID]


class JobListParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    limit: Annotated[int, about(f"Maximum number of jobs; 1 to {MAX_LIST}."), LIMIT] = 50
    cursor: Annotated[str | None, CURSOR, checks.NUMBERED] = None


# New tasks


class _Identified(msgspec.Struct, frozen=True):
    objectID: msgspec.Raw = msgspec.Raw(b"null")


_decode_identified = msgspec.json.Decoder(_Identified).decode


def new_task(given: EnqueueParams, settings: "Settings", *, large: bool = True) -> NewTask:
    """given: whose fields have been checked. large: its payload may become an object."""
    payload = bytes(given.payload).decode("utf-8")
    check_task_payload(payload, settings, large=large)
    offered = None if given.sealed_payload is None else _offered(given, settings)
    run_at = read_start(given)
    if given.expires_at is not None and given.expires_in is not None:
        raise InvalidParams("expires_in", "and expires_at exclude each other; give one")
    if given.unique_key is None:
        for name, usual in (("unique", "retained"), ("on_duplicate", "return")):
            if getattr(given, name) != usual:
                raise InvalidParams(name, "goes with unique_key")
    if not isinstance(given.unique, str):
        checks.check_seconds(given.unique, "unique")
    return NewTask(
        action=given.action,
        payload=payload,
        run_at=run_at,
        delay_seconds=given.delay,
        priority=given.priority or 0,
        unique_key=given.unique_key,
        ordering_key=given.ordering_key,
        max_attempts=given.max_attempts or settings.max_attempts,
        timeout_seconds=given.timeout,
        labels=msgspec.json.encode(given.labels).decode("utf-8") if given.labels else None,
        expires_at=checks.read_instant(given.expires_at, "expires_at"),
        expires_in_seconds=given.expires_in,
        limit_key=given.limit_key,
        unique=given.unique,
        on_duplicate=given.on_duplicate,
        replaces_priority=given.on_duplicate == "replace" and given.priority is not None,
        tenant=given.tenant,
        offered=offered,
    )


def read_start(given: EnqueueParams | RescheduleParams | BulkRescheduleParams) -> datetime | None:
    """The time in run_at. Raises InvalidParams."""
    if given.run_at is not None and given.delay is not None:
        raise InvalidParams("delay", "and run_at exclude each other; give one")
    return checks.read_instant(given.run_at)


def submitted_task(action: str, raw: bytes, settings: "Settings") -> NewTask:
    payload = raw.decode("utf-8")
    check_task_payload(payload, settings, field="params")
    unique_key = None
    raw_id = bytes(_decode_identified(payload).objectID) if payload.lstrip().startswith("{") else b"null"
    if raw_id != b"null":
        object_id = None if raw_id[:1] in (b"{", b"[", b"t", b"f") else decode_any(raw_id.decode("utf-8"))
        if object_id is None or (isinstance(object_id, float) and not isfinite(object_id)):
            raise InvalidParams("objectID", "must be a string or a number, no larger than a double")
        # 23 and "23" are one object: the older convention sends either.
        unique_key = checks.read_key(str(object_id), "objectID")
    return NewTask(checks.read_action(action), payload, unique_key=unique_key, max_attempts=settings.max_attempts)


def check_task_payload(payload: str, settings: "Settings", *, field: str = "payload", large: bool = True) -> None:
    limit = settings.largest_payload_bytes if large else settings.payload_limit_bytes
    check_payload(escape_for_sqs(payload), field, limit)  # as it will travel


def _offered(given: EnqueueParams, settings: "Settings") -> str:
    """A payload that a client has sealed, as the text that stands for it; see methods.inbound.take_in."""
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
