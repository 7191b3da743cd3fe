"""A task's timeline: its events, oldest first. Pure."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from penstock.api.dashboard.formats import error_parts, instant_of, plain, span
from penstock.protocol.task import State
from penstock.tasks.views import TaskDetail


def timeline(task: TaskDetail, life: Any, now: datetime) -> list[dict[str, Any]]:
    """Events with ``at``, ``kind``, ``title``, ``detail``, ``later``; of a failure, ``error``. life: read_life's."""
    created, run_at = instant_of(task.created_at), instant_of(task.run_at)
    assert created is not None
    assert run_at is not None
    events: list[dict[str, Any]] = [_event(created, "begin", "Enqueued", f"priority {task.priority}")]
    if not task.failures and run_at > created and not task.state.final:
        events.append(_event(run_at, "due", "Due" if run_at <= now else "Is due", f"{_after(created, run_at)} later"))
    for failure in task.failures:
        at = instant_of(failure.at)
        error = error_parts(failure.error)
        title = f"Attempt {failure.attempt} failed"
        events.append(_event(at, "bad", title, f"{_ran_on(failure.worker)}claim {failure.claim}", error=error))
    claimed = life["claimed_at"] if life is not None else None
    if claimed is not None and all(failure.claim != task.claim for failure in task.failures):
        detail = f"claim {task.claim}" + (f", by route {life['route']}" if life["route"] else "")
        title = f"Attempt {max(1, task.attempts)} of {task.max_attempts} claimed"
        events.append(_event(claimed, "claim", title, detail))
        if life["unsent"]:
            events.append(_event(claimed, "note", "Being sent", "the queue has not confirmed it yet"))
    if life is not None and life["heartbeat_at"] is not None:
        events.append(
            _event(life["heartbeat_at"], "note", "Reported by its worker", _ran_on(task.worker) + _progress(task))
        )
    events.sort(key=lambda event: event["at"])
    settled = instant_of(task.updated_at)
    if task.state.final and settled is not None:
        events.append(_event(settled, *_END[task.state], _end_detail(task, claimed, created, settled)))
    elif task.state is State.ERROR:
        events.append(_event(run_at, "due", f"Attempt {task.attempts + 1} is due", f"of {task.max_attempts}"))
    elif task.state is State.WAITING:
        events.append(_event(None, "due", _waits_for(task, life), ""))
    elif task.state is State.ACQUIRED:
        events.append(_event(None, "run", "In flight", "at a worker, or in a queue"))
    before: datetime | None = None
    for event in events:
        event["later"] = None if before is None or event["at"] is None else _after(before, event["at"])
        before = event["at"] or before
    return events


_END = {
    State.SUCCESS: ("ok", "Succeeded"),
    State.CRITICAL_ERROR: ("bad", "Failed permanently"),
    State.CANCELLED: ("note", "Cancelled"),
}


def _event(at: datetime | None, kind: str, title: str, detail: str, *, error: Any = None) -> dict[str, Any]:
    return {"at": at, "kind": kind, "title": title, "detail": detail, "error": error}


def _after(start: datetime, end: datetime) -> str:
    return span(max(0.0, (end - start).total_seconds()))


def _end_detail(task: TaskDetail, claimed: datetime | None, created: datetime, settled: datetime) -> str:
    if task.state is State.CANCELLED:
        return task.reason or "no reason given"
    ran_on = _ran_on(task.worker) if task.state is State.SUCCESS else ""
    took = f", {_after(claimed, settled)} after its claim" if claimed is not None else ""
    return f"{ran_on}{_after(created, settled)} after it was enqueued{took}"


def _ran_on(worker: str | None) -> str:
    return f"ran on {worker}, " if worker else ""


def _waits_for(task: TaskDetail, life: Any) -> str:
    if task.waits_for is not None:
        return f"Waiting for an event, token {task.waits_for.token}"
    if life is not None and life["workflow"] is not None:
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
