"""The OpenRPC document of the api, made from the parameters and results that it really takes and gives."""

from __future__ import annotations

import inspect
from typing import Any, get_args

import msgspec

from penstock.api import audit_views, key_views, message_views
from penstock.limits import model as rule_views
from penstock.methods.table import METHODS, PARAMS
from penstock.protocol import errors
from penstock.protocol.api_key import NAME_MAX_CHARS
from penstock.protocol.checks import MAX_IDS, MAX_LIST
from penstock.protocol.method import declared, described
from penstock.protocol.task import (
    ACTION_MAX_CHARS,
    KEY_MAX_CHARS,
    LABEL_NAME_MAX_CHARS,
    LABEL_VALUE_MAX_CHARS,
    MAX_ATTEMPTS_LIMIT,
    MAX_LABELS,
    PRIORITY_MAX,
    PRIORITY_MIN,
    REASON_MAX_CHARS,
    TOKEN_MAX_CHARS,
)
from penstock.protocol.tenant import TENANT_MAX_CHARS
from penstock.protocol.version import __version__
from penstock.schedules import methods as schedules
from penstock.tasks import bulk_views, views
from penstock.tasks.params import SUBMIT_PREFIX
from penstock.tasks.reading import LONGEST_WAIT_SECONDS
from penstock.tasks.tenant_stats import TenantStatistics
from penstock.workflows import methods as workflows
from penstock.workflows import model as workflow_views

OPENRPC_VERSION = "1.3.2"
_REFERENCE = "#/components/schemas/{name}"

ERRORS: dict[str, tuple[int, str]] = {
    "ParseError": (errors.PARSE_ERROR, "The body is not JSON"),
    "InvalidRequest": (
        errors.INVALID_REQUEST,
        "The entry is no JSON-RPC 2.0 request, or the batch is empty or too long",
    ),
    "MethodNotFound": (errors.METHOD_NOT_FOUND, "Method not found"),
    "InvalidParams": (errors.INVALID_PARAMS, "A parameter is missing, unknown or wrong; data.field names it"),
    "InternalError": (errors.INTERNAL_ERROR, "A failure of the server; data.ref finds it in the log"),
    "AccessDenied": (
        errors.ACCESS_DENIED,
        "No valid API key, or not from this machine, or not permitted, data.needs naming the permission; "
        "HTTP 401 or 403",
    ),
    "KeyNotFound": (errors.KEY_NOT_FOUND, "No such API key"),
    "ScheduleNotFound": (errors.SCHEDULE_NOT_FOUND, "No such schedule, or import of schedules"),
    "WorkflowNotFound": (errors.WORKFLOW_NOT_FOUND, "No such workflow"),
    "WorkflowConflict": (
        errors.WORKFLOW_CONFLICT,
        "The workflow's state forbids it, or its key is that of another definition; data.id and data.state tell",
    ),
    "RateLimited": (errors.RATE_LIMITED, "Too many requests; data.retry_after in seconds; HTTP 429"),
    "TaskNotFound": (errors.TASK_NOT_FOUND, "No such task"),
    "MessageNotFound": (errors.MESSAGE_NOT_FOUND, "No such message, rejected or in a dead-letter queue"),
    "QueueAway": (errors.QUEUE_AWAY, "The api cannot use a queue; data.queue names it, data.ref finds why in the log"),
    "RouteNotFound": (errors.ROUTE_NOT_FOUND, "No such route"),
    "JobNotFound": (errors.JOB_NOT_FOUND, "No such job"),
    "StateConflict": (
        errors.STATE_CONFLICT,
        "The task's state forbids it; data.state is that state; a retry names data.holder, which has the unique key, "
        "or data.workflow, of which it is a step",
    ),
    "DuplicateTask": (errors.DUPLICATE_TASK, "Another task has the unique key; data.id is that task"),
    "TooManyWaits": (
        errors.TOO_MANY_WAITS,
        "The api waits for as many results as it may; data.limit, and data.retry_after in seconds",
    ),
    "TooLarge": (errors.TOO_LARGE, "A payload or a request is over its limit; data.size and data.limit in bytes"),
}
_ALWAYS = ("InvalidParams", "InternalError", "AccessDenied")

