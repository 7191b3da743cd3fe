"""Schedules of kafka-message-scheduler in Avro (binary, without a header) and in JSON. No I/O."""

import base64
import binascii
import io
from collections.abc import Callable
from typing import Annotated, Any, Generic, TypeVar

import msgspec

from penstock.brokers.kafka.messages import Received, topic_problem
from penstock.compat.delayed_records import DelayedRecord, instant_of, key_of, ordering_key_of
from penstock.protocol.errors import PenstockError, needing
from penstock.settings.model import Settings

MARKER = "schedule:expired"
Data = TypeVar("Data", str, bytes)
_FIELDS: list[dict[str, Any]] = [
    {"name": "time", "type": "long"},
    {"name": "topic", "type": "string"},
    {"name": "key", "type": "bytes"},
    {"name": "value", "type": ["null", "bytes"]},
    {"name": "headers", "type": {"type": "map", "values": "bytes"}},
]


class Undecodable(PenstockError):
    """A value that is not a schedule. kind: its label in kafka-message-scheduler's metrics, and in ours.

    is_too_large: for a task; it is stored as rejected and cancels nothing.
    """

    def __init__(self, kind: str, reason: str, *, is_too_large: bool = False) -> None:
        super().__init__(f"{kind}: {reason}")
        self.kind, self.is_too_large = kind, is_too_large


class Schedule(msgspec.Struct, Generic[Data]):
    """Data: bytes, or their base64 in JSON. time: epoch milliseconds. value: to publish, None for a tombstone."""

    time: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
    topic: str
    key: Data
    value: Data | None = None
    headers: dict[str, Data] | None = None


_read_json = msgspec.json.Decoder(Schedule[str]).decode
Read = Callable[[bytes], Schedule[bytes]]


def read_json(value: bytes) -> Schedule[bytes]:
    """Raises Undecodable."""
    try:
        given = _read_json(value)
        headers = None if given.headers is None else {name: _bytes_of(text) for name, text in given.headers.items()}
        data = None if given.value is None else _bytes_of(given.value)
        return Schedule(given.time, given.topic, _bytes_of(given.key), data, headers)
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        try:
            msgspec.json.decode(value)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            raise Undecodable("not-json", str(exc)[:200]) from None
        raise Undecodable("invalid-json", str(exc)[:200]) from None


def _bytes_of(text: str) -> bytes:
    """Base64 as Java decodes it: the padding is complete or missing. Raises ValueError."""
    try:
        padded = text if "=" in text else text + "=" * (-len(text) % 4)
        if len(padded) % 4:
            raise binascii.Error("Incorrect padding")
        return base64.b64decode(padded, validate=True)
    except binascii.Error as exc:
        raise ValueError(f"{text[:60]!r} is not base64: {exc}") from None


def avro_reader() -> Read:
    """A reader of values in Avro, with or without the field ``headers``. Raises SettingsError without fastavro."""
    with needing("reading schedules in Avro", "kafka"):
        import fastavro
    schemas: list[Any] = [
        fastavro.parse_schema({"type": "record", "name": name, "fields": fields})
        for name, fields in (("AvroSchedule", _FIELDS), ("AvroScheduleWithoutHeaders", _FIELDS[:4]))
    ]

    def read(value: bytes) -> Schedule[bytes]:
        reason = ""
        for schema in schemas:
            try:
                return msgspec.convert(fastavro.schemaless_reader(io.BytesIO(value), schema, None), Schedule[bytes])
            except Exception as exc:  # the library raises errors of any kind for invalid bytes
                reason = str(exc) or type(exc).__name__
        raise Undecodable("invalid-avro", reason[:200])

    return read


def delayed_record_of(schedule: Schedule[bytes], record: Received, settings: Settings, *, held: bool) -> DelayedRecord:
    """The delayed record of a schedule in a Kafka record. Raises Undecodable."""
    if (problem := topic_problem(schedule.topic, settings)) is not None:
        raise Undecodable("transformation", problem)
    key, source = record.key or b"", source_of(record.topic)
    value = {"value": None} if schedule.value is None else {"value_base64": schedule.value}
    headers = {"headers_base64": schedule.headers} if schedule.headers else {}
    members = {"topic": schedule.topic, "key_base64": schedule.key, "due_at": max(0, schedule.time)} | value | headers
    # In the partition of the schedule itself, where compaction and its readers look for it.
    tombstone = {
        "topic": record.topic, "partition": record.partition, "key_base64": key, "value": None,
        "headers": {MARKER: "true"},
    }  # fmt: skip
    published, last = msgspec.json.encode(members).decode(), msgspec.json.encode(tombstone).decode()
    size = len(published.encode()) + len(last.encode())
    limit = settings.payload_limit_bytes
    if size + 100 > limit:
        reason = f"it is {size} bytes as a task; the limit is {limit} (PENSTOCK_PAYLOAD_LIMIT_BYTES)"
        raise Undecodable("transformation", reason, is_too_large=True)
    return DelayedRecord(
        source,
        key_of(key),
        instant_of(schedule.time),
        ordering_key_of(source, shown_key(key)),
        published,
        last,
        partition=record.partition,
        held=held,
    )


def source_of(topic: str) -> str:
    return f"kafka:{topic}"


def is_expired_mark(record: Received) -> bool:
    """Whether a record without a value marks its schedule as published, by us or by kafka-message-scheduler."""
    return any(name.lower() == MARKER and (value or b"").lower() == b"true" for name, value in record.headers)


def shown_key(key: bytes) -> str:
    """A record's key as text, in base64 unless it is UTF-8."""
    try:
        return key.decode()
    except UnicodeDecodeError:
        return "base64:" + base64.b64encode(key).decode()
