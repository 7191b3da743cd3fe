"""Source: schedules from Kafka's topics into Postgres, each record once.

How far a partition has been read stands in Postgres and is moved in the transaction that stores what was read, guarded
by where this process believes it to be. So a record counts once, whoever is killed and whichever two processes believe
a partition to be theirs; the positions that the group keeps in Kafka follow, for the eyes of tools.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from time import monotonic
from typing import Any

from penstock.brokers.kafka.consumer import KafkaConsumer
from penstock.brokers.kafka.library import consumer_config
from penstock.brokers.kafka.messages import Partition, Position, Received
from penstock.compat.topics.feeds import ClockworkFeed, Feed, ScheduleFeed, SourceRecord
from penstock.compat.topics.schedules import source_of
from penstock.db.notify import DELAYED_RECORDS, Notifier
from penstock.db.pool import Store
from penstock.db.session import Session
from penstock.protocol.errors import PenstockError, Refused, Unavailable
from penstock.runtime.halving import in_halves
from penstock.runtime.logs import get_logger
from penstock.runtime.loop import Service, SideTask
from penstock.settings.model import Settings

__all__ = ["ClockworkFeed", "Feed", "ScheduleFeed", "Source"]

RECORDS_AT_ONCE = 1000
_WAIT_SECONDS = 0.5
_COMMIT_SECONDS = 1.0
_RELEASED_AT_ONCE = 5000

log = get_logger()


class _State:
    """What this process believes of a partition that is its own.

    next: offset of the next record. complete: it has been read to its end once, by whomever. caught_up: it has been
    since it is ours.
    """

    __slots__ = ("caught_up", "complete", "next")

    def __init__(self, next_offset: int, complete: bool) -> None:
        self.next = next_offset
        self.complete = complete
        self.caught_up = False


class Source(Service):
    """One kafka-source or clockwork-source; ``run_once`` is one receive, stored."""

    def __init__(self, *, name: str, store: Store, feed: Feed, settings: Settings) -> None:
        self.name = name
        self._store = store
        self._feed = feed
        self._notifier = Notifier(store, DELAYED_RECORDS)
        self._states: dict[Partition, _State] = {}
        self._astray: set[Partition] = set()  # Kafka stands elsewhere than we
        self._ended: set[Partition] = set()
        self._uncommitted: set[Partition] = set()
        self._committed_at = monotonic()
        self._is_open = False
        self._consumer = KafkaConsumer(
            consumer_config(settings, feed.group) | {"enable.partition.eof": True},
            feed.topics,
            on_revoked=self._revoked,
            on_lost=self._lost,
        )

    async def open(self) -> None:
        await self._store.open()
        if not self._is_open:
            await self._consumer.open()
            self._is_open = True

    def side_tasks(self) -> Mapping[str, SideTask]:
        return {"notify": self._notifier.run}

    @property
    def is_caught_up(self) -> bool:
        """Whether it has partitions, and all of them were read to their ends."""
        return bool(self._states) and all(state.caught_up for state in self._states.values())

    async def run_once(self) -> int:
        """Receive, store, move the positions; returns how many records came. Raises Unavailable."""
        await self._realign()
        records = await self._consumer.receive(max_records=RECORDS_AT_ONCE, wait_seconds=_WAIT_SECONDS)
        self._ended |= self._consumer.take_ended()
        by_partition: dict[Partition, list[Received]] = {}
        for record in records:
            by_partition.setdefault(Partition(record.topic, record.partition), []).append(record)
        try:
            unknown = by_partition.keys() - self._states.keys()
            if unknown:
                by_partition = {one: by_partition[one] for one in by_partition.keys() - unknown}
                self._astray |= unknown
            if by_partition:
                await self._store_all(by_partition)
            for partition in [one for one in self._ended if one in self._states and one not in self._astray]:
                await self._reach_end(partition)
                self._ended.discard(partition)
            await self._commit()
        except BaseException:
            self._astray |= by_partition.keys()  # what was received and not stored is read again
            raise
        return len(records)

    async def _store_all(self, by_partition: Mapping[Partition, Sequence[Received]]) -> None:
        moved: dict[Partition, int] = {}
        async with self._store.transaction() as session:
            taken: list[SourceRecord] = []
            for row in await session.fetch("lock_positions", self._feed.group, *_columns(by_partition)):
                partition = Partition(row["topic"], row["partition"])
                state = self._states[partition]
                if row["next_offset"] != state.next:
                    # Another process has read on; it is the group's to say whose the partition is, and ours to follow.
                    log.info("source_overtaken", topic=partition.topic, partition=partition.partition)
                    state.next, state.complete = row["next_offset"], row["complete"]
                    self._astray.add(partition)
                    continue
                fresh = [record for record in by_partition[partition] if record.offset >= state.next]
                taken += [SourceRecord(record, not state.caught_up, not state.complete) for record in fresh]
                if fresh:
                    moved[partition] = fresh[-1].offset + 1
            await self._store_taken(session, taken)
            if moved:
                await session.fetch("move_positions", self._feed.group, *_columns(moved), list(moved.values()))
        for partition, offset in moved.items():
            self._states[partition].next = offset
        self._uncommitted |= moved.keys()
        self._notifier.wake()

    async def _store_taken(self, session: Session, taken: Sequence[SourceRecord]) -> None:
        """What Postgres refuses is told and passed over, and harms no other record."""

        async def store(part: Sequence[SourceRecord], hurried: bool) -> None:
            async with session.savepoint(hurried=hurried):
                await self._feed.store(session, part)

        async def pass_over(one: SourceRecord, error: PenstockError) -> None:
            log.error(
                "source_record_refused", topic=one.record.topic, partition=one.record.partition,
                offset=one.record.offset, reason=str(error),
            )  # fmt: skip

        # A partition is read in its order: behind a lock, all of it waits.
        await in_halves(taken, store, pass_over, errors=(Refused,))

    async def _reach_end(self, partition: Partition) -> None:
        """The partition was read to its end: what it holds may be fired."""
        state = self._states[partition]
        if state.caught_up:
            return
        released = 0
        while True:
            async with self._store.transaction() as session:
                (row,) = await session.fetch("lock_positions", self._feed.group, *_columns([partition]))
                if row["next_offset"] != state.next:
                    return  # it is another's, who has read on
                count = await session.value("release_held_records", source_of(partition.topic), partition.partition,
                                            _RELEASED_AT_ONCE)  # fmt: skip
                if count < _RELEASED_AT_ONCE and not state.complete:
                    await session.fetch("complete_position", self._feed.group, *partition)
            released += count
            if count < _RELEASED_AT_ONCE:
                break
        state.caught_up = state.complete = True
        self._notifier.wake()
        log.info(
            "source_caught_up", topic=partition.topic, partition=partition.partition, offset=state.next,
            released=released,
        )  # fmt: skip

    # Where partitions are read from

    async def _look_up(self, partitions: Sequence[Partition]) -> list[tuple[Position, _State]]:
        """Where each partition goes on by what Postgres says, or begins. Raises Unavailable."""
        bounds = await asyncio.gather(*(self._consumer.bounds(partition) for partition in partitions))
        begins = {partition: low for partition, (low, _) in zip(partitions, bounds, strict=True)}
        if self._feed.begins_where_the_group_is:
            begins |= {Partition(*one[:2]): one.offset for one in await self._consumer.committed(partitions)}
        ends = {partition: high for partition, (_, high) in zip(partitions, bounds, strict=True)}
        async with self._store.transaction() as session:
            await session.fetch("begin_positions", self._feed.group, *_columns(begins), list(begins.values()))
            rows = await session.fetch("lock_positions", self._feed.group, *_columns(begins))
            known = {Partition(row["topic"], row["partition"]): row for row in rows}
            gone = {
                partition: begins[partition] for partition, row in known.items() if row["next_offset"] > ends[partition]
            }
            if gone:
                log.warning("source_topic_is_shorter", partitions=",".join(f"{one[0]}/{one[1]}" for one in gone))
                await session.fetch("move_positions", self._feed.group, *_columns(gone), list(gone.values()))
        found = []
        for partition, row in known.items():
            offset = gone.get(partition, row["next_offset"])
            found.append((Position(*partition, offset), _State(offset, row["complete"])))
        return found

    async def _realign(self) -> None:
        """Have Kafka go where we are: in partitions that have just become ours, and after a failure."""
        mine = set(await self._consumer.assignment())
        self._states = {partition: state for partition, state in self._states.items() if partition in mine}
        unknown = sorted(mine - self._states.keys())
        if unknown:
            self._states |= {Partition(*begin[:2]): state for begin, state in await self._look_up(unknown)}
        for partition in sorted((self._astray & mine) | set(unknown)):
            await self._consumer.seek(Position(*partition, self._states[partition].next))
            self._astray.discard(partition)
            self._ended.discard(partition)
        self._astray &= mine

    # What the group keeps in Kafka

    async def _commit(self, *, at_once: bool = False) -> None:
        if not self._uncommitted or not (at_once or monotonic() - self._committed_at >= _COMMIT_SECONDS):
            return
        self._committed_at = monotonic()
        moved, self._uncommitted = self._uncommitted, set()
        positions = [Position(*one, self._states[one].next) for one in moved if one in self._states]
        try:
            await self._consumer.commit(positions)
        except Unavailable as exc:
            self._uncommitted |= moved
            log.info("source_commit_failed", reason=str(exc))  # Postgres has them

    async def _revoked(self, partitions: Sequence[Partition]) -> None:
        await self._commit(at_once=True)
        await self._lost(partitions)

    async def _lost(self, partitions: Sequence[Partition]) -> None:
        for partition in partitions:
            self._states.pop(partition, None)
        self._uncommitted -= set(partitions)

    async def drain(self, seconds: float) -> None:
        if self._is_open:
            await self._commit(at_once=True)

    async def close(self) -> None:
        if self._is_open:
            await self._consumer.close()


def _columns(partitions: Iterable[Partition]) -> tuple[list[Any], list[Any]]:
    listed = list(partitions)
    return [one.topic for one in listed], [one.partition for one in listed]