# Summary, result, errors beyond those of every method
SUMMARIES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "enqueue": ("Add a task; it is stored when the answer comes.", "Accepted", ("TooLarge", "DuplicateTask")),
    "status": (
        "Show one task, or several in the order of `ids`, with null for one that there is not.",
        "",
        ("TaskNotFound",),
    ),
    "result": (
        "Wait until a task has settled, or several, and tell what came of them; when the time is up, their state.",
        "",
        ("TaskNotFound", "TooManyWaits"),
    ),
    "cancel": (
        "Cancel a task that is not settled; a result that comes later is ignored.",
        "Changed",
        ("TaskNotFound", "StateConflict"),
    ),
    "retry": (
        "Start a CRITICAL_ERROR or CANCELLED task anew, its attempts at 0.",
        "Changed",
        ("TaskNotFound", "StateConflict"),
    ),
    "reschedule": (
        "Move a task that waits (WAITING, SCHEDULED, ERROR) to another time or priority.",
        "Changed",
        ("TaskNotFound", "StateConflict"),
    ),
    "list": ("List tasks, newest first.", "TaskPage", ()),
    "audit.list": ("List what was changed by hand and by whom, newest first.", "AuditPage", ()),
    "stats": (
        "Count tasks by state and action, with rates over the last minute and lag; of one tenant, counts alone. "
        "At most a second old.",
        "Statistics|TenantStatistics",
        (),
    ),
    "rejected.list": ("List messages of the queues that could not be understood, newest first.", "RejectedPage", ()),
    "rejected.show": ("Show one of them.", "Rejected", ("MessageNotFound",)),
    "rejected.retry": (
        "Read rejected messages again; what is accepted of a message is not accepted twice.",
        "Replayed",
        (),
    ),
    "rejected.purge": ("Delete rejected messages for good.", "Purged", ()),
    "dlq.stats": ("Count the messages of each dead-letter queue.", "DeadLetterQueues", ()),
    "dlq.list": (
        "List messages of a dead-letter queue, with what Postgres knows of them; they stay where they are.",
        "DeadMessages",
        ("QueueAway",),
    ),
    "dlq.show": (
        "Show one of them whole, with what each task in it is now.",
        "DeadMessageDetail",
        ("MessageNotFound", "QueueAway"),
    ),
    "dlq.replay": (
        "Send messages again and take them from the dead-letter queue; doing so twice does nothing twice.",
        "DeadReplayed",
        ("QueueAway",),
    ),
    "dlq.purge": ("Delete messages of a dead-letter queue for good.", "DeadPurged", ("QueueAway",)),
    "keys.create": ("Make an API key; this answer is the only place where it can be read.", "NewKey", ()),
    "keys.list": ("List API keys, newest first, without the keys themselves.", "KeyPage", ()),
    "keys.revoke": ("Revoke an API key for good; it is refused within 10 seconds.", "Key", ("KeyNotFound",)),
    "task.complete": (
        "Give a task the result that it waits for; one that comes before its task waits is kept.",
        "Answered",
        ("TaskNotFound", "StateConflict", "TooLarge"),
    ),
    "task.fail": (
        "Fail the attempt of a task that waits; one that comes before its task waits is kept.",
        "Answered",
        ("TaskNotFound", "StateConflict", "TooLarge"),
    ),
    "rpc.discover": ("This document.", "", ()),
}

