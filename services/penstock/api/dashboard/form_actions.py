"""What forms do: their fields become the parameters of a method, which is called as over JSON-RPC."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import msgspec

from penstock.api.dashboard.page_request import PageRequest, cleaned, labels_of, utc
from penstock.methods.table import read_command
from penstock.protocol.checks import MAX_IDS
from penstock.protocol.errors import AccessDenied, InvalidParams, MethodNotFound, RpcError
from penstock.protocol.tenant import EVERY_TENANT

_MINUTE, _DAY = 60, 86_400
_TEXT_FIELDS = ("action", "unique_key", "ordering_key", "limit_key", "tenant")
_EDIT_FIELDS = ("id", "payload", "priority", "max_attempts", "timeout", "delay", "labels", *_TEXT_FIELDS)
_TENANT_LIMITS = {"max_in_flight": int, "rate": float, "burst": int}
_ACTION_LIMITS = _TENANT_LIMITS | {f"key_{name}": kind for name, kind in _TENANT_LIMITS.items()}
_Number = TypeVar("_Number", int, float)


class Form:
    """values: the first value of each field, since a page's own hidden fields come first."""

    def __init__(self, pairs: Sequence[tuple[str, str]]) -> None:
        self._pairs = pairs
        self.values = dict(reversed(pairs))

    def text(self, name: str) -> str:
        return self.values.get(name, "")

    def all(self, name: str) -> list[str]:
        return [value for field_name, value in self._pairs if field_name == name]


@dataclass(frozen=True, slots=True)
class FormOutcome:
    """text: shown on the next page. next: its path; None: back to the form's. complete: no part was refused."""

    text: str
    next: str | None = None
    complete: bool = True


@dataclass(frozen=True, slots=True)
class ResultPage:
    """A result that can be shown only once, as a page of its own."""

    template: str
    values: dict[str, Any] = field(repr=False)


class FormAction(NamedTuple):
    """params: from the fields of a form. text, next: as of FormOutcome, formats of ``result`` and ``params``."""

    params: Callable[[Mapping[str, str]], dict[str, Any]]
    text: str | Callable[[Any], str]
    next: str | None = None


async def carry_out(request: PageRequest, form: Form) -> FormOutcome | ResultPage:
    """Call the method that a form names. Raises RpcError, Unavailable."""
    method = form.text("method")
    match method:
        case "enqueue":
            return await _run_again(request, form)
        case "keys.create":
            return await _create_key(request, form)
        case "cancel.selected" | "retry.selected":
            return await _change_selected(request, method.removesuffix(".selected"), form)
    action = FORM_ACTIONS.get(method)
    if action is None:
        raise MethodNotFound(f"Unknown form method {method[:100]!r}", None)
    params = action.params(request.query)
    result = await request.call(method, **params)
    text = action.text(result) if callable(action.text) else action.text.format(result=result, params=params)
    return FormOutcome(text, None if action.next is None else action.next.format(result=result))


def page_again(form: Form, exc: RpcError) -> tuple[str, dict[str, Any]] | None:
    """The template and values of the form again after an error, if it holds text that must not be lost."""
    if form.text("method") != "enqueue":
        return None
    values: dict[str, Any] = {name: form.text(name) for name in _EDIT_FIELDS}
    return "edit.html", {"values": values | {"cancel": bool(form.text("cancel"))}, "problem": exc.message}


async def _run_again(request: PageRequest, form: Form) -> FormOutcome:
    """Enqueue an edited copy of a task, cancelling that task first if requested."""
    # Payloads may be longer than other fields, and are not cleaned.
    values = {name: value for name, value in cleaned(form.values).items() if name != "payload"}
    params = {
        **{name: values.get(name) for name in _TEXT_FIELDS},
        "payload": msgspec.Raw(_json(form.text("payload") or "{}", "payload")),
        "priority": _number(values, "priority", int),
        "max_attempts": _number(values, "max_attempts", int),
        "timeout": _number(values, "timeout", float),
        "delay": _number(values, "delay", float),
        "labels": msgspec.json.decode(_json(values.get("labels", "{}"), "labels")),
    }
    params = {name: value for name, value in params.items() if value is not None}
    if "unique_key" in params:
        params["unique"] = "live"  # the old task keeps its record, and the new one takes over the key
    if not request.browser.may("enqueue"):
        raise AccessDenied(403, "Your API key may not enqueue tasks")
    raw = msgspec.json.encode(params)
    read_command("enqueue", raw, request.settings)  # before the old task is cancelled
    if values.get("cancel"):
        await request.call("cancel", id=_required(values, "id"), reason="edited and enqueued again")
    async with request.methods.audit.recording("enqueue", raw):
        task = await request.call("enqueue", **params)
    if task.duplicate:
        text = f"Task {task.id} already has this unique key; no task was added"
    else:
        text = f"Enqueued as task {task.id}"
    return FormOutcome(text, f"/tasks/{task.id}", complete=not task.duplicate)


async def _create_key(request: PageRequest, form: Form) -> ResultPage:
    values = request.query
    days = _number(values, "days", float)
    key = await request.call(
        "keys.create", name=_required(values, "name"), permissions=form.all("permission"),
        expires_in=None if days is None else days * _DAY, tenant=values.get("tenant"),
        actions=[one.strip() for one in values["actions"].split(",")] if "actions" in values else None,
    )  # fmt: skip
    return ResultPage("new_key.html", {"key": key})


