"""New tasks: those of `enqueue` and of `submit:<action>`."""

from __future__ import annotations

import json
from datetime import datetime
from math import isfinite
from typing import TYPE_CHECKING

import msgspec

from penstock.protocol import checks
from penstock.protocol.errors import InvalidParams, TooLarge
from penstock.protocol.json_text import check_payload, decode_any, escape_for_sqs
from penstock.protocol.sealed import Reference, decode_sealed
from penstock.protocol.task import NewTask
from penstock.tasks.params import BulkRescheduleParams, EnqueueParams, RescheduleParams

if TYPE_CHECKING:
    from penstock.settings.model import Settings


class _Identified(msgspec.Struct, frozen=True):
    objectID: msgspec.Raw = msgspec.Raw(b"null")


_decode_identified = msgspec.json.Decoder(_Identified).decode


def new_task(given: EnqueueParams, settings: Settings, *, large: bool = True) -> NewTask:
    """given: whose fields have been checked. large: its payload may become an object."""
    payload = bytes(given.payload).decode("utf-8")
    check_task_payload(payload, settings, large=large)
    offered = None if given.sealed_payload is None else _offered(given, settings)
    run_at = read_start(given)
    if given.expires_at is not None and given.expires_in is not None:
        raise InvalidParams("expires_in", "and expires_at exclude each other; give one")
    if given.unique_key is None:
        for name, usual in (("unique", "retained"), ("on_duplicate", "return")):
            if getattr(given, name) != usual:
                raise InvalidParams(name, "goes with unique_key")
    if not isinstance(given.unique, str):
        checks.check_seconds(given.unique, "unique")
    return NewTask(
        action=given.action,
        payload=payload,
        run_at=run_at,
        delay_seconds=given.delay,
        priority=given.priority or 0,
        unique_key=given.unique_key,
        ordering_key=given.ordering_key,
        max_attempts=given.max_attempts or settings.max_attempts,
        timeout_seconds=given.timeout,
        labels=msgspec.json.encode(given.labels).decode("utf-8") if given.labels else None,
        expires_at=checks.read_instant(given.expires_at, "expires_at"),
        expires_in_seconds=given.expires_in,
        limit_key=given.limit_key,
        unique=given.unique,
        on_duplicate=given.on_duplicate,
        replaces_priority=given.on_duplicate == "replace" and given.priority is not None,
        tenant=given.tenant,
        offered=offered,
    )


def read_start(given: EnqueueParams | RescheduleParams | BulkRescheduleParams) -> datetime | None:
    """The time in run_at. Raises InvalidParams."""
    if given.run_at is not None and given.delay is not None:
        raise InvalidParams("delay", "and run_at exclude each other; give one")
    return checks.read_instant(given.run_at)


def submitted_task(action: str, raw: bytes, settings: Settings) -> NewTask:
    payload = raw.decode("utf-8")
    check_task_payload(payload, settings, field="params")
    unique_key = None
    raw_id = bytes(_decode_identified(payload).objectID) if payload.lstrip().startswith("{") else b"null"
    if raw_id != b"null":
        object_id = None if raw_id[:1] in (b"{", b"[", b"t", b"f") else decode_any(raw_id.decode("utf-8"))
        if object_id is None or (isinstance(object_id, float) and not isfinite(object_id)):
            raise InvalidParams("objectID", "must be a string or a number, no larger than a double")
        # 23 and "23" are one object: the older convention sends either.
        unique_key = checks.read_key(str(object_id), "objectID")
    return NewTask(checks.read_action(action), payload, unique_key=unique_key, max_attempts=settings.max_attempts)


def check_task_payload(payload: str, settings: Settings, *, field: str = "payload", large: bool = True) -> None:
    limit = settings.largest_payload_bytes if large else settings.payload_limit_bytes
    check_payload(escape_for_sqs(payload), field, limit)  # as it will travel


def _offered(given: EnqueueParams, settings: Settings) -> str:
    """A payload that a client has sealed, as the text that stands for it; see methods.inbound.take_in."""
    text = json.dumps(given.sealed_payload)
    try:
        found = decode_sealed(text)
    except ValueError:
        found = ""
    if isinstance(found, str) or (isinstance(found, Reference) and not found.is_offered):
        raise InvalidParams("sealed_payload", "is nothing that a client of Penstock has sealed")
    if bytes(given.payload) != b"{}":
        raise InvalidParams("sealed_payload", "and payload exclude each other; give one")
    if isinstance(found, Reference):
        if settings.payload_bucket is None:
            raise InvalidParams("sealed_payload", "is an object, and this process has no PENSTOCK_PAYLOAD_BUCKET")
        if found.size > settings.payload_max_bytes:
            raise TooLarge("sealed_payload", found.size, settings.payload_max_bytes)
    elif not settings.payload_keys:
        raise InvalidParams("sealed_payload", "is encrypted, and this process has no PENSTOCK_PAYLOAD_KEYS")
    return text
