"""What forms do: their fields to the parameters of a method, which is then called as anybody would over JSON-RPC."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from penstock.api.audit import Audit
from penstock.api.dashboard.page_request import Ask, cleaned, labels_of, utc
from penstock.methods.reading import read_command
from penstock.protocol.checks import MAX_IDS
from penstock.protocol.errors import AccessDenied, InvalidParams, MethodNotFound, RpcError
from penstock.protocol.tenant import EVERY_TENANT

_MINUTE, _DAY = 60, 86_400
_PAYLOAD_FIELDS = ("action", "unique_key", "ordering_key", "limit_key", "tenant")


class Form:
    """A form as it was sent. first: each field by its first value."""

    def __init__(self, pairs: Sequence[tuple[str, str]]) -> None:
        self._pairs = pairs
        self.first: dict[str, str] = {}
        for name, value in pairs:
            self.first.setdefault(name, value)

    def text(self, name: str) -> str:
        return self.first.get(name, "")

    def all(self, name: str) -> list[str]:
        return [value for given, value in self._pairs if given == name]


@dataclass(frozen=True, slots=True)
class Done:
    """What came of it, to be told on the page that follows. whole: nothing was refused."""

    text: str
    next: str | None = None
    whole: bool = True


@dataclass(frozen=True, slots=True)
class Shown:
    """What came of it is a page of its own, for it cannot be shown twice."""

    template: str
    values: dict[str, Any] = field(repr=False)


class Deed(NamedTuple):
    """params: from the fields of a form; said: what to tell of the method's result."""

    params: Callable[[Mapping[str, str]], dict[str, Any]]
    said: Callable[[Mapping[str, Any], Any], str]
    next: Callable[[Any], str] | None = None


async def carry_out(ask: Ask, form: Form) -> Done | Shown:
    """Do what a form asks for. Raises RpcError, Unavailable."""
    method = form.text("method")
    if method == "enqueue":
        return await _run_again(ask, form)
    if method == "keys.create":
        return await _create_key(ask, form)
    if method.endswith(".selected"):
        return await _selected(ask, method.removesuffix(".selected"), form)
    deed = DEEDS.get(method)
    if deed is None:
        raise MethodNotFound(f"Unknown form method {method[:100]!r}", None)
    params = deed.params(ask.query)
    result = await ask.call(method, **params)
    return Done(deed.said(params, result), deed.next(result) if deed.next else None)


def page_again(form: Form, exc: RpcError) -> tuple[str, dict[str, Any]] | None:
    """A page to show in place of a message alone, where somebody has typed what should not be lost."""
    if form.text("method") != "enqueue":
        return None
    names = ("id", "action", "priority", "max_attempts", "timeout", "labels", "payload", "delay", *_PAYLOAD_FIELDS[1:])
    values: dict[str, Any] = {name: form.text(name) for name in names}
    return "edit.html", {"values": values | {"cancel": bool(form.text("cancel"))}, "problem": exc.message}


async def _run_again(ask: Ask, form: Form) -> Done:
    """A new task from an old one, as edited; the old one is called off first where that is asked for."""
    # Payloads may be long and hold what other fields may not.
    values = {name: value for name, value in cleaned(form.first).items() if name != "payload"}
    params = {
        **{name: values.get(name) for name in _PAYLOAD_FIELDS},
        "payload": msgspec.Raw(_json(form.text("payload") or "{}", "payload")),
        "priority": _whole(values, "priority"),
        "max_attempts": _whole(values, "max_attempts"),
        "timeout": _float(values, "timeout"),
        "delay": _float(values, "delay"),
        "labels": msgspec.json.decode(_json(values.get("labels", "{}"), "labels")),
    }
    params = {name: value for name, value in params.items() if value is not None}
    if "unique_key" in params:
        params["unique"] = "live"  # the old task keeps its record, and the new one takes the key over
    if not ask.visitor.may("enqueue"):
        raise AccessDenied(403, "Your API key may not enqueue tasks")
    raw = msgspec.json.encode(params)
    read_command("enqueue", raw, ask.settings)  # before the old task is called off
    if values.get("cancel"):
        await ask.call("cancel", id=_required(values, "id"), reason="edited and enqueued again")
    audit: Audit = ask.methods.audit
    async with audit.noting("enqueue", raw):
        made = await ask.call("enqueue", **params)
    if made.duplicate:
        return Done(f"Task {made.id} already has this unique key; no task was added", f"/tasks/{made.id}", whole=False)
    return Done(f"Enqueued as task {made.id}", f"/tasks/{made.id}")


