"""The api's results, one struct each, and rows made into them; JSON text of Postgres is put into them unchanged."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from datetime import datetime
from heapq import nlargest
from typing import Annotated, Any

import msgspec

from penstock.protocol import trace_context
from penstock.protocol.task import MAX_ACTIONS_SHOWN, OTHER_ACTIONS, State
from penstock.protocol.tenant import own_key
from penstock.protocol.views import Instant, View, about, raw, timestamp, view_of

TENANT_LOOKED_AT = 50_000  # of live tasks, and of the records of each final state
CountsByAction = Annotated[
    dict[str, dict[State, int]],
    about(
        f"The same by action; states without a task are left out. Beyond {MAX_ACTIONS_SHOWN} actions, those with the "
        f"fewest tasks are counted together as `{OTHER_ACTIONS}`."
    ),
]


class Accepted(msgspec.Struct, frozen=True, omit_defaults=True):
    id: int
    state: State
    duplicate: Annotated[
        bool, about("True: a task with this unique key was there already, and this is its id; nothing was added.")
    ]
    replaced: Annotated[
        bool | None, about("With on_duplicate replace: whether the first task waited and took what this one asks.")
    ] = None


class Changed(msgspec.Struct, frozen=True):
    id: int
    state: State


class Failure(msgspec.Struct, frozen=True):
    """One failed attempt."""

    attempt: int
    claim: int
    at: Instant
    error: Annotated[Any, about("The JSON-RPC error object that the worker sent.")]
    worker: Annotated[
        str | None,
        about("The worker that sent it, or that ran the task when it stopped heartbeating; null: not reported."),
    ]


class Task(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    id: int
    action: str
    state: State
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


class WaitsFor(msgspec.Struct, frozen=True):
    """The outside event that a WAITING task waits for."""

    token: Annotated[str, about("For task.complete and task.fail.")]
    until: Instant


class FinishedStep(msgspec.Struct, frozen=True, kw_only=True):
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


class TaskDetail(Task, frozen=True, kw_only=True):
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


class Outcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The outcome of a task."""

    id: int
    state: Annotated[State | None, about("Null: there is no such task.")]
    result: Annotated[Any, about("What the handler returned; null unless the state is SUCCESS.")]
    error: Annotated[Any, about("The error object of the last failed attempt; null after a SUCCESS.")]
    reason: Annotated[str | None, about("Why it was cancelled; omitted if no reason was given.")] = None
    result_gone: Annotated[bool, about("True: there was a result, and retention has emptied it.")] = False
    result_unread: Annotated[str | None, about("Why the result is null: it is large, or cannot be had now.")] = None
    again: Annotated[str | None, about("Only there where this is not the last word: how to ask again.")] = None


class TaskPage(msgspec.Struct, frozen=True):
    tasks: list[Task]
    cursor: Annotated[
        str | None,
        about("Pass it on for the next page; null at the end. With a filter a page may hold fewer than asked for."),
    ]


class Rates(msgspec.Struct, frozen=True):
    """Events a second over the last minute."""

    enqueued_per_second: float
    succeeded_per_second: float
    failed_per_second: Annotated[float, about("Failed attempts.")]


class Lag(msgspec.Struct, frozen=True):
    due: Annotated[int, about("Tasks that may run now and are not claimed.")]
    oldest_due_seconds: Annotated[float, about("How long the oldest of them has waited.")]


class Statistics(msgspec.Struct, frozen=True):
    states: Annotated[dict[State, int], about("Tasks kept, by state; every state is there.")]
    actions: CountsByAction
    rates: Rates
    lag: Lag


class TenantStatistics(msgspec.Struct, frozen=True):
    tenant: str
    states: Annotated[dict[State, int], about("Its tasks kept, by state; every state is there.")]
    actions: CountsByAction
    at_least: Annotated[
        list[State],
        about(f"States whose counts are of the newest {TENANT_LOOKED_AT} records, of all tenants: there are more."),
    ]


FULL = "the answer is full: ask for this task alone"


def task_bytes(row: Any) -> int:
    """Of what of a task may be large."""
    return sum(len(row[name] or "") for name in ("payload", "result", "failures", "error"))


def task(row: Any) -> Task:
    """A row of the statement ``show_tasks``."""
    return _task(Task, row)


def task_detail(row: Any) -> TaskDetail:
    """The same with payload, keys, claim and every failed attempt."""
    return _task(
        TaskDetail,
        row,
        payload=raw(row["payload"]),
        payload_unread=FULL if row["is_cut"] else row.get("payload_unread"),
        unique_key=own_key(row["unique_key"]),
        ordering_key=own_key(row["ordering_key"]),
        labels=raw(row["labels"]),
        failures=[
            Failure(one.attempt, one.claim, timestamp(one.at), one.error, one.worker)
            for one in _decode_failures(row["failures"] or "[]")
        ],
        waits_for=WaitsFor(own_key(row["token"]), timestamp(row["deadline"])) if row["token"] else None,
        steps=None if row["is_cut"] else row.get("steps"),
    )


def _task(kind: type[View], row: Any, **more: Any) -> View:
    trace = trace_context.of_text(row["trace"])
    trace_id = None if trace is None else trace.trace_id
    return view_of(kind, row, progress=raw(row["progress"]), trace_id=trace_id, **_ending(row), **more)


def _ending(row: Any) -> dict[str, Any]:
    unread = FULL if row.get("is_cut") else row.get("result_unread")
    return {
        "state": State(row["state"]), "result": raw(row["result"]), "result_unread": unread, "error": raw(row["error"])
    }  # fmt: skip


def outcome(row: Any) -> Outcome:
    """A row of the statement ``read_settled``."""
    if row["state"] is None:
        return unsettled(row["id"], None)
    return view_of(Outcome, row, again=None, **_ending(row))


def unsettled(task_id: int, state: str | None) -> Outcome:
    """A task that is waited for no longer, in the state that it has now; None for an unknown one."""
    if state is None:
        return Outcome(id=task_id, state=None, result=None, error=None)
    seen = State(state)
    again = "the answer was full" if seen.final else "it has not settled within the timeout"
    return Outcome(id=task_id, state=seen, result=None, error=None, again=f"{again}: call result again with this id")


def counted(rows: Iterable[Any]) -> tuple[dict[State, int], dict[str, dict[State, int]]]:
    """Rows of action, state and count, by state and as ``CountsByAction``, by name."""
    counts: defaultdict[str, Counter[State]] = defaultdict(Counter)
    for row in rows:
        counts[row["action"]][State(row["state"])] += row["count"]
    by_state = {state: sum(of_action[state] for of_action in counts.values()) for state in State}
    largest = set(nlargest(MAX_ACTIONS_SHOWN, counts, key=lambda action: counts[action].total()))
    shown: defaultdict[str, Counter[State]] = defaultdict(Counter)
    for action, of_action in counts.items():
        shown[action if action in largest else OTHER_ACTIONS].update(of_action)
    return by_state, {
        action: {state: of_action[state] for state in State if of_action[state]}
        for action, of_action in sorted(shown.items())
    }


class _StoredFailure(msgspec.Struct, frozen=True):
    attempt: int
    claim: int
    at: datetime
    error: msgspec.Raw
    worker: str | None = None


_decode_failures = msgspec.json.Decoder(list[_StoredFailure]).decode
