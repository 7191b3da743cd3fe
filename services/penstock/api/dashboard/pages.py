"""What each page but the overview reads: the methods of JSON-RPC, and a few statements that no method has."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import msgspec

from penstock.api.dashboard import graph, tenants
from penstock.api.dashboard.form_actions import bulk_params
from penstock.api.dashboard.formats import indented, plain
from penstock.api.dashboard.page_request import PAGE_ROWS, Ask, Page, Values, labels_of, utc
from penstock.api.dashboard.timeline import timeline
from penstock.protocol.api_key import Permission
from penstock.protocol.errors import AccessDenied, InvalidParams, QueueAway
from penstock.protocol.task import State
from penstock.settings.model import Settings
from penstock.tasks.bulk import COUNTED
from penstock.tasks.filters import Operation
from penstock.workflows.params import WorkflowState

GRAPH_STEPS = 150
DEAD_SHOWN = 20
BULK_OPERATIONS = {operation.value: operation.states for operation in Operation}
_MOVABLE = (State.WAITING, State.SCHEDULED, State.ERROR)


async def load_tasks(ask: Ask) -> dict[str, Any]:
    wanted = ask.get("id")
    if wanted is not None and wanted.isascii() and wanted.isdigit():
        return {"redirect": f"/tasks/{wanted}"}
    found = await ask.call(
        "list", state=ask.get("state"), action=ask.get("action"), labels=labels_of(ask.get("labels")),
        key=ask.get("key"), since=utc(ask.get("since")), until=utc(ask.get("until")), cursor=ask.get("cursor"),
        tenant=ask.get("tenant"), limit=PAGE_ROWS,
    )  # fmt: skip
    filters = {name: ask.get(name) for name in ("state", "action", "tenant", "labels", "key", "since", "until")}
    # For the list of actions in the form alone, which is no part of what is kept up to date.
    actions = [] if ask.follows else await known_actions(ask)
    bulk = {name: filters[name] for name in ("state", "action", "tenant", "labels") if filters[name]}
    return {
        "tasks": found.tasks, "cursor": found.cursor, "filters": filters, "any_filter": any(filters.values()),
        "states": list(State), "actions": actions, "bulk": bulk,
        "full": len(found.tasks) >= PAGE_ROWS,
    }  # fmt: skip


async def known_actions(ask: Ask) -> list[str]:
    """The actions of which there is anything, to whoever asks."""
    stats = await ask.call("stats")
    return list(stats.actions if ask.visitor.tenant is not None else msgspec.json.decode(stats)["actions"])


async def load_task(ask: Ask) -> dict[str, Any]:
    """Raises TaskNotFound."""
    task = await ask.call("status", id=_id(ask.path["id"]), detail=True)
    async with ask.session() as session:
        rows = await session.fetch("read_life", task.id)
    life = rows[0] if rows else None
    return {
        "task": task,
        "life": life,
        "labels": plain(task.labels) or {},
        "trace_url": trace_url(ask.settings, task.trace_id),
        "progress": plain(task.progress),
        "events": timeline(task, life, datetime.now(UTC)),
        "can_cancel": not task.state.final,
        "can_retry": task.state in (State.CRITICAL_ERROR, State.CANCELLED),
        "can_move": task.state in _MOVABLE and not (task.state is State.WAITING and task.attempts),
    }


def trace_url(settings: Settings, trace_id: str | None) -> str | None:
    """Where a trace can be looked at, by the settings."""
    if trace_id is None or settings.trace_url is None:
        return None
    return settings.trace_url.replace("{trace_id}", trace_id)


async def load_edit(ask: Ask) -> dict[str, Any]:
    """A form with all that a task was made with. Raises TaskNotFound."""
    if not ask.visitor.may("enqueue"):
        raise AccessDenied(403, "Your API key may not enqueue tasks")
    task = await ask.call("status", id=_id(ask.path["id"]), detail=True)
    values = {
        "id": task.id, "action": task.action, "priority": task.priority, "max_attempts": task.max_attempts,
        "timeout": task.timeout, "unique_key": task.unique_key, "ordering_key": task.ordering_key,
        "limit_key": task.limit_key, "tenant": task.tenant,
        "labels": msgspec.json.encode(plain(task.labels) or {}).decode("utf-8"),
        "payload": "" if task.payload is None else indented(task.payload),
        "delay": None, "cancel": not task.state.final,
    }  # fmt: skip
    return {"values": values, "problem": None}


async def load_schedules(ask: Ask) -> dict[str, Any]:
    paused = {"yes": True, "no": False}.get(ask.get("paused") or "")
    found = await ask.call(
        "schedule.list", action=ask.get("action"), paused=paused, tenant=ask.get("tenant"), cursor=ask.get("cursor"),
        limit=PAGE_ROWS,
    )  # fmt: skip
    return {"schedules": found.schedules, "cursor": found.cursor, "filters": Values(ask.query)}


async def load_schedule(ask: Ask) -> dict[str, Any]:
    """Raises ScheduleNotFound."""
    name = ask.path["name"]
    shown, runs = await asyncio.gather(
        ask.call("schedule.get", name=name),
        ask.call("schedule.runs", name=name, cursor=ask.get("cursor"), limit=PAGE_ROWS),
    )
    return {"schedule": shown, "runs": runs.runs, "cursor": runs.cursor}


async def load_workflows(ask: Ask) -> dict[str, Any]:
    found = await ask.call(
        "workflow.list", state=ask.get("state"), tenant=ask.get("tenant"), cursor=ask.get("cursor"), limit=PAGE_ROWS
    )
    return {
        "workflows": found.workflows,
        "cursor": found.cursor,
        "filters": Values(ask.query),
        "states": list(WorkflowState),
    }


async def load_workflow(ask: Ask) -> dict[str, Any]:
    """Raises WorkflowNotFound."""
    found = await ask.call("workflow.status", id=_id(ask.path["id"]), cursor=ask.get("cursor"), limit=GRAPH_STEPS)
    whole = found.cursor is None and ask.get("cursor") is None
    return {
        "workflow": found, "drawn": graph.draw(found.tree), "whole": whole, "cursor": found.cursor,
        "can_cancel": found.finished_at is None,
        "can_retry": found.state in (WorkflowState.FAILED, WorkflowState.CANCELLED),
    }  # fmt: skip


async def load_queues(ask: Ask) -> dict[str, Any]:
    """How much is in each queue, and the newest rejected messages."""
    depths, dead, rejected = await asyncio.gather(
        ask.methods.depths(), ask.call("dlq.stats"), ask.call("rejected.list", limit=10)
    )
    counted = {queue.queue: queue for queue in dead.queues}
    queues = [(label, depths.get(label), counted.get(label)) for label in ("inbound", "outbound", "results")]
    names = {label: getattr(ask.settings, f"{label}_queue") for label, _, _ in queues}
    return {"queues": queues, "names": names, "rejected": rejected.rejected, "more": rejected.cursor is not None}


async def load_dead(ask: Ask) -> dict[str, Any]:
    """Some dead letters of one queue. To look is to receive: a message that is shown is hidden for a while."""
    queue = ask.path["queue"]
    if queue not in ("inbound", "outbound", "results"):
        raise InvalidParams("queue", f"must be inbound, outbound or results, not {queue[:60]!r}")
    try:
        found = await ask.call("dlq.list", queue=queue, limit=DEAD_SHOWN)
    except QueueAway as exc:
        return {"queue": queue, "found": None, "problem": exc.message}
    return {"queue": queue, "found": found, "problem": None}


async def load_dead_message(ask: Ask) -> dict[str, Any]:
    """Raises MessageNotFound, QueueAway."""
    return {
        "queue": ask.path["queue"],
        "message": await ask.call("dlq.show", queue=ask.path["queue"], id=ask.path["id"]),
    }


async def load_rejected(ask: Ask) -> dict[str, Any]:
    found = await ask.call("rejected.list", source=ask.get("source"), cursor=ask.get("cursor"), limit=PAGE_ROWS)
    return {"rejected": found.rejected, "cursor": found.cursor, "filters": Values(ask.query)}


async def load_rejected_message(ask: Ask) -> dict[str, Any]:
    """Raises MessageNotFound."""
    return {"message": await ask.call("rejected.show", id=_id(ask.path["id"]))}


async def load_actions(ask: Ask) -> dict[str, Any]:
    """Every action that there was anything of, with its limits; routes; ordering keys that are held."""
    raw, limited, routes, held = await asyncio.gather(
        ask.call("stats"), ask.call("action.list"), ask.call("route.list"), ask.call("ordering.list", limit=PAGE_ROWS)
    )
    counts = msgspec.json.decode(raw)["actions"]
    limits = {action.action: action for action in limited.actions}
    names = sorted({*counts, *limits})
    return {
        "actions": [(name, counts.get(name, {}), limits.get(name)) for name in names],
        "routes": routes.routes, "held": held.keys,
    }  # fmt: skip


async def load_action(ask: Ask) -> dict[str, Any]:
    return {"action": await ask.call("action.get", action=ask.path["name"])}


async def load_bulk(ask: Ask) -> dict[str, Any]:
    """The jobs; and, where the form was filled, how many tasks it is about."""
    jobs = await ask.call("job.list", limit=PAGE_ROWS, cursor=ask.get("cursor"))
    operation = ask.get("operation") or Operation.RETRY.value
    shown: dict[str, Any] = {
        "jobs": jobs.jobs, "cursor": jobs.cursor, "operation": operation, "operations": BULK_OPERATIONS,
        "values": Values(ask.query), "count": None, "looked_at": COUNTED, "problem": None, "states": list(State),
    }  # fmt: skip
    if operation not in BULK_OPERATIONS:
        raise InvalidParams("operation", f"must be one of {', '.join(BULK_OPERATIONS)}, not {operation[:60]!r}")
    if ask.get("count") is not None:
        try:
            shown["count"] = await ask.call(operation, **bulk_params(operation, ask.query), dry_run=True)
        except InvalidParams as exc:
            shown["problem"] = exc.message
    return shown


async def load_job(ask: Ask) -> dict[str, Any]:
    """Raises JobNotFound."""
    return {"job": await ask.call("job.get", id=_id(ask.path["id"]))}


async def load_keys(ask: Ask) -> dict[str, Any]:
    revoked = ask.get("revoked") == "yes"
    found = await ask.call("keys.list", revoked=revoked, cursor=ask.get("cursor"), limit=PAGE_ROWS)
    return {
        "keys": found.keys, "cursor": found.cursor, "revoked": revoked, "permissions": list(Permission),
        "asked": ask.settings.needs_keys,
    }  # fmt: skip


async def load_audit(ask: Ask) -> dict[str, Any]:
    found = await ask.call("audit.list", cursor=ask.get("cursor"), limit=PAGE_ROWS)
    return {"audit": found.audit, "cursor": found.cursor}


def _id(text: str) -> str:
    return text[:40]


PAGES = (
    Page("/tasks", "tasks.html", load_tasks, "list"),
    Page("/tasks/{id}", "task.html", load_task, "status"),
    Page("/tasks/{id}/edit", "edit.html", load_edit, "status", live=False),
    Page("/schedules", "schedules.html", load_schedules, "schedule.list"),
    Page("/schedules/{name:path}", "schedule.html", load_schedule, "schedule.get"),
    Page("/workflows", "workflows.html", load_workflows, "workflow.list"),
    Page("/workflows/{id}", "workflow.html", load_workflow, "workflow.status"),
    Page("/queues", "queues.html", load_queues, "dlq.stats"),
    Page("/queues/{queue}/dead", "dead.html", load_dead, "dlq.list", live=False),
    Page("/queues/{queue}/dead/{id}", "dead_message.html", load_dead_message, "dlq.show", live=False),
    Page("/rejected", "rejected.html", load_rejected, "rejected.list"),
    Page("/rejected/{id}", "rejected_message.html", load_rejected_message, "rejected.show", live=False),
    Page("/actions", "actions.html", load_actions, "action.list"),
    Page("/actions/{name:path}", "action.html", load_action, "action.get", live=False),
    *tenants.PAGES,
    Page("/bulk", "bulk.html", load_bulk, "job.list"),
    Page("/jobs/{id}", "job.html", load_job, "job.get"),
    Page("/keys", "keys.html", load_keys, "keys.list"),
    Page("/audit", "audit.html", load_audit, "audit.list"),
)
