"""Bodies of the inbound queue: tasks to store, methods to carry out, and what is refused, with the reason.

Payloads are checked against the JSON Schemas that workers announce (PENSTOCK_CHECK_PAYLOADS).
"""

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from penstock.db.context import within
from penstock.db.session import OpenSession, Session
from penstock.methods.audit import AuditEntry, begin_audit, end_audit, shown_params
from penstock.methods.table import API_ONLY, METHODS, read_command
from penstock.payloads.codec import PayloadCodec, offered_aad, payload_aad
from penstock.protocol import errors
from penstock.protocol.answers import Accepted
from penstock.protocol.json_text import check_payload, decode_any
from penstock.protocol.requests import Invalid, Request, decode_body
from penstock.protocol.spelling import did_you_mean
from penstock.protocol.task import ANNOUNCED_SECONDS, NewTask
from penstock.runtime.logs import log
from penstock.settings.model import Settings
from penstock.tasks import enqueue

_ONLY_ANSWERS = "{method} only answers, and a queue has no way back: ask over HTTP"
_encode = msgspec.json.Encoder().encode
_SHOWN_CHARS = 100
_KINDS = {dict: "object", list: "array", str: "string", bool: "boolean", int: "number", float: "number"}

Schemas = Mapping[str, Sequence[str]]
"""JSON Schemas of payloads as text, by action: of each version that runs now, the newest announcement first."""


def refusal_of(task: NewTask, enqueued: Accepted) -> errors.DuplicateTask | None:
    """The error for a task that asked to be refused if another has its unique key, and one has."""
    if task.on_duplicate == "error" and enqueued.duplicate:
        return errors.DuplicateTask(enqueued.id, enqueued.state)
    return None


class Wanted(NamedTuple):
    """A change that a request asks for, and who the broker says has sent it, empty where it does not say."""

    request: Request
    change: Any
    sender: str


@lru_cache(maxsize=4096)
def _is_allowed(method: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(method, pattern) for pattern in patterns)


@dataclass(slots=True)
class Inbound:
    """What a body of the inbound queue asks for. See ``take_in`` for large payloads."""

    tasks: list[NewTask] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)  # of each task
    changes: list[Wanted] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)  # texts, with the reason

    def refuse(self, request: Request, reason: str) -> None:
        self.refused.append((_encode(request).decode(), reason))


def is_change(method: str, command: Any) -> bool:
    """Whether a body of the inbound queue may ask for it: an answer has no way back."""
    return METHODS[method].by_queue and not METHODS[method].dry(command)


def read_inbound(body: str, settings: Settings, *, sender: str = "") -> Inbound:
    """Read a body of the inbound queue; raises nothing, whatever the body is. sender: see ``Wanted``."""
    inbound = Inbound()
    try:
        entries = decode_body(body, batch_limit=settings.batch_limit).entries
    except errors.RpcError as exc:
        inbound.refused.append((body, exc.message))
        return inbound
    for entry in entries:
        if isinstance(entry, Invalid):
            inbound.refused.append((entry.text, entry.error.message))
            continue
        reason = ""
        try:
            command = read_command(entry.method, entry.params, settings)
        except errors.MethodNotFound:
            reason = f"unknown method {entry.method[:200]!r}{did_you_mean(entry.method, METHODS)}"
            if entry.method.startswith(API_ONLY):
                reason = _ONLY_ANSWERS.format(method=entry.method)
        except errors.RpcError as exc:
            reason = exc.message
        except Exception:
            log.exception("request_not_read", method=entry.method[:200])  # it must not hold up its neighbours
            reason = "could not be read: the log of the submitter says why"
        else:
            if not _is_allowed(entry.method, settings.inbound_methods):
                reason = f"{entry.method} is not among PENSTOCK_INBOUND_METHODS: ask over HTTP, with a key that may"
            elif isinstance(command, NewTask):
                inbound.tasks.append(command)
                inbound.requests.append(entry)
            elif is_change(entry.method, command):
                inbound.changes.append(Wanted(entry, command, sender))
            else:
                reason = _ONLY_ANSWERS.format(method=entry.method)
        if reason:
            inbound.refuse(entry, reason)
    return inbound


async def take_in(inbound: Inbound, codec: PayloadCodec, settings: Settings, open_session: OpenSession) -> None:
    """Store large payloads as objects; decode, check and encode again those that clients encoded.

    ``inbound.refused`` gains what is no longer available, or is no payload. Best called before the transaction.
    Raises PayloadUnavailable while the bucket is unavailable.
    """
    taken = await take_in_tasks(inbound.tasks, codec, settings, open_session)
    requests, inbound.tasks, inbound.requests = inbound.requests, [], []
    for task, request in zip(taken, requests, strict=True):
        if isinstance(task, errors.RpcError):
            inbound.refuse(request, task.message)
        elif isinstance(task, BaseException):
            raise task
        else:
            inbound.tasks.append(task)
            inbound.requests.append(request)


