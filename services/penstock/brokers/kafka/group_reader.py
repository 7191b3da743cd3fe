"""Receiving as a member of a consumer group: a task reads ahead a little, and keeps the membership alive."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic

from penstock.brokers.base import Limits, Message
from penstock.brokers.kafka.consumer import KafkaConsumer
from penstock.brokers.kafka.library import consumer_config
from penstock.brokers.kafka.messages import message_of, receives_of, record_again
from penstock.brokers.kafka.offsets import Progress
from penstock.brokers.kafka.records import Partition, Position, Received, Record
from penstock.brokers.leases import MessageLeases
from penstock.protocol.errors import Unavailable
from penstock.runtime.backoff import Pauses
from penstock.runtime.logs import get_logger
from penstock.settings.broker_urls import DEAD_LETTER_SUFFIX
from penstock.settings.model import Settings

Write = Callable[[Sequence[Record]], Awaitable[list[tuple[str, bool] | None]]]

_AHEAD_RECORDS = 100
_AHEAD_BYTES = 16 * 1024 * 1024
_POLL_SECONDS = 0.25
_COMMIT_SECONDS = 0.5
_AGAIN_SECONDS = 2.0  # until writing a message again is tried again
_LONGEST_PAUSE_SECONDS = 5.0

log = get_logger()


@dataclass(slots=True)
class _Mine:
    """A partition while it is ours. token: of this time, so that receipts of another are told apart.

    progress: None until the group's position was asked for; within the change of partitions it is not told.
    """

    progress: Progress | None = None
    token: str = field(default_factory=lambda: secrets.token_hex(4))
    dirty: bool = False


@dataclass(slots=True)
class _Leased:
    received: Received
    receives: int


class GroupReader:
    """Receives from one topic. write: publishes records; see :class:`penstock.brokers.kafka.queue.KafkaTransport`."""

    def __init__(self, settings: Settings, name: str, write: Write, limits: Limits) -> None:
        self._name = name
        self._write = write
        self._limits = limits
        self._consumer = KafkaConsumer(
            consumer_config(settings, name), [name],
            on_assigned=self._assigned, on_revoked=self._revoked, on_lost=self._lost,
        )  # fmt: skip
        self._mine: dict[Partition, _Mine] = {}
        self._ahead: deque[Received] = deque()
        self._ahead_bytes = 0
        self._came = asyncio.Event()
        self._paused = False
        self._failure: str | None = None
        self._leases: MessageLeases[_Leased] = MessageLeases(self._overdue)
        self._tasks: list[asyncio.Task[None]] = []
        self._committing = asyncio.Lock()

    async def open(self) -> None:
        """Raises SettingsError."""
        await self._consumer.open()
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._read_ahead(), name="read ahead"),
            loop.create_task(self._commit_now_and_then(), name="commit"),
        ]

    async def close(self) -> None:
        """Commit what is done, and leave the group; what is held goes to whoever has its partition next."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._leases.close()
        try:
            await self._commit(list(self._mine))
        except Unavailable as exc:
            log.warning("kafka_commit_failed", topic=self._name, reason=str(exc))
        self._mine.clear()
        await self._consumer.close()

    # Receiving

    async def receive(self, wait_seconds: float, visibility_seconds: float) -> list[Message]:
        """Raises Unavailable."""
        deadline = monotonic() + wait_seconds
        while True:
            if self._ahead:
                messages = await self._hand_out(visibility_seconds)
                if messages:
                    return messages
                continue
            if self._failure is not None:
                failure, self._failure = self._failure, None
                raise Unavailable(failure)
            left = deadline - monotonic()
            if left <= 0:
                return []
            self._came.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._came.wait()

    async def _hand_out(self, visibility_seconds: float) -> list[Message]:
        """A few of those read ahead, once it is written down that they were handed out."""
        await self._learn_positions()
        some: list[tuple[Received, _Mine, int]] = []
        while self._ahead and len(some) < self._limits.max_call_messages:
            received = self._ahead[0]
            mine = self._mine.get(Partition(received.topic, received.partition))
            if mine is not None and mine.progress is None:
                break  # it came while the others were asked about
            self._ahead.popleft()
            self._ahead_bytes -= len(received.value or b"")
            if mine is not None and mine.progress is not None:
                some.append((received, mine, mine.progress.hand_out(received.offset)))
        partitions = list({Partition(received.topic, received.partition): None for received, _, _ in some})
        try:
            not_mine = set(await self._commit(partitions))
        except Unavailable:
            not_mine = set(partitions)
            # Handed out to nobody; as if the time to hold them were over.
            for received, mine, _ in some:
                self._hold(received, mine, _AGAIN_SECONDS, receives_of(received))
            raise
        messages = []
        for received, mine, times_before in some:
            if Partition(received.topic, received.partition) in not_mine or not self._is_mine(received, mine):
                continue
            message = message_of(received, self._receipt(received, mine), times_before)
            if message.receive_count > self._limits.max_receives:
                # Those who had it died of it, one after the other.
                self._hold(received, mine, 0, message.receive_count - 1)
                continue
            self._hold(received, mine, visibility_seconds, message.receive_count)
            messages.append(message)
        return messages

    async def _learn_positions(self) -> None:
        """Ask where the partitions of those read ahead were left. Raises Unavailable."""
        ahead = {Partition(received.topic, received.partition) for received in self._ahead}
        unknown = [partition for partition in ahead if partition in self._mine and not self._mine[partition].progress]
        if not unknown:
            return
        asked = {partition: self._mine[partition] for partition in unknown}
        found = {Partition(one.topic, one.partition): one for one in await self._consumer.committed(unknown)}
        for partition, mine in asked.items():
            if mine.progress is None:
                position = found.get(partition)
                mine.progress = Progress() if position is None else Progress(position.offset, position.note)

    def _hold(self, received: Received, mine: _Mine, seconds: float, receives: int) -> None:
        self._leases.add(self._receipt(received, mine), _Leased(received, receives), seconds)

    def _receipt(self, received: Received, mine: _Mine) -> str:
        return f"{mine.token}:{received.partition}:{received.offset}"

    def _is_mine(self, received: Received, mine: _Mine) -> bool:
        return self._mine.get(Partition(received.topic, received.partition)) is mine

    # What becomes of what is held

    async def delete(self, receipts: Sequence[str]) -> set[str]:
        """Returns those that were held, and are done with now."""
        done = set()
        for receipt in receipts:
            held = self._leases.remove(receipt)
            if held is not None:
                self._finish(held.received)
                done.add(receipt)
        return done

    def extend(self, receipt: str, seconds: float) -> bool:
        return self._leases.extend(receipt, seconds)

    async def release(self, receipts: Sequence[str]) -> int:
        """Returns how many were held, and can be received again."""
        held = [found for receipt in receipts if (found := self._leases.remove(receipt)) is not None]
        await self._overdue(held)
        return len(held)

    async def _overdue(self, given_back: list[_Leased]) -> None:
        """Write them again, or as dead letters; what cannot be written is held a while longer."""
        given_back = [held for held in given_back if self._of(held) is not None]
        if not given_back:
            return
        dead = self._name + DEAD_LETTER_SUFFIX
        records = [
            record_again(
                dead if held.receives >= self._limits.max_receives else self._name, held.received, held.receives
            )
            for held in given_back
        ]
        for held, outcome in zip(given_back, await self._write(records), strict=True):
            mine = self._of(held)
            if outcome is None:
                self._finish(held.received)
            elif mine is not None:
                log.warning("message_not_written_again", queue=self._name, reason=outcome[0])
                self._hold(held.received, mine, _AGAIN_SECONDS, held.receives)

    def _of(self, held: _Leased) -> _Mine | None:
        return self._mine.get(Partition(held.received.topic, held.received.partition))

    def _finish(self, received: Received) -> None:
        mine = self._mine.get(Partition(received.topic, received.partition))
        if mine is not None and mine.progress is not None:
            mine.progress.finish(received.offset)
            mine.dirty = True

    # Committing

    async def _commit(self, partitions: Sequence[Partition]) -> list[Partition]:
        """Write down how far these are; returns those that are not ours any more. Raises Unavailable."""
        async with self._committing:
            positions = []
            for partition in partitions:
                mine = self._mine.get(partition)
                if mine is not None and mine.progress is not None and mine.progress.position is not None:
                    mine.dirty = False
                    positions.append(Position(*partition, mine.progress.position, mine.progress.note))
            try:
                return await self._consumer.commit(positions)
            except Unavailable:
                for position in positions:
                    if (mine := self._mine.get(Partition(position.topic, position.partition))) is not None:
                        mine.dirty = True
                raise

    async def _commit_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(_COMMIT_SECONDS)
            dirty = [partition for partition, mine in self._mine.items() if mine.dirty]
            try:
                await self._commit(dirty)
            except Unavailable as exc:
                log.warning("kafka_commit_failed", topic=self._name, reason=str(exc))

    # Reading ahead

    async def _read_ahead(self) -> None:
        pauses = Pauses(0.2, _LONGEST_PAUSE_SECONDS)
        while True:
            try:
                await self._pause_or_resume()
                # Membership ends without calls, so a full reader goes on calling, of partitions that give nothing.
                some = await self._consumer.receive(max_records=_AHEAD_RECORDS, wait_seconds=_POLL_SECONDS)
            except Exception as exc:  # of whatever kind: a reader that stands still looks like an empty queue
                if not isinstance(exc, Unavailable):
                    log.error("kafka_reader_failed", topic=self._name, error=repr(exc))
                self._failure = str(exc) or type(exc).__name__
                self._came.set()
                await asyncio.sleep(pauses.next_seconds())
                continue
            pauses.reset()
            if some:
                self._ahead += some
                self._ahead_bytes += sum(len(received.value or b"") for received in some)
                self._failure = None
                self._came.set()

    async def _pause_or_resume(self) -> None:
        is_full = len(self._ahead) >= _AHEAD_RECORDS or self._ahead_bytes >= _AHEAD_BYTES
        if is_full == self._paused:
            return
        change = self._consumer.pause if is_full else self._consumer.resume
        await change([partition for partition in await self._consumer.assignment() if partition in self._mine])
        self._paused = is_full

    # Partitions that come and go

    async def _assigned(self, partitions: Sequence[Partition]) -> None:
        for partition in partitions:
            self._mine[partition] = _Mine()
        if self._paused:
            self._paused = False  # those that came are not; the next turn sees to it

    async def _revoked(self, partitions: Sequence[Partition]) -> None:
        try:
            await self._commit([partition for partition in partitions if partition in self._mine])
        except Unavailable as exc:
            log.warning("kafka_commit_failed", topic=self._name, reason=str(exc))
        await self._lost(partitions)

    async def _lost(self, partitions: Sequence[Partition]) -> None:
        gone = set(partitions)
        for partition in gone:
            self._mine.pop(partition, None)
        kept = [received for received in self._ahead if Partition(received.topic, received.partition) not in gone]
        self._ahead = deque(kept)
        self._ahead_bytes = sum(len(received.value or b"") for received in kept)
        lost = self._leases.drop(lambda held: Partition(held.received.topic, held.received.partition) in gone)
        if lost:
            log.warning("holds_lost", queue=self._name, messages=lost, reason="their partitions went to another member")
