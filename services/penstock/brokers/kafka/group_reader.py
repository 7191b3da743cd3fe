"""Receiving as a member of a consumer group: a task reads ahead a little, and keeps the membership alive.

Kafka keeps one offset for a group: everything before it is done. Records are done in any order, so the end of the
finished ones without a gap is committed. Kafka does not count deliveries either; they are kept in the note beside the
offset, committed before a record is handed out, so that a crash of the receiver is counted.
"""

import asyncio
import secrets
from collections import deque
from collections.abc import Iterable, Sequence
from time import monotonic

from penstock.brokers.base import MAX_RECEIVES, Message
from penstock.brokers.kafka.consumer import KafkaConsumer
from penstock.brokers.kafka.library import consumer_config
from penstock.brokers.kafka.messages import LIMITS, Partition, Position, Received, Write
from penstock.brokers.leases import Reader
from penstock.protocol.errors import Unavailable
from penstock.runtime.logs import log
from penstock.runtime.periodic import Pauses, is_set_within
from penstock.settings.broker_urls import DEAD_LETTER_SUFFIX
from penstock.settings.model import Settings

_AHEAD_RECORDS = 100
_AHEAD_BYTES = 16 * 1024 * 1024
_POLL_SECONDS = 0.25
_COMMIT_SECONDS = 0.5
_AGAIN_SECONDS = 2.0  # until the next try to write a message again
_MOST_STRETCHES = 16


class Progress:
    """One partition while it is this member's. position: the offset to commit, None before the first record. is_known:
    the group's position is. is_dirty: there is something to commit. token: of receipts."""

    def __init__(self, position: int | None = None, note: str = "", *, is_known: bool = True) -> None:
        self._taken: deque[int] = deque()  # handed out or finished, in the order of the partition
        self._finished: set[int] = set()
        self.position = position
        self._next = 0  # behind the last that was handed out
        self._before = _read(note)
        self.is_known = is_known
        self.is_dirty = False
        self.token = secrets.token_hex(4)

    def hand_out(self, offset: int) -> int:
        """Count the delivery of a record; returns its deliveries during earlier assignments of the partition."""
        self._taken.append(offset)
        self._next = offset + 1
        if self.position is None:
            self.position = offset
        return self._times_before(offset)

    def _times_before(self, offset: int) -> int:
        return next((times for end, times in self._before if offset < end), 0)

    def finish(self, offset: int) -> None:
        self._finished.add(offset)
        self.is_dirty = True
        while self._taken and self._taken[0] in self._finished:
            done = self._taken.popleft()
            self._finished.discard(done)
            self.position = done + 1

    @property
    def note(self) -> str:
        """The note to commit: ends of stretches of records, and how often each stretch was handed out by now."""
        ends = sorted({self._next, *(end for end, _ in self._before)})
        left = [(end, self._times_before(end - 1) + (end <= self._next)) for end in ends if end > (self.position or 0)]
        return ",".join(f"{end}:{times}" for end, times in left[:_MOST_STRETCHES])


def _read(note: str) -> list[tuple[int, int]]:
    """Stretches by their end, ascending; none of a note that cannot be read."""
    try:
        parts = [part.split(":") for part in note.split(",") if part]
        return sorted((int(end), int(times)) for end, times in parts)[:_MOST_STRETCHES]
    except ValueError:
        return []