_TOKEN = f"What the task waits for, or will wait for; 1 to {TOKEN_MAX_CHARS} characters."
_WAITING_TENANT = "Of the task, with a token that its handler thought out; null for none. A bound key need not name it."
_QUEUE = "The queue whose dead-letter queue is meant."
_REJECTED = {
    "ids": f"Ids from rejected.list; 1 to {MAX_IDS}.",
    "limit": f"In place of ids: the newest, so many at the most; 1 to {MAX_LIST}.",
    "cursor": "With limit: the cursor of the page before.",
    "source": "With limit: only messages of this queue.",
}
PARAMETERS: dict[str, dict[str, str]] = {
    "enqueue": {
        "action": f"What a worker's handler is registered for; 1 to {ACTION_MAX_CHARS} characters.",
        "payload": "The handler's parameters: an object (by name) or an array (by position).",
        "run_at": "Not before this instant: RFC 3339 with a zone, or epoch milliseconds.",
        "delay": "Not before so many seconds from now, by the database's clock; excludes run_at.",
        "priority": f"Higher first; {PRIORITY_MIN} to {PRIORITY_MAX}, null for 0.",
        "unique_key": "One task per action and key, see unique; a second enqueue gets the first's id. "
        f"1 to {KEY_MAX_CHARS} characters.",
        "ordering_key": f"Tasks of one key run one at a time, in order. 1 to {KEY_MAX_CHARS} characters.",
        "max_attempts": f"Attempts before CRITICAL_ERROR; 1 to {MAX_ATTEMPTS_LIMIT}, null for the server's own.",
        "timeout": "Seconds that one attempt may take; null for the action's or worker's own.",
        "labels": f"Text by text, to find it and to route it by; up to {MAX_LABELS}, names of 1 to "
        f"{LABEL_NAME_MAX_CHARS} and values of up to {LABEL_VALUE_MAX_CHARS} characters.",
        "expires_at": "Cancelled unless started before this instant; as run_at.",
        "expires_in": "The same, so many seconds from now, by the database's clock; excludes expires_at.",
        "limit_key": f"Which of its action's limits by key it counts against. 1 to {KEY_MAX_CHARS} characters.",
        "unique": "Until when another task keeps the unique key from this one: retained, until its record is cleaned; "
        "live, until it settles; a number, for so many seconds from when it took the key.",
        "on_duplicate": "When another has the key: return its id; replace its payload, and its run_at and priority if "
        "given, while it waits; or error.",
        "tenant": f"For whom it is; 1 to {TENANT_MAX_CHARS} characters. Its keys are that tenant's own.",
        "sealed_payload": "In place of payload: one that a client has encrypted, or put into the bucket of large ones.",
    },
    "status": {
        "id": "One task; the answer is an object.",
        "ids": f"Up to {MAX_IDS} tasks; the answer is an array.",
        "detail": "With payload, keys, claim and every failed attempt.",
    },
    "result": {
        "id": "One task; the answer is an object.",
        "ids": f"Up to {MAX_IDS} tasks; the answer is an array.",
        "timeout": f"Seconds to wait, 0 to {LONGEST_WAIT_SECONDS:.0f}.",
        "wait": "With ids: until all have settled; or until any has, and only those that have are answered.",
    },
    "cancel": {"id": "The task.", "reason": f"Shown with the task; 1 to {REASON_MAX_CHARS} characters."},
    "retry": {"id": "The task."},
    "reschedule": {
        "id": "The task.",
        "run_at": "Not before this instant; null leaves it.",
        "delay": "Not before so many seconds from now; excludes run_at.",
        "priority": "Null leaves it.",
    },
    "list": {
        "state": "Only tasks in this state.",
        "action": "Only tasks of this action.",
        "limit": f"Tasks at the most; 1 to {MAX_LIST}.",
        "cursor": "The cursor of the page before.",
        "labels": "Only tasks that have all of these labels.",
        "key": "Only tasks that have this unique key or ordering key.",
        "since": "Only tasks created at this instant or later; RFC 3339, or epoch milliseconds.",
        "until": "Only tasks created before this instant.",
        "tenant": "Only tasks of this tenant; with key, a key of its own.",
    },
    "audit.list": {"limit": f"Entries at the most; 1 to {MAX_LIST}.", "cursor": "The cursor of the page before."},
    "stats": {"tenant": "Only tasks of this tenant, among the newest records; without rates and lag."},
    "rejected.list": {
        "limit": f"Messages at the most; 1 to {MAX_LIST}.",
        "cursor": "The cursor of the page before.",
        "source": "Only messages of this queue.",
    },
    "rejected.show": {"id": "From rejected.list."},
    "rejected.retry": _REJECTED,
    "rejected.purge": _REJECTED,
    "dlq.stats": {},
    "dlq.list": {"queue": _QUEUE, "limit": f"Messages at the most; 1 to {MAX_LIST}."},
    "dlq.show": {"queue": _QUEUE, "id": "From dlq.list."},
    "dlq.replay": {
        "queue": _QUEUE,
        "ids": f"From dlq.list; 1 to {MAX_IDS}.",
        "limit": f"In place of ids: any messages, so many at the most; 1 to {MAX_LIST}.",
        "force": "Also inbound messages so old that nobody can tell whether they were accepted before.",
    },
    "dlq.purge": {
        "queue": _QUEUE,
        "ids": f"From dlq.list; 1 to {MAX_IDS}.",
        "limit": f"In place of ids: any messages, so many at the most; 1 to {MAX_LIST}.",
    },
    "keys.create": {
        "name": f"Whose it is; one key of a name at a time. 1 to {NAME_MAX_CHARS} characters.",
        "permissions": "What it may do: enqueue, read, worker, scaling, admin; admin implies the others, read worker "
        "and scaling.",
        "expires_in": "Seconds until it expires; null for never.",
        "tenant": "Bind it to a tenant, whose tasks alone it sees; null for none.",
        "actions": "It may enqueue these actions alone, such as mail.send or mail.*; null for all, with a tenant all "
        "but the built-in ones.",
    },
    "keys.list": {
        "limit": f"Keys at the most; 1 to {MAX_LIST}.",
        "cursor": "The cursor of the page before.",
        "revoked": "With those that are revoked.",
    },
    "keys.revoke": {"id": "From keys.list."},
    "task.complete": {"token": _TOKEN, "result": "Any JSON, as a handler would return it.", "tenant": _WAITING_TENANT},
    "task.fail": {
        "token": _TOKEN,
        "error": "What went wrong, as text, or an object with message, code and data (an object).",
        "final": "No more attempts: CRITICAL_ERROR now.",
        "retry_after": "Seconds until the next attempt, in place of the usual delay.",
        "tenant": _WAITING_TENANT,
    },
    "rpc.discover": {},
}

