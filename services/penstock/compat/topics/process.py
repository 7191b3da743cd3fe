"""Source: stores schedules from Kafka's topics in Postgres, each record once, as its feed reads them.

The transaction that stores records also moves the position of their partition in Postgres, if it is where this process
expects it: so each record is stored once, even if two processes own a partition. The group's offsets in Kafka follow.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, NamedTuple

from penstock.brokers.kafka.consumer import KafkaConsumer
from penstock.brokers.kafka.library import consumer_config
from penstock.brokers.kafka.messages import Partition, Position, Received, topic_problem
from penstock.compat import delayed_records
from penstock.compat.clockwork import schedules as clockwork
from penstock.compat.delayed_records import DelayedRecord, key_of
from penstock.compat.topics import schedules
from penstock.compat.topics.schedules import Undecodable, source_of
from penstock.db.notify import DELAYED_RECORDS, Notifier
from penstock.db.pool import Store
from penstock.db.session import Session
from penstock.protocol.errors import PenstockError, Refused, SettingsError, Unavailable
from penstock.runtime import metrics
from penstock.runtime.halving import in_halves
from penstock.runtime.logs import log
from penstock.runtime.loop import Service, SideTask
from penstock.settings.model import Settings
from penstock.settings.values import PREFIX
from penstock.tasks import enqueue

RECORDS_AT_ONCE = 1000
_WAIT_SECONDS = 0.5
_COMMIT_SECONDS = 1.0
_RELEASED_AT_ONCE = 5000


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
                changes = self._settings.kafka_source_on_undecodable == "cancel" and not exc.is_too_large
                key = schedules.shown_key(record.key or b"")
                log.warning("schedule_undecodable", **place_of(record), schedule=key, reason=str(exc), cancels=changes)
                if exc.is_too_large:
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
        await enqueue.insert_rejected(session, "kafka-source", rejected)
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


@dataclass(slots=True)
class PartitionState:
    """What this process expects of a partition that it owns."""

    next: int  # offset of the next record
    complete: bool  # it was read to its end once, by any process
    caught_up: bool = False  # by this one
    is_aligned: bool = False  # the consumer is there too
    is_at_end: bool = False  # it has received all records
    is_committed: bool = True  # Kafka knows ``next``


class Source(Service):
    """One kafka-source or clockwork-source; ``run_once`` is one receive, stored."""

    def __init__(self, *, name: str, store: Store, feed: Feed, settings: Settings) -> None:
        self.name = name
        self._store = store
        self._feed = feed
        self._notifier = Notifier(store, DELAYED_RECORDS)
        self._states: dict[Partition, PartitionState] = {}
        self._committed_at = monotonic()
        self._consumer = KafkaConsumer(
            consumer_config(settings, feed.group) | {"enable.partition.eof": True},
            feed.topics,
            on_revoked=self._uncommitted,
            on_lost=self._lost,
        )

    async def open(self) -> None:
        await self._store.open()
        await self._consumer.open()

    def side_tasks(self) -> Mapping[str, SideTask]:
        return {"notify": self._notifier.run}

    async def run_once(self) -> int:
        """Receive, store, move the positions; returns the number of records received. Raises Unavailable."""
        await self._realign()
        records = await self._consumer.receive(max_records=RECORDS_AT_ONCE, wait_seconds=_WAIT_SECONDS)
        for partition in self._consumer.take_ended() & self._states.keys():
            self._states[partition].is_at_end = True
        by_partition: dict[Partition, list[Received]] = {}
        for record in records:
            if record.topic_partition in self._states:
                by_partition.setdefault(record.topic_partition, []).append(record)
        try:
            if by_partition:
                await self._store_all(by_partition)
            for partition, state in list(self._states.items()):
                if state.is_at_end and state.is_aligned and not state.caught_up:
                    await self._reach_end(partition, state)
            await self._commit()
        except BaseException:
            for partition in by_partition.keys() & self._states.keys():
                self._states[partition].is_aligned = False  # what was received and not stored is read again
            raise
        return len(records)

    async def _positions(
        self, session: Session, statement: str, partitions: Iterable[Partition], *columns: Any
    ) -> dict[Partition, Any]:
        """Run a statement on positions of the group; returns its rows by partition."""
        listed = list(partitions)
        topics, numbers = [one.topic for one in listed], [one.partition for one in listed]
        rows = await session.fetch(statement, self._feed.group, topics, numbers, *columns)
        return {Partition(row["topic"], row["partition"]): row for row in rows}

    async def _move(self, session: Session, ends: Mapping[Partition, int]) -> Collection[Partition]:
        """Move positions that are where they are expected; returns those. The group decides who owns a partition: where
        another process has read on, this one follows."""
        expected = [self._states[partition].next for partition in ends]
        moved = await self._positions(session, "move_positions", ends, expected, list(ends.values()))
        for partition in ends.keys() - moved.keys():
            log.info("source_overtaken", **partition._asdict())
            del self._states[partition]
        return moved.keys()

    async def _store_all(self, by_partition: Mapping[Partition, Sequence[Received]]) -> None:
        """Store what is new of the records, except those that Postgres rejects, and move the positions."""
        fresh: dict[Partition, list[Received]] = {}
        for partition, records in by_partition.items():
            new = [record for record in records if record.offset >= self._states[partition].next]
            if new:
                fresh[partition] = new
            else:  # the consumer has begun again, as where the topic was made again and is shorter
                del self._states[partition]
        async with self._store.transaction() as session:
            moved = await self._move(session, {partition: new[-1].offset + 1 for partition, new in fresh.items()})
            taken: list[SourceRecord] = []
            for partition in moved:
                state = self._states[partition]
                taken += [SourceRecord(one, not state.caught_up, not state.complete) for one in fresh[partition]]

            async def store(part: Sequence[SourceRecord], hurried: bool) -> None:
                async with session.savepoint(hurried=hurried):
                    await self._feed.store(session, part)

            async def skip(one: SourceRecord, error: PenstockError) -> None:
                log.error("source_record_refused", **place_of(one.record), reason=str(error))

            # A partition is read in its order, so all of it waits for a lock.
            await in_halves(taken, store, skip, errors=(Refused,))
        for partition in moved:
            state = self._states[partition]
            state.next, state.is_committed = fresh[partition][-1].offset + 1, False
        self._notifier.wake()

    async def _reach_end(self, partition: Partition, state: PartitionState) -> None:
        """Release the delayed records of a partition that was read to its end."""
        released, is_last = 0, False
        while not is_last:
            async with self._store.transaction() as session:
                if not await self._move(session, {partition: state.next}):
                    return
                place = source_of(partition.topic), partition.partition
                count = await session.value("release_held_records", *place, _RELEASED_AT_ONCE)
                is_last = count < _RELEASED_AT_ONCE
                if is_last and not state.complete:
                    await session.fetch("complete_position", self._feed.group, *partition)
            released += count
        state.caught_up = state.complete = True
        self._notifier.wake()
        log.info("source_caught_up", **partition._asdict(), offset=state.next, released=released)

    async def _read_states(self, partitions: Sequence[Partition]) -> dict[Partition, PartitionState]:
        """The positions of partitions in Postgres, or where they begin. Raises Unavailable."""
        committed = await self._consumer.committed(partitions) if self._feed.begins_at_group_offset else []
        bounds = dict(zip(partitions, await asyncio.gather(*map(self._consumer.bounds, partitions)), strict=True))
        begins = {partition: low for partition, (low, _) in bounds.items()}
        # One beyond the end is of a topic that has lost records since, or of an earlier one of that name.
        begins |= {Partition(*at[:2]): at.offset for at in committed if at.offset <= bounds[Partition(*at[:2])][1]}
        offsets = [begins[partition] for partition in partitions], [bounds[partition][1] for partition in partitions]
        async with self._store.transaction() as session:
            rows = await self._positions(session, "open_positions", partitions, *offsets)
        shorter = [f"{one.topic}/{one.partition}" for one, row in rows.items() if row["restarted"]]
        if shorter:
            log.warning("source_topic_is_shorter", partitions=",".join(shorter))
        return {one: PartitionState(row["next_offset"], row["complete"]) for one, row in rows.items()}

    async def _realign(self) -> None:
        """Move the consumer to our positions: in partitions that were just assigned, and after a failure."""
        owned = set(await self._consumer.assignment())
        self._states = {partition: state for partition, state in self._states.items() if partition in owned}
        unknown = sorted(owned - self._states.keys())
        if unknown:
            self._states |= await self._read_states(unknown)
        for partition, state in list(self._states.items()):
            if not state.is_aligned:
                await self._consumer.seek(Position(*partition, state.next))
                state.is_aligned, state.is_at_end = True, False

    async def _commit(self, *, at_once: bool = False) -> None:
        """Commit the group's offsets to Kafka, once a second."""
        moved = {partition: state for partition, state in self._states.items() if not state.is_committed}
        if not moved or not (at_once or monotonic() - self._committed_at >= _COMMIT_SECONDS):
            return
        self._committed_at = monotonic()
        try:
            await self._consumer.commit([Position(*partition, state.next) for partition, state in moved.items()])
        except Unavailable as exc:
            log.info("source_commit_failed", reason=str(exc))  # Postgres has them
            return
        for state in moved.values():
            state.is_committed = True

    def _uncommitted(self, partitions: Sequence[Partition]) -> list[Position]:
        known = {one: self._states[one] for one in partitions if one in self._states}
        return [Position(*one, state.next) for one, state in known.items() if not state.is_committed]

    def _lost(self, partitions: Sequence[Partition]) -> None:
        for partition in partitions:
            self._states.pop(partition, None)

    async def drain(self, seconds: float) -> None:
        await self._commit(at_once=True)

    async def close(self) -> None:
        await self._consumer.close()
