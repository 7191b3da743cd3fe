"""The api's results, one struct each, and rows made into them; JSON text of Postgres is put into them unchanged."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from datetime import datetime
from heapq import nlargest
from typing import Any, TypeVar

import msgspec

from penstock.protocol import trace_context
from penstock.protocol.answers import Failure, Outcome, StateName, Task, TaskDetail, WaitsFor
from penstock.protocol.record import view_of
from penstock.protocol.task import MAX_ACTIONS_SHOWN, OTHER_ACTIONS, State
from penstock.protocol.tenant import own_key
from penstock.protocol.views import raw, timestamp

Shown = TypeVar("Shown", Task, TaskDetail)
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
            Failure(attempt=one.attempt, claim=one.claim, at=timestamp(one.at), error=one.error, worker=one.worker)
            for one in _decode_failures(row["failures"] or "[]")
        ],
        waits_for=WaitsFor(token=own_key(row["token"]), until=timestamp(row["deadline"])) if row["token"] else None,
        steps=None if row["is_cut"] else row.get("steps"),
    )


def _task(kind: type[Shown], row: Any, **more: Any) -> Shown:
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


def counted(rows: Iterable[Any]) -> tuple[dict[StateName, int], dict[str, dict[StateName, int]]]:
    """Rows of action, state and count, by state and as ``CountsByAction``, by name."""
    counts: defaultdict[str, Counter[State]] = defaultdict(Counter)
    for row in rows:
        counts[row["action"]][State(row["state"])] += row["count"]
    by_state: dict[StateName, int] = {state: sum(of_action[state] for of_action in counts.values()) for state in State}
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