_RAW: dict[str, dict[str, Any]] = {"payload": {"type": ["object", "array"]}, "result": {}}  # taken as they are written
_RESULTS = (
    views.Accepted, views.Changed, views.Answered, views.Outcome, views.Task, views.TaskDetail, views.TaskPage,
    views.Statistics, views.HeldKeys, views.ReleasedKey, views.CheckedClaims,
    message_views.RejectedPage, message_views.Rejected, message_views.Replayed, message_views.Purged,
    message_views.DeadLetterQueues, message_views.DeadMessages, message_views.DeadMessageDetail,
    message_views.DeadReplayed, message_views.DeadPurged,
    key_views.Key, key_views.NewKey, key_views.KeyPage,
    audit_views.Audited, audit_views.AuditPage,
    rule_views.Action, rule_views.Actions, rule_views.Routes, rule_views.RouteChanged,
    bulk_views.BulkStarted, bulk_views.BulkPreview, bulk_views.Job, bulk_views.JobPage,
    *(method.result for method in declared(schedules)),
    workflow_views.WorkflowAccepted, workflow_views.WorkflowChanged,
    *(method.result for method in declared(workflows)),
    rule_views.Tenant, rule_views.TenantDetail, rule_views.TenantPage, TenantStatistics,
)  # fmt: skip