async def _change_selected(request: PageRequest, method: str, form: Form) -> FormOutcome:
    """One call for each selected task; a refused one does not stop the others."""
    ids = form.all("ids")[:MAX_IDS]
    if not ids:
        raise InvalidParams("ids", "must not be empty: select tasks first")
    refused: list[str] = []
    for task_id in ids:
        try:
            await request.call(method, id=task_id[:40])
        except AccessDenied:
            raise
        except RpcError as exc:
            refused.append(exc.message)
    verb = "cancelled" if method == "cancel" else "retried"
    text = f"{len(ids) - len(refused)} of {len(ids)} tasks {verb}"
    return FormOutcome(text + (f"; {refused[0]}" if refused else ""), complete=not refused)


def bulk_params(operation: str, values: Mapping[str, str]) -> dict[str, Any]:
    """Parameters of a bulk operation. Raises InvalidParams."""
    params: dict[str, Any] = {
        "action": values.get("action"),
        "states": [values["state"]] if "state" in values else None,
        "labels": labels_of(values.get("labels")),
        "tenant": values.get("tenant"),
        "older_than": _minutes(values, "older_than"),
        "newer_than": _minutes(values, "newer_than"),
        "all": True if values.get("all") else None,
    }
    if operation == "bulk.reschedule":
        params |= {
            "delay": _minutes(values, "delay"),
            "spread": _minutes(values, "spread"),
            "priority": _number(values, "priority", int),
        }
    return {name: value for name, value in params.items() if value is not None}


def _bulk(operation: str) -> FormAction:
    return FormAction(
        lambda values: bulk_params(operation, values), "Job {result.job} has started", "/jobs/{result.job}"
    )


def _of(*names: str) -> Callable[[Mapping[str, str]], dict[str, Any]]:
    """Parameters that are required fields of the same name."""
    return lambda values: {name: _required(values, name) for name in names}


def _limits(subject: str, limits: Mapping[str, type[int] | type[float]]) -> Callable[[Mapping[str, str]], Any]:
    """Limits of an action or tenant. An empty one is removed: raw JSON, since a call leaves out None."""

    def params(values: Mapping[str, str]) -> dict[str, Any]:
        numbers = {name: _number(values, name, kind) for name, kind in limits.items()}
        return {subject: _required(values, subject)} | {
            name: msgspec.Raw(b"null") if value is None else value for name, value in numbers.items()
        }

    return params


def _whom(tenant: str) -> str:
    return "tenants without their own" if tenant == EVERY_TENANT else tenant


def _messages(values: Mapping[str, str]) -> dict[str, Any]:
    """One message by its id, or up to ``limit``."""
    return {"ids": [values["id"]]} if "id" in values else {"limit": _number(values, "limit", int) or 1000}


def _rejected(values: Mapping[str, str]) -> dict[str, Any]:
    return _messages(values) | ({} if "id" in values else {"source": values.get("source")})


def _dead(values: Mapping[str, str]) -> dict[str, Any]:
    force = {"force": True} if values.get("force") else {}
    return {"queue": _required(values, "queue"), **_messages(values), **force}


def _replayed(result: Any) -> str:
    left = f"; {len(result.left)} stay: {result.left[0].reason}" if result.left else ""
    return f"{result.replayed} messages replayed, {result.dropped} dropped as stale{left}"


def _retried(result: Any) -> str:
    still = result.still_rejected
    return f"{result.retried} messages accepted" + (
        f"; {len(still)} still rejected: {still[0].reason}" if still else ""
    )


FORM_ACTIONS: dict[str, FormAction] = {
    "cancel": FormAction(
        lambda values: {"id": _required(values, "id"), "reason": values.get("reason")}, "Task {result.id} is cancelled"
    ),
    "retry": FormAction(_of("id"), "Task {result.id} runs again"),
    "reschedule": FormAction(
        lambda values: {
            "id": _required(values, "id"),
            "run_at": utc(values.get("run_at")),
            "delay": _minutes(values, "delay"),
            "priority": _number(values, "priority", int),
        },
        "Task {result.id} is rescheduled",
    ),
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
    "ordering.release": FormAction(
        lambda values: {"key": _required(values, "key"), "tenant": values.get("tenant")},
        "Ordering key {result.key} is released",
    ),
    **{f"bulk.{name}": _bulk(f"bulk.{name}") for name in ("cancel", "retry", "delete", "reschedule")},
}


def _required(values: Mapping[str, str], name: str) -> str:
    if name not in values:
        raise InvalidParams(name, "is missing")
    return values[name]


def _number(values: Mapping[str, str], name: str, kind: type[_Number]) -> _Number | None:
    if name not in values:
        return None
    try:
        number = kind(values[name])
    except ValueError:
        number = None
    if number is None or (isinstance(number, float) and not math.isfinite(number)):
        wanted = "a whole number" if kind is int else "a number"
        raise InvalidParams(name, f"must be {wanted}, not {values[name][:60]!r}")
    return number


def _minutes(values: Mapping[str, str], name: str) -> float | None:
    """A field in minutes, in seconds."""
    number = _number(values, name, float)
    return None if number is None else number * _MINUTE


def _json(text: str, name: str) -> bytes:
    """Typed JSON without blanks. Raises InvalidParams."""
    try:
        return msgspec.json.format(text.encode("utf-8"), indent=-1)
    except (ValueError, RecursionError) as exc:
        raise InvalidParams(name, f"is not JSON: {str(exc)[:200]}") from None
