"""What forms do: their fields become the parameters of a method, which is called as over JSON-RPC."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import msgspec
from starlette.datastructures import ImmutableMultiDict

from penstock.api.dashboard.page_request import PageRequest, cleaned, labels_of, utc
from penstock.methods.table import read_command
from penstock.protocol.checks import MAX_IDS
from penstock.protocol.errors import AccessDenied, InvalidParams, MethodNotFound, RpcError
from penstock.protocol.tenant import EVERY_TENANT
from penstock.tasks.bulk import Operation

_MINUTE, _DAY = 60, 86_400
_TENANT_LIMITS = ("max_in_flight", "rate", "burst")
_ACTION_LIMITS = (*_TENANT_LIMITS, *(f"key_{name}" for name in _TENANT_LIMITS))
_EDIT_TEXTS = ("action", "unique_key", "ordering_key", "limit_key", "tenant")
_EDIT_NUMBERS: dict[str, type[int] | type[float]] = {
    "priority": int, "max_attempts": int, "timeout": float, "delay": float,  # in seconds; other forms have minutes
}  # fmt: skip
EDIT_FIELDS = ("id", "payload", "labels", *_EDIT_TEXTS, *_EDIT_NUMBERS)


Form = ImmutableMultiDict[str, str]
"""The fields of a form, the first one last: it is what ``get`` gives, as a page's own hidden fields come first."""


class FormOutcome(NamedTuple):
    """text: shown on the next page. next: its path; None: back to the form's. complete: no part was refused."""

    text: str
    next: str | None = None
    complete: bool = True


@dataclass(frozen=True, slots=True)
class ResultPage:
    """A page of its own: a result that can be shown only once, or a form again whose text must not be lost."""

    template: str
    values: dict[str, Any] = field(repr=False)
    status: int = 200


class FormAction(NamedTuple):
    """params: from the fields of a form. text, next: as of FormOutcome, formats of ``result`` and ``params``."""

    params: Callable[[Mapping[str, str]], dict[str, Any]]
    text: str | Callable[[Any], str]
    next: str | None = None


async def carry_out(request: PageRequest, form: Form) -> FormOutcome | ResultPage:
    """Call the method that a form names. Raises RpcError, Unavailable."""
    method = form.get("method", "")
    match method:
        case "enqueue":
            try:
                return await _run_again(request, form)
            except RpcError as exc:
                again = {name: form.get(name, "") for name in EDIT_FIELDS} | {"cancel": bool(form.get("cancel"))}
                return ResultPage("edit.html", {"values": again, "problem": exc.message}, 422)
        case "keys.create":
            return await _create_key(request, form)
        case "cancel.selected" | "retry.selected" | "reschedule.selected":
            return await _change_selected(request, method.removesuffix(".selected"), form)
    action = FORM_ACTIONS.get(method)
    if action is None:
        raise MethodNotFound(f"Unknown form method {method[:100]!r}", None)
    params = action.params(request.query)
    result = await request.call(method, **params)
    text = action.text(result) if callable(action.text) else action.text.format(result=result, params=params)
    return FormOutcome(text, None if action.next is None else action.next.format(result=result))


async def _run_again(request: PageRequest, form: Form) -> FormOutcome:
    """Enqueue an edited copy of a task, cancelling that task first if requested."""
    # Payloads may be longer than other fields, and are not cleaned.
    values = {name: value for name, value in cleaned(form).items() if name != "payload"}
    params: dict[str, Any] = {name: values[name] for name in _EDIT_TEXTS if name in values}
    params |= {name: _number(values[name], name, kind) for name, kind in _EDIT_NUMBERS.items() if name in values}
    params["payload"] = msgspec.Raw(_json(form.get("payload") or "{}", "payload"))
    params["labels"] = msgspec.json.decode(_json(values.get("labels", "{}"), "labels"))
    if "unique_key" in params:
        params["unique"] = "live"  # the old task keeps its record, and the new one takes over the key
    if not request.browser.may("enqueue"):
        raise AccessDenied(403, "Your API key may not enqueue tasks")
    raw = msgspec.json.encode(params)
    read_command("enqueue", raw, request.settings)  # before the old task is cancelled
    if values.get("cancel"):
        await request.call("cancel", **_of("id")(values), reason="edited and enqueued again")
    async with request.methods.audit.recording("enqueue", raw):
        task = await request.call("enqueue", **params)
    if task.duplicate:
        text = f"Task {task.id} already has this unique key; no task was added"
    else:
        text = f"Enqueued as task {task.id}"
    return FormOutcome(text, f"/tasks/{task.id}", complete=not task.duplicate)


