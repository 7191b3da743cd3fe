"""A member of a consumer group for asyncio, whose offsets are committed by hand.

All calls are made in one thread of the consumer's own: since confluent-kafka 2.16 a call from another thread waits
until the one that runs has ended, and a receive may run for long. In the middle of a receive librdkafka reports
partitions that come and go; the coroutines given for that run on the event loop, and the thread makes their calls.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any

from penstock.brokers.kafka.library import confluent, error_text, open_client
from penstock.brokers.kafka.messages import Partition, Position, Received
from penstock.protocol.errors import Unavailable
from penstock.runtime.logs import get_logger

_CALLBACK_SECONDS = 30.0
_SLICE_SECONDS = 0.01  # a receive lets other calls in after so long
_REBALANCE_SECONDS = 2.0  # so long a commit waits until all members have their partitions
_AGAIN_SECONDS = 0.05
_LATE = ("ILLEGAL_GENERATION", "UNKNOWN_MEMBER_ID", "FENCED_INSTANCE_ID")

log = get_logger()

Rebalance = Callable[[Sequence[Partition]], Coroutine[Any, Any, None]]


async def _nothing(partitions: Sequence[Partition]) -> None:
    pass


class KafkaConsumer:
    """Reads topics as a member of a group. Records of one partition come in their order.

    config: as :func:`penstock.brokers.kafka.library.consumer_config` makes it.
    on_assigned, on_revoked, on_lost: called with partitions that come, that are about to go (positions may still be
    committed), and that are gone: another member's already, or left by :meth:`close`. They are awaited for at most half
    a minute, and the group waits with them. They may call every method of the consumer but a receive.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        topics: Sequence[str],
        *,
        on_assigned: Rebalance = _nothing,
        on_revoked: Rebalance = _nothing,
        on_lost: Rebalance = _nothing,
    ) -> None:
        self._config = config
        self._topics = list(topics)
        self._on_assigned, self._on_revoked, self._on_lost = on_assigned, on_revoked, on_lost
        self._consumer: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: _CallThread | None = None
        self._receiving = asyncio.Lock()  # a receive lets other calls in, but neither another receive nor the close
        self._failure: str | None = None
        self._ended: set[Partition] = set()
        self._fatal = False
        self._closing = False

    async def open(self) -> None:
        """Subscribe; the group is joined by the first receives. Raises SettingsError, Unavailable."""
        self._loop = asyncio.get_running_loop()
        self._closing = False
        self._thread = _CallThread()
        self._consumer = open_client("Consumer", dict(self._config) | {"error_cb": self._erred})
        self._consumer.subscribe(
            self._topics,
            on_assign=partial(self._report, "assigned", self._on_assigned),
            on_revoke=self._revoked,
            on_lost=partial(self._report, "lost", self._on_lost),
        )

    async def receive(self, *, max_records: int, wait_seconds: float) -> list[Received]:
        """Up to so many records, at once when there are any; none after ``wait_seconds``.

        Raises Unavailable when the brokers, or a topic, cannot be reached; the next call may work.
        """
        if self._fatal:
            await self.close()
            await self.open()
            self._fatal = False
        try:
            async with self._receiving:
                messages = await self._call(self._take, max_records, wait_seconds)
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
        """Partitions whose end was reached since the last call, all records up to there having been received.

        With the option ``enable.partition.eof`` alone.
        """
        ended, self._ended = self._ended, set()
        return ended

    async def commit(self, positions: Sequence[Position]) -> list[Partition]:
        """Keep positions for the group; returns the partitions for which that failed, as a rule another member's now.

        Raises Unavailable when the group cannot be reached. What is not committed is read again by the next member
        that has the partition.
        """
        if not positions:
            return []
        module = confluent()
        offsets = [module.TopicPartition(*position) for position in positions]
        deadline = monotonic() + _REBALANCE_SECONDS
        while True:
            try:
                kept = await self._ask("commit", offsets=offsets, asynchronous=False)
                break
            except module.KafkaException as exc:
                error = exc.args[0]
                if error.name() in _LATE:
                    log.info("kafka_commit_late", reason=error_text(error), partitions=len(positions))
                    return [Partition(position.topic, position.partition) for position in positions]
                if error.name() != "REBALANCE_IN_PROGRESS" or monotonic() >= deadline:
                    raise Unavailable(f"Kafka does not keep the positions: {error_text(error)}") from exc
            await asyncio.sleep(_AGAIN_SECONDS)
        failed = [one for one in kept if one.error is not None]
        for one in failed:
            log.warning("kafka_commit_failed", topic=one.topic, partition=one.partition, reason=error_text(one.error))
        return _partitions(failed)

    async def assignment(self) -> list[Partition]:
        """The partitions that are this member's as far as it knows."""
        return _partitions(await self._ask("assignment"))

    async def pause(self, partitions: Sequence[Partition]) -> None:
        """Receive nothing of these until they are resumed; the membership is kept by further receives."""
        await self._ask("pause", _topic_partitions(partitions))

    async def resume(self, partitions: Sequence[Partition]) -> None:
        """Resume paused partitions; those of other members by now are ignored."""
        mine = set(await self.assignment())
        wanted = [partition for partition in partitions if partition in mine]
        if wanted:
            await self._ask("resume", _topic_partitions(wanted))

    async def seek(self, position: Position) -> None:
        """Read this partition from here on. Raises Unavailable."""
        at = confluent().TopicPartition(*position)
        await self._ask_for(f"Kafka cannot seek to {position}", "seek", at)

    async def bounds(self, partition: Partition, *, seconds: float = 5) -> tuple[int, int]:
        """The offsets of the first record and of the one that will be written next. Raises Unavailable."""
        at = confluent().TopicPartition(*partition)
        failure = f"Kafka does not say how far {partition} goes"
        low, high = await self._ask_for(failure, "get_watermark_offsets", at, timeout=seconds)
        return low, high

    async def committed(self, partitions: Sequence[Partition], *, seconds: float = 5) -> list[Position]:
        """The group's positions, of those partitions that have one. Raises Unavailable."""
        failure = "Kafka does not say the positions of the group"
        found = await self._ask_for(failure, "committed", _topic_partitions(partitions), timeout=seconds)
        return [Position(one.topic, one.partition, one.offset, one.metadata or "") for one in found if one.offset >= 0]

    async def close(self) -> None:
        """Leave the group, so that others take over at once. Commit before it: within it nothing is kept any more."""
        if self._consumer is None or self._thread is None:
            return
        async with self._receiving:
            self._closing = True
            try:
                await self._call(self._consumer.close)
            finally:
                self._consumer = None
                self._thread.end()

    def _take(self, max_records: int, wait_seconds: float) -> list[Any]:
        """The first record as soon as it comes, and with it what has been fetched by then."""
        assert self._thread is not None  # it is what runs this
        deadline = monotonic() + wait_seconds
        while (first := self._consumer.poll(min(_SLICE_SECONDS, max(0.0, deadline - monotonic())))) is None:
            if monotonic() >= deadline:
                return []
            self._thread.serve()
        return [first, *(self._consumer.consume(max_records - 1, 0) if max_records > 1 else ())]

    async def _ask(self, name: str, *arguments: Any, **named: Any) -> Any:
        """Call a method of the library's consumer. Raises Unavailable while there is none."""
        if self._consumer is None:
            raise Unavailable("Kafka is not asked: this consumer is closed, or being opened again")
        return await self._call(partial(getattr(self._consumer, name), *arguments, **named))

    async def _ask_for(self, failure: str, name: str, *arguments: Any, **named: Any) -> Any:
        """As :meth:`_ask`; raises Unavailable, with ``failure``, for errors of the library too."""
        try:
            return await self._ask(name, *arguments, **named)
        except confluent().KafkaException as exc:
            raise Unavailable(f"{failure}: {error_text(exc)}") from exc

    async def _call(self, call: Callable[..., Any], *arguments: Any) -> Any:
        assert self._thread is not None  # opened first
        return await self._thread.call(call, *arguments)

    def _revoked(self, consumer: Any, partitions: Sequence[Any]) -> None:
        if self._closing:
            self._report("left", self._on_lost, consumer, partitions)
        else:
            self._report("revoked", self._on_revoked, consumer, partitions)

    def _report(self, change: str, callback: Rebalance, _consumer: Any, partitions: Sequence[Any]) -> None:
        """Runs in the consumer's thread, which goes on making calls: those of the callback, and those it waits for."""
        if not partitions:
            return
        changed = _partitions(partitions)
        log.info("kafka_partitions", change=change, partitions=",".join(f"{one[0]}/{one[1]}" for one in changed))
        assert self._loop is not None
        assert self._thread is not None
        if callback is _nothing or self._loop.is_closed():
            return
        running = asyncio.run_coroutine_threadsafe(callback(changed), self._loop)
        try:
            self._thread.serve_until(running, _CALLBACK_SECONDS)
        except Exception as exc:  # an exception here would end the receive, and with it what it has fetched
            running.cancel()
            log.error("kafka_partitions_failed", change=change, error=repr(exc))

    def _erred(self, error: Any) -> None:
        self._fatal = self._fatal or error.fatal()
        self._failure = error_text(error)
        log.warning("kafka_away", client="consumer", reason=self._failure)


