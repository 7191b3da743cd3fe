"""clockwork's schedules: what a body must look like, and the delayed records that schedules are stored as.

A schedule is identified by the pair of clientId and scheduleKey. As in clockwork, a pair may have several schedules
with different contents; the same contents are stored once.
"""

import base64
import hashlib
from collections.abc import Sequence
from typing import Annotated, TypeVar

import msgspec

from penstock.brokers.kafka.messages import topic_problem
from penstock.compat import delayed_records
from penstock.compat.delayed_records import DelayedRecord, instant_of, key_of, ordering_key_of
from penstock.db.session import Session
from penstock.protocol.errors import PenstockError
from penstock.protocol.json_text import escape_for_sqs, utf8_size
from penstock.runtime import metrics
from penstock.settings.model import Settings

SOURCE = "clockwork"
OTHER_CONTENTS = "the pair of clientId and scheduleKey has a schedule with other contents"

_Text = Annotated[str, msgspec.Meta(min_length=1)]
Shape = TypeVar("Shape")


class BadRequest(PenstockError):
    """The body is not a request of clockwork's; the text is for the log."""


class IllegalArgument(PenstockError):
    """A well-formed request cannot be carried out; the text is for the log."""


class Destination(msgspec.Struct):
    topic: _Text


class CancelRequest(msgspec.Struct, rename="camel"):
    """The body of DELETE /schedule."""

    client_id: _Text
    schedule_key: _Text


class ScheduleRequest(CancelRequest, rename="camel"):
    """The body of POST /schedule, and of a record of the create topic. schedule_time: epoch milliseconds."""

    ordering_key: _Text
    task_data: _Text
    delivery: Destination
    schedule_time: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] = 0


def read(body: bytes, kind: type[Shape]) -> Shape:
    """Decode a body. Raises BadRequest."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        raise BadRequest(str(exc)[:300]) from None


def identity_of(request: CancelRequest) -> bytes:
    """The key of a delayed record; the length in front keeps ("a-b", "c") and ("a", "b-c") apart."""
    client, key = request.client_id.encode(), request.schedule_key.encode()
    return key_of(b"%d:%s%s" % (len(client), client, key))


def delayed_record_of(request: ScheduleRequest, settings: Settings) -> DelayedRecord:
    """The delayed record of a request. Raises IllegalArgument for an invalid topic or a record that is too large."""
    topic = request.delivery.topic
    if (problem := topic_problem(topic, settings)) is not None:
        raise IllegalArgument(problem)
    members = {"topic": topic} | _text("key", request.ordering_key) | _text("value", request.task_data)
    record = escape_for_sqs(msgspec.json.encode(members | {"due_at": max(0, request.schedule_time)}).decode())
    size, limit = utf8_size(record), settings.payload_limit_bytes
    if size + 100 > limit:  # of a task that holds it alone
        problem = f"the record is {size} bytes as JSON; the limit is {limit} (PENSTOCK_PAYLOAD_LIMIT_BYTES)"
        raise IllegalArgument(problem)
    contents = [request.schedule_time, request.ordering_key, request.task_data, topic]
    return DelayedRecord(
        source=SOURCE,
        key=identity_of(request),
        variant=hashlib.sha256(msgspec.json.encode(contents)).digest(),
        due_at=instant_of(request.schedule_time),
        ordering_key=ordering_key_of(SOURCE, request.ordering_key),
        record=record,
    )


def _text(name: str, text: str) -> dict[str, str]:
    """A member as text, or in base64 where Postgres cannot store the text."""
    return {f"{name}_base64": base64.b64encode(text.encode()).decode()} if "\0" in text else {name: text}


async def create_schedules(session: Session, wanted: Sequence[DelayedRecord], settings: Settings) -> list[bool]:
    """Store delayed records inside a transaction; returns for each whether it is stored, now or before."""
    accepted = wanted
    if settings.clockwork_same_key == "reject":  # a record of a known key with other contents
        keys = [one.key for one in wanted]
        await session.fetch("lock_delayed_record_keys", [SOURCE] * len(keys), keys)
        taken: dict[bytes, set[bytes]] = {}  # several where the setting was another one
        for row in await session.fetch("find_delayed_records", SOURCE, keys):
            taken.setdefault(row["key"], set()).add(row["variant"])
        accepted = [one for one in wanted if one.variant in taken.setdefault(one.key, {one.variant})]
        metrics.DELAYED_RECORD_CHANGES.labels(SOURCE, "refused").inc(len(wanted) - len(accepted))
    chosen = {(one.key, one.variant): one for one in accepted}
    await delayed_records.put(session, list(chosen.values()), replaces=False)
    return [(one.key, one.variant) in chosen for one in wanted]