async def _create_key(request: PageRequest, form: Form) -> ResultPage:
    params = _of("name", optional=("tenant",))(request.query)
    if "days" in request.query:
        params["expires_in"] = _number(request.query["days"], "days", float) * _DAY
    if "actions" in request.query:
        params["actions"] = [one.strip() for one in request.query["actions"].split(",")]
    key = await request.call("keys.create", **params, permissions=form.getlist("permission"))
    return ResultPage("new_key.html", {"key": key})


async def _change_selected(request: PageRequest, method: str, form: Form) -> FormOutcome:
    """One call for each selected task; a refused one does not stop the others."""
    ids = form.getlist("ids")[::-1][:MAX_IDS]
    if not ids:
        raise InvalidParams("ids", "must not be empty: select tasks first")
    more = {"delay": 0} if method == "reschedule" else {}
    refused: list[str] = []
    for task_id in ids:
        try:
            await request.call(method, id=task_id[:40], **more)
        except AccessDenied:
            raise
        except RpcError as exc:
            refused.append(exc.message)
    outcome = {"cancel": "cancelled", "retry": "retried", "reschedule": "due now"}[method]
    text = f"{len(ids) - len(refused)} of {len(ids)} tasks {outcome}"
    return FormOutcome(text + (f"; {refused[0]}" if refused else ""), complete=not refused)


def bulk_params(operation: str, values: Mapping[str, str]) -> dict[str, Any]:
    """Parameters of a bulk operation. Raises InvalidParams."""
    moves = ("delay", "spread", "priority") if operation == "bulk.reschedule" else ()
    params = _fields(values, ("action", "labels", "tenant", "older_than", "newer_than", "all", *moves))
    return params | ({"states": [values["state"]]} if "state" in values else {})


def _of(*required: str, optional: Iterable[str] = ()) -> Callable[[Mapping[str, str]], dict[str, Any]]:
    """Parameters that are fields of the same name."""

    def params(values: Mapping[str, str]) -> dict[str, Any]:
        for name in required:
            if name not in values:
                raise InvalidParams(name, "is missing")
        return _fields(values, (*required, *optional))

    return params


def _limits(subject: str, limits: Sequence[str]) -> Callable[[Mapping[str, str]], dict[str, Any]]:
    """Limits of an action or tenant. An empty one is removed: raw JSON, since a call leaves out None."""
    read = _of(subject, optional=limits)
    return lambda values: dict.fromkeys(limits, msgspec.Raw(b"null")) | read(values)


def _messages(values: Mapping[str, str], *of_many: str) -> dict[str, Any]:
    """One message by its id, or up to ``limit`` of those with the values of some fields."""
    return {"ids": [values["id"]]} if "id" in values else {"limit": 1000} | _fields(values, ("limit", *of_many))


def _rejected(values: Mapping[str, str]) -> dict[str, Any]:
    return _messages(values, "source")


def _dead(values: Mapping[str, str]) -> dict[str, Any]:
    return _of("queue", optional=("force",))(values) | _messages(values)


def _whom(tenant: str) -> str:
    return "tenants without their own" if tenant == EVERY_TENANT else tenant


def _replayed(result: Any) -> str:
    left = f"; {len(result.left)} stay: {result.left[0].reason}" if result.left else ""
    return f"{result.replayed} messages replayed, {result.dropped} dropped as stale{left}"


def _retried(result: Any) -> str:
    still = result.still_rejected
    left = f"; {len(still)} still rejected: {still[0].reason}" if still else ""
    return f"{result.retried} messages accepted{left}"


