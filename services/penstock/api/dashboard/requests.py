"""Requests of browsers as calls of methods: what pages are rendered from, and what forms do."""

import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, get_args, get_origin

import msgspec
from msgspec.structs import fields
from starlette.datastructures import ImmutableMultiDict

from penstock.api.dashboard.browser_sessions import BrowserSession
from penstock.api.dispatch import Methods
from penstock.api.table import METHODS
from penstock.protocol.checks import MAX_IDS
from penstock.protocol.errors import AccessDenied, InvalidParams, MethodNotFound, RpcError
from penstock.protocol.method import described
from penstock.protocol.tenant import EVERY_TENANT
from penstock.settings.model import Settings
from penstock.tasks.bulk import Operation

PAGE_ROWS = 50
# Seconds of one unit, in which forms have what methods take in seconds.
_UNITS = {"delay": 60, "spread": 60, "older_than": 60, "newer_than": 60}
_VALUE_CHARS = 16_000
EDIT_FIELDS = (
    "id", "payload", "labels", "action", "unique_key", "ordering_key", "limit_key", "tenant", "priority",
    "max_attempts", "timeout", "delay",
)  # fmt: skip

Form = ImmutableMultiDict[str, str]
"""The fields of a form, the first one last: it is what ``get`` gives, as a page's own hidden fields come first."""


class Values(dict[str, Any]):
    """Values of a query or form, None where a value is missing."""

    def __missing__(self, _name: str) -> None:
        return None


@dataclass(frozen=True, slots=True)
class PageRequest:
    browser: BrowserSession
    path: Mapping[str, str]  # parameters of its path
    query: Values  # of its query or form, without empty ones
    methods: Methods = field(repr=False)
    settings: Settings = field(repr=False)
    is_stream: bool = False  # the page is kept up to date, and so can wait for values that are expensive to read

    async def call(self, method: str, **params: Any) -> Any:
        """Call a method with the rights of the browser, leaving out what is None. Raises its errors, AccessDenied."""
        if not self.browser.may(method):
            raise AccessDenied(403, f"Your API key may not do this ({method})")
        return await self.methods.call(method, {name: value for name, value in params.items() if value is not None})


class Page(NamedTuple):
    """A page. What no method answers is read for callers that are bound to no tenant."""

    path: str
    template: str
    load: Callable[[PageRequest], Awaitable[dict[str, Any]]]  # it may return another ``template``, or a ``redirect``
    method: str = "stats"  # a caller that may call it may see the page
    live: bool = True  # kept up to date


def cleaned(values: Mapping[str, str], *, strip: bool = True) -> Values:
    """Values without NUL, lone surrogates, and empty ones. strip: also without outer blanks, which names may have."""
    texts = {name: value[:_VALUE_CHARS].encode("utf-8", "replace").decode("utf-8") for name, value in values.items()}
    texts = {name: text.replace("\0", "\ufffd") for name, text in texts.items() if text.strip()}
    return Values({name: text.strip() if strip else text for name, text in texts.items()})


def params_of(method: str, values: Mapping[str, str], units: Mapping[str, int] = _UNITS) -> dict[str, Any]:
    """Parameters of a method from the fields of their names, as their types say. Raises InvalidParams.

    A list is made of the field in the singular. A limit whose field is empty is removed: raw JSON, since a call
    leaves out None.
    """
    params: dict[str, Any] = {}
    for one in fields(METHODS[method].params):
        kind, _ = described(one.type)
        kinds = {get_origin(part) or part for part in get_args(kind) or (kind,)}
        text = values.get(one.name.removesuffix("s") if list in kinds else one.name)
        if text is not None:
            params[one.name] = _parameter(one.name, text, kinds, units.get(one.name, 1))
        elif one.default is msgspec.UNSET:
            params[one.name] = msgspec.Raw(b"null")
    return params


def _parameter(name: str, text: str, kinds: set[Any], unit: int) -> Any:
    if name in ("run_at", "since", "until"):
        return utc(text)
    if list in kinds:
        return [text]
    if dict in kinds:
        return labels_of(text)
    if bool in kinds:
        return text != "no"
    if float in kinds:
        return number_of(text, name, unit=unit)
    return number_of(text, name, int) if int in kinds and str not in kinds else text


def number_of(text: str, name: str, kind: type[int] | type[float] = float, *, unit: int = 1) -> float:
    """Raises InvalidParams, also for what is beyond a bigint or a double: JSON would make null of an infinity."""
    try:
        number = kind(text) * unit
        fits = abs(number) < 2**63 if kind is int else math.isfinite(number)
    except ValueError:
        fits = False
    if not fits:
        raise InvalidParams(name, f"must be {'a whole number' if kind is int else 'a number'}, not {text[:60]!r}")
    return number


def labels_of(text: str) -> dict[str, str]:
    """``name=value name=value`` as labels; a name alone has an empty value."""
    parts = text.replace(",", " ").split()
    return {name: value for name, _, value in (part.partition("=") for part in parts)}


