"""Kafka by confluent-kafka: a topic and a consumer group of the same name for each queue.

Records of a partition are done with in any order; the committed offset is behind those that are all done. A message
that is given back, or not deleted in time, is written again at the end of the topic with the number of its deliveries,
so a partition never stands still for one message (decisions/020), and messages keep no order.
"""

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from penstock.brokers.base import Message, Outgoing, QueueMissing, Unsent
from penstock.brokers.kafka import library
from penstock.brokers.kafka.consumer import received_from
from penstock.brokers.kafka.group_reader import GroupReader
from penstock.brokers.kafka.messages import LIMITS, Received, Record, Write, record_of
from penstock.brokers.kafka.producer import KafkaProducer
from penstock.brokers.leases import LeasingTransport, Reader
from penstock.protocol.errors import SettingsError, Unavailable
from penstock.runtime.logs import log
from penstock.settings.broker_urls import DEAD_LETTER_SUFFIX
from penstock.settings.model import Settings

_LARGEST_BYTES = 100_000_000  # as much as a receive takes, for records that are written again; brokers have a limit too
_MAKE_SECONDS = 5.0
_POLL_SECONDS = 0.25
_MAY_NOT_MAKE = (
    "TOPIC_AUTHORIZATION_FAILED", "CLUSTER_AUTHORIZATION_FAILED", "POLICY_VIOLATION", "UNSUPPORTED_VERSION",
    "_UNSUPPORTED_FEATURE",
)  # fmt: skip


class DeadLetterReader(Reader[Received]):
    """Receives from a dead-letter topic, all partitions for as long as a look takes. Raises SettingsError.

    A consumer group would show each of several apis a part of the dead letters. So a look belongs to no group: it reads
    from the group's positions to the ends, and commits what was deleted meanwhile once all its leases have ended. Of
    two looks at once each sees everything; what both replay comes twice, which fencing and receipts make harmless.
    """

    def __init__(self, settings: Settings, name: str, write: Write) -> None:
        super().__init__()
        # Questions to a broker wait for a fetch that is under way.
        self._consumer = library.open_client(
            "Consumer", library.consumer_config(settings, name) | {"fetch.wait.max.ms": 100}
        )
        self._name = name
        self._failure = f"Kafka gives no records of {self._name!r}"
        self._write = write
        self._token = ""  # of the look under way, "" for none
        self._ends: dict[int, int] = {}
        self._next: dict[int, int] = {}
        self._seen: list[Received] = []
        self._deleted: set[tuple[int, int]] = set()  # partition and offset
        self._turn = asyncio.Lock()

    async def close(self) -> None:
        self.drop_all_leases()
        await self._end_if_idle()
        async with self._turn:
            await asyncio.to_thread(self._consumer.close)

    async def receive(self, wait_seconds: float, visibility_seconds: float) -> list[Message]:
        """Some that this look has not returned yet; none at the ends. Raises Unavailable."""
        async with self._turn:
            if not self._token:
                await library.ask(self._begin, self._failure)
            messages: list[Message] = []
            for received in await library.ask(self._take, self._failure):
                receipt = f"{self._token}:{received.partition}:{received.offset}"
                self.lease(receipt, received, visibility_seconds)
                messages.append(received.message(receipt, 0))
            if not messages and not self.leases:
                await self._end()
            return messages

    async def settle(self, messages: Sequence[Received], *, delete: bool) -> bool:
        if delete:
            self._deleted |= {(received.partition, received.offset) for received in messages}
        await self._end_if_idle()
        return True

    async def _end_if_idle(self) -> None:
        async with self._turn:
            if self._token and not self.leases:
                try:
                    await self._end()
                except Unavailable as exc:
                    # The next look finds again what was deleted.
                    log.warning("dead_letters_not_committed", topic=self._name, reason=str(exc))

    async def _end(self) -> None:
        """Commit behind the deleted records. Those before it that were not deleted are written again."""
        seen, self._seen = self._seen, []
        deleted, self._deleted = self._deleted, set()
        last = dict(sorted(deleted))  # deleted offset of each partition
        self._token = ""
        self._consumer.unassign()
        if not last:
            return
        again = [
            one
            for one in seen
            if one.offset < last.get(one.partition, 0) and (one.partition, one.offset) not in deleted
        ]
        outcomes = await self._write([one.again(self._name, one.receives + 1) for one in again])
        reason = next((outcome[0] for outcome in outcomes if outcome is not None), None)
        if reason is not None:
            raise Unavailable(f"Kafka does not take what is to stay in {self._name!r}: {reason}")
        await library.ask(lambda: self._commit(last), self._failure)

    # In a thread

    def _begin(self) -> None:
        for number, (start, end) in library.unread_ranges(self._consumer, self._name).items():
            self._next[number], self._ends[number] = start, end
        self._consumer.assign([self._position(number, offset) for number, offset in self._next.items()])
        self._token = secrets.token_hex(4)

    def _position(self, partition: int, offset: int) -> Any:
        return library.confluent().TopicPartition(self._name, partition, offset)

    def _take(self) -> list[Received]:
        """Those up to the ends, a few at a time."""
        some: list[Received] = []
        waited = 0.0
        while len(some) < LIMITS.max_call_messages and any(self._next[n] < end for n, end in self._ends.items()):
            message = self._consumer.poll(0 if some else _POLL_SECONDS)
            if message is None:
                waited += _POLL_SECONDS
                if some or waited >= library.ANSWER_SECONDS:
                    break
                continue
            if message.error() is not None:
                raise library.confluent().KafkaException(message.error())
            received = received_from(message)
            self._next[received.partition] = received.offset + 1
            if received.offset < self._ends[received.partition]:
                self._seen.append(received)
                some.append(received)
        return some

    def _commit(self, last: dict[int, int]) -> None:
        before = library.committed_offsets(self._consumer, self._name)  # another look may have come further
        further = [self._position(number, at + 1) for number, at in last.items() if at >= before.get(number, at + 1)]
        if further:
            self._consumer.commit(offsets=further, asynchronous=False)