class _CallThread:
    """Makes calls in the order in which they come. ``serve`` and ``serve_until`` let others in during a call."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._ended = False
        threading.Thread(target=self._run, name="kafka-consumer", daemon=True).start()

    async def call(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """The call's result, or what it raised. A cancelled caller waits for its end: it cannot be broken off."""
        assert not self._ended
        future: Future[Any] = Future()
        self._calls.put((future, partial(call, *arguments)))
        running = asyncio.wrap_future(future)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait([running])
            raise

    def end(self) -> None:
        """Let the thread end after the calls that were given to it."""
        self._ended = True
        self._calls.put(None)

    def serve(self) -> None:
        """Make the calls that wait. From within a call."""
        while not self._calls.empty():
            self._make_next()

    def serve_until(self, future: Future[Any], seconds: float) -> Any:
        """Make calls until the future is done, and return its result. From within a call. Raises TimeoutError."""
        future.add_done_callback(lambda _future: self._calls.put(None))
        deadline = monotonic() + seconds
        while not future.done():
            try:
                self._make_next(max(0.0, deadline - monotonic()))
            except Empty:
                raise TimeoutError from None
        return future.result()

    def _run(self) -> None:
        while not (self._ended and self._calls.empty()):
            self._make_next()

    def _make_next(self, seconds: float | None = None) -> None:
        """Wait for a call, and make it. None wakes the thread without one. Raises Empty after so long."""
        given = self._calls.get(timeout=seconds)
        if given is None:
            return
        future, call = given
        try:
            future.set_result(call())
        except BaseException as exc:  # whatever it is, it is the caller's
            future.set_exception(exc)


def _partitions(given: Sequence[Any]) -> list[Partition]:
    return [Partition(one.topic, one.partition) for one in given]


def _topic_partitions(partitions: Sequence[Partition]) -> list[Any]:
    return [confluent().TopicPartition(*partition) for partition in partitions]


def received_from(message: Any) -> Received:
    """A record of the library as one of ours."""
    kind, milliseconds = message.timestamp()
    return Received(
        topic=message.topic(),
        partition=message.partition(),
        offset=message.offset(),
        key=message.key(),
        value=message.value(),
        headers=message.headers() or (),
        timestamp_ms=milliseconds if kind else None,
    )
