"""Receiving dead letters: a reader sees those of all partitions, for as long as its look takes.

A consumer group would show each of several apis a part of the dead letters. So a look belongs to no group: it reads
from the group's positions to the ends, and commits what was deleted meanwhile once all its leases have ended. Of two
looks at once each sees everything; what both replay is replayed twice, which fencing and receipts make harmless.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

from penstock.brokers.base import Limits, Message
from penstock.brokers.kafka.consumer import received_from
from penstock.brokers.kafka.group_reader import Write
from penstock.brokers.kafka.library import (
    ANSWER_SECONDS,
    ask,
    committed_offsets,
    confluent,
    consumer_config,
    open_client,
    unread_ranges,
)
from penstock.brokers.kafka.messages import Received, message_of, receives_of, record_again
from penstock.brokers.leases import MessageLeases
from penstock.protocol.errors import Unavailable
from penstock.runtime.logs import get_logger
from penstock.settings.model import Settings

_POLL_SECONDS = 0.25

log = get_logger()

T = TypeVar("T")


class DeadLetterReader:
    """Receives from a dead-letter topic. write: publishes records."""

    closed: str | None = None

    def __init__(self, settings: Settings, name: str, write: Write, limits: Limits) -> None:
        # Questions to a broker wait for a fetch that is under way.
        self._config = consumer_config(settings, name) | {"fetch.wait.max.ms": 100}
        self._name = name
        self._write = write
        self._limits = limits
        self._consumer: Any = None
        self._token = ""  # of the look under way, "" for none
        self._ends: dict[int, int] = {}
        self._next: dict[int, int] = {}
        self._seen: dict[int, dict[int, Received]] = defaultdict(dict)
        self._done: dict[int, set[int]] = defaultdict(set)
        self.leases: MessageLeases[Received] = MessageLeases(self._overdue)
        self._turn = asyncio.Lock()

    async def open(self) -> None:
        """Raises SettingsError."""
        self._consumer = open_client("Consumer", self._config)

    async def close(self) -> None:
        self.leases.close()
        async with self._turn:
            if self._token:
                try:
                    await self._end()
                except Unavailable as exc:
                    log.warning("kafka_commit_failed", topic=self._name, reason=str(exc))
            await asyncio.to_thread(self._consumer.close)

    async def receive(self, wait_seconds: float, visibility_seconds: float) -> list[Message]:
        """Some that this look has not returned yet; none at the ends. Raises Unavailable."""
        async with self._turn:
            if not self._token:
                await self._ask(self._begin)
            messages: list[Message] = []
            for received in await self._ask(self._take):
                receipt = f"{self._token}:{received.partition}:{received.offset}"
                self.leases.add(receipt, received, visibility_seconds)
                messages.append(message_of(received, receipt, 0))
            if not messages and not len(self.leases):
                await self._end()
            return messages

    async def delete(self, receipts: Sequence[str]) -> Collection[str]:
        deleted = self.leases.remove(receipts)
        for received in deleted.values():
            self._done[received.partition].add(received.offset)
        await self._end_if_idle()
        return deleted.keys()

    async def release(self, receipts: Sequence[str]) -> Collection[str]:
        released = self.leases.remove(receipts)
        await self._end_if_idle()
        return released.keys()

    async def _overdue(self, _: list[Received]) -> None:
        await self._end_if_idle()

    async def _end_if_idle(self) -> None:
        async with self._turn:
            if self._token and not len(self.leases):
                try:
                    await self._end()
                except Unavailable as exc:
                    # The next look finds again what was deleted.
                    log.warning("dead_letters_not_committed", topic=self._name, reason=str(exc))

    async def _end(self) -> None:
        """Commit behind the deleted records. Those before it that were not deleted are written again."""
        positions, again = {}, []
        for partition, done in self._done.items():
            if done:
                positions[partition] = max(done) + 1
                seen = self._seen[partition]
                again += [seen[offset] for offset in sorted(seen) if offset < max(done) and offset not in done]
        self._token = ""
        self._consumer.unassign()
        self._seen.clear()
        self._done.clear()
        if not positions:
            return
        outcomes = await self._write([record_again(self._name, one, receives_of(one) + 1) for one in again])
        reason = next((outcome[0] for outcome in outcomes if outcome is not None), None)
        if reason is not None:
            raise Unavailable(f"Kafka does not take what is to stay in {self._name!r}: {reason}")
        await self._ask(lambda: self._commit(positions))

    async def _ask(self, question: Callable[[], T]) -> T:
        return await ask(question, f"Kafka gives no records of {self._name!r}")

    # In a thread

    def _begin(self) -> None:
        for number, (start, end) in unread_ranges(self._consumer, self._name).items():
            self._next[number], self._ends[number] = start, end
        self._consumer.assign([self._position(number, offset) for number, offset in self._next.items()])
        self._token = secrets.token_hex(4)

    def _position(self, partition: int, offset: int) -> Any:
        return confluent().TopicPartition(self._name, partition, offset)

    def _take(self) -> list[Received]:
        """Those up to the ends, a few at a time."""
        some: list[Received] = []
        waited = 0.0
        while len(some) < self._limits.max_call_messages and any(self._next[n] < end for n, end in self._ends.items()):
            message = self._consumer.poll(0 if some else _POLL_SECONDS)
            if message is None:
                waited += _POLL_SECONDS
                if some or waited >= ANSWER_SECONDS:
                    break
                continue
            if message.error() is not None:
                raise confluent().KafkaException(message.error())
            received = received_from(message)
            self._next[received.partition] = received.offset + 1
            if received.offset < self._ends[received.partition]:
                self._seen[received.partition][received.offset] = received
                some.append(received)
        return some

    def _commit(self, positions: dict[int, int]) -> None:
        before = committed_offsets(self._consumer, self._name)  # another look may have come further
        further = [
            self._position(number, offset)
            for number, offset in positions.items()
            if offset > before.get(number, offset)
        ]
        if further:
            self._consumer.commit(offsets=further, asynchronous=False)
