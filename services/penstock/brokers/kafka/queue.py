"""Kafka by confluent-kafka: a topic and a consumer group of the same name for each queue.

Who receives is a member of the group and is given records of its partitions. They are done with in any order, and
what is committed stands behind the ones that are all done (:mod:`penstock.brokers.kafka.offsets`). A message that
is given back, or not deleted in time, is written again at the end of the topic with the number of its deliveries, and
the record it came as is done with: a partition never stands still for one message. So messages keep no order; Penstock
asks for none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.brokers.base import MAX_RECEIVES, Depth, Limits, Message, Outgoing, SendReport
from penstock.brokers.kafka.dead_letters import LetterReader
from penstock.brokers.kafka.group_reader import GroupReader
from penstock.brokers.kafka.library import confluent, producer_config
from penstock.brokers.kafka.messages import record_of, size_of
from penstock.brokers.kafka.producer import KafkaProducer
from penstock.brokers.kafka.records import Record
from penstock.brokers.kafka.topics import Topics
from penstock.protocol.errors import SettingsError, Unavailable
from penstock.runtime import metrics
from penstock.settings.broker_urls import DEAD_LETTER_SUFFIX
from penstock.settings.model import Settings

LIMITS = Limits(
    max_message_bytes=990_000,  # brokers take a record of 1 MB unless told otherwise, and ours has headers more
    max_call_bytes=990_000,
    max_call_messages=10,
    max_wait_seconds=20,
    # Nothing behind a record that is held can be committed, and all of it would come again after a crash.
    max_extend_seconds=600,
    max_receives=MAX_RECEIVES,
    counts_held=True,
    deletes_overdue=True,
    outlives_connection=False,
    makes_queues=True,
)


class KafkaTransport:
    """One producer, and a consumer for each queue that is received from.

    makes_queues: make the topics of a queue that are missing, when it is first used.
    Raises SettingsError when confluent-kafka is not installed.
    """

    limits = LIMITS

    def __init__(self, settings: Settings, *, makes_queues: bool = True) -> None:
        confluent()
        self._url = settings.transport
        self._settings = settings.model_copy(update={"kafka_brokers": ",".join(self._url.hosts)})
        self._makes_queues = makes_queues
        # Without it, what is sent in one go is all in one partition, and so with one receiver.
        self._producer = KafkaProducer(producer_config(self._settings) | {"sticky.partitioning.linger.ms": 0})
        self._topics = Topics(self._settings, self._url.shown)
        self._queues: list[KafkaQueue] = []

    def queue(self, name: str, *, label: str) -> KafkaQueue:
        """The queue of that name; its topics are made, or looked up, at the first call."""
        queue = KafkaQueue(self, name, label)
        self._queues.append(queue)
        return queue

    async def make_queues(self, names: Mapping[str, str]) -> dict[str, str]:
        """See :class:`penstock.brokers.base.Transport`."""
        for name in names.values():
            await self._topics.ensure(name, make=True)
        return {label: f"{self._url.shown}/{name}" for label, name in names.items()}

    async def greet(self) -> str:
        """Where the brokers are, and how many. Raises Unavailable."""
        brokers = await self._topics.count_brokers()
        return f"Kafka at {self._url.shown}, {brokers} brokers"

    async def close(self) -> None:
        await asyncio.gather(*(queue.close() for queue in self._queues))
        await self._producer.close()
        await self._topics.close()

    # For queues

    async def ensure(self, name: str) -> None:
        """Raises QueueMissing, Unavailable."""
        await self._topics.ensure(name, make=self._makes_queues)

    async def lag(self, name: str) -> int:
        """Records of a queue that its group has not done with. Raises Unavailable."""
        return await self._topics.lag(name)

    async def write(self, records: Sequence[Record]) -> list[tuple[str, bool] | None]:
        """Publish; returns, of each record, None or the reason why it is not there and whether it never will be."""
        try:
            deliveries = await self._producer.send(records)
        except (Unavailable, SettingsError) as exc:
            return [(str(exc), False)] * len(records)
        return [None if found.error is None else (found.error, found.refused) for found in deliveries]

    @property
    def settings(self) -> Settings:
        """With the brokers of the URL."""
        return self._settings


class KafkaQueue:
    """One topic; see :class:`penstock.brokers.base.Queue` for the contract."""

    limits = LIMITS

    def __init__(self, transport: KafkaTransport, name: str, label: str) -> None:
        self.label = label
        self._transport = transport
        self._name = name
        self._reader: GroupReader | LetterReader | None = None
        self._opening = asyncio.Lock()

    async def send(self, messages: Sequence[Outgoing]) -> SendReport:
        sizes = [size_of(message) for message in messages]
        limit = self.limits.max_message_bytes
        going = [position for position, size in enumerate(sizes) if size <= limit]
        reasons = [f"a message of {size} bytes is over the limit of {limit}" for size in sizes if size > limit]
        refused = set(range(len(messages))) - set(going)
        failed = set(refused)
        outcomes: list[tuple[str, bool] | None] = []
        if going:
            try:
                await self._transport.ensure(self._name)
            except Unavailable as exc:
                outcomes = [(str(exc), False)] * len(going)
            else:
                outcomes = await self._transport.write([record_of(self._name, messages[n]) for n in going])
        for position, outcome in zip(going, outcomes, strict=True):
            if outcome is not None:
                reason, for_good = outcome
                reasons.append(reason)
                failed.add(position)
                if for_good:
                    refused.add(position)
        sent = len(messages) - len(failed)
        self._count("produce", ok=sent, failed=len(failed))
        if sent:
            metrics.MESSAGES.labels(self.label, "sent").inc(sent)
        return SendReport(sorted(failed), next(iter(reasons), None), frozenset(refused))

    async def receive(self, *, wait_seconds: int, visibility_seconds: int) -> list[Message]:
        try:
            reader = await self._open_reader()
            messages = await reader.receive(wait_seconds, visibility_seconds)
        except Unavailable:
            self._count("receive", failed=1)
            raise
        self._count("receive", ok=1)
        if messages:
            metrics.MESSAGES.labels(self.label, "received").inc(len(messages))
        return messages

    async def delete(self, messages: Sequence[Message]) -> list[Message]:
        gone = set() if self._reader is None else await self._reader.delete([message.receipt for message in messages])
        if gone:
            metrics.MESSAGES.labels(self.label, "deleted").inc(len(gone))
        return [message for message in messages if message.receipt not in gone]

    async def extend(self, messages: Sequence[Message], seconds: int) -> list[Message]:
        reader = self._reader
        return [m for m in messages if reader is None or not reader.extend(m.receipt, seconds)]

    async def release(self, messages: Sequence[Message]) -> None:
        if self._reader is not None and messages:
            released = await self._reader.release([message.receipt for message in messages])
            if released:
                metrics.MESSAGES.labels(self.label, "released").inc(released)

    async def depth(self) -> Depth:
        try:
            await self._transport.ensure(self._name)
            lag = await self._transport.lag(self._name)
        except Unavailable:
            self._count("depth", failed=1)
            raise
        self._count("depth", ok=1)
        return Depth(visible=lag, in_flight=None, delayed=0)

    async def close(self) -> None:
        """Give back what is held, and leave the group."""
        reader, self._reader = self._reader, None
        if reader is not None:
            await reader.close()

    async def _open_reader(self) -> GroupReader | LetterReader:
        async with self._opening:
            if self._reader is None:
                await self._transport.ensure(self._name)
                kind: Any = LetterReader if self._name.endswith(DEAD_LETTER_SUFFIX) else GroupReader
                reader = kind(self._transport.settings, self._name, self._transport.write, self.limits)
                await reader.open()
                self._reader = reader
            return self._reader

    def _count(self, operation: str, *, ok: int = 0, failed: int = 0) -> None:
        for outcome, number in (("ok", ok), ("failed", failed)):
            if number:
                metrics.TRANSPORT_CALLS.labels("kafka", operation, self.label, outcome).inc(number)
