"""Feeds: records of a source's topics, stored in the transaction that moves the source's positions."""

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from penstock.brokers.kafka.messages import Received, topic_problem
from penstock.compat import delayed_records
from penstock.compat.clockwork import schedules as clockwork
from penstock.compat.delayed_records import DelayedRecord, key_of
from penstock.compat.topics import schedules
from penstock.compat.topics.schedules import OverLimit, Undecodable, source_of
from penstock.db.session import Session
from penstock.protocol.errors import SettingsError
from penstock.runtime import metrics
from penstock.runtime.logs import log
from penstock.settings.model import Settings
from penstock.settings.values import PREFIX
from penstock.tasks import enqueue

REJECTED_SOURCE = "kafka-source"  # of rejected messages that were records of a topic of schedules


class SourceRecord(NamedTuple):
    record: Received
    behind: bool  # this process has not read its partition to the end yet
    is_first_read: bool  # nor has any process before


class ScheduleFeed:
    """Topics of kafka-message-scheduler: the newest record of a key stores, replaces or cancels a delayed record.

    While a partition is behind, its delayed records are held, because a later record may cancel them; at its first
    read, expiry marks identify schedules that another scheduler published. Raises SettingsError without topics, and
    for one that may not be published to.
    """

    begins_at_group_offset = False

    def __init__(self, settings: Settings) -> None:
        json_topics, avro_topics = settings.kafka_source_json_topics, settings.kafka_source_avro_topics
        self.group = settings.kafka_source_group
        self.topics = [*json_topics, *avro_topics]
        if not self.topics:
            raise SettingsError(
                f"no topics to read schedules from: set {PREFIX}KAFKA_SOURCE_JSON_TOPICS or "
                f"{PREFIX}KAFKA_SOURCE_AVRO_TOPICS"
            )
        both = set(json_topics) & set(avro_topics)
        if both:
            raise SettingsError(f"{min(both)} is given as a topic of JSON and of Avro: keep one of them")
        for topic in self.topics:
            if (problem := topic_problem(topic, settings)) is not None:
                raise SettingsError(f"the tombstones of schedules cannot be published to their own topic: {problem}")
        self._settings = settings
        self._read: dict[str, schedules.Read] = dict.fromkeys(json_topics, schedules.read_json)
        if avro_topics:
            self._read |= dict.fromkeys(avro_topics, schedules.avro_reader())

    async def store(self, session: Session, records: Sequence[SourceRecord]) -> None:
        """Store records of a partition in their order, inside a transaction. Raises Refused, Unavailable."""
        newest: dict[tuple[str, bytes], DelayedRecord | None] = {}  # by topic and key; None: cancel
        kinds: Counter[tuple[str, str]] = Counter()
        rejected: list[tuple[bytes, str]] = []
        for one in records:
            record = one.record
            delayed: DelayedRecord | None = None
            try:
                if record.value is None:
                    kind = "expired" if schedules.is_expired_mark(record) else "canceled"
                    changes = kind == "canceled" or one.is_first_read
                else:
                    schedule = self._read[record.topic](record.value)
                    delayed = schedules.delayed_record_of(schedule, record, self._settings, held=one.behind)
                    kind, changes = "update", True
            except Undecodable as exc:
                kind = exc.kind
                changes = self._settings.kafka_source_on_undecodable == "cancel" and not isinstance(exc, OverLimit)
                key = schedules.shown_key(record.key or b"")
                log.warning("schedule_undecodable", **place_of(record), schedule=key, reason=str(exc), cancels=changes)
                if isinstance(exc, OverLimit):
                    place = f"{record.topic}/{record.partition} at offset {record.offset}"
                    rejected.append((record.value or b"", f"schedule {key!r} of {place}: {exc}"))
            kinds[source_of(record.topic), kind] += 1
            if changes:
                newest[record.topic, key_of(record.key or b"")] = delayed
        for topic in {topic for topic, _ in newest}:
            cancelled = [key for (of, key), delayed in newest.items() if of == topic and delayed is None]
            await delayed_records.cancel(session, source_of(topic), cancelled)
        wanted = [delayed for _, delayed in sorted(newest.items()) if delayed is not None]
        await delayed_records.put(session, wanted, replaces=True)
        await enqueue.insert_rejected(session, REJECTED_SOURCE, rejected)
        _count(kinds, records)


class ClockworkFeed:
    """clockwork's create topic: each record is the body of a POST /schedule."""

    begins_at_group_offset = True  # unless Postgres has a position

    def __init__(self, settings: Settings) -> None:
        self.group = settings.clockwork_group
        self.topics = [settings.clockwork_create_topic]
        self._settings = settings

    async def store(self, session: Session, records: Sequence[SourceRecord]) -> None:
        """Store records of a partition in their order, inside a transaction. Raises Refused, Unavailable."""
        kinds: Counter[tuple[str, str]] = Counter()
        wanted: list[tuple[Received, DelayedRecord]] = []
        refused: list[tuple[Received, str]] = []
        for record, _, _ in records:
            try:
                request = clockwork.read(record.value or b"", clockwork.ScheduleRequest)
                wanted.append((record, clockwork.delayed_record_of(request, self._settings)))
                kinds[clockwork.SOURCE, "update"] += 1
            except (clockwork.BadRequest, clockwork.IllegalArgument) as exc:
                kinds[clockwork.SOURCE, "invalid-json"] += 1
                refused.append((record, str(exc)))
        stored = await clockwork.create_schedules(session, [delayed for _, delayed in wanted], self._settings)
        known = [record for (record, _), is_stored in zip(wanted, stored, strict=True) if not is_stored]
        refused += [(record, clockwork.OTHER_CONTENTS) for record in known]
        for record, reason in refused:
            log.warning("clockwork_record_refused", **place_of(record), reason=reason)
        _count(kinds, records)


Feed = ScheduleFeed | ClockworkFeed


def place_of(record: Received) -> dict[str, Any]:
    """Where a record is, for a log."""
    return {"topic": record.topic, "partition": record.partition, "offset": record.offset}


def _count(kinds: Counter[tuple[str, str]], records: Sequence[SourceRecord]) -> None:
    for (source, kind), count in kinds.items():
        metrics.SOURCE_RECORDS.labels(source, kind).inc(count)
    now = time.time()
    by_topic: dict[str, list[float]] = {}
    for record, behind, _ in records:
        if record.timestamp_ms is not None and not behind:
            by_topic.setdefault(record.topic, []).append(max(0.0, now - record.timestamp_ms / 1000))
    for topic, seconds in by_topic.items():
        metrics.CREATION_LATENCY_SECONDS.labels(source_of(topic)).observe_many(seconds)
