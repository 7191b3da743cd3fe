"""A member of a consumer group for asyncio, whose offsets are committed by hand.

All calls are made in one thread of the consumer's own: since confluent-kafka 2.16 a call from another thread waits
until the one that runs has ended. In the middle of a receive librdkafka reports partitions that come and go, and makes
no other call until that is dealt with.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from operator import methodcaller
from time import monotonic
from typing import Any

from penstock.brokers.kafka.library import confluent, error_text, open_client
from penstock.brokers.kafka.messages import Headers, Partition, Position, Received
from penstock.protocol.errors import Unavailable
from penstock.runtime.logs import log

_CALLBACK_SECONDS = 30.0
_SLICE_SECONDS = 0.01  # a receive lets other calls in after so long
_REBALANCE_SECONDS = 2.0  # so long a commit waits until all members have their partitions
_AGAIN_SECONDS = 0.05
_POSITIONS_SECONDS = 5.0  # until an answer about positions comes
_read_headers = methodcaller("headers")  # Python's own call leaves a failure of the library to the next one

Callback = Callable[[Sequence[Partition]], Any]


class KafkaConsumer:
    """Reads topics as a member of a group. Records of one partition come in their order.

    config: as :func:`penstock.brokers.kafka.library.consumer_config` makes it.
    on_assigned: called with partitions that come. on_revoked: with those that are about to go; returns the positions to
    commit before. on_lost: with those that are gone: another member's already, or left by :meth:`close`. All are called
    on the event loop, while the group waits.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        topics: Sequence[str],
        *,
        on_assigned: Callback | None = None,
        on_revoked: Callable[[Sequence[Partition]], Sequence[Position]] | None = None,
        on_lost: Callback | None = None,
    ) -> None:
        self._config = config
        self._topics = list(topics)
        self._on_assigned, self._on_revoked, self._on_lost = on_assigned, on_revoked, on_lost
        self._consumer: Any = None  # with loop and thread set by open()
        self._receiving = asyncio.Lock()  # a receive lets other calls in, but neither another receive nor the close
        self._failure: str | None = None
        self._ended: set[Partition] = set()
        self._gone: set[Partition] = set()  # since the first record of a receive was taken
        self._fatal = False
        self._closing = False

    async def open(self) -> None:
        """Subscribe; the group is joined by the first receives. Raises SettingsError, Unavailable."""
        self._loop = asyncio.get_running_loop()
        self._closing = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kafka-consumer")
        self._consumer = open_client("Consumer", dict(self._config) | {"error_cb": self._erred})
        self._consumer.subscribe(
            self._topics,
            on_assign=partial(self._report, "assigned"),
            on_revoke=partial(self._report, "revoked"),
            on_lost=partial(self._report, "lost"),
        )

    async def receive(self, *, max_records: int, wait_seconds: float) -> list[Received]:
        """Up to so many records, at once when there are any. Raises Unavailable; the next call may work."""
        if self._fatal:
            await self.close()
            await self.open()
            self._fatal = False
        messages: list[Any] = []
        deadline = monotonic() + wait_seconds
        try:
            async with self._receiving:
                while not messages:
                    left = max(0.0, deadline - monotonic())
                    messages = await self._call(self._take, max_records, min(_SLICE_SECONDS, left))
                    if not left:
                        break
        except confluent().KafkaException as exc:  # after an error that the library calls fatal
            self._fatal = True
            raise Unavailable(f"Kafka gives no records: {error_text(exc)}") from exc
        records = []
        for message in messages:
            error = message.error()
            if error is None:
                records.append(received_from(message))
            elif error.name() == "_PARTITION_EOF":
                self._ended.add(Partition(message.topic(), message.partition()))
            else:
                self._fatal = self._fatal or error.fatal()
                self._failure = error_text(error)
        if self._failure is not None and not records:
            failure, self._failure = self._failure, None
            raise Unavailable(f"Kafka gives no records: {failure}")
        return records

    def take_ended(self) -> set[Partition]:
        """Partitions whose end was received since the last call; with the option ``enable.partition.eof`` alone."""
        ended, self._ended = self._ended, set()
        return ended

    async def commit(self, positions: Sequence[Position]) -> list[Partition]:
        """Keep positions for the group; returns partitions where that failed: most are another member's, and one whose
        group is just changing may keep them. Raises Unavailable."""
        deadline = monotonic() + _REBALANCE_SECONDS
        while positions:
            try:
                return await self._call(self._commit, positions)  # type: ignore[no-any-return]
            except confluent().KafkaException as exc:
                if exc.args[0].name() != "REBALANCE_IN_PROGRESS" or monotonic() >= deadline:
                    raise Unavailable(f"Kafka does not keep the positions: {error_text(exc)}") from exc
            await asyncio.sleep(_AGAIN_SECONDS)
        return []

    async def assignment(self) -> list[Partition]:
        """The partitions that are this member's as far as it knows."""
        return _partitions(await self._ask("assignment"))

    async def pause(self) -> None:
        """Receive nothing of the partitions that are this member's now; the membership is kept by further receives."""
        await self._call(lambda: self._consumer.pause(self._consumer.assignment()))

    async def resume(self) -> None:
        await self._call(lambda: self._consumer.resume(self._consumer.assignment()))

    async def seek(self, position: Position) -> None:
        """Read this partition from here on. Raises Unavailable."""
        await self._ask("seek", confluent().TopicPartition(*position), failure=f"Kafka cannot seek to {position}")

    async def bounds(self, partition: Partition) -> tuple[int, int]:
        """The offsets of the first record and of the one that will be written next. Raises Unavailable."""
        at, failure = confluent().TopicPartition(*partition), f"Kafka does not say how far {partition} goes"
        low, high = await self._ask("get_watermark_offsets", at, timeout=_POSITIONS_SECONDS, failure=failure)
        return low, high

    async def committed(self, partitions: Sequence[Partition]) -> list[Position]:
        """The group's positions, of those partitions that have one. Raises Unavailable."""
        failure = "Kafka does not say the positions of the group"
        asked = [confluent().TopicPartition(*partition) for partition in partitions]
        found = await self._ask("committed", asked, timeout=_POSITIONS_SECONDS, failure=failure)
        return [Position(one.topic, one.partition, one.offset, one.metadata or "") for one in found if one.offset >= 0]

    async def close(self) -> None:
        """Leave the group, so that others take over at once. Commit before it: within it nothing is kept any more."""
        if self._consumer is None:
            return
        async with self._receiving:
            self._closing = True
            try:
                await self._call(self._consumer.close)
            finally:
                self._consumer = None
                self._thread.shutdown(wait=False)

    async def _ask(self, name: str, *arguments: Any, failure: str = "Kafka refuses a call", **named: Any) -> Any:
        """Call a method of the library's consumer. failure: begins the text of an error. Raises Unavailable."""
        try:
            return await self._call(lambda: getattr(self._consumer, name)(*arguments, **named))
        except confluent().KafkaException as exc:
            raise Unavailable(f"{failure}: {error_text(exc)}") from exc

    async def _call(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Make a call in the thread; a cancelled caller waits for its end. Raises Unavailable for a closed consumer."""
        if self._consumer is None:
            raise Unavailable("Kafka is not asked: this consumer is closed, or being opened again")
        running = self._loop.run_in_executor(self._thread, call, *arguments)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait([running])
            raise

    # In the thread

    def _take(self, max_records: int, wait_seconds: float) -> list[Any]:
        """The first record as soon as it comes, and with it what has been fetched by then."""
        first = self._consumer.poll(wait_seconds)
        if first is None:
            return []
        self._gone.clear()
        taken = [first, *(self._consumer.consume(max_records - 1, 0) if max_records > 1 else ())]
        if self._gone:
            taken = [one for one in taken if Partition(one.topic(), one.partition()) not in self._gone]
        return taken

    def _commit(self, positions: Sequence[Position]) -> list[Partition]:
        """Returns the partitions for which it failed; those that went before the thread came to it are left out."""
        mine = _partitions(self._consumer.assignment())
        failed = [one for one in _partitions(positions) if one not in mine]
        offsets = [confluent().TopicPartition(*one) for one in positions if Partition(one[0], one[1]) in mine]
        try:
            kept = self._consumer.commit(offsets=offsets, asynchronous=False) if offsets else []
        except confluent().KafkaException as exc:
            if exc.args[0].name() not in ("ILLEGAL_GENERATION", "UNKNOWN_MEMBER_ID", "FENCED_INSTANCE_ID"):
                raise
            log.info("kafka_commit_late", reason=error_text(exc), partitions=len(positions))
            return _partitions(positions)
        for one in kept:
            if one.error is not None:
                reason = error_text(one.error)
                log.warning("kafka_commit_failed", topic=one.topic, partition=one.partition, reason=reason)
                failed.append(Partition(one.topic, one.partition))
        return failed

    def _report(self, change: str, _consumer: Any, given: Sequence[Any]) -> None:
        """Called by librdkafka, in the middle of a receive or of the close."""
        partitions = _partitions(given)
        if not partitions:
            return
        if change == "revoked" and self._closing:
            change = "left"
        log.info("kafka_partitions", change=change, partitions=",".join(f"{one[0]}/{one[1]}" for one in partitions))
        if change == "revoked":
            try:
                self._commit(self._call_on_loop(change, self._on_revoked, partitions) or ())
            except confluent().KafkaException as exc:
                log.warning("kafka_commit_failed", topic=",".join(self._topics), reason=error_text(exc))
        if change != "assigned":
            self._gone.update(partitions)
        self._call_on_loop(change, self._on_assigned if change == "assigned" else self._on_lost, partitions)

    def _call_on_loop(self, change: str, callback: Callback | None, partitions: Sequence[Partition]) -> Any:
        if callback is None or self._loop.is_closed():
            return None

        async def call() -> Any:
            return callback(partitions)

        try:
            return asyncio.run_coroutine_threadsafe(call(), self._loop).result(_CALLBACK_SECONDS)
        except Exception as exc:  # an exception here would end the receive, and with it what it has fetched
            log.error("kafka_partitions_failed", change=change, error=repr(exc))
            return None

    def _erred(self, error: Any) -> None:
        self._fatal = self._fatal or error.fatal()
        self._failure = error_text(error)
        log.warning("kafka_away", client="consumer", reason=self._failure)


def _partitions(given: Sequence[Any]) -> list[Partition]:
    return [Partition(one.topic, one.partition) for one in given]


def received_from(message: Any) -> Received:
    """A record of the library as one of ours, without headers where one has a name that is not UTF-8."""
    kind, milliseconds = message.timestamp()
    headers: Headers = ()
    with suppress(SystemError):
        headers = _read_headers(message) or ()
    return Received(
        topic=message.topic(),
        partition=message.partition(),
        offset=message.offset(),
        key=message.key(),
        value=message.value(),
        headers=headers,
        timestamp_ms=milliseconds if kind else None,
    )
