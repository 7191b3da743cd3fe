"""What the api's results look like: one struct a result, its members in the order of the wire; and rows made into them.

Payloads, results and errors are the JSON text that Postgres holds, put into the answer as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from penstock import tasks, tracecontext
from penstock.auditstore import AuditRecord
from penstock.jobs import Job as JobRecord
from penstock.jobs import JobState
from penstock.keys import Permission
from penstock.keystore import KeyRecord
from penstock.tasks import State
from penstock.tenants import own_key, tenant_of_key

Instant = Annotated[
    str, Meta(description="RFC 3339 in UTC, with microseconds.", examples=["2030-01-31T08:00:00.000000Z"])
]


def _about(description: str) -> Meta:
    return Meta(description=description)


class Accepted(msgspec.Struct, frozen=True, omit_defaults=True):
    id: int
    state: State
    duplicate: Annotated[
        bool, _about("True: a task with this unique key was there already, and this is its id; nothing was added.")
    ]
    replaced: Annotated[
        bool | None, _about("With on_duplicate replace: whether the first task waited and took what this one asks.")
    ] = None


class Changed(msgspec.Struct, frozen=True):
    id: int
    state: State


class Failure(msgspec.Struct, frozen=True):
    """One failed attempt."""

    attempt: int
    claim: int
    at: Instant
    error: Annotated[Any, _about("The JSON-RPC error object that the worker sent.")]
    worker: Annotated[str | None, _about("Which one sent it, or had the task when it fell silent; null: not told.")]


class Task(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    id: int
    action: str
    state: State
    attempts: Annotated[int, _about("Attempts begun so far.")]
    max_attempts: int
    priority: int
    run_at: Annotated[str, _about("Not before this instant; after a failure, the next attempt's.")]
    created_at: Instant
    updated_at: Instant
    progress: Annotated[Any, _about("`percent` and `note` as the worker last reported them, or null.")]
    result: Annotated[Any, _about("What the handler returned; null unless the state is SUCCESS.")]
    error: Annotated[Any, _about("The error object of the last failed attempt; null after a SUCCESS.")]
    reason: Annotated[str | None, _about("Why it was cancelled; only there where it is told.")] = None
    result_gone: Annotated[bool, _about("True: there was a result, and retention has emptied it.")] = False
    tenant: Annotated[str | None, _about("For whom it is; only there where it is for somebody.")] = None
    trace_id: Annotated[str | None, _about("OpenTelemetry trace of its enqueue; only there where it has one.")] = None
    result_unread: Annotated[str | None, _about("Why the result is null: it is large, or cannot be had now.")] = None


class WaitsFor(msgspec.Struct, frozen=True):
    """The outside event that a WAITING task waits for."""

    token: Annotated[str, _about("For task.complete and task.fail.")]
    until: Instant


class Answered(msgspec.Struct, frozen=True):
    id: Annotated[int | None, _about("The task that waited; null for an answer that is kept.")]
    state: Annotated[State | None, _about("Its state now.")]
    kept: Annotated[bool, _about("True: no task waits for it yet; the first one to do so within a day gets it.")]
    duplicate: Annotated[bool, _about("True: the same answer came before, and this one changed nothing.")]


class TaskDetail(Task, frozen=True, kw_only=True):
    payload: Any
    unique_key: str | None
    ordering_key: str | None
    limit_key: str | None
    labels: Annotated[Any, _about("Object of text by text.")]
    expires_at: Annotated[str | None, _about("Not started from then on.")]
    timeout: Annotated[float | None, _about("Seconds that one attempt may take; null: the action's or worker's own.")]
    claim: Annotated[int, _about("Token of the newest claim; 0 before the first.")]
    worker: Annotated[str | None, _about("Which one has, or had, the newest claim; null where none has told it.")]
    failures: Annotated[list[Failure], _about("Every failed attempt, oldest first.")]
    waits_for: Annotated[WaitsFor | None, _about("Only there while it waits for an outside event.")] = None
    payload_gone: Annotated[bool, _about("True: retention has emptied the payload.")] = False
    payload_unread: Annotated[str | None, _about("Why the payload is null: it is large, or cannot be had now.")] = None


class Outcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What came of a task."""

    id: int
    state: Annotated[State | None, _about("Null: there is no such task.")]
    result: Annotated[Any, _about("What the handler returned; null unless the state is SUCCESS.")]
    error: Annotated[Any, _about("The error object of the last failed attempt; null after a SUCCESS.")]
    reason: Annotated[str | None, _about("Why it was cancelled; only there where it is told.")] = None
    result_gone: Annotated[bool, _about("True: there was a result, and retention has emptied it.")] = False
    result_unread: Annotated[str | None, _about("Why the result is null: it is large, or cannot be had now.")] = None
    again: Annotated[str | None, _about("Only there where this is not the last word: how to ask again.")] = None


