"""The OpenRPC document of the api, made from the parameters and results that it really takes and gives."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_origin

import msgspec
from msgspec.structs import fields

from penstock.methods.table import SUBMIT_PREFIX
from penstock.protocol import errors
from penstock.protocol.method import Method, described
from penstock.protocol.version import __version__

OPENRPC_VERSION = "1.3.2"
_REFERENCE = "#/components/schemas/{name}"

_ERRORS: dict[type[errors.RpcError], str] = {
    errors.ParseError: "The body is not JSON",
    errors.InvalidRequest: "The entry is no JSON-RPC 2.0 request, or the batch is empty or too long",
    errors.MethodNotFound: "Method not found",
    errors.InvalidParams: "A parameter is missing, unknown or wrong; data.field names it",
    errors.InternalError: "A failure of the server; data.ref finds it in the log",
    errors.AccessDenied: (
        "No valid API key, or not from this machine, or not permitted, data.needs naming the permission; "
        "HTTP 401 or 403"
    ),
    errors.KeyNotFound: "No such API key",
    errors.ScheduleNotFound: "No such schedule, or import of schedules",
    errors.WorkflowNotFound: "No such workflow",
    errors.WorkflowConflict: (
        "The workflow's state forbids it, or its key belongs to another definition; see data.id and data.state"
    ),
    errors.RateLimited: "Too many requests; data.retry_after in seconds; HTTP 429",
    errors.TaskNotFound: "No such task",
    errors.MessageNotFound: "No such message, rejected or in a dead-letter queue",
    errors.QueueAway: "The api cannot use a queue; data.queue names it, data.ref finds why in the log",
    errors.RouteNotFound: "No such route",
    errors.JobNotFound: "No such job",
    errors.StateConflict: (
        "The task's state forbids it; data.state is that state; a retry names data.holder, which has the unique key, "
        "or data.workflow, of which it is a step"
    ),
    errors.DuplicateTask: "Another task has the unique key; data.id is that task",
    errors.TooManyWaits: "The api waits for as many results as it may; data.limit, and data.retry_after in seconds",
    errors.TooLarge: "A payload or a request is over its limit; data.size and data.limit in bytes",
}
_ALWAYS = (errors.InvalidParams, errors.InternalError, errors.AccessDenied)

_RAW: dict[str, dict[str, Any]] = {"payload": {"type": ["object", "array"]}, "result": {}}  # taken as they are written
# The document's order of methods, by the part of their names before the dot, and of components; others stand last.
_FAMILIES = (
    "rejected", "dlq", "keys", "action", "route", "tenant", "bulk", "job", "audit", "ordering", "claims", "task",
    "schedule", "workflow", "rpc",
)  # fmt: skip
_COMPONENTS = (
    "Accepted", "State", "Changed", "Answered", "Outcome", "Task", "TaskDetail", "Failure", "WaitsFor", "FinishedStep",
    "TaskPage", "Statistics", "Rates", "Lag", "HeldKeys", "HeldKey", "ReleasedKey", "CheckedClaims", "RejectedPage",
    "Rejected", "Replayed", "StillRejected", "Purged", "DeadLetterQueues", "DeadLetterQueue", "DeadMessages",
    "DeadMessage", "DeadMessageDetail", "DeadEntry", "DeadReplayed", "NotReplayed", "DeadPurged", "Key", "Permission",
    "NewKey",
    "KeyPage", "Audited", "AuditPage", "Action", "Actions", "Routes", "Route", "RouteChanged", "BulkStarted",
    "BulkPreview", "Job", "JobState", "JobError", "JobPage", "ScheduleDetail", "Missed", "Overlap", "SchedulePage",
    "Schedule", "ScheduleDeleted", "ScheduleRun", "SchedulePageOfRuns", "ImportStarted", "ImportStatus",
    "WorkflowAccepted", "WorkflowState", "WorkflowChanged", "WorkflowDetail", "Step", "StepKind", "WorkflowPage",
    "Workflow", "Tenant", "TenantDetail", "TenantPage", "TenantStatistics", "StepParams", "Compensate",
)  # fmt: skip
_RESULT_NAMES = {"status": "tasks", "result": "outcome", "rpc.discover": "document"}


def describe(methods: Mapping[str, Method]) -> dict[str, Any]:
    """The OpenRPC document."""
    shown = sorted(methods.values(), key=lambda method: _place(_FAMILIES, method.name.rpartition(".")[0]))
    kinds = dict.fromkeys(
        kind
        for method in shown
        for kind in (*_plain_types(method.result), *(described(field.type)[0] for field in fields(method.params)))
    )  # in this order, not in that of a set, which differs between runs
    known = [kind for kind in kinds if kind is not msgspec.Raw]
    found, components = msgspec.json.schema_components(known, ref_template=_REFERENCE)
    schemas: dict[Any, dict[str, Any]] = {msgspec.Raw: {"type": "object"}, **dict(zip(known, found, strict=True))}
    listed = [
        {
            "name": method.name,
            "summary": method.summary,
            "paramStructure": "either",
            "params": [_parameter(field, schemas) for field in fields(method.params)],
            "result": _result(method, schemas),
            "errors": _references(*method.errors),
        }
        for method in shown
    ]
    return {
        "openrpc": OPENRPC_VERSION,
        "info": {
            "title": "Penstock",
            "version": __version__,
            "description": "A durable task pipeline. Send JSON-RPC 2.0 requests, single or batch, to POST /rpc.",
        },
        "methods": [*listed, _submit(_result(methods["enqueue"], schemas))],
        "components": {
            "schemas": dict(sorted(components.items(), key=lambda named: _place(_COMPONENTS, named[0]))),
            "errors": {error.__name__: {"code": error.code, "message": text} for error, text in _ERRORS.items()},
        },
    }


def _place(order: Sequence[str], name: str) -> int:
    """Names without a family stand first."""
    return order.index(name) if name in order else len(order) if name else -1


def _parameter(field: Any, schemas: Mapping[Any, dict[str, Any]]) -> dict[str, Any]:
    kind, description = described(field.type)
    schema = _RAW[field.name] if kind is msgspec.Raw else schemas[kind]
    default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    if not field.required and default is not msgspec.UNSET:
        schema = schema | {"default": msgspec.json.decode(default) if isinstance(default, msgspec.Raw) else default}
    return {"name": field.name, "description": description, "required": field.required, "schema": schema}


def _result(method: Method, schemas: Mapping[Any, dict[str, Any]]) -> dict[str, Any]:
    schema = _schema(method.result, schemas)
    name = schema["$ref"].rpartition("/")[2] if "$ref" in schema else method.name
    return {"name": _RESULT_NAMES.get(method.name, name), "schema": schema}


def _schema(kind: Any, schemas: Mapping[Any, dict[str, Any]]) -> dict[str, Any]:
    """Of a result: msgspec describes no union of structs."""
    inner = [_schema(one, schemas) for one in get_args(kind)]
    if get_origin(kind) is list:
        return {"type": "array", "items": inner[0]}
    return {"anyOf": inner} if inner else schemas[kind]


def _plain_types(kind: Any) -> list[Any]:
    """Those in a result, out of lists and unions."""
    return [plain for one in get_args(kind) for plain in _plain_types(one)] or [kind]


def _submit(result: dict[str, Any]) -> dict[str, Any]:
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
        "result": result,
        "errors": _references(errors.TooLarge),
    }


def _references(*more: type[errors.RpcError]) -> list[dict[str, str]]:
    return [{"$ref": f"#/components/errors/{error.__name__}"} for error in (*_ALWAYS, *more)]
