"""What a receiver of messages does beside its work: long polls that a stop cuts off, and deletes in batches."""

import asyncio
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Protocol

from penstock.brokers.base import Message, Queue
from penstock.protocol.errors import Unavailable
from penstock.runtime.logs import log
from penstock.runtime.periodic import Linger, is_set_within
from penstock.settings.model import Settings

_ON_ITS_WAY_SECONDS = 0.2  # several round trips to a queue in the same region
_SHORTEST_SECONDS = 0.005  # messages that are added within it are deleted by one call
_LONGEST_SECONDS = 0.05  # where calls are not billed
_VISIBILITY_SHARE = 0.1  # of the lease, which is not extended any more
_TRIES = 5
_FIRST_PAUSE_SECONDS = 0.1  # before a try


class Source(Protocol):
    """What messages are received from; a :class:`penstock.brokers.base.Queue` is one."""

    async def receive(self, *, wait_seconds: int, visibility_seconds: int) -> list[Message]: ...


class Receiver:
    """Receives from a queue until it is stopped, which cuts off the long poll that waits. An answer on its way still
    arrives. Messages that a broker hands out later are delivered again after the visibility timeout; RabbitMQ, Kafka
    and the embedded SQS notice at once that the caller has left."""

    def __init__(self, source: Source, settings: Settings) -> None:
        self._source = source
        self._settings = settings
        self._polls: set[asyncio.Timeout] = set()
        self._stopped = False

    async def receive(self, *, wait_seconds: int | None = None) -> list[Message]:
        """One receive; nothing once stopped. wait_seconds: None for the settings'."""
        if self._stopped:
            return []
        poll = asyncio.timeout(None)
        try:
            async with poll:
                self._polls.add(poll)
                return await self._source.receive(
                    wait_seconds=self._settings.receive_wait_seconds if wait_seconds is None else wait_seconds,
                    visibility_seconds=self._settings.visibility_timeout_seconds,
                )
        except TimeoutError:
            if not poll.expired():
                raise
            return []
        finally:
            self._polls.discard(poll)

    def stop(self) -> None:
        """Have each receive under way return soon."""
        self._stopped = True
        at = asyncio.get_running_loop().time() + _ON_ITS_WAY_SECONDS
        for poll in self._polls:
            poll.reschedule(at)


class Deleter:
    """Deletes added messages as soon as they fill a call, else after a delay that grows with their rate: no caller
    waits for a delete, and each call to SQS is billed. deleted: called with messages that are deleted, or given up:
    those are delivered again, and what is stored of them changes nothing."""

    def __init__(
        self, queue: Queue, settings: Settings, deleted: Callable[[Sequence[Message]], None] = lambda messages: None
    ) -> None:
        longest_seconds = _LONGEST_SECONDS
        if queue.limits.bills_calls:
            share = settings.visibility_timeout_seconds * _VISIBILITY_SHARE
            longest_seconds = max(longest_seconds, min(settings.billed_call_wait_seconds, share))
        self._queue = queue
        self._deleted = deleted
        self._full = queue.limits.max_call_messages
        self._linger = Linger(self._full, longest_seconds=longest_seconds)
        self._waiting: dict[str, tuple[Message, float]] = {}  # by id, with when it was added; the oldest is first
        self._tries: dict[str, int] = {}  # of messages that could not be deleted yet
        self._flushes = 0
        self._any = asyncio.Event()
        self._enough = asyncio.Event()
        self._none = asyncio.Event()
        self._none.set()

    def add(self, messages: Sequence[Message]) -> None:
        """Have messages deleted; one that was received again is deleted by its newest receipt."""
        now = monotonic()
        for message in messages:
            self._waiting[message.id] = message, self._waiting.get(message.id, (message, now))[1]
        if self._waiting:
            self._none.clear()
            self._any.set()
            if len(self._waiting) >= self._full:
                self._enough.set()

    async def flush(self) -> None:
        """Wait until every added message is deleted or given up, without a delay; :meth:`run` must be running."""
        self._flushes += 1
        self._enough.set()
        try:
            await self._none.wait()
        finally:
            self._flushes -= 1

    async def run(self) -> None:
        """Delete what is added; a side task."""
        while True:
            await self._any.wait()
            if len(self._waiting) < self._full and not self._flushes:
                self._enough.clear()
                (_, since), *_ = self._waiting.values()
                delay = max(_SHORTEST_SECONDS, self._linger.seconds(len(self._waiting)))
                await is_set_within(self._enough, since + delay - monotonic())
            # The oldest messages that fill calls; all, where they fill none or everything is to go.
            count = len(self._waiting)
            if count > self._full and not self._flushes:
                count -= count % self._full
            batch = [self._waiting.pop(message_id)[0] for message_id in list(self._waiting)[:count]]
            self._linger.record(len(batch))
            again = await self._delete(batch)
            if again:
                await asyncio.sleep(_FIRST_PAUSE_SECONDS * 2 ** max(self._tries[message.id] for message in again))
                self.add([message for message in again if message.id not in self._waiting])
            if not self._waiting:
                self._any.clear()
                self._none.set()

    async def _delete(self, batch: list[Message]) -> list[Message]:
        """Returns the messages to try again; the others are deleted, or given up."""
        try:
            failed = await self._queue.delete(batch)
        except Unavailable:
            failed = batch
        again = {}
        for message in failed:
            tries = self._tries[message.id] = self._tries.get(message.id, 0) + 1
            if tries < _TRIES:
                again[message.id] = message
            else:
                log.warning("message_not_deleted", message_id=message.id, tries=tries)
        done = [message for message in batch if message.id not in again]
        for message in done:
            self._tries.pop(message.id, None)
        if done:
            self._deleted(done)
        return [*again.values()]
