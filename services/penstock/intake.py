"""Carrying out what requests ask for: tasks in, tasks cancelled or started anew, and what is refused, with why."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from penstock import metrics
from penstock.commands import PARAMS, Cancel, Change, Enqueue, Restart, read_command
from penstock.errors import MethodNotFound, RpcError, StateConflict, TaskNotFound
from penstock.schedules import ScheduleChange
from penstock.settings import Settings
from penstock.store import Session
from penstock.tasks import Enqueued, NewTask, State
from penstock.timetable import change_schedule
from penstock.wire import Invalid, Request, decode_body


async def apply_change(session: Session, command: Change) -> dict[str, Any]:
    """Cancel or retry one task, inside a transaction. Raises TaskNotFound, StateConflict."""
    if isinstance(command, Cancel):
        if await session.cancel([command.id]):
            return {"id": command.id, "state": State.CANCELLED}
        verb = "cancelled"
    else:
        restarted = await session.restart([command.id])
        if restarted:
            return {"id": command.id, "state": restarted[command.id]}
        verb = "retried"
    rows = await session.fetch("read_states", [command.id])
    if not rows:
        raise TaskNotFound(command.id)
    raise StateConflict(command.id, rows[0]["state"], verb)


@dataclass(slots=True)
class Inbound:
    """What a body of the inbound queue asks for: tasks, changes with their text, and what is refused with why."""

    tasks: list[NewTask] = field(default_factory=list)
    changes: list[tuple[Change | ScheduleChange, str]] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)


def read_inbound(body: str, settings: Settings) -> Inbound:
    """Read a body of the inbound queue; raises nothing, whatever the body is."""
    inbound = Inbound()
    try:
        entries = decode_body(body, batch_limit=settings.batch_limit).entries
    except RpcError as exc:
        inbound.refused.append((body, exc.message))
        return inbound
    for entry in entries:
        if isinstance(entry, Invalid):
            inbound.refused.append((entry.text, entry.error.message))
            continue
        try:
            command = read_command(entry.method, entry.params, settings)
        except RpcError as exc:
            inbound.refused.append((_text_of(entry), _reason(entry, exc)))
            continue
        if isinstance(command, Enqueue):
            inbound.tasks.append(command.task)
        elif isinstance(command, Cancel | Restart | ScheduleChange):
            inbound.changes.append((command, _text_of(entry)))
        else:
            reason = f"{entry.method} only answers, and a queue has no way back: ask over HTTP"
            inbound.refused.append((_text_of(entry), reason))
    return inbound


async def accept_inbound(session: Session, inbound: Inbound, *, door: str) -> list[Enqueued]:
    """Carry out what a body asked for, inside a transaction; ``inbound.refused`` gains what could not be done.

    The caller keeps what was refused. Raises Refused when Postgres will not have the values.
    """
    enqueued = await session.enqueue(inbound.tasks)
    count_enqueued(inbound.tasks, enqueued, door=door)
    for change, text in inbound.changes:
        try:
            if isinstance(change, ScheduleChange):
                await change_schedule(session, change)
            else:
                await apply_change(session, change)
        except RpcError as exc:
            inbound.refused.append((text, exc.message))
    return enqueued


def count_enqueued(tasks: Iterable[NewTask], enqueued: Iterable[Enqueued], *, door: str) -> None:
    """Count accepted tasks and duplicates in the metrics."""
    fresh: Counter[str] = Counter()
    duplicates: Counter[str] = Counter()
    for task, answer in zip(tasks, enqueued, strict=True):
        (duplicates if answer.duplicate else fresh)[task.action] += 1
    for action, count in fresh.items():
        metrics.ENQUEUED.labels(action, door).inc(count)
    for action, count in duplicates.items():
        metrics.DUPLICATES.labels(action).inc(count)


def _reason(request: Request, exc: RpcError) -> str:
    if isinstance(exc, MethodNotFound):
        near = difflib.get_close_matches(request.method, PARAMS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        return f"unknown method {request.method[:200]!r}{hint}"
    return exc.message


def _text_of(request: Request) -> str:
    """The request as JSON text again; absent members stay absent."""
    members: dict[str, Any] = {"jsonrpc": "2.0", "method": request.method}
    for name in ("params", "id"):
        raw = getattr(request, name)
        if bytes(raw):
            members[name] = raw
    return msgspec.json.encode(members).decode("utf-8")
