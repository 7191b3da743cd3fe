"""Receiver: long polls of a queue that a stop cuts off."""

import asyncio
from typing import Protocol

from penstock.brokers.base import Message
from penstock.settings.model import Settings

_ON_ITS_WAY_SECONDS = 0.2  # several round trips to a queue in the same region


class Source(Protocol):
    """What messages are received from; a :class:`penstock.brokers.base.Queue` is one."""

    async def receive(self, *, wait_seconds: int, visibility_seconds: int) -> list[Message]: ...


class Receiver:
    """Receives from a queue until it is stopped, which cuts off the long poll that waits.

    An answer on its way still arrives. Messages that a broker hands out later are delivered again after the visibility
    timeout; RabbitMQ, Kafka and the embedded SQS notice at once that the caller has left.
    """

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
