"""What each page but the overview reads: the answers of JSON-RPC methods, and the instants of a task."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import msgspec

from penstock.api.dashboard import graph
from penstock.api.dashboard.formats import indented, plain, segment
from penstock.api.dashboard.requests import EDIT_FIELDS, PAGE_ROWS, Page, PageRequest, labels_of, params_of
from penstock.api.dashboard.timeline import timeline, waterfall
from penstock.protocol.errors import InvalidParams, NotFound, QueueAway, StateConflict
from penstock.protocol.task import KEY_MAX_CHARS
from penstock.protocol.tenant import EVERY_TENANT
from penstock.tasks import output
from penstock.tasks.bulk import COUNTED, Operation
from penstock.tasks.methods import SCAN_TASKS, TEXT_TASKS

FAILED_STEPS = 10  # of a workflow, whose errors its page shows
ZOOMS = (50, 75, 100, 150, 200)  # percent
FAILURES = 5000  # of the newest, to be grouped
NAMED = 1000  # of the newest schedules and workflows, for a search by name
HITS = 20  # of each kind of task
_OUTPUT_BYTES = 1024 * 1024  # of a task that are read


def record_page(path: str, template: str, method: str, name: str, *, live: bool = True) -> Page:
    """A page of one record, which ``method`` answers to the parameters of the path. name: in the template."""

    async def load(request: PageRequest) -> dict[str, Any]:
        return {**request.path, name: await request.call(method, **request.path)}

    return Page(path, template, load, method, live)


def list_page(path: str, template: str, method: str, name: str) -> Page:
    """A page of the records that ``method`` lists under ``name``, with its parameters from the query."""

    async def load(request: PageRequest) -> dict[str, Any]:
        found = await request.call(method, **params_of(method, request.query) | {"limit": PAGE_ROWS})
        return {name: getattr(found, name), "cursor": found.cursor, "filters": request.query}

    return Page(path, template, load, method)


async def load_tasks(request: PageRequest) -> dict[str, Any]:
    query = request.query
    names = ("state", "action", "tenant", "labels", "key", "text", "since", "until")
    filters = {name: query[name] for name in names}
    found = await request.call("list", **params_of("list", query) | {"limit": PAGE_ROWS})
    return {
        "tasks": found.tasks,
        "cursor": found.cursor,
        "filters": filters,
        "any_filter": any(filters.values()),
        # For the form, which a stream does not update.
        "actions": [] if request.is_stream else list((await request.call("stats")).actions),
        "full": len(found.tasks) >= PAGE_ROWS,
        "covered": SCAN_TASKS if filters["text"] is None else TEXT_TASKS,
    }


async def load_failures(request: PageRequest) -> dict[str, Any]:
    """Groups of the newest permanent failures; with a fingerprint, one of them and its tasks."""
    (groups,) = await request.methods.fetch(("read_failure_groups", FAILURES, request.browser.caller.tenant))
    wanted = request.query["fingerprint"]
    groups = [group for group in groups if wanted in (None, group["fingerprint"])]
    ids = groups[0]["ids"] if wanted and groups else []
    return {
        "groups": groups[:100], "fingerprint": wanted, "ids": ids[:PAGE_ROWS],
        "more": max(0, len(ids) - PAGE_ROWS), "looked_at": FAILURES,
    }  # fmt: skip


async def load_search(request: PageRequest) -> dict[str, Any]:
    """What has an id, key or label, or a name that contains the text. The id of a task leads to its page."""
    wanted = request.query["q"]
    page = {"wanted": wanted, "named": NAMED}
    if wanted is None:
        return page
    if wanted.isascii() and wanted.isdigit() and len(wanted) < 19:
        with suppress(NotFound, InvalidParams):
            await request.call("status", id=wanted)
            return {"redirect": f"/tasks/{wanted}"}

    async def tasks(**filters: Any) -> Sequence[Any]:
        with suppress(InvalidParams):  # no task has such a key or label
            return (await request.call("list", limit=HITS, **filters)).tasks  # type: ignore[no-any-return]
        return ()

    name = wanted.casefold()
    by_key, by_label, stats, schedules, workflows = await asyncio.gather(
        tasks(key=wanted[:KEY_MAX_CHARS]),
        tasks(labels=labels_of(wanted)) if "=" in wanted else asyncio.sleep(0, ()),
        request.call("stats"),
        request.call("schedule.list", limit=NAMED),
        request.call("workflow.list", limit=NAMED),
    )
    return page | {
        "by_key": by_key,
        "by_label": by_label,
        "actions": [one for one in stats.actions if name in one.casefold()],
        "schedules": [one for one in schedules.schedules if name in one.name.casefold()],
        "workflows": [
            one for one in workflows.workflows if name in one.name.casefold() or wanted in (one.key, str(one.id))
        ],
    }


async def load_task(request: PageRequest) -> dict[str, Any]:
    task = await request.call("status", id=request.path["id"], detail=True)
    async with request.methods.session() as session:
        rows = await session.fetch("read_life", task.id)
        parts = await output.read_newest(session, task.id, room_bytes=_OUTPUT_BYTES)
    life = rows[0] if rows else None
    explanation = None if task.state.final else await request.call("task.explain", id=task.id)
    trace_url = request.settings.trace_url
    return {
        "task": task,
        "life": life,
        "explanation": explanation,
        "trace_url": trace_url and task.trace_id and trace_url.replace("{trace_id}", task.trace_id),
        "events": timeline(task, life, datetime.now(UTC)),
        "steps": waterfall(task),
        "output": [(part.claim, entry) for part in parts for entry in part.entries][-300:],
        "dropped": sum({part.claim: part.dropped for part in parts}.values()),
    }


async def load_edit(request: PageRequest) -> dict[str, Any]:
    task = await request.call("status", id=request.path["id"], detail=True)
    if task.payload is None:  # the copy would get an empty one
        gone = "gone (PENSTOCK_PAYLOAD_RETENTION_SECONDS): enqueue it again"
        why = gone if task.payload_gone else f"unavailable ({task.payload_unread})"
        raise StateConflict(task.id, task.state, "edited", f", as its payload is {why}")
    values = {name: getattr(task, name, None) for name in EDIT_FIELDS} | {
        "labels": msgspec.json.encode(plain(task.labels) or {}).decode("utf-8"),
        "payload": indented(task.payload),
        "cancel": not task.state.final,
    }
    return {"values": values, "problem": None}


async def load_schedule(request: PageRequest) -> dict[str, Any]:
    name = request.path["name"]
    schedule, runs = await asyncio.gather(
        request.call("schedule.get", name=name),
        request.call("schedule.runs", name=name, cursor=request.query["cursor"], limit=PAGE_ROWS),
    )
    return {"schedule": schedule, "runs": runs.runs, "cursor": runs.cursor}


async def load_workflow(request: PageRequest) -> dict[str, Any]:
    cursor, opened = request.query["cursor"], request.query["open"]
    zoom = next((size for size in ZOOMS if str(size) == request.query["zoom"]), None)
    workflow = await request.call("workflow.status", id=request.path["id"], cursor=cursor, limit=150)
    (failed,) = await request.methods.fetch(("read_failed_steps", workflow.id, FAILED_STEPS))
    ids = [step["task_id"] for step in failed if step["task_id"] is not None]
    tasks = await request.call("status", ids=ids) if ids else []
    errors = {task.id: task.error for task in tasks if task is not None}
    return {
        "workflow": workflow,
        "failed": [(step, errors.get(step["task_id"])) for step in failed],
        "layout": graph.layout(workflow.tree, opened),
        "opened": opened,
        "zoom": zoom,
        "zooms": ZOOMS,
        "values": {"cursor": cursor, "zoom": zoom},
    }


async def load_queues(request: PageRequest) -> dict[str, Any]:
    depths, dead, rejected = await asyncio.gather(
        request.methods.depths(), request.call("dlq.stats"), request.call("rejected.list", limit=10)
    )
    counted = {queue.queue: queue for queue in dead.queues}
    queues = [(label, depths.get(label), counted.get(label)) for label in ("inbound", "outbound", "results")]
    names = {label: getattr(request.settings, f"{label}_queue") for label, _, _ in queues}
    return {"queues": queues, "names": names, "rejected": rejected.rejected}


async def load_dead(request: PageRequest) -> dict[str, Any]:
    """Some dead letters of one queue. Reading receives them, which hides them from other readers for a while."""
    queue, found, problem = request.path["queue"], None, None
    try:
        found = await request.call("dlq.list", queue=queue, limit=20)
    except QueueAway as exc:
        problem = exc.message
    return {"queue": queue, "found": found, "problem": problem}


async def load_actions(request: PageRequest) -> dict[str, Any]:
    """Every action with tasks or limits; routes; ordering keys that a failed task holds."""
    stats, limited, announced, routes, held = await asyncio.gather(
        request.call("stats"),
        request.call("action.list"),
        request.call("action.announced"),
        request.call("route.list"),
        request.call("ordering.list", limit=PAGE_ROWS),
    )
    counts = stats.actions
    limits = {action.action: action for action in limited.actions}
    workers = {action.action: action for action in announced.actions}
    actions = [
        (name, counts.get(name, {}), limits.get(name), workers.get(name))
        for name in sorted({*counts, *limits, *workers})
    ]
    return {"actions": actions, "routes": routes.routes, "held": held.keys}


async def load_tenants(request: PageRequest) -> dict[str, Any]:
    """Tenants with a rule of their own; any other one is opened by name."""
    name = request.query["name"]
    if name is not None:
        return {"redirect": f"/tenants/{segment(name)}"}
    found = await request.call("tenant.list", cursor=request.query["cursor"], limit=PAGE_ROWS)
    return {"tenants": found.tenants, "cursor": found.cursor}


async def load_tenant(request: PageRequest) -> dict[str, Any]:
    """Counts and limits of the tenant of the path, or of the key. Raises InvalidParams if the key has another one."""
    name = request.path.get("name", request.browser.caller.tenant)
    return {
        "rule": await request.call("tenant.get", tenant=name),
        "counted": None if name == EVERY_TENANT else await request.call("stats", tenant=name),
    }


async def load_bulk(request: PageRequest) -> dict[str, Any]:
    """The bulk jobs; with ``count`` in the query, also how many tasks the form selects."""
    query = request.query
    jobs = await request.call("job.list", limit=PAGE_ROWS, cursor=query["cursor"])
    operation, operations = query["operation"] or Operation.RETRY, list(Operation)
    if operation not in operations:
        raise InvalidParams("operation", f"must be one of {', '.join(operations)}, not {operation[:60]!r}")
    count = problem = None
    if query["count"] is not None and not request.is_stream:  # which does not update it
        try:
            count = await request.call(operation, **params_of(operation, query) | {"dry_run": True})
        except InvalidParams as exc:
            problem = exc.message
    return {
        "jobs": jobs.jobs, "cursor": jobs.cursor, "operation": operation, "operations": operations,
        "values": query, "count": count, "looked_at": COUNTED, "problem": problem,
    }  # fmt: skip


PAGES = (
    Page("/tasks", "tasks.html", load_tasks, "list"),
    Page("/failures", "failures.html", load_failures, "list"),
    Page("/search", "search.html", load_search, "list", live=False),
    Page("/tasks/{id}", "task.html", load_task, "status"),
    Page("/tasks/{id}/edit", "edit.html", load_edit, "enqueue", live=False),
    list_page("/schedules", "schedules.html", "schedule.list", "schedules"),
    Page("/schedules/{name:path}", "schedule.html", load_schedule, "schedule.get"),
    list_page("/workflows", "workflows.html", "workflow.list", "workflows"),
    Page("/workflows/{id}", "workflow.html", load_workflow, "workflow.status"),
    Page("/queues", "queues.html", load_queues, "dlq.stats"),
    Page("/queues/{queue}/dead", "dead.html", load_dead, "dlq.list", live=False),
    record_page("/queues/{queue}/dead/{id}", "dead_message.html", "dlq.show", "message", live=False),
    list_page("/rejected", "rejected.html", "rejected.list", "rejected"),
    record_page("/rejected/{id}", "rejected_message.html", "rejected.show", "message", live=False),
    Page("/actions", "actions.html", load_actions, "action.list"),
    record_page("/actions/{action:path}", "action.html", "action.get", "action", live=False),
    Page("/tenants", "tenants.html", load_tenants, "tenant.list"),
    Page("/tenants/{name:path}", "tenant.html", load_tenant, "tenant.get"),
    Page("/bulk", "bulk.html", load_bulk, "job.list"),
    record_page("/jobs/{id}", "job.html", "job.get", "job"),
    list_page("/keys", "keys.html", "keys.list", "keys"),
    list_page("/audit", "audit.html", "audit.list", "audit"),
)  # fmt: skip
