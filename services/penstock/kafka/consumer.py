"""A member of a consumer group for asyncio, whose offsets are committed by hand.

All that may call back runs in one thread of the consumer's own, where librdkafka tells of partitions that come and go
in the middle of a receive; the coroutines given for that run on the event loop while it waits for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from penstock.errors import Unavailable
from penstock.kafka.library import confluent, open_client, told
from penstock.kafka.records import Partition, Position, Received
from penstock.logs import get_logger

_CALLBACK_SECONDS = 30.0

log = get_logger()

Rebalance = Callable[[Sequence[Partition]], Awaitable[None]]


async def _nothing(partitions: Sequence[Partition]) -> None:
    pass


class KafkaConsumer:
    """Reads topics as a member of a group. Records of one partition come in their order.

    config: as :func:`penstock.kafka.library.consumer_config` makes it.
    on_assigned, on_revoked, on_lost: told of partitions that come, that are about to go (positions may still be
    committed), and that are somebody else's already. They are awaited for half a minute at the most, and the group
    waits with them; of the consumer they may ask for a commit and nothing else, or they wait for themselves.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        topics: Sequence[str],
        *,
        on_assigned: Rebalance = _nothing,
        on_revoked: Rebalance = _nothing,
        on_lost: Rebalance = _nothing,
    ) -> None:
        self._config = config
        self._topics = list(topics)
        self._on_assigned, self._on_revoked, self._on_lost = on_assigned, on_revoked, on_lost
        self._consumer: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._failure: str | None = None
        self._ended: set[Partition] = set()
        self._fatal = False

    async def open(self) -> None:
        """Subscribe; the group is joined by the first receives. Raises SettingsError, Unavailable."""
        self._loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(1, "kafka-consumer")
        self._consumer = open_client("Consumer", dict(self._config) | {"error_cb": self._erred})
        self._consumer.subscribe(
            self._topics, on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._lost_partitions
        )

    async def receive(self, *, max_records: int, wait_seconds: float) -> list[Received]:
        """Up to so many records, at once when there are any; none after ``wait_seconds``.

        Raises Unavailable when the brokers, or a topic, cannot be reached; the next call may work.
        """
        if self._fatal:
            await self.close()
            await self.open()
            self._fatal = False
        try:
            messages = await self._in_thread(self._take, max_records, wait_seconds)
        except confluent().KafkaException as exc:  # after an error that the library calls fatal
            self._fatal = True
            raise Unavailable(f"Kafka gives no records: {told(exc)}") from exc
        records = [received_from(message) for message in messages if message.error() is None]
        failures = []
        for message in messages:
            error = message.error()
            if error is not None and error.name() == "_PARTITION_EOF":
                self._ended.add(Partition(message.topic(), message.partition()))
            elif error is not None:
                failures.append(error)
        for error in failures:
            self._fatal = self._fatal or error.fatal()
        if failures:
            self._failure = told(failures[-1])
        if self._failure is not None and not records:
            failure, self._failure = self._failure, None
            raise Unavailable(f"Kafka gives no records: {failure}")
        return records

    def take_ended(self) -> set[Partition]:
        """Partitions whose end was reached since this was asked last, all up to there having been received.

        With the option ``enable.partition.eof`` alone.
        """
        ended, self._ended = self._ended, set()
        return ended

    async def commit(self, positions: Sequence[Position]) -> list[Partition]:
        """Keep positions for the group; returns the partitions for which that failed, ours no more as a rule.

        Raises Unavailable when the group cannot be reached. What is not committed is read again by whoever has the
        partition next.
        """
        if not positions:
            return []
        module = confluent()
        offsets = [module.TopicPartition(*position) for position in positions]
        try:
            kept = await asyncio.to_thread(self._consumer.commit, offsets=offsets, asynchronous=False)
        except module.KafkaException as exc:
            error = exc.args[0]
            if error.name() in ("ILLEGAL_GENERATION", "UNKNOWN_MEMBER_ID", "FENCED_INSTANCE_ID"):
                log.info("kafka_commit_late", reason=told(error), partitions=len(positions))
                return [Partition(position.topic, position.partition) for position in positions]
            raise Unavailable(f"Kafka does not keep the positions: {told(error)}") from exc
        failed = [one for one in kept if one.error is not None]
        for one in failed:
            log.warning("kafka_commit_failed", topic=one.topic, partition=one.partition, reason=told(one.error))
        return [Partition(one.topic, one.partition) for one in failed]

    def assignment(self) -> list[Partition]:
        """The partitions that are ours as far as we know."""
        return _partitions(self._consumer.assignment())

    def pause(self, partitions: Sequence[Partition]) -> None:
        """Receive nothing of these until they are resumed; the membership is kept by further receives."""
        self._consumer.pause([confluent().TopicPartition(*partition) for partition in partitions])

    def resume(self, partitions: Sequence[Partition]) -> None:
        """Take up what was paused. Partitions that are not ours any more are passed over."""
        mine = set(self.assignment())
        wanted = [confluent().TopicPartition(*partition) for partition in partitions if partition in mine]
        if wanted:
            self._consumer.resume(wanted)

    async def seek(self, position: Position) -> None:
        """Read this partition from here on. Raises Unavailable."""
        module = confluent()
        try:
            await asyncio.to_thread(self._consumer.seek, module.TopicPartition(*position))
        except module.KafkaException as exc:
            raise Unavailable(f"Kafka does not go to {position}: {told(exc)}") from exc

    async def bounds(self, partition: Partition, *, seconds: float = 5) -> tuple[int, int]:
        """The offsets of the first record and of the one that will be written next. Raises Unavailable."""
        module = confluent()
        try:
            low, high = await asyncio.to_thread(
                self._consumer.get_watermark_offsets, module.TopicPartition(*partition), timeout=seconds
            )
        except module.KafkaException as exc:
            raise Unavailable(f"Kafka does not tell how far {partition} goes: {told(exc)}") from exc
        return low, high

    async def committed(self, partitions: Sequence[Partition], *, seconds: float = 5) -> list[Position]:
        """The group's positions, of those partitions that have one. Raises Unavailable."""
        module = confluent()
        asked = [module.TopicPartition(*partition) for partition in partitions]
        try:
            told_of = await asyncio.to_thread(self._consumer.committed, asked, timeout=seconds)
        except module.KafkaException as exc:
            raise Unavailable(f"Kafka does not tell the positions of the group: {told(exc)}") from exc
        return [
            Position(one.topic, one.partition, one.offset, one.metadata or "") for one in told_of if one.offset >= 0
        ]

    async def close(self) -> None:
        """Leave the group, so that others take over at once; partitions are told of as revoked."""
        consumer, self._consumer = self._consumer, None
        if consumer is None or self._thread is None:
            return
        await self._in_thread(consumer.close)
        self._thread.shutdown(wait=False)

    def _take(self, max_records: int, wait_seconds: float) -> list[Any]:
        """The first record as soon as it comes, and with it what has been fetched by then."""
        first = self._consumer.poll(wait_seconds)
        if first is None:
            return []
        return [first, *(self._consumer.consume(max_records - 1, 0) if max_records > 1 else ())]

    async def _in_thread(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Run in the consumer's thread, to its end: a cancelled receive must not leave records behind unseen."""
        assert self._loop is not None  # opened first
        running = self._loop.run_in_executor(self._thread, call, *arguments)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait([running])
            raise

    def _assigned(self, _consumer: Any, partitions: Sequence[Any]) -> None:
        self._tell("assigned", self._on_assigned, partitions)

    def _revoked(self, _consumer: Any, partitions: Sequence[Any]) -> None:
        self._tell("revoked", self._on_revoked, partitions)

    def _lost_partitions(self, _consumer: Any, partitions: Sequence[Any]) -> None:
        self._tell("lost", self._on_lost, partitions)

    def _tell(self, change: str, callback: Rebalance, partitions: Sequence[Any]) -> None:
        """Runs in the consumer's thread; the event loop is free meanwhile."""
        if not partitions:
            return
        told_of = _partitions(partitions)
        log.info("kafka_partitions", change=change, partitions=",".join(f"{one[0]}/{one[1]}" for one in told_of))
        assert self._loop is not None
        if callback is _nothing or self._loop.is_closed():
            return
        running = asyncio.run_coroutine_threadsafe(_as_coroutine(callback, told_of), self._loop)
        try:
            running.result(_CALLBACK_SECONDS)
        except Exception as exc:  # an exception here would end the receive, and with it what it has fetched
            running.cancel()
            log.error("kafka_partitions_failed", change=change, error=repr(exc))

    def _erred(self, error: Any) -> None:
        self._fatal = self._fatal or error.fatal()
        self._failure = told(error)
        log.warning("kafka_away", client="consumer", reason=self._failure)


async def _as_coroutine(callback: Rebalance, partitions: Sequence[Partition]) -> None:
    await callback(partitions)


def _partitions(given: Sequence[Any]) -> list[Partition]:
    return [Partition(one.topic, one.partition) for one in given]


def received_from(message: Any) -> Received:
    """A record of the library as one of ours."""
    kind, milliseconds = message.timestamp()
    return Received(
        topic=message.topic(),
        partition=message.partition(),
        offset=message.offset(),
        key=message.key(),
        value=message.value(),
        headers=message.headers() or (),
        timestamp_ms=milliseconds if kind else None,
    )
