"""A queue service that keeps no more than SQS promises: messages may come late, in any order, twice, or again."""

from __future__ import annotations

import asyncio
import random
import re
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from penstock.brokers.base import Depth, Message, Outgoing, SendReport
from penstock.brokers.sqs import LIMITS
from penstock.protocol.errors import Unavailable
from penstock.testing.queue import MemoryQueue, Stored
from tests.simulation.clock import Clock, wall

_LOOK_SECONDS = 0.5  # of a long poll, for messages
_CLAIM_ID = re.compile(r'"id": ?"(\d+):(\d+)')


@dataclass(slots=True)
class QueueService:
    """All queues. chance: of faults and delays, a generator of their own. pause: the way to the service and back.

    fault_share: how many calls go wrong; 0 while the world comes to rest. doubled: tasks of messages that two workers
    held at once, by leases that had not ended, of which the second was not counted as a delivery. is_out: what the
    results queue delivers does not arrive. held_until: when the lease ends of such a message.
    """

    chance: random.Random
    pause: Callable[[], Awaitable[None]]
    fault_share: float = 0.0
    messages: dict[str, list[Stored]] = field(default_factory=lambda: defaultdict(list))
    dead: dict[str, list[Stored]] = field(default_factory=lambda: defaultdict(list))
    is_out: bool = False
    doubled: set[int] = field(default_factory=set)
    held_until: dict[str, float] = field(default_factory=dict)
    count: int = 0

    def strikes(self) -> bool:
        return self.chance.random() < self.fault_share

    def number(self) -> int:
        self.count += 1
        return self.count

    def reports(self, task_id: int, claim: int) -> int:
        """How many messages of the results queue, of those not dead, are of this claim."""
        return sum((task_id, claim) in claims_of(stored) for stored in self.messages["penstock-results"])

    def queue(self, name: str, label: str) -> SimulatedQueue:
        return SimulatedQueue(self, name, label)


def claims_of(stored: Stored) -> set[tuple[int, int]]:
    """Task and claim of each entry of a message."""
    return {(int(task_id), int(claim)) for task_id, claim in _CLAIM_ID.findall(stored.sent.body)}


class SimulatedQueue(MemoryQueue):
    """A queue to which calls, and from which answers, may get lost."""

    def __init__(self, service: QueueService, name: str, label: str) -> None:
        # So that some messages become dead letters, but results only after more than an outage.
        limits = replace(LIMITS, max_receives=6 if label == "results" else 3)
        super().__init__(label, lambda: wall().timestamp(), limits=limits, number=service.number)
        self.messages, self.dead = service.messages[name], service.dead[name]
        self._service = service

    async def _reach(self) -> bool:
        """On the way to the service. Returns whether the answer will be lost; raises Unavailable when the call is."""
        await self._service.pause()
        if not self._service.strikes():
            return False
        if self._service.chance.random() < 0.5:
            raise Unavailable("simulated: the call did not reach the queue")
        return True

    async def _return(self, is_lost: bool) -> None:
        await self._service.pause()
        if is_lost:
            raise Unavailable("simulated: the answer of the queue is lost")

    async def send(self, messages: Sequence[Outgoing]) -> SendReport:
        is_lost = await self._reach()
        failed = []
        for place, message in enumerate(messages):
            strikes = self._service.strikes()
            if strikes:
                failed.append(place)
            if not strikes or self._service.chance.random() < 0.5:
                self.put(message, self._service.chance.random() * (5.0 if self._service.strikes() else 0.05))
        await self._return(is_lost)
        return SendReport(failed, "simulated" if failed else None)

    async def receive(self, *, wait_seconds: int, visibility_seconds: int) -> list[Message]:
        is_lost = await self._reach()
        deadline = Clock.now + wait_seconds
        while not (ready := self.visible()) and Clock.now < deadline:
            await asyncio.sleep(min(_LOOK_SECONDS, max(0.001, deadline - Clock.now)))
        chance = self._service.chance
        chance.shuffle(ready)
        few = ready[: chance.randint(1, self.limits.max_call_messages)]
        for stored in few:
            if self._service.held_until.pop(stored.id, 0.0) > self._now() and self.label.startswith("outbound"):
                self._service.doubled |= {task_id for task_id, _ in claims_of(stored)}
        received = self.take(few, visibility_seconds)
        for message in received:
            if self._service.strikes() and (stored := self.find(message)) is not None:
                if self._service.chance.random() < 0.5:  # SQS may not count it
                    stored.receives -= 1
                    self._service.held_until[stored.id] = stored.visible_at
                self.show(stored)  # another receiver gets the message too
        await self._return(is_lost or (self._service.is_out and self.label == "results"))
        return received

    async def delete(self, messages: Sequence[Message]) -> list[Message]:
        def delete(stored: Stored | None) -> bool:
            if stored is not None:  # else it was deleted before, or has been received again: no error either
                self.messages.remove(stored)
            return True

        return await self._each(messages, delete)

    async def extend(self, messages: Sequence[Message], seconds: int) -> list[Message]:
        return await self._each(messages, lambda stored: self.hide(stored, seconds))

    async def release(self, messages: Sequence[Message]) -> None:
        def release(stored: Stored | None) -> bool:
            if stored is not None:
                self.show(stored)
            return True

        await self._each(messages, release)

    async def _each(self, messages: Sequence[Message], change: Callable[[Stored | None], bool]) -> list[Message]:
        """Change messages by their latest receipts; returns those for which that failed, or seems to have failed."""
        is_lost = await self._reach()
        failed = []
        for message in messages:
            strikes = self._service.strikes()
            skipped = strikes and self._service.chance.random() < 0.5
            is_done = not skipped and change(self.find(message))
            if strikes or not is_done:
                failed.append(message)
        await self._return(is_lost)
        return failed

    async def depth(self) -> Depth:
        await self._return(await self._reach())
        return await super().depth()