FORM_ACTIONS: dict[str, FormAction] = {
    "cancel": FormAction(_of("id", optional=("reason",)), "Task {result.id} is cancelled"),
    "retry": FormAction(_of("id", optional=["from_step"]), "Task {result.id} runs again"),
    "reschedule": FormAction(_of("id", optional=("run_at", "delay", "priority")), "Task {result.id} is rescheduled"),
    "schedule.pause": FormAction(_of("name"), "Schedule {result.name} is paused"),
    "schedule.resume": FormAction(_of("name"), "Schedule {result.name} is resumed"),
    "schedule.run_now": FormAction(_of("name"), "Schedule {params[name]} created task {result.task_id}"),
    "schedule.delete": FormAction(_of("name"), "Schedule {result.name} is deleted", "/schedules"),
    "workflow.cancel": FormAction(_of("id"), "Workflow {result.id} is cancelled"),
    "workflow.retry": FormAction(_of("id"), "Workflow {result.id}: {result.restarted} steps run again"),
    "action.pause": FormAction(_of("action"), "Action {result.action} is paused"),
    "action.resume": FormAction(_of("action"), "Action {result.action} is resumed"),
    "action.set": FormAction(_limits("action", _ACTION_LIMITS), "Limits of {result.action} are set", "/actions"),
    "tenant.pause": FormAction(_of("tenant"), "Tenant {result.tenant} is paused"),
    "tenant.resume": FormAction(_of("tenant"), "Tenant {result.tenant} is resumed"),
    "tenant.set": FormAction(
        _limits("tenant", _TENANT_LIMITS), lambda result: f"Limits of {_whom(result.tenant)} are set", "/tenants"
    ),
    "tenant.delete": FormAction(
        _of("tenant"), lambda result: f"The rule of {_whom(result.tenant)} is removed", "/tenants"
    ),
    "rejected.retry": FormAction(_rejected, _retried, "/rejected"),
    "rejected.purge": FormAction(_rejected, "{result.purged} messages deleted", "/rejected"),
    "dlq.replay": FormAction(_dead, _replayed),
    "dlq.purge": FormAction(_dead, "{result.purged} messages deleted"),
    "keys.revoke": FormAction(_of("id"), "Key {result.name} is revoked"),
    "job.cancel": FormAction(_of("id"), lambda result: f"Job {result.id} is {result.state.lower()}"),
    "ordering.release": FormAction(_of("key", optional=("tenant",)), "Ordering key {result.key} is released"),
    **{
        operation: FormAction(partial(bulk_params, operation), "Job {result.job} has started", "/jobs/{result.job}")
        for operation in Operation
    },
}


def _fields(values: Mapping[str, str], names: Iterable[str]) -> dict[str, Any]:
    """Parameters that are fields of the same name, as methods take them, without missing ones. Raises InvalidParams."""
    return {name: _parameter(name, values[name]) for name in names if name in values}


def _parameter(name: str, text: str) -> Any:
    match name:
        case "delay" | "spread" | "older_than" | "newer_than":
            return _number(text, name, float) * _MINUTE
        case "priority" | "limit" | "max_in_flight" | "burst" | "key_max_in_flight" | "key_burst":
            return _number(text, name, int)
        case "rate" | "key_rate":
            return _number(text, name, float)
        case "all" | "force":
            return True
        case "labels":
            return labels_of(text)
        case "run_at":
            return utc(text)
    return text


def _number(text: str, name: str, kind: type[int] | type[float]) -> float:
    try:
        number = kind(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise InvalidParams(name, f"must be {'a whole number' if kind is int else 'a number'}, not {text[:60]!r}")
    return number


def _json(text: str, name: str) -> bytes:
    """Typed JSON without blanks. Raises InvalidParams."""
    try:
        return msgspec.json.format(text.encode("utf-8"), indent=-1)
    except (ValueError, RecursionError) as exc:
        raise InvalidParams(name, f"is not JSON: {str(exc)[:200]}") from None
