"""kafka.publish: records to Kafka by one producer, whose batches tasks share; the result is the place of each."""

import time
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Annotated, Any

import msgspec

from penstock.brokers.kafka.library import confluent, producer_config
from penstock.brokers.kafka.messages import Delivery, Record, topic_problem
from penstock.brokers.kafka.producer import KafkaProducer
from penstock.runtime import metrics
from penstock.settings.model import Settings
from penstock.worker.deliveries.errors import NotDelivered, Undeliverable
from penstock.worker.deliveries.registry import Deliveries
from penstock.worker.handlers.context import Context

ACTION = "kafka.publish"
_SHOWN_CHARS = 300
_ENVELOPE_BYTES = 100  # of a result, for what is no place

Value = str | None | msgspec.UnsetType
Number = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
EpochMs = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]  # as in clockwork's requests and the schedules of topics


class RecordParams(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A record in a payload; docs/deliveries.md describes each member."""

    topic: str
    key: str | None = None
    key_base64: bytes | None = None
    value: Value = msgspec.UNSET
    value_base64: bytes | None = None
    json: Any = msgspec.UNSET
    headers: dict[str, str] = {}
    headers_base64: dict[str, bytes] = {}
    partition: Number | None = None
    due_at: EpochMs | None = None


def add_to(deliveries: Deliveries) -> None:
    confluent()
    producer = KafkaProducer(producer_config(deliveries.settings))
    deliveries.at_open(producer.open)
    deliveries.at_close(producer.close)
    deliveries.action(ACTION, Publisher(producer, deliveries.settings).publish, bad_params_attempts=1)


class Publisher:
    def __init__(self, producer: KafkaProducer, settings: Settings) -> None:
        self._producer = producer
        self._settings = settings

    async def publish(
        self,
        ctx: Context,
        /,
        *,
        topic: str | None = None,
        key: str | None = None,
        key_base64: bytes | None = None,
        value: Value = msgspec.UNSET,
        value_base64: bytes | None = None,
        json: Any = msgspec.UNSET,
        headers: dict[str, str] | None = None,
        headers_base64: dict[str, bytes] | None = None,
        partition: Number | None = None,
        due_at: EpochMs | None = None,
        records: list[RecordParams] | None = None,
        then: list[RecordParams] | None = None,
    ) -> dict[str, Any]:
        """Publish one record, or those of ``records`` in order, then those of ``then``; returns the place of each."""
        if (topic is None) == (records is None):
            raise Undeliverable("a task of kafka.publish has either a topic, or records: give one of them")
        single = RecordParams(
            topic=topic or "", key=key, key_base64=key_base64, value=value, value_base64=value_base64, json=json,
            headers=headers or {}, headers_base64=headers_base64 or {}, partition=partition, due_at=due_at,
        )  # fmt: skip
        if records is not None and single != RecordParams(topic=""):
            raise Undeliverable("beside records a task has nothing but then: give key, value and others in each record")
        wanted = [single] if records is None else records
        last = [record_of(one, self._settings) for one in then or ()]  # before anything is published: it may be wrong
        first = [record_of(one, self._settings) for one in wanted]
        places = await self._send(first)
        due = [time.time() - one.due_at / 1000 for one in wanted if one.due_at is not None]
        if due:
            metrics.PUBLISH_LATENESS_SECONDS.observe_many([max(0.0, seconds) for seconds in due])
        places += await self._send(last)
        published = [
            {"topic": record.topic, "partition": place.partition, "offset": place.offset}
            for record, place in zip((*first, *last), places, strict=True)
        ]
        if topic is not None and not last:
            return published[0]
        ends = list(accumulate(len(msgspec.json.encode(place)) + 1 for place in published))
        kept = published[: bisect_right(ends, self._settings.largest_result_bytes - _ENVELOPE_BYTES)]
        return {"records": kept} | ({"truncated": True} if len(kept) < len(published) else {})

    async def _send(self, records: Sequence[Record]) -> list[Delivery]:
        deliveries = await self._producer.send(records)
        failed = [(record, one) for record, one in zip(records, deliveries, strict=True) if one.error is not None]
        refused = [(record, one) for record, one in failed if one.refused]
        metrics.KAFKA_PUBLISHED.labels("published").inc(len(deliveries) - len(failed))
        if not failed:
            return deliveries
        metrics.KAFKA_PUBLISHED.labels("refused").inc(len(refused))
        metrics.KAFKA_PUBLISHED.labels("failed").inc(len(failed) - len(refused))
        is_final = len(refused) == len(failed)  # else another attempt may publish those that only failed
        record, delivery = next((record, one) for record, one in failed if one.refused == is_final)
        size = len(record.value or b"") + len(record.key or b"")
        text = (
            f"{len(failed)} of {len(records)} records were not published; the first, for the topic {record.topic}, "
            f"{size} bytes: {str(delivery.error)[:_SHOWN_CHARS]}"
        )
        if is_final:
            raise Undeliverable(f"{text}; Kafka will never take it: enqueue another one")
        raise NotDelivered(text)


def record_of(params: RecordParams, settings: Settings) -> Record:
    """The record that a payload asks for. Raises Undeliverable, naming the member that is wrong."""
    if (problem := topic_problem(params.topic, settings)) is not None:
        raise Undeliverable(problem)
    if params.key is not None and params.key_base64 is not None:
        raise Undeliverable("key and key_base64 are two names of one thing: give one of them")
    if both := params.headers.keys() & params.headers_base64.keys():
        raise Undeliverable(f"header {min(both)!r} stands in headers and in headers_base64: give it once")
    is_given = {
        "value": params.value is not msgspec.UNSET,
        "value_base64": params.value_base64 is not None,
        "json": params.json is not msgspec.UNSET,
    }
    given = [name for name in is_given if is_given[name]]
    if len(given) != 1:
        raise Undeliverable(
            f"a record has one of value, value_base64 and json; this one has {' and '.join(given) or 'none'} "
            '(a tombstone is "value": null)'
        )
    value = params.value.encode() if isinstance(params.value, str) else params.value_base64
    if params.json is not msgspec.UNSET:
        value = msgspec.json.encode(params.json)
    headers = [(name, text.encode()) for name, text in params.headers.items()]
    key = params.key_base64 if params.key is None else params.key.encode()
    return Record(params.topic, value, key, [*headers, *params.headers_base64.items()], params.partition)
