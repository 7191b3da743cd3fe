"""What forms do: their fields become the parameters of a method, which is called as over JSON-RPC."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
from starlette.datastructures import ImmutableMultiDict

from penstock.api.dashboard.page_request import PageRequest, number_of, params_of
from penstock.protocol.checks import MAX_IDS
from penstock.protocol.errors import AccessDenied, InvalidParams, MethodNotFound, RpcError
from penstock.protocol.tenant import EVERY_TENANT
from penstock.tasks.bulk import Operation

_DAY = 86_400
EDIT_FIELDS = (
    "id", "payload", "labels", "action", "unique_key", "ordering_key", "limit_key", "tenant", "priority",
    "max_attempts", "timeout", "delay",
)  # fmt: skip

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
            return await _create_key(request, form)
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


async def _create_key(request: PageRequest, form: Form) -> ResultPage:
    query = request.query
    key = await request.call(
        "keys.create",
        name=query["name"],
        permissions=form.getlist("permission"),
        expires_in=query["days"] and number_of(query["days"], "days", unit=_DAY),
        tenant=query["tenant"] and query["tenant"].strip(),
        actions=query["actions"] and [one.strip() for one in query["actions"].split(",")],
    )
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


def _whom(tenant: str) -> str:
    return "tenants without their own" if tenant == EVERY_TENANT else tenant


def _replayed(result: Any) -> str:
    left = f"; {len(result.left)} stay: {result.left[0].reason}" if result.left else ""
    return f"{result.replayed} messages replayed, {result.dropped} dropped as stale{left}"


def _retried(result: Any) -> str:
    still = result.still_rejected
    left = f"; {len(still)} still rejected: {still[0].reason}" if still else ""
    return f"{result.retried} messages accepted{left}"


def _ran_now(result: Any) -> str:
    return "Skipped: its last task is not settled" if result.task_id is None else f"Task {result.task_id} is created"


FORM_ACTIONS: dict[str, FormAction] = {
    "cancel": FormAction("Task {result.id} is cancelled"),
    "retry": FormAction("Task {result.id} runs again"),
    "reschedule": FormAction("Task {result.id} is rescheduled"),
    "schedule.pause": FormAction("Schedule {result.name} is paused"),
    "schedule.resume": FormAction("Schedule {result.name} is resumed"),
    "schedule.run_now": FormAction(_ran_now),
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