def utc(text: str) -> str:
    """An instant from a form field, which has no zone: UTC."""
    if text.endswith("Z") or "+" in text[10:] or "-" in text[10:]:
        return text
    return f"{text}:00Z" if len(text) == 16 else f"{text}Z"


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
    """What follows a call of its method. text, next: as of FormOutcome, formats of ``result``."""

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
            query = request.query
            key = await request.call(
                "keys.create",
                name=query["name"],
                permissions=form.getlist("permission"),
                expires_in=query["days"] and number_of(query["days"], "days", unit=86_400),
                tenant=query["tenant"] and query["tenant"].strip(),
                actions=query["actions"] and [one.strip() for one in query["actions"].split(",")],
            )
            return ResultPage("new_key.html", {"key": key})
        case "cancel.selected" | "retry.selected" | "reschedule.selected":
            return await _change_selected(request, method.removesuffix(".selected"), form)
    action = FORM_ACTIONS.get(method)
    if action is None:
        raise MethodNotFound(f"Unknown form method {method[:100]!r}", None)
    params = params_of(method, request.query)
    params.pop("dry_run", None)  # a form is carried out; its page has counted before
    result = await request.call(method, **params)
    text = action.text(result) if callable(action.text) else action.text.format(result=result)
    return FormOutcome(text, None if action.next is None else action.next.format(result=result))


async def _run_again(request: PageRequest, form: Form) -> FormOutcome:
    """Enqueue an edited copy of a task, cancelling that task first if requested."""
    values = request.query
    params = params_of("enqueue", values, units={}) | {
        # Payloads may be longer than other fields, and are not cleaned.
        "payload": msgspec.Raw(_json(form.get("payload") or "{}", "payload")),
        "labels": msgspec.Raw(_json(values["labels"] or "{}", "labels")),
    }
    if "unique_key" in params:
        params["unique"] = "live"  # the old task keeps its record, and the new one takes over the key
    if not request.browser.may("enqueue"):
        raise AccessDenied(403, "Your API key may not enqueue tasks")
    raw = msgspec.json.encode(params)
    await request.methods.check_enqueue(raw)  # before the old task is cancelled
    if values["cancel"]:
        await request.call("cancel", id=values["id"], reason="edited and enqueued again")
    async with request.methods.audit.recording("enqueue", raw):
        task = await request.call("enqueue", **params)
    if task.duplicate:
        text = f"Task {task.id} already has this unique key; no task was added"
    else:
        text = f"Enqueued as task {task.id}"
    return FormOutcome(text, f"/tasks/{task.id}", complete=not task.duplicate)


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
    "cancel": FormAction("Task {result.id} is cancelled"),
    "retry": FormAction("Task {result.id} runs again"),
    "reschedule": FormAction("Task {result.id} is rescheduled"),
    "schedule.pause": FormAction("Schedule {result.name} is paused"),
    "schedule.resume": FormAction("Schedule {result.name} is resumed"),
    "schedule.run_now": FormAction(
        lambda ran: "Skipped: its last task is not settled" if ran.task_id is None else f"Task {ran.task_id} is created"
    ),
    "schedule.delete": FormAction("Schedule {result.name} is deleted", "/schedules"),
    "workflow.cancel": FormAction("Workflow {result.id} is cancelled"),
    "workflow.retry": FormAction("Workflow {result.id}: {result.restarted} steps run again"),
    "action.pause": FormAction("Action {result.action} is paused"),
    "action.resume": FormAction("Action {result.action} is resumed"),
    "action.set": FormAction("Limits of {result.action} are set", "/actions"),
    "tenant.pause": FormAction("Tenant {result.tenant} is paused"),
    "tenant.resume": FormAction("Tenant {result.tenant} is resumed"),
    "tenant.set": FormAction(lambda result: f"Limits of {_whom(result.tenant)} are set", "/tenants"),
    "tenant.delete": FormAction(lambda result: f"The rule of {_whom(result.tenant)} is removed", "/tenants"),
    "rejected.retry": FormAction(_retried, "/rejected"),
    "rejected.purge": FormAction("{result.purged} messages deleted", "/rejected"),
    "dlq.replay": FormAction(_replayed),
    "dlq.purge": FormAction("{result.purged} messages deleted"),
    "keys.revoke": FormAction("Key {result.name} is revoked"),
    "job.cancel": FormAction(lambda result: f"Job {result.id} is {result.state.lower()}"),
    "ordering.release": FormAction(
        lambda result: f"Ordering key {result.key} {'is released' if result.released else 'was not held'}"
    ),
    **dict.fromkeys(Operation, FormAction("Job {result.job} has started", "/jobs/{result.job}")),
}


def _json(text: str, name: str) -> bytes:
    """Typed JSON without blanks. Raises InvalidParams."""
    try:
        return msgspec.json.format(text.encode("utf-8"), indent=-1)
    except (ValueError, RecursionError) as exc:
        raise InvalidParams(name, f"is not JSON: {str(exc)[:200]}") from None