class KafkaTransport(LeasingTransport):
    """One producer, and a consumer for each queue that is received from. makes_queues: missing topics, at first use."""

    broker, sending, header_bytes = "kafka", "produce", 8

    def __init__(self, settings: Settings, *, makes_queues: bool = True) -> None:
        super().__init__(LIMITS)
        library.confluent()
        self._url = settings.transport
        self._failure = f"Kafka at {self._url.shown} is unavailable or rejected the request"
        self.settings = settings.model_copy(update={"kafka_brokers": ",".join(self._url.hosts)})
        producer_config = library.producer_config(self.settings) | {
            # Without it, all that is sent at once is in one partition, and so with one receiver.
            "sticky.partitioning.linger.ms": 0,
            "message.max.bytes": _LARGEST_BYTES,
        }
        self._producer = KafkaProducer(producer_config, ordered=False)
        self._makes_queues = makes_queues
        self._known: set[str] = set()
        self._asking = asyncio.Lock()
        self._admin: Any = None
        self._groups: dict[str, Any] = {}  # consumers that read nothing, by the group that they ask about

    async def make_queues(self, names: Mapping[str, str]) -> dict[str, str]:
        for name in names.values():
            await self.ensure(name)
        return {label: f"{self._url.shown}/{name}" for label, name in names.items()}

    async def greet(self) -> str:
        found = await library.ask(self._list_topics, self._failure)
        return f"Kafka at {self._url.shown}, {len(found.brokers)} brokers"

    async def close(self) -> None:
        await super().close()
        await self._producer.close()
        groups, self._groups, self._admin = self._groups, {}, None
        for consumer in groups.values():
            await asyncio.to_thread(consumer.close)

    async def publish(self, name: str, messages: Sequence[Outgoing]) -> list[Unsent | None]:
        try:
            await self.ensure(name)
        except Unavailable as exc:
            return [(str(exc), False)] * len(messages)
        return await self.write([record_of(name, message) for message in messages])

    async def open_reader(self, name: str) -> GroupReader | DeadLetterReader:
        await self.ensure(name)
        if name.endswith(DEAD_LETTER_SUFFIX):
            return DeadLetterReader(self.settings, name, self.write)
        reader = GroupReader(self.settings, name, self.write)
        await reader.open()
        return reader

    async def write(self, records: Sequence[Record]) -> list[Unsent | None]:
        """Publish; returns None for each record that the brokers have."""
        try:
            deliveries = await self._producer.send(records)
        except (Unavailable, SettingsError) as exc:
            return [(str(exc), False)] * len(records)
        return [None if found.error is None else (found.error, found.refused) for found in deliveries]

    async def ensure(self, name: str) -> None:
        """Check once that the topics of a queue and of its dead letters exist. Raises QueueMissing, Unavailable."""
        if name in self._known:
            return
        async with self._asking:
            wanted = [name] if name.endswith(DEAD_LETTER_SUFFIX) else [name + DEAD_LETTER_SUFFIX, name]
            there = (await library.ask(self._list_topics, self._failure)).topics
            for topic in wanted:
                if topic not in there and self._makes_queues:
                    await library.ask(partial(self._make, topic), self._failure)
            if name not in there and not self._makes_queues:
                raise QueueMissing(
                    f"topic {name!r} does not exist at {self._url.shown}: make it with `penstock create-queues`"
                )
            self._known.add(name)

    async def count_ready(self, name: str) -> int:
        """Records behind the group's positions, over all partitions. If the topic is gone, the next call makes it."""
        await self.ensure(name)

        def count() -> int:
            if name not in self._groups:
                self._groups[name] = library.open_client("Consumer", library.consumer_config(self.settings, name))
            return sum(max(0, end - start) for start, end in library.unread_ranges(self._groups[name], name).values())

        async with self._asking:
            try:
                return await library.ask(count, self._failure)
            except Unavailable as exc:
                if "UNKNOWN_TOPIC_OR_PART" in str(exc):
                    self._known.discard(name)
                raise

    # In a thread

    def _list_topics(self, *only: str) -> Any:
        """Metadata of the cluster: topics and brokers."""
        if self._admin is None:
            config = library.client_config(self.settings)
            self._admin = library.confluent().admin.AdminClient(config, logger=library.LOGGER)
        return self._admin.list_topics(*only, timeout=library.ANSWER_SECONDS)

    def _make(self, topic: str) -> None:
        partitions, copies = self.settings.kafka_partitions, self.settings.kafka_replication
        new = library.confluent().admin.NewTopic(topic, num_partitions=partitions, replication_factor=copies)
        try:
            self._admin.create_topics([new], request_timeout=_MAKE_SECONDS)[topic].result(2 * _MAKE_SECONDS)
            log.info("topic_made", topic=topic, partitions=partitions)
            return
        except TimeoutError:
            raise Unavailable(f"{self._failure}: no answer") from None
        except library.confluent().KafkaException as exc:
            name = exc.args[0].name()
            if name == "TOPIC_ALREADY_EXISTS":
                return
            if name not in _MAY_NOT_MAKE:
                raise
            reason = library.error_text(exc)
        # Brokers may make topics that are asked for, though they do not let us make them.
        found = self._list_topics(topic).topics[topic]
        if found.error is not None and found.error.name() != "LEADER_NOT_AVAILABLE":
            raise QueueMissing(f"topic {topic!r} does not exist at {self._url.shown} and cannot be made: {reason}")