class GroupReader(Reader[tuple[Received, int]]):  # a record with its deliveries
    """Receives from one topic. write: publishes records."""

    def __init__(self, settings: Settings, name: str, write: Write) -> None:
        super().__init__()
        self._name = name
        self._write = write
        self._consumer = KafkaConsumer(
            consumer_config(settings, name), [name],
            on_assigned=self._assigned, on_revoked=self._positions, on_lost=self._lost,
        )  # fmt: skip
        self._mine: dict[Partition, Progress] = {}
        self._ahead: deque[Received] = deque()
        self._came = asyncio.Event()
        self._paused: bool | None = False  # None: some partitions may be, others not
        self._failure: str | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._committing = asyncio.Lock()

    async def open(self) -> None:
        """Raises SettingsError."""
        await self._consumer.open()
        tasks = {"read ahead": self._read_ahead(), "commit": self._commit_now_and_then()}
        self._tasks = [asyncio.create_task(work, name=name) for name, work in tasks.items()]

    async def close(self) -> None:
        """Commit what is done, and leave the group; the next member that has the partition receives the rest."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.drop_all_leases()
        await self._try_to_commit(list(self._mine))
        self._mine.clear()
        await self._consumer.close()

    async def receive(self, wait_seconds: float, visibility_seconds: float) -> list[Message]:
        deadline = monotonic() + wait_seconds
        while True:
            while self._ahead:
                if messages := await self._hand_out(visibility_seconds):
                    return messages
            if self._failure is not None:
                failure, self._failure = self._failure, None
                raise Unavailable(failure)
            left = deadline - monotonic()
            if left <= 0:
                return []
            self._came.clear()
            await is_set_within(self._came, left)

    async def _hand_out(self, visibility_seconds: float) -> list[Message]:
        """A few of those read ahead, once their delivery is committed."""
        await self._learn_positions()
        some: list[tuple[Received, Progress, int]] = []
        while self._ahead and len(some) < LIMITS.max_call_messages:
            received = self._ahead[0]
            mine = self._mine.get(received.topic_partition)
            if mine is not None and not mine.is_known:
                break  # it came while the positions of the others were asked for
            self._ahead.popleft()
            if mine is not None:
                some.append((received, mine, mine.hand_out(received.offset)))
        partitions = failed = {received.topic_partition for received, _, _ in some}
        messages = []
        try:
            failed = set(await self._commit(partitions))
        finally:
            for received, mine, times_before in some:
                if self._mine.get(received.topic_partition) is not mine:
                    continue
                message = received.message(_receipt(received, mine), times_before)
                if received.topic_partition in failed:  # delivered to no one; as if the lease were over
                    self._lease(received, mine, _AGAIN_SECONDS, received.receives)
                elif message.receive_count > MAX_RECEIVES:
                    # Every receiver crashed with it, one after the other.
                    self._lease(received, mine, 0, message.receive_count - 1)
                else:
                    self._lease(received, mine, visibility_seconds, message.receive_count)
                    messages.append(message)
        return messages

    async def _learn_positions(self) -> None:
        """Ask for the group's positions in the partitions of those read ahead. Raises Unavailable."""
        ahead = {received.topic_partition for received in self._ahead}
        unknown = {
            partition: mine for partition, mine in self._mine.items() if partition in ahead and not mine.is_known
        }
        if not unknown:
            return
        committed = await self._consumer.committed(list(unknown))
        notes = {Partition(topic, number): (offset, note) for topic, number, offset, note in committed}
        for partition, mine in unknown.items():
            if self._mine.get(partition) is mine:
                self._mine[partition] = Progress(*notes.get(partition, ()))

    def _lease(self, received: Received, mine: Progress, seconds: float, receives: int) -> None:
        self.lease(_receipt(received, mine), (received, receives), seconds)

    async def settle(self, messages: Sequence[tuple[Received, int]], *, delete: bool) -> bool:
        """Given back, they are written again, or as dead letters; what cannot be written is leased for longer."""
        if delete:
            for received, _ in messages:
                self._finish(received)
            return True
        leased = [one for one in messages if one[0].topic_partition in self._mine]
        dead = self._name + DEAD_LETTER_SUFFIX
        records = [
            received.again(dead if receives >= MAX_RECEIVES else self._name, receives) for received, receives in leased
        ]
        for (received, receives), outcome in zip(leased, await self._write(records), strict=True):
            mine = self._mine.get(received.topic_partition)
            if outcome is None:
                self._finish(received)
            elif mine is not None:
                log.warning("message_not_written_again", queue=self._name, reason=outcome[0])
                self._lease(received, mine, _AGAIN_SECONDS, receives)
        return True

    def _finish(self, received: Received) -> None:
        mine = self._mine.get(received.topic_partition)
        if mine is not None and mine.is_known:
            mine.finish(received.offset)

    async def _commit(self, partitions: Iterable[Partition]) -> list[Partition]:
        """Commit the progress of these; returns those where that failed. Raises Unavailable."""
        async with self._committing:
            positions = self._positions(partitions)
            failed = [Partition(topic, number) for topic, number, *_ in positions]
            try:
                failed = await self._consumer.commit(positions)
            finally:
                for partition in failed:
                    if (mine := self._mine.get(partition)) is not None:
                        mine.is_dirty = True
            return failed

    def _positions(self, partitions: Iterable[Partition]) -> list[Position]:
        """What to commit of these."""
        positions = []
        for partition in partitions:
            mine = self._mine.get(partition)
            if mine is not None and mine.position is not None:
                mine.is_dirty = False
                positions.append(Position(*partition, mine.position, mine.note))
        return positions

    async def _try_to_commit(self, partitions: Iterable[Partition]) -> None:
        try:
            await self._commit(partitions)
        except Unavailable as exc:
            log.warning("kafka_commit_failed", topic=self._name, reason=str(exc))

    async def _commit_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(_COMMIT_SECONDS)
            await self._try_to_commit([partition for partition, mine in self._mine.items() if mine.is_dirty])

    async def _read_ahead(self) -> None:
        pauses = Pauses(first_seconds=0.2, longest_seconds=5.0)
        while True:
            try:
                ahead_bytes = sum(len(received.value or b"") for received in self._ahead)
                is_full = len(self._ahead) >= _AHEAD_RECORDS or ahead_bytes >= _AHEAD_BYTES
                if is_full != self._paused:
                    await (self._consumer.pause() if is_full else self._consumer.resume())
                    self._paused = is_full
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
                self._failure = None
                self._came.set()

    def _assigned(self, partitions: Sequence[Partition]) -> None:
        for partition in partitions:
            self._mine[partition] = Progress(is_known=False)
        self._paused = None  # those that came are not, the others may be; the next turn sees to it

    def _lost(self, partitions: Sequence[Partition]) -> None:
        gone = set(partitions)
        for partition in gone:
            self._mine.pop(partition, None)
        self._ahead = deque(received for received in self._ahead if received.topic_partition not in gone)
        held = [receipt for receipt, ((received, _), _) in self.leases.items() if received.topic_partition in gone]
        if lost := self.end_leases(held):
            reason = "their partitions went to another member"
            log.warning("holds_lost", queue=self._name, messages=len(lost), reason=reason)


def _receipt(received: Received, mine: Progress) -> str:
    return f"{mine.token}:{received.partition}:{received.offset}"