class TaskPage(msgspec.Struct, frozen=True):
    tasks: list[Task]
    cursor: Annotated[
        str | None,
        _about("Pass it on for the next page; null at the end. With a filter a page may hold fewer than asked for."),
    ]


class Rates(msgspec.Struct, frozen=True):
    """Events a second over the last minute."""

    enqueued_per_second: float
    succeeded_per_second: float
    failed_per_second: Annotated[float, _about("Failed attempts.")]


class Lag(msgspec.Struct, frozen=True):
    due: Annotated[int, _about("Tasks that may run now and are not claimed.")]
    oldest_due_seconds: Annotated[float, _about("How long the oldest of them has waited.")]


class Statistics(msgspec.Struct, frozen=True):
    states: Annotated[dict[State, int], _about("Tasks kept, by state; every state is there.")]
    actions: Annotated[dict[str, dict[State, int]], _about("The same by action; states without a task are left out.")]
    rates: Rates
    lag: Lag


class Rejected(msgspec.Struct, frozen=True):
    id: int
    source: Literal["inbound", "results"]
    body: Annotated[str, _about("As it came; bytes that are not UTF-8 are written as \\xNN.")]
    reason: str
    at: Instant


class RejectedPage(msgspec.Struct, frozen=True):
    rejected: list[Rejected]
    cursor: Annotated[str | None, _about("Pass it on for the next page; null at the end.")]


_NEXT = _about("With `limit`: where the next page begins; null at the end, and with `ids`.")


class StillRejected(msgspec.Struct, frozen=True):
    id: Annotated[int, _about("Another id than before where a part was accepted and the rest is a new record.")]
    reason: str


class Replayed(msgspec.Struct, frozen=True):
    retried: Annotated[int, _about("Records that were accepted whole and are gone.")]
    still_rejected: list[StillRejected]
    unknown: Annotated[list[int], _about("Ids of no record, or of one that somebody else is retrying.")]
    cursor: Annotated[str | None, _NEXT]


class Purged(msgspec.Struct, frozen=True):
    purged: int
    cursor: Annotated[str | None, _NEXT]


class DeadLetterQueue(msgspec.Struct, frozen=True):
    """Approximate counts of one dead-letter queue; null where the api cannot use it."""

    queue: Literal["inbound", "outbound", "results"]
    messages: Annotated[int | None, _about("All that there are.")]
    held: Annotated[
        int | None, _about("Those of them that somebody is looking at; null where the queue does not tell.")
    ]


class DeadLetterQueues(msgspec.Struct, frozen=True):
    queues: list[DeadLetterQueue]


