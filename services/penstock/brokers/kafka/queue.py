"""Kafka by confluent-kafka: a topic and a consumer group of the same name for each queue.

A receiver is a member of the group and reads the records of its partitions. They are done with in any order, and the
committed offset is that behind the ones that are all done (:mod:`penstock.brokers.kafka.offsets`). A message that is
given back, or not deleted in time, is written again at the end of the topic with the number of its deliveries, and the
record it came as is done with: a partition never stands still for one message. So messages keep no order; Penstock
needs none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from penstock.brokers.base import Limits, Outgoing
from penstock.brokers.kafka.dead_letters import DeadLetterReader
from penstock.brokers.kafka.group_reader import GroupReader
from penstock.brokers.kafka.library import confluent, producer_config
from penstock.brokers.kafka.messages import Record, record_of
from penstock.brokers.kafka.producer import KafkaProducer
from penstock.brokers.kafka.topics import Topics
from penstock.brokers.leases import LeasedQueue, Unsent
from penstock.protocol.errors import SettingsError, Unavailable
from penstock.settings.broker_urls import DEAD_LETTER_SUFFIX
from penstock.settings.model import Settings

LIMITS = Limits(
    max_message_bytes=990_000,  # brokers take a record of 1 MB by default, and ours has headers more
    max_call_bytes=990_000,
    max_call_messages=10,
    max_wait_seconds=20,
    # Nothing behind a leased record can be committed, and all of it would be delivered again after a crash.
    max_extend_seconds=600,
    counts_held=True,
    deletes_overdue=True,
    outlives_connection=False,
    makes_queues=True,
)


class KafkaTransport:
    """One producer, and a consumer for each queue that is received from.

    makes_queues: make the missing topics of a queue when it is first used.
    Raises SettingsError when confluent-kafka is not installed.
    """

    limits = LIMITS

    def __init__(self, settings: Settings, *, makes_queues: bool = True) -> None:
        confluent()
        self._url = settings.transport
        self.settings = settings.model_copy(update={"kafka_brokers": ",".join(self._url.hosts)})
        # Without it, all that is sent at once is in one partition, and so with one receiver.
        self._producer = KafkaProducer(producer_config(self.settings) | {"sticky.partitioning.linger.ms": 0})
        self.topics = Topics(self.settings, self._url.shown, makes=makes_queues)
        self._queues: list[KafkaQueue] = []

    def queue(self, name: str, *, label: str) -> KafkaQueue:
        """The queue of that name; its topics are made, or looked up, at the first call."""
        queue = KafkaQueue(self, name, label)
        self._queues.append(queue)
        return queue

    async def make_queues(self, names: Mapping[str, str]) -> dict[str, str]:
        for name in names.values():
            await self.topics.ensure(name, make=True)
        return {label: f"{self._url.shown}/{name}" for label, name in names.items()}

    async def greet(self) -> str:
        brokers = await self.topics.count_brokers()
        return f"Kafka at {self._url.shown}, {brokers} brokers"

    async def close(self) -> None:
        await asyncio.gather(*(queue.close() for queue in self._queues))
        await self._producer.close()
        await self.topics.close()

    async def write(self, records: Sequence[Record]) -> list[Unsent | None]:
        """Publish; returns None for each record that the brokers have."""
        try:
            deliveries = await self._producer.send(records)
        except (Unavailable, SettingsError) as exc:
            return [(str(exc), False)] * len(records)
        return [None if found.error is None else (found.error, found.refused) for found in deliveries]


class KafkaQueue(LeasedQueue):
    """One topic."""

    broker, sending, header_bytes = "kafka", "produce", 8

    def __init__(self, transport: KafkaTransport, name: str, label: str) -> None:
        super().__init__(name, label, LIMITS)
        self._transport = transport

    async def _publish(self, messages: Sequence[Outgoing]) -> list[Unsent | None]:
        try:
            await self._transport.topics.ensure(self._name)
        except Unavailable as exc:
            return [(str(exc), False)] * len(messages)
        return await self._transport.write([record_of(self._name, message) for message in messages])

    async def _count_ready(self) -> int:
        await self._transport.topics.ensure(self._name)
        return await self._transport.topics.lag(self._name)

    async def _open_reader(self) -> GroupReader | DeadLetterReader:
        await self._transport.topics.ensure(self._name)
        kind = DeadLetterReader if self._name.endswith(DEAD_LETTER_SUFFIX) else GroupReader
        reader = kind(self._transport.settings, self._name, self._transport.write, self.limits)
        await reader.open()
        return reader