async def _create_key(ask: Ask, form: Form) -> Shown:
    days = _float(ask.query, "days")
    made = await ask.call(
        "keys.create", name=_required(ask.query, "name"), permissions=form.all("permission"),
        expires_in=None if days is None else days * _DAY, tenant=ask.query.get("tenant"),
        actions=[one.strip() for one in ask.query["actions"].split(",")] if ask.query.get("actions") else None,
    )  # fmt: skip
    return Shown("new_key.html", {"key": made})


async def _selected(ask: Ask, method: str, form: Form) -> Done:
    """One call for each task that was ticked; those that are refused keep no other from it."""
    ids = form.all("ids")[:MAX_IDS]
    if method not in ("cancel", "retry"):
        raise MethodNotFound(f"Unknown form method {method[:100]!r}", None)
    if not ids:
        raise InvalidParams("ids", "must not be empty: select tasks first")
    refused: list[str] = []
    for task_id in ids:
        try:
            await ask.call(method, id=task_id[:40])
        except AccessDenied:
            raise
        except RpcError as exc:
            refused.append(exc.message)
    verb = "cancelled" if method == "cancel" else "retried"
    text = f"{len(ids) - len(refused)} of {len(ids)} tasks {verb}"
    return Done(text + (f"; {refused[0]}" if refused else ""), whole=not refused)


def bulk_params(operation: str, values: Mapping[str, str]) -> dict[str, Any]:
    """The filter of a bulk operation, and what it does, from a form."""
    older, newer = _float(values, "older_than"), _float(values, "newer_than")
    params: dict[str, Any] = {
        "action": values.get("action"),
        "states": [values["state"]] if "state" in values else None,
        "labels": labels_of(values.get("labels")),
        "tenant": values.get("tenant"),
        "older_than": None if older is None else older * _MINUTE,
        "newer_than": None if newer is None else newer * _MINUTE,
        "all": True if values.get("all") else None,
    }
    if operation == "bulk.reschedule":
        delay, spread = _float(values, "delay"), _float(values, "spread")
        params |= {
            "delay": None if delay is None else delay * _MINUTE, "spread": None if spread is None else spread * _MINUTE,
            "priority": _whole(values, "priority"),
        }  # fmt: skip
    return {name: value for name, value in params.items() if value is not None}


def _bulk(operation: str) -> Deed:
    return Deed(
        lambda values: bulk_params(operation, values), lambda _, made: f"Job {made.job} has started",
        lambda made: f"/jobs/{made.job}",
    )  # fmt: skip


def _of(*names: str) -> Callable[[Mapping[str, str]], dict[str, Any]]:
    """Parameters that a form must give as they are."""
    return lambda values: {name: _required(values, name) for name in names}


def _held_key(values: Mapping[str, str]) -> dict[str, Any]:
    tenant = {"tenant": values["tenant"]} if "tenant" in values else {}
    return {"key": _required(values, "key"), **tenant}


def _limits(values: Mapping[str, str]) -> dict[str, Any]:
    """Of a limit that is left empty, that it goes. The call leaves out what is None, so it is given as raw JSON."""
    params: dict[str, Any] = {"action": _required(values, "action")}
    for name in ("max_in_flight", "burst", "key_max_in_flight", "key_burst"):
        params[name] = _whole(values, name)
    for name in ("rate", "key_rate"):
        params[name] = _float(values, name)
    return {name: msgspec.Raw(b"null") if value is None else value for name, value in params.items()}


def _tenant_limits(values: Mapping[str, str]) -> dict[str, Any]:
    """As ``_limits``, of a tenant."""
    params: dict[str, Any] = {
        "max_in_flight": _whole(values, "max_in_flight"), "rate": _float(values, "rate"),
        "burst": _whole(values, "burst"),
    }  # fmt: skip
    tenant = {"tenant": _required(values, "tenant")}
    return tenant | {name: msgspec.Raw(b"null") if value is None else value for name, value in params.items()}


def _whom(tenant: str) -> str:
    return "tenants without their own" if tenant == EVERY_TENANT else tenant


def _reschedule(values: Mapping[str, str]) -> dict[str, Any]:
    delay = _float(values, "delay")
    return {
        "id": _required(values, "id"), "run_at": utc(values.get("run_at")),
        "delay": None if delay is None else delay * _MINUTE, "priority": _whole(values, "priority"),
    }  # fmt: skip


def _rejected(values: Mapping[str, str]) -> dict[str, Any]:
    if "id" in values:
        return {"ids": [values["id"]]}
    return {"limit": _whole(values, "limit") or 1000, "source": values.get("source")}


def _dead(values: Mapping[str, str]) -> dict[str, Any]:
    which: dict[str, Any] = {"ids": [values["id"]]} if "id" in values else {"limit": _whole(values, "limit") or 1000}
    force = {"force": True} if values.get("force") else {}
    return {"queue": _required(values, "queue"), **which, **force}


