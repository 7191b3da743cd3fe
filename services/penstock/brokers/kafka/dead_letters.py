"""Receiving dead letters: whoever looks sees all partitions, for as long as the look takes.

A consumer group would show each of several apis a part of the dead letters. So a look belongs to no group: it reads
from the group's positions to the ends, and what was deleted meanwhile is put behind the positions when all that it held
is given back. Of two looks at once each sees everything; what both replay is replayed twice, which the fence and the
receipts make harmless.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from penstock.brokers.base import Limits, Message
from penstock.brokers.kafka.consumer import received_from
from penstock.brokers.kafka.group_reader import Write
from penstock.brokers.kafka.library import confluent, consumer_config, open_client, told
from penstock.brokers.kafka.messages import message_of, receives_of, record_again
from penstock.brokers.kafka.records import Received
from penstock.brokers.leases import MessageLeases
from penstock.protocol.errors import Unavailable
from penstock.runtime.logs import get_logger
from penstock.settings.model import Settings

_ANSWER_SECONDS = 10.0
_POLL_SECONDS = 0.25

log = get_logger()


class LetterReader:
    """Receives from a dead-letter topic. write: publishes records."""

    def __init__(self, settings: Settings, name: str, write: Write, limits: Limits) -> None:
        # What is asked of a broker waits for a fetch that is under way.
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
        self._leases: MessageLeases[Received] = MessageLeases(self._overdue)
        self._turn = asyncio.Lock()

    async def open(self) -> None:
        """Raises SettingsError."""
        self._consumer = open_client("Consumer", self._config)

    async def close(self) -> None:
        self._leases.close()
        async with self._turn:
            if self._token:
                try:
                    await self._end()
                except Unavailable as exc:
                    log.warning("kafka_commit_failed", topic=self._name, reason=str(exc))
            await asyncio.to_thread(self._consumer.close)

    async def receive(self, wait_seconds: float, visibility_seconds: float) -> list[Message]:
        """Some that this look has not brought yet; none at the ends. Raises Unavailable."""
        async with self._turn:
            if not self._token:
                await self._ask(self._begin)
            messages: list[Message] = []
            some = await self._ask(self._take)
            for received in some:
                receipt = f"{self._token}:{received.partition}:{received.offset}"
                self._leases.add(receipt, received, visibility_seconds)
                messages.append(message_of(received, receipt, 0))
            if not messages and not len(self._leases):
                await self._end()
            return messages

    async def delete(self, receipts: Sequence[str]) -> set[str]:
        """Returns those that were held, and are done with now."""
        gone = set()
        for receipt in receipts:
            received = self._leases.remove(receipt)
            if received is not None:
                self._done[received.partition].add(received.offset)
                gone.add(receipt)
        await self._close_if_idle()
        return gone

    def extend(self, receipt: str, seconds: float) -> bool:
        return self._leases.extend(receipt, seconds)

    async def release(self, receipts: Sequence[str]) -> int:
        """Returns how many were held."""
        released = sum(self._leases.remove(receipt) is not None for receipt in receipts)
        await self._close_if_idle()
        return released

    async def _overdue(self, _: list[Received]) -> None:
        await self._close_if_idle()

    async def _close_if_idle(self) -> None:
        async with self._turn:
            if self._token and not len(self._leases):
                try:
                    await self._end()
                except Unavailable as exc:
                    # What was deleted is there again at the next look.
                    log.warning("dead_letters_not_committed", topic=self._name, reason=str(exc))

    async def _end(self) -> None:
        """Put what was deleted behind the positions. What stands before it and was not deleted is written again."""
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

    async def _ask(self, question: Any) -> Any:
        module = confluent()
        try:
            return await asyncio.to_thread(question)
        except module.KafkaException as exc:
            raise Unavailable(f"Kafka gives no records of {self._name!r}: {told(exc)}") from exc

    # In a thread

    def _partition(self, number: int, offset: int) -> Any:
        return confluent().TopicPartition(self._name, number, offset)

    def _positions(self) -> dict[int, int]:
        found = self._consumer.list_topics(self._name, timeout=_ANSWER_SECONDS).topics[self._name]
        asked = [confluent().TopicPartition(self._name, number) for number in found.partitions]
        return {at.partition: at.offset for at in self._consumer.committed(asked, timeout=_ANSWER_SECONDS)}

    def _begin(self) -> None:
        for number, offset in self._positions().items():
            low, high = self._consumer.get_watermark_offsets(
                confluent().TopicPartition(self._name, number), timeout=_ANSWER_SECONDS
            )
            self._next[number] = max(low, offset)
            self._ends[number] = high
        self._consumer.assign([self._partition(number, offset) for number, offset in self._next.items()])
        self._token = secrets.token_hex(4)

    def _take(self) -> list[Received]:
        """Those up to the ends, a few at a time."""
        some: list[Received] = []
        waited = 0.0
        while len(some) < self._limits.max_call_messages and any(self._next[n] < end for n, end in self._ends.items()):
            message = self._consumer.poll(0 if some else _POLL_SECONDS)
            if message is None:
                waited += _POLL_SECONDS
                if some or waited >= _ANSWER_SECONDS:
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
        # Another look may have come further.
        further = [
            self._partition(number, positions[number])
            for number, offset in self._positions().items()
            if number in positions and positions[number] > offset
        ]
        if further:
            self._consumer.commit(offsets=further, asynchronous=False)
