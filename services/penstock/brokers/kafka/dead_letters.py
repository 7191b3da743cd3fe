"""Receiving dead letters: a reader sees those of all partitions, for as long as its look takes.

A consumer group would show each of several apis a part of the dead letters. So a look belongs to no group: it reads
from the group's positions to the ends, and commits what was deleted meanwhile once all its leases have ended. Of two
looks at once each sees everything; what both replay is replayed twice, which fencing and receipts make harmless.
"""

import asyncio
import secrets
from collections.abc import Sequence
from typing import Any

from penstock.brokers.base import Limits, Message
from penstock.brokers.kafka import library
from penstock.brokers.kafka.consumer import received_from
from penstock.brokers.kafka.group_reader import Write
from penstock.brokers.kafka.messages import Received, message_of, receives_of, record_again
from penstock.brokers.leases import Reader
from penstock.protocol.errors import Unavailable
from penstock.runtime.logs import log
from penstock.settings.model import Settings

_POLL_SECONDS = 0.25


class DeadLetterReader(Reader[Received]):
    """Receives from a dead-letter topic. write: publishes records. Raises SettingsError."""

    def __init__(self, settings: Settings, name: str, write: Write, limits: Limits) -> None:
        super().__init__()
        # Questions to a broker wait for a fetch that is under way.
        self._consumer = library.open_client(
            "Consumer", library.consumer_config(settings, name) | {"fetch.wait.max.ms": 100}
        )
        self._name = name
        self._failure = f"Kafka gives no records of {self._name!r}"
        self._write = write
        self._limits = limits
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
                messages.append(message_of(received, receipt, 0))
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
        outcomes = await self._write([record_again(self._name, one, receives_of(one) + 1) for one in again])
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
        while len(some) < self._limits.max_call_messages and any(self._next[n] < end for n, end in self._ends.items()):
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
