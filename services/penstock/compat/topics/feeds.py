"""Feeds: what the records of a source's topics mean, stored in the transaction that moves the positions."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from penstock.brokers.kafka.messages import Received
from penstock.compat import delayed_records
from penstock.compat.clockwork import schedules
from penstock.compat.clockwork.store import create_schedules
from penstock.compat.delayed_records import DelayedRecord, key_of
from penstock.compat.topics.schedules import (
    OverLimit,
    Read,
    Undecodable,
    avro_reader,
    delayed_record_of,
    is_expired_mark,
    read_json,
    shown_key,
    source_of,
)
from penstock.db.session import Session
from penstock.protocol.errors import SettingsError
from penstock.runtime import metrics
from penstock.runtime.logs import get_logger
from penstock.settings.model import Settings
from penstock.settings.values import PREFIX
from penstock.tasks import enqueue

log = get_logger()

REJECTED_SOURCE = "kafka-source"
"""Where a rejected message came from, when it was a record of a topic of schedules."""


class SourceRecord(NamedTuple):
    """A record of a topic of schedules.

    behind: its partition has not been read to its end since this process owns it. is_first_read: nor by any before.
    """

    record: Received
    behind: bool
    is_first_read: bool


class Feed(Protocol):
    """begins_where_the_group_is: what nobody has read here begins at the group's position in Kafka, if it has one."""

    @property
    def group(self) -> str: ...

    @property
    def topics(self) -> Sequence[str]: ...

    @property
    def begins_where_the_group_is(self) -> bool: ...

    async def store(self, session: Session, records: Sequence[SourceRecord]) -> None:
        """Inside a transaction, records of one partition in their order. Raises Refused, Unavailable."""
        ...


class ScheduleFeed:
    """Topics of kafka-message-scheduler: the newest record of a key stores, replaces or cancels a delayed record.

    While a partition is behind, its delayed records are held, because a later record may cancel them; at its first
    read, expiry marks identify schedules that another scheduler published. Raises SettingsError without topics.
    """

    begins_where_the_group_is = False

    def __init__(self, settings: Settings) -> None:
        self.group = settings.kafka_source_group
        self.topics = [*settings.kafka_source_json_topics, *settings.kafka_source_avro_topics]
        both = set(settings.kafka_source_json_topics) & set(settings.kafka_source_avro_topics)
        if not self.topics:
            raise SettingsError(
                f"no topics to read schedules from: set {PREFIX}KAFKA_SOURCE_JSON_TOPICS or "
                f"{PREFIX}KAFKA_SOURCE_AVRO_TOPICS"
            )
        if both:
            raise SettingsError(f"{min(both)} is given as a topic of JSON and of Avro: keep one of them")
        self._cancels_undecodable = settings.kafka_source_on_undecodable == "cancel"
        self._settings = settings
        read_avro = avro_reader() if settings.kafka_source_avro_topics else read_json
        self._read: dict[str, Read] = dict.fromkeys(settings.kafka_source_json_topics, read_json)
        self._read |= dict.fromkeys(settings.kafka_source_avro_topics, read_avro)

    async def store(self, session: Session, records: Sequence[SourceRecord]) -> None:
        last: dict[tuple[str, bytes], DelayedRecord | None] = {}  # by key, from its newest record; None: cancel
        kinds: Counter[tuple[str, str]] = Counter()
        rejected: list[tuple[bytes, str]] = []
        for one in records:
            record = one.record
            key = record.topic, key_of(record.key or b"")
            try:
                kind, delayed = self._meaning_of(one)
            except Undecodable as exc:
                kind, delayed = exc.kind, None
                cancels = self._cancels_undecodable and not isinstance(exc, OverLimit)
                schedule = shown_key(record.key or b"")
                log.warning(
                    "schedule_undecodable", topic=record.topic, partition=record.partition, offset=record.offset,
                    schedule=schedule, reason=str(exc), cancels=cancels,
                )  # fmt: skip
                if isinstance(exc, OverLimit):
                    place = f"{record.topic}/{record.partition} at offset {record.offset}"
                    rejected.append((record.value or b"", f"schedule {schedule!r} of {place}: {exc}"))
                if not cancels:
                    kinds[source_of(record.topic), kind] += 1
                    continue
            kinds[source_of(record.topic), kind] += 1
            if kind != "expired" or one.is_first_read:
                last[key] = delayed
        for topic in {topic for topic, _ in last}:
            cancelled = [key for (of, key), delayed in last.items() if of == topic and delayed is None]
            await delayed_records.cancel(session, source_of(topic), cancelled)
        await delayed_records.put(
            session, [delayed for _, delayed in sorted(last.items()) if delayed is not None], replaces=True
        )
        await enqueue.insert_rejected(session, REJECTED_SOURCE, rejected)
        _note(kinds, records)

    def _meaning_of(self, one: SourceRecord) -> tuple[str, DelayedRecord | None]:
        """The kind of a record, and its delayed record. Raises Undecodable."""
        record = one.record
        if record.value is None:
            return ("expired" if is_expired_mark(record) else "canceled"), None
        schedule = self._read[record.topic](record.value)
        return "update", delayed_record_of(schedule, record, settings=self._settings, held=one.behind)


class ClockworkFeed:
    """clockwork's create topic: each record is the body of a POST /schedule."""

    begins_where_the_group_is = True

    def __init__(self, settings: Settings) -> None:
        self.group = settings.clockwork_group
        self.topics = [settings.clockwork_create_topic]
        self._same_key = settings.clockwork_same_key
        self._settings = settings

    async def store(self, session: Session, records: Sequence[SourceRecord]) -> None:
        kinds: Counter[tuple[str, str]] = Counter()
        wanted: list[tuple[Received, DelayedRecord]] = []
        for record, _, _ in records:
            try:
                request = schedules.read_schedule(record.value or b"")
                delayed = schedules.delayed_record_of(request, self._settings)
            except (schedules.BadRequest, schedules.IllegalArgument) as exc:
                kinds[schedules.SOURCE, "invalid-json"] += 1
                self._refused(record, str(exc))
            else:
                kinds[schedules.SOURCE, "update"] += 1
                wanted.append((record, delayed))
        kept = await create_schedules(session, [delayed for _, delayed in wanted], same_key=self._same_key)
        for (record, _), is_stored in zip(wanted, kept, strict=True):
            if not is_stored:
                self._refused(record, "the pair of clientId and scheduleKey has a schedule with other contents")
        _note(kinds, records)

    @staticmethod
    def _refused(record: Received, reason: str) -> None:
        log.warning(
            "clockwork_record_refused", topic=record.topic, partition=record.partition, offset=record.offset,
            reason=reason,
        )  # fmt: skip


def _note(kinds: Counter[tuple[str, str]], records: Sequence[SourceRecord]) -> None:
    for (source, kind), count in kinds.items():
        metrics.SOURCE_RECORDS.labels(source, kind).inc(count)
    if not kinds:
        return
    now = time.time()
    by_topic: dict[str, list[float]] = {}
    for record, behind, _ in records:
        if record.timestamp_ms is not None and not behind:
            by_topic.setdefault(record.topic, []).append(max(0.0, now - record.timestamp_ms / 1000))
    for topic, seconds in by_topic.items():
        metrics.CREATION_LATENCY_SECONDS.labels(source_of(topic)).observe_many(seconds)
