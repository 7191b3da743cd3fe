"""A task's timeline: its events, oldest first. Pure."""

from datetime import datetime, timedelta
from typing import Any

from penstock.api.dashboard.formats import error_parts, plain
from penstock.protocol.answers import TaskDetail
from penstock.protocol.journal import EVENT, SLEEP, StepPlace
from penstock.protocol.task import State
from penstock.protocol.views import span


def timeline(task: TaskDetail, life: Any, now: datetime) -> list[dict[str, Any]]:
    """Events with ``at``, ``kind``, ``title``, ``detail``, ``later``; of a failure, ``error``. life: read_life's."""
    events: list[dict[str, Any]] = []

    def add(at: datetime | None, kind: str, title: str, detail: str, error: Any = None) -> None:
        events.append({"at": at, "kind": kind, "title": title, "detail": detail, "error": error})

    created, run_at, settled = map(datetime.fromisoformat, (task.created_at, task.run_at, task.updated_at))
    claimed = life["claimed_at"] if life is not None else None
    add(created, "begin", "Enqueued", f"priority {task.priority}")
    if not task.failures and run_at > created and not State(task.state).final:
        add(run_at, "due", "Due" if run_at <= now else "Is due", f"{_between(created, run_at)} later")
    for failure in task.failures:
        at, detail = datetime.fromisoformat(failure.at), f"{_ran_on(failure.worker)}claim {failure.claim}"
        add(at, "bad", f"Attempt {failure.attempt} failed", detail, error_parts(failure.error))
    if claimed is not None and all(failure.claim != task.claim for failure in task.failures):
        detail = f"claim {task.claim}" + (f", by route {life['route']}" if life["route"] else "")
        add(claimed, "claim", f"Attempt {max(1, task.attempts)} of {task.max_attempts} claimed", detail)
        if life["unsent"]:
            add(claimed, "note", "Being sent", "the queue has not confirmed it yet")
    if life is not None and life["heartbeat_at"] is not None:
        add(life["heartbeat_at"], "note", "Reported by its worker", _ran_on(task.worker) + _progress(task))
    events.sort(key=lambda event: event["at"])
    took = f"{_between(created, settled)} after it was enqueued"
    if claimed is not None:
        took += f", {_between(claimed, settled)} after its claim"
    match task.state:
        case State.SUCCESS:
            add(settled, "ok", "Succeeded", _ran_on(task.worker) + took)
        case State.CRITICAL_ERROR:
            add(settled, "bad", "Failed permanently", took)
        case State.CANCELLED:
            add(settled, "note", "Cancelled", task.reason or "no reason given")
        case State.ERROR:
            add(run_at, "due", f"Attempt {task.attempts + 1} is due", f"of {task.max_attempts}")
        case State.WAITING:
            add(None, "due", _waits_for(task, life), "")
        case State.ACQUIRED:
            add(None, "run", "In flight", "at a worker, or in a queue")
    before: datetime | None = None
    for event in events:
        event["later"] = None if before is None or event["at"] is None else _between(before, event["at"])
        before = event["at"] or before
    return events


def waterfall(task: TaskDetail) -> list[dict[str, Any]]:
    """Its durable steps with ``label``, ``kind``, ``title``, and a bar from ``left`` of ``width``, in percent."""
    steps = task.steps or []
    began = [datetime.fromisoformat(step.began_at or step.recorded_at) for step in steps]
    ended = [at + timedelta(seconds=step.seconds or 0) for at, step in zip(began, steps, strict=True)]
    first = min(began, default=datetime.min)
    whole = max((max(ended, default=first) - first).total_seconds(), 0.001)
    rows: list[dict[str, Any]] = []
    for step, at, end in zip(steps, began, ended, strict=True):
        left = min((at - first).total_seconds() / whole * 100, 99)
        width = max((end - at).total_seconds() / whole * 100, 1)
        tries = f", {step.tries} tries" if step.tries > 1 else ""
        rows.append(
            {
                "label": StepPlace(name=step.name, repetition=step.repetition).label,
                "kind": "failed" if step.error is not None else "idle" if step.name in (SLEEP, EVENT) else "success",
                "title": f"{'' if step.seconds is None else span(step.seconds)}{tries}",
                "left": round(left, 2), "width": round(min(width, 100 - left), 2),
                "at": at, "claim": step.claim, "worker": step.worker,
                "value": error_parts(step.error) if step.error is not None else step.result, "unread": step.unread,
            }
        )  # fmt: skip
    return rows


def _between(start: datetime, end: datetime) -> str:
    return span(max(0.0, (end - start).total_seconds()))


def _ran_on(worker: str | None) -> str:
    return f"ran on {worker}, " if worker else ""


def _waits_for(task: TaskDetail, life: Any) -> str:
    if task.waits_for is not None:
        return f"Waiting for an event, token {task.waits_for.token}"
    has_started = task.ordering_key is not None  # a step has its key from its start on
    if life is not None and life["workflow"] is not None and not has_started:
        return f"Waiting for earlier steps of workflow {life['workflow']}"
    behind = life["behind"] if life is not None else None
    return f"Waiting for task {behind}, by ordering key {task.ordering_key}" if behind else "Waiting for its turn"


def _progress(task: TaskDetail) -> str:
    given = plain(task.progress)
    if not isinstance(given, dict):
        return ""
    percent = given.get("percent")
    parts = [f"{percent:g} %" if isinstance(percent, int | float) else "", str(given.get("note") or "")]
    return ", ".join(filter(None, parts))