def _replayed(params: Mapping[str, Any], done: Any) -> str:
    left = f"; {len(done.left)} stay: {done.left[0].reason}" if done.left else ""
    return f"{done.replayed} messages replayed, {done.dropped} dropped as stale{left}"


def _retried(params: Mapping[str, Any], done: Any) -> str:
    still = (
        f"; {len(done.still_rejected)} still rejected: {done.still_rejected[0].reason}" if done.still_rejected else ""
    )
    return f"{done.retried} messages accepted{still}"


DEEDS: dict[str, Deed] = {
    "cancel": Deed(
        lambda values: {"id": _required(values, "id"), "reason": values.get("reason")},
        lambda _, done: f"Task {done.id} is cancelled",
    ),
    "retry": Deed(_of("id"), lambda _, done: f"Task {done.id} runs again"),
    "reschedule": Deed(_reschedule, lambda _, done: f"Task {done.id} is rescheduled"),
    "schedule.pause": Deed(_of("name"), lambda _, done: f"Schedule {done.name} is paused"),
    "schedule.resume": Deed(_of("name"), lambda _, done: f"Schedule {done.name} is resumed"),
    "schedule.run_now": Deed(_of("name"), lambda given, done: f"Schedule {given['name']} created task {done.task_id}"),
    "schedule.delete": Deed(_of("name"), lambda _, done: f"Schedule {done.name} is deleted", lambda _: "/schedules"),
    "workflow.cancel": Deed(_of("id"), lambda _, done: f"Workflow {done.id} is cancelled"),
    "workflow.retry": Deed(_of("id"), lambda _, done: f"Workflow {done.id}: {done.restarted} steps run again"),
    "action.pause": Deed(_of("action"), lambda _, done: f"Action {done.action} is paused"),
    "action.resume": Deed(_of("action"), lambda _, done: f"Action {done.action} is resumed"),
    "action.set": Deed(_limits, lambda _, done: f"Limits of {done.action} are set", lambda _: "/actions"),
    "tenant.pause": Deed(_of("tenant"), lambda _, done: f"Tenant {done.tenant} is paused"),
    "tenant.resume": Deed(_of("tenant"), lambda _, done: f"Tenant {done.tenant} is resumed"),
    "tenant.set": Deed(_tenant_limits, lambda _, done: f"Limits of {_whom(done.tenant)} are set", lambda _: "/tenants"),
    "tenant.delete": Deed(
        _of("tenant"), lambda _, done: f"The rule of {_whom(done.tenant)} is removed", lambda _: "/tenants"
    ),
    "rejected.retry": Deed(_rejected, _retried, lambda _: "/rejected"),
    "rejected.purge": Deed(_rejected, lambda _, done: f"{done.purged} messages deleted", lambda _: "/rejected"),
    "dlq.replay": Deed(_dead, _replayed),
    "dlq.purge": Deed(_dead, lambda _, done: f"{done.purged} messages deleted"),
    "keys.revoke": Deed(_of("id"), lambda _, done: f"Key {done.name} is revoked"),
    "job.cancel": Deed(_of("id"), lambda _, done: f"Job {done.id} is {done.state.lower()}"),
    "ordering.release": Deed(_held_key, lambda _, done: f"Ordering key {done.key} is released"),
    **{f"bulk.{name}": _bulk(f"bulk.{name}") for name in ("cancel", "retry", "delete", "reschedule")},
}


def _required(values: Mapping[str, str], name: str) -> str:
    if name not in values:
        raise InvalidParams(name, "is missing")
    return values[name]


def _whole(values: Mapping[str, str], name: str) -> int | None:
    if name not in values:
        return None
    try:
        return int(values[name])
    except ValueError:
        raise InvalidParams(name, f"must be a whole number, not {values[name][:60]!r}") from None


def _float(values: Mapping[str, str], name: str) -> float | None:
    if name not in values:
        return None
    try:
        number = float(values[name])
    except ValueError:
        raise InvalidParams(name, f"must be a number, not {values[name][:60]!r}") from None
    if number != number or number in (float("inf"), float("-inf")):
        raise InvalidParams(name, f"must be a number, not {values[name][:60]!r}")
    return number


def _json(text: str, name: str) -> bytes:
    """The JSON that somebody typed, without the spaces. Raises InvalidParams."""
    try:
        return msgspec.json.format(text.encode("utf-8"), indent=-1)
    except (ValueError, RecursionError) as exc:
        raise InvalidParams(name, f"is not JSON: {str(exc)[:200]}") from None
