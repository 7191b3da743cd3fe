"""clockwork's requests: what a body must look like, and the delayed record it describes. No I/O.

Who a schedule is: the pair of clientId and scheduleKey, which no other pair can look like. One pair may be armed
several times, with different contents, as clockwork itself has it; the same contents are one schedule.
"""

from __future__ import annotations

import base64
import hashlib
from typing import Annotated

import msgspec

from penstock.brokers.kafka.topics import topic_problem
from penstock.compat.delayed_records import DelayedRecord, key_of, ordering_key_of
from penstock.protocol.errors import PenstockError
from penstock.protocol.json_text import escape_for_sqs, utf8_size
from penstock.settings.model import Settings

SOURCE = "clockwork"

_Text = Annotated[str, msgspec.Meta(min_length=1)]


class BadRequest(PenstockError):
    """The body is no request of clockwork's; the text tells why, for a log."""


class IllegalArgument(PenstockError):
    """The request is well-formed and cannot be carried out; the text tells why, for a log."""


class Destination(msgspec.Struct):
    """Where a schedule is delivered."""

    topic: _Text


class ScheduleRequest(msgspec.Struct, rename="camel"):
    """The body of POST /schedule, and of a record of the create topic. schedule_time: epoch milliseconds."""

    client_id: _Text
    schedule_key: _Text
    ordering_key: _Text
    task_data: _Text
    delivery: Destination
    schedule_time: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] = 0


class CancelRequest(msgspec.Struct, rename="camel"):
    """The body of DELETE /schedule."""

    client_id: _Text
    schedule_key: _Text


_read_schedule = msgspec.json.Decoder(ScheduleRequest).decode
_read_cancel = msgspec.json.Decoder(CancelRequest).decode


def read_schedule(body: bytes) -> ScheduleRequest:
    """Raises BadRequest."""
    try:
        return _read_schedule(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        raise BadRequest(str(exc)[:300]) from None


def read_cancel(body: bytes) -> CancelRequest:
    """Raises BadRequest."""
    try:
        return _read_cancel(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        raise BadRequest(str(exc)[:300]) from None


def identity_of(client_id: str, schedule_key: str) -> bytes:
    """The key of a delayed record; the length in front keeps ("a-b", "c") and ("a", "b-c") apart."""
    client, key = client_id.encode(), schedule_key.encode()
    return key_of(b"%d:%s%s" % (len(client), client, key))


def delayed_record_of(request: ScheduleRequest, settings: Settings) -> DelayedRecord:
    """The delayed record of a request. Raises IllegalArgument for an invalid topic or a record that is too large."""
    topic = request.delivery.topic
    problem = topic_problem(topic, settings)
    if problem is not None:
        raise IllegalArgument(problem)
    members = {"topic": topic} | _text("key", request.ordering_key) | _text("value", request.task_data)
    record = escape_for_sqs(msgspec.json.encode(members | {"due_at": max(0, request.schedule_time)}).decode())
    size = utf8_size(record)
    if size + 100 > settings.payload_limit_bytes:  # of a task that holds it alone
        raise IllegalArgument(
            f"the record is {size} bytes as JSON; the limit is {settings.payload_limit_bytes} "
            "(PENSTOCK_PAYLOAD_LIMIT_BYTES)"
        )
    contents = [request.schedule_time, request.ordering_key, request.task_data, topic]
    return DelayedRecord(
        source=SOURCE,
        key=identity_of(request.client_id, request.schedule_key),
        variant=hashlib.sha256(msgspec.json.encode(contents)).digest(),
        due_ms=request.schedule_time,
        ordering_key=ordering_key_of(SOURCE, request.ordering_key),
        record=record,
    )


def _text(name: str, text: str) -> dict[str, str]:
    """As it is where Postgres can hold it, else as base64."""
    return {f"{name}_base64": base64.b64encode(text.encode()).decode()} if "\0" in text else {name: text}
