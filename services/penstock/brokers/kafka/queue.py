"""Kafka by confluent-kafka: a topic and a consumer group of the same name for each queue.

Records of a partition are done with in any order; the committed offset is behind those that are all done. A message
that is given back, or not deleted in time, is written again at the end of the topic with the number of its deliveries,
so a partition never stands still for one message (decisions/020), and messages keep no order.
"""

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from penstock.brokers.base import Limits, Outgoing, QueueMissing, Unsent
from penstock.brokers.kafka import library
from penstock.brokers.kafka.dead_letters import DeadLetterReader
from penstock.brokers.kafka.group_reader import GroupReader
from penstock.brokers.kafka.messages import Record, record_of
from penstock.brokers.kafka.producer import KafkaProducer
from penstock.brokers.leases import LeasingTransport
from penstock.protocol.errors import SettingsError, Unavailable
from penstock.runtime.logs import log
from penstock.settings.broker_urls import DEAD_LETTER_SUFFIX
from penstock.settings.model import Settings

_LARGEST_BYTES = 100_000_000  # as much as a receive takes, for records that are written again; brokers have a limit too
_MAKE_SECONDS = 5.0
_MAY_NOT_MAKE = (
    "TOPIC_AUTHORIZATION_FAILED", "CLUSTER_AUTHORIZATION_FAILED", "POLICY_VIOLATION", "UNSUPPORTED_VERSION",
    "_UNSUPPORTED_FEATURE",
)  # fmt: skip
LIMITS = Limits(
    max_message_bytes=990_000,  # brokers take a record of 1 MB by default, and ours has headers more
    max_call_messages=10,
    # Nothing behind a leased record can be committed, and all of it would be delivered again after a crash.
    max_extend_seconds=600,
    deletes_overdue=True,
    outlives_connection=False,
    makes_queues=True,
)


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
            return DeadLetterReader(self.settings, name, self.write, LIMITS)
        reader = GroupReader(self.settings, name, self.write, LIMITS)
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