class DeadMessage(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    sent_at: Annotated[str | None, _about("When it was first sent, by the queue's clock.")]
    receives: Annotated[int, _about("How often it was received, looks such as this included.")]
    bytes: Annotated[int, _about("Of its body.")]
    entries: Annotated[int, _about("Requests or responses in it; 0 when it cannot be read.")]
    first: Annotated[list[str], _about("The first few of them: action or kind, then task id and claim.")]
    current: Annotated[
        int | None, _about("Entries whose claim holds its task now; null for the inbound queue, which has no claims.")
    ]
    stale: Annotated[
        int | None, _about("Entries whose claim holds no task any more: whatever comes of them is ignored.")
    ]
    accepted: Annotated[
        bool | None,
        _about("Inbound: true when it was accepted already, so that a replay adds nothing; null when nobody can tell."),
    ]
    problem: Annotated[str | None, _about("Why it, or an entry among the first, is of no use.")]


class DeadMessages(msgspec.Struct, frozen=True):
    messages: Annotated[list[DeadMessage], _about("In no order: the queue has none.")]
    seen: Annotated[int, _about("Messages looked at.")]
    total: Annotated[int, _about("Messages in the queue, approximately.")]
    held: Annotated[int, _about("Those of them that somebody else is looking at, approximately.")]


class DeadEntry(msgspec.Struct, frozen=True):
    what: Annotated[str, _about("The action, the method, or result, error, progress.")]
    task_id: Annotated[int | None, _about("Its task; of a new one with a unique key, the task that has the key.")]
    claim: int | None
    state: Annotated[State | None, _about("The task's state now; null when there is no such task.")]
    current: Annotated[bool | None, _about("Whether its claim holds the task now.")]
    problem: str | None


class DeadMessageDetail(DeadMessage, frozen=True, kw_only=True):
    body: str
    attributes: dict[str, str]
    contents: list[DeadEntry]


class NotReplayed(msgspec.Struct, frozen=True):
    id: str
    reason: str


class DeadReplayed(msgspec.Struct, frozen=True):
    replayed: Annotated[int, _about("Messages sent again, whole or in part, and gone from the dead-letter queue.")]
    dropped: Annotated[int, _about("Messages of which nothing was left to be sent, and gone likewise.")]
    entries: Annotated[int, _about("Entries sent again.")]
    stale: Annotated[int, _about("Entries left out because their claim holds no task any more.")]
    left: Annotated[list[NotReplayed], _about("Messages still in the dead-letter queue, and why.")]
    unknown: Annotated[list[str], _about("Ids of no message that was seen.")]
    seen: int
    total: int


class DeadPurged(msgspec.Struct, frozen=True):
    purged: int
    unknown: Annotated[list[str], _about("Ids of no message that was seen.")]
    seen: int
    total: int


class Key(msgspec.Struct, frozen=True, kw_only=True):
    id: int
    name: str
    prefix: Annotated[str, _about("The beginning of the key, to tell it from others.")]
    permissions: list[Permission]
    created_at: Instant
    expires_at: Instant | None
    revoked_at: Instant | None
    last_used_at: Annotated[str | None, _about("To the minute or so.")]
    tenant: Annotated[str | None, _about("To which it is bound: it sees that one's tasks alone. Null: to none.")]


class NewKey(Key, frozen=True, kw_only=True):
    key: Annotated[str, _about("The key itself; it is kept nowhere and cannot be shown again.")]


class KeyPage(msgspec.Struct, frozen=True):
    keys: list[Key]
    cursor: Annotated[str | None, _about("Pass it on for the next page; null at the end.")]


class Action(msgspec.Struct, frozen=True):
    action: str
    paused: Annotated[bool, _about("Its tasks are taken and none is sent.")]
    max_in_flight: int | None
    rate: Annotated[float | None, _about("Tasks a second.")]
    burst: int | None
    key_max_in_flight: int | None
    key_rate: float | None
    key_burst: int | None
    in_flight: Annotated[int, _about("Claimed and not settled; counted while it is limited.")]
    updated_at: Annotated[str | None, _about("When its limits were last changed; null when it has none.")]


class Actions(msgspec.Struct, frozen=True):
    actions: Annotated[list[Action], _about("Those that are limited or paused.")]


class Route(msgspec.Struct, frozen=True):
    name: str
    queue: str
    actions: list[str]
    labels: dict[str, str]
    position: int
    in_flight: int


class Routes(msgspec.Struct, frozen=True):
    routes: Annotated[list[Route], _about("In the order in which they are tried.")]


class RouteChanged(msgspec.Struct, frozen=True):
    name: str
    deleted: bool


class BulkStarted(msgspec.Struct, frozen=True):
    job: Annotated[int, _about("Of the job that does it; see job.get.")]


class BulkPreview(msgspec.Struct, frozen=True):
    """With `dry_run`: what a job would be about."""

    count: Annotated[int, _about("Tasks found.")]
    exact: Annotated[bool, _about("False: there were too many records to look at them all, and there may be more.")]
    estimate: Annotated[int, _about("How many there may be in all; the count where that is exact.")]
    sample: Annotated[list[int], _about("The lowest ids of them.")]


class JobError(msgspec.Struct, frozen=True):
    id: Annotated[int | None, _about("The task; null where the job itself failed.")]
    reason: str


class Job(msgspec.Struct, frozen=True, kw_only=True):
    id: int
    kind: Annotated[str, _about("The method that made it.")]
    params: Annotated[Any, _about("What it was made with, and `top`, the highest id of a task that it is about.")]
    state: JobState
    total: Annotated[int | None, _about("Tasks that it is about, as counted before it began; null before that.")]
    total_is_exact: Annotated[bool, _about("False: estimated.")]
    seen: Annotated[int, _about("Records looked at so far.")]
    changed: int
    refused: Annotated[int, _about("Tasks that the filter fits, and that could not be changed.")]
    rate: Annotated[float, _about("Tasks changed or refused a second.")]
    errors: Annotated[list[JobError], _about("Of the first 20 that were refused, or why the job failed.")]
    created_at: Instant
    updated_at: Instant
    finished_at: Instant | None


class JobPage(msgspec.Struct, frozen=True):
    jobs: list[Job]
    cursor: Annotated[str | None, _about("Pass it on for the next page; null at the end.")]


class HeldKey(msgspec.Struct, frozen=True):
    """An ordering key that a task in CRITICAL_ERROR holds."""

    key: str
    task_id: Annotated[int, _about("The task that failed.")]
    action: str | None
    since: Annotated[str | None, _about("When it failed.")]
    waiting: Annotated[int, _about("Tasks that wait behind it, counted up to 10000.")]
    tenant: Annotated[str | None, _about("Whose key it is.")] = None


class HeldKeys(msgspec.Struct, frozen=True):
    keys: list[HeldKey]
    cursor: Annotated[str | None, _about("Pass it on for the next page; null at the end.")]


class ReleasedKey(msgspec.Struct, frozen=True):
    key: str
    released: Annotated[bool, _about("False: it was not held, and nothing was changed.")]
    next: Annotated[int | None, _about("The task that waited longest and may run now; null when none did.")]


class Audited(msgspec.Struct, frozen=True, kw_only=True):
    """Something that was changed by hand."""

    id: int
    at: Instant
    who: Annotated[str, _about("Name of the API key; empty where none is asked for.")]
    address: Annotated[str, _about("Where the request came from, as the api saw it.")]
    door: Annotated[str, _about("dashboard, or http.")]
    method: str
    params: Annotated[str, _about("As JSON text, payloads left out, cut where it is long.")]
    outcome: Annotated[
        str | None, _about("ok, or the error; null: it is under way, or the api died before it could tell.")
    ]
    ended_at: Instant | None


class AuditPage(msgspec.Struct, frozen=True):
    audit: list[Audited]
    cursor: Annotated[str | None, _about("Pass it on for the next page; null at the end.")]


class CheckedClaims(msgspec.Struct, frozen=True):
    lost: Annotated[list[str], _about("Those that hold their task no more: cancelled, settled, or claimed anew since.")]


def timestamp(instant: datetime) -> str:
    """RFC 3339 in UTC with microseconds and Z."""
    return instant.astimezone(UTC).isoformat(timespec="microseconds").removesuffix("+00:00") + "Z"


def raw(text: str | None) -> Any:
    """JSON text as it is put into an answer; None becomes null."""
    return None if text is None else msgspec.Raw(text.encode("utf-8"))


def task(row: Any) -> Task:
    """A row of the statement ``read_tasks``."""
    return Task(**_members(row))


def task_detail(row: Any) -> TaskDetail:
    """The same with payload, keys, claim and every failed attempt."""
    return TaskDetail(
        **_members(row),
        payload=None if row["payload_gone"] else raw(row["payload"]),
        payload_gone=bool(row["payload_gone"]),
        payload_unread=row.get("payload_unread"),
        unique_key=own_key(row["unique_key"]),
        ordering_key=own_key(row["ordering_key"]),
        limit_key=row["limit_key"],
        labels=raw(row["labels"] or "{}"),
        expires_at=row["expires_at"] and timestamp(row["expires_at"]),
        timeout=row["timeout_seconds"],
        claim=row["claim"],
        worker=row["worker"],
        failures=[
            Failure(one.attempt, one.claim, timestamp(one.at), one.error, one.worker)
            for one in _decode_failures(row["failures"] or "[]")
        ],
    )


def outcome(row: Any) -> Outcome:
    """A row of the statement ``read_settled``."""
    if row["state"] is None:
        return unsettled(row["id"], None)
    state = State(row["state"])
    return Outcome(
        id=row["id"],
        state=state,
        result=None if row["result_gone"] else raw(row["result"]),
        error=None if state is State.SUCCESS else raw(row["error"]),
        reason=row["reason"],
        result_gone=bool(row["result_gone"]),
        result_unread=row.get("result_unread"),
    )


def unsettled(task_id: int, state: str | None) -> Outcome:
    """A task that is waited for no longer, in the state that it has now; None for one that there is not."""
    if state is None:
        return Outcome(id=task_id, state=None, result=None, error=None)
    seen = State(state)
    again = "the answer was full" if seen.final else "it has not settled within the timeout"
    return Outcome(id=task_id, state=seen, result=None, error=None, again=f"{again}: call result again with this id")


def rates(counted: Mapping[str, int], seconds: float) -> Rates:
    """Events counted over so many seconds, as rates."""

    def per_second(*names: str) -> float:
        return round(sum(counted.get(name, 0) for name in names) / seconds, 3)

    return Rates(per_second("ENQUEUED"), per_second(State.SUCCESS), per_second(State.ERROR, State.CRITICAL_ERROR))


def held_keys(found: Sequence[tasks.HeldKey], limit: int) -> HeldKeys:
    """A page of held ordering keys."""
    shown = [
        HeldKey(
            own_key(k.key) or "", k.task_id, k.action, timestamp(k.since) if k.since else None, k.waiting,
            tenant_of_key(k.key),
        )
        for k in found
    ]  # fmt: skip
    return HeldKeys(shown, found[-1].key if len(found) == limit else None)


def key(record: KeyRecord) -> Key:
    """A record as it is shown."""
    return Key(**key_members(record))


def key_members(record: KeyRecord) -> dict[str, Any]:
    """The members of both Key and NewKey."""
    return {
        "id": record.id,
        "name": record.name,
        "prefix": record.prefix,
        "permissions": list(record.permissions),
        "created_at": timestamp(record.created_at),
        "expires_at": record.expires_at and timestamp(record.expires_at),
        "revoked_at": record.revoked_at and timestamp(record.revoked_at),
        "last_used_at": record.last_used_at and timestamp(record.last_used_at),
        "tenant": record.tenant,
    }


def audited(record: AuditRecord) -> Audited:
    """A record of the audit as it is shown."""
    return Audited(
        id=record.id, at=timestamp(record.at), who=record.who, address=record.address, door=record.door,
        method=record.method, params=record.params, outcome=record.outcome,
        ended_at=None if record.ended_at is None else timestamp(record.ended_at),
    )  # fmt: skip


def job(record: JobRecord) -> Job:
    return Job(
        id=record.id,
        kind=record.kind,
        params=record.params,
        state=record.state,
        total=record.total,
        total_is_exact=record.total_is_exact,
        seen=record.seen,
        changed=record.changed,
        refused=record.refused,
        rate=round(record.rate, 1),
        errors=[JobError(error["id"], error["reason"]) for error in record.errors],
        created_at=timestamp(record.created_at),
        updated_at=timestamp(record.updated_at),
        finished_at=None if record.finished_at is None else timestamp(record.finished_at),
    )


def rejected(row: Any) -> Rejected:
    """A row of the statement ``list_rejected``."""
    body = bytes(row["body"]).decode("utf-8", "backslashreplace")
    return Rejected(row["id"], row["source"], body, row["reason"], timestamp(row["at"]))


class _StoredFailure(msgspec.Struct, frozen=True):
    attempt: int
    claim: int
    at: datetime
    error: msgspec.Raw
    worker: str | None = None


_decode_failures = msgspec.json.Decoder(list[_StoredFailure]).decode


def trace_id(text: str | None) -> str | None:
    """Of the trace that a row belongs to."""
    trace = tracecontext.of_text(text)
    return None if trace is None else trace.trace_id


def _members(row: Any) -> dict[str, Any]:
    state = State(row["state"])
    return {
        "id": row["id"],
        "action": row["action"],
        "state": state,
        "attempts": row["attempts"],
        "max_attempts": row["max_attempts"],
        "priority": row["priority"],
        "run_at": timestamp(row["run_at"]),
        "created_at": timestamp(row["created_at"]),
        "updated_at": timestamp(row["updated_at"]),
        "progress": raw(row["progress"]),
        "result": None if row["result_gone"] else raw(row["result"]),
        "result_gone": bool(row["result_gone"]),
        "result_unread": row.get("result_unread"),
        "error": None if state is State.SUCCESS else raw(row["error"]),
        "reason": row["reason"],
        "tenant": row["tenant"],
        "trace_id": trace_id(row["trace"]),
    }