async def take_in_tasks(
    tasks: Sequence[NewTask], codec: PayloadCodec, settings: Settings, open_session: OpenSession
) -> list[NewTask | BaseException]:
    """Tasks as they are to be stored, or instead of one why not: PayloadUnavailable, or a final RpcError."""
    taken: list[NewTask | BaseException] = list(tasks)
    schemas: Schemas = {}
    if settings.check_payloads:
        async with open_session() as session:
            schemas = await read_schemas(session, (task.action for task in tasks))
        for place, given in enumerate(tasks):
            try:
                if given.offered is None:
                    check_fits(schemas, given.action, given.payload)
            except errors.InvalidParams as exc:
                taken[place] = exc
    large = {
        place: task
        for place, task in enumerate(taken)
        if isinstance(task, NewTask) and (task.offered is not None or codec.is_large(task.payload))
    }
    if not large:
        return taken
    async with open_session() as session:
        routes = await enqueue.routes_of_kinds(session, {(task.action, task.labels) for task in large.values()})

    async def take(task: NewTask) -> NewTask:
        payload, queue = task.payload, routes[task.action, task.labels]["queue"]
        # What is loaded is stored before the loads behind it: else all would be held at once.
        async with nullcontext() if task.offered is None else codec.taking:
            if task.offered is not None:
                try:
                    payload = await codec.load(task.offered, offered_aad(task.action, task.tenant))
                except errors.PayloadLost as exc:
                    raise errors.InvalidParams("sealed_payload", f"cannot be taken: {exc}") from None
                check_payload(payload, "sealed_payload", settings.largest_payload_bytes)
                check_fits(schemas, task.action, payload)
            stored = await codec.store(payload, payload_aad(task.action, task.tenant), queue=queue)
            return replace(task, payload=stored)

    stored = await asyncio.gather(*map(take, large.values()), return_exceptions=True)
    for place, task in zip(large, stored, strict=True):
        taken[place] = task
    return taken


async def accept_inbound(session: Session, inbound: Inbound, settings: Settings, *, source: str) -> list[Accepted]:
    """Carry out a body, inside a transaction; ``inbound.refused`` gains what could not be done. Raises Refused."""
    enqueued = await enqueue.enqueue(session, inbound.tasks, source=source)
    for task, request, answer in zip(inbound.tasks, inbound.requests, enqueued, strict=True):
        if (refusal := refusal_of(task, answer)) is not None:
            inbound.refuse(request, refusal.message)
    noted = await _note(session, inbound.changes) if source == "inbound" else {}
    outcomes = dict.fromkeys(noted.values(), "ok")
    context = within(session, settings)
    for place, (request, change, _) in enumerate(inbound.changes):
        method = METHODS[request.method]
        try:
            async with session.savepoint() if method.savepoint else nullcontext():
                await method.carry_out(context, change)
        except errors.RpcError as exc:
            inbound.refuse(request, exc.message)
            if place in noted:
                outcomes[noted[place]] = exc.message
    if outcomes:
        await end_audit(session, outcomes)
    return enqueued


async def _note(session: Session, changes: Sequence[Wanted]) -> dict[int, int]:
    """Record the audited changes, in the transaction that makes them: records by place."""
    entries: dict[int, AuditEntry] = {}
    for place, (request, _, sender) in enumerate(changes):
        if METHODS[request.method].audited:
            params = shown_params(request.method, bytes(request.params))
            entries[place] = AuditEntry(sender, "", "inbound", request.method, params)
    return dict(zip(entries, await begin_audit(session, list(entries.values())), strict=True)) if entries else {}


async def read_schemas(session: Session, actions: Iterable[str]) -> Schemas:
    found = defaultdict(list)
    for row in await session.fetch("read_announced_params", list(set(actions)), ANNOUNCED_SECONDS):
        found[row["action"]].append(row["params"])
    return found


def check_fits(schemas: Schemas, action: str, payload: str) -> None:
    """Raises InvalidParams for a payload that fits none of its action's schemas; arrays by position are not checked."""
    texts = schemas.get(action, ())
    if not texts or payload.startswith("["):
        return
    value, problem = decode_any(payload), None
    for text in texts:
        try:
            misfit = _first_misfit(text, value)
        except Exception:  # a schema that cannot be applied checks nothing
            return
        if misfit is None:
            return
        problem = problem or misfit
    if problem is not None:
        raise errors.InvalidParams(f"payload{problem[0]}", f"{problem[1]}, as workers announce the action {action!r}")


def _first_misfit(schema: str, value: Any) -> tuple[str, str] | None:
    """Where a value does not fit, as a path, and how, without the value itself."""
    from jsonschema.exceptions import best_match

    error = best_match(_validator(schema).iter_errors(value))
    if error is None:
        return None
    path, seen, wanted = error.json_path[1:], error.instance, error.validator_value
    match error.validator:
        case "required":
            return f"{path}.{next(name for name in wanted if name not in seen)}"[:_SHOWN_CHARS], "is missing"
        case "additionalProperties" if wanted is False:
            unknown = next(name for name in seen if name not in error.schema.get("properties", {}))
            return f"{path}.{unknown}"[:_SHOWN_CHARS], "is no parameter"
        case "type":
            kinds = wanted if isinstance(wanted, str) else " or ".join(wanted)
            problem = f"must be {kinds}"
        case keyword:
            problem = f"must fit {keyword} {str(wanted)[:_SHOWN_CHARS]}"
    return path[:_SHOWN_CHARS], f"{problem}, and is of type {_KINDS.get(type(seen), 'null')}"


@lru_cache(maxsize=1000)
def _validator(schema: str) -> Any:
    from jsonschema import Draft202012Validator  # not before the setting asks for it
    from referencing import Registry

    return Draft202012Validator(decode_any(schema), registry=Registry())  # which fetches nothing