def describe() -> dict[str, Any]:
    """The OpenRPC document."""
    fields = [field for kind in PARAMS.values() for field in msgspec.structs.fields(kind)]
    types = {kind for kind, _ in (described(field.type) for field in fields) if kind is not msgspec.Raw}
    listed = list(types)
    schemas, components = msgspec.json.schema_components([*_RESULTS, *listed], ref_template=_REFERENCE)
    by_type = dict(zip(listed, schemas[len(_RESULTS) :], strict=True))
    return {
        "openrpc": OPENRPC_VERSION,
        "info": {
            "title": "Penstock",
            "version": __version__,
            "description": "A durable task pipeline. Send JSON-RPC 2.0 requests, single or batch, to POST /rpc.",
        },
        "methods": [*(_method(name, by_type) for name in PARAMS), _submit()],
        "components": {
            "schemas": components,
            "errors": {name: {"code": code, "message": text} for name, (code, text) in ERRORS.items()},
        },
    }


def _method(name: str, schemas: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    if name in METHODS:
        declaration = METHODS[name]
        summary = declaration.summary
        result = "|".join(one.__name__ for one in get_args(declaration.result) or (declaration.result,))
        errors_of = tuple(error.__name__ for error in declaration.errors)
    else:
        summary, result, errors_of = SUMMARIES[name]
    return {
        "name": name,
        "summary": summary,
        "paramStructure": "either",
        "params": [_parameter(name, f, schemas) for f in msgspec.structs.fields(PARAMS[name])],
        "result": _result(name, result),
        "errors": _errors(*errors_of),
    }


def _parameter(method: str, field: Any, schemas: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    kind, description = described(field.type)
    schema = _RAW[field.name] if kind is msgspec.Raw else schemas[kind]
    default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    if not field.required and default is not msgspec.UNSET:
        schema = schema | {"default": msgspec.json.decode(default) if isinstance(default, msgspec.Raw) else default}
    return {
        "name": field.name,
        "description": description or PARAMETERS[method][field.name],
        "required": field.required,
        "schema": schema,
    }


def _result(method: str, name: str) -> dict[str, Any]:
    if method == "rpc.discover":
        return {"name": "document", "schema": {"type": "object"}}
    if method == "status":
        one = {"anyOf": [_ref("Task"), _ref("TaskDetail")]}
        many = {"type": "array", "items": {"anyOf": [*one["anyOf"], {"type": "null"}]}}
        return {"name": "tasks", "schema": {"anyOf": [*one["anyOf"], many]}}
    if method == "result":
        return {"name": "outcome", "schema": {"anyOf": [_ref("Outcome"), {"type": "array", "items": _ref("Outcome")}]}}
    if "|" in name:
        return {"name": method, "schema": {"anyOf": [_ref(one) for one in name.split("|")]}}
    return {"name": name, "schema": _ref(name)}


def _submit() -> dict[str, Any]:
    return {
        "name": f"{SUBMIT_PREFIX}<action>",
        "summary": "Add a task of the action that stands behind the colon; the parameters are its payload.",
        "description": inspect.cleandoc(
            """
            Any name that begins with `submit:` is this method: `submit:export` adds a task of the action `export`.
            All members of `params` make up the payload. With a member `objectID`, a string or a number, the task is
            unique per action and objectID, as with `unique_key`.
            """
        ),
        "paramStructure": "either",
        "params": [
            {
                "name": "objectID",
                "description": "Makes the task unique; a part of the payload like every other member.",
                "required": False,
                "schema": {"type": ["string", "number", "null"]},
            }
        ],
        "result": _result("submit", "Accepted"),
        "errors": _errors("TooLarge"),
    }


def _errors(*names: str) -> list[dict[str, str]]:
    return [{"$ref": f"#/components/errors/{name}"} for name in (*_ALWAYS, *names)]


def _ref(name: str) -> dict[str, str]:
    return {"$ref": _REFERENCE.format(name=name)}
