"""A queue service that keeps no more than SQS promises: messages may come late, in any order, twice, or again."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from penstock.brokers.base import Depth, Limits, Message, Outgoing, SendReport
from penstock.brokers.sqs import LIMITS
from penstock.protocol.errors import Unavailable
from tests.simulation.clock import Clock, wall

_LOOK_SECONDS = 0.25  # of a long poll, for messages


@dataclass(slots=True)
class _Stored:
    id: str
    sent: Outgoing
    sent_at: float
    visible_at: float
    receipt: str = ""
    receives: int = 0


@dataclass(slots=True)
class QueueService:
    """All queues. chance: of faults and delays, a generator of their own. pause: the way to the service and back.

    fault_share: how many calls go wrong; 0 while the world comes to rest.
    """

    chance: random.Random
    pause: Callable[[], Awaitable[None]]
    fault_share: float = 0.0
    messages: dict[str, list[_Stored]] = field(default_factory=lambda: defaultdict(list))
    dead: dict[str, list[_Stored]] = field(default_factory=lambda: defaultdict(list))
    count: int = 0

    def strikes(self) -> bool:
        return self.chance.random() < self.fault_share

    def number(self) -> int:
        self.count += 1
        return self.count

    def queue(self, name: str, label: str) -> SimulatedQueue:
        return SimulatedQueue(self, name, label)


class SimulatedQueue:
    """See :class:`penstock.brokers.base.Queue` for the contract."""

    limits: Limits = replace(LIMITS, max_receives=3)  # so that some messages become dead letters

    def __init__(self, service: QueueService, name: str, label: str) -> None:
        self.label = label
        self._service = service
        self._name = name

    @property
    def _messages(self) -> list[_Stored]:
        return self._service.messages[self._name]

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
                self._store(message)
        await self._return(is_lost)
        return SendReport(failed, "simulated" if failed else None)

    def _store(self, message: Outgoing) -> None:
        late = self._service.chance.random() * (5.0 if self._service.strikes() else 0.05)
        stored = _Stored(f"m{self._service.number()}", message, wall().timestamp(), Clock.now + late)
        self._messages.append(stored)

    async def receive(self, *, wait_seconds: int, visibility_seconds: int) -> list[Message]:
        is_lost = await self._reach()
        deadline = Clock.now + wait_seconds
        while not (ready := [one for one in self._messages if one.visible_at <= Clock.now]) and Clock.now < deadline:
            await asyncio.sleep(min(_LOOK_SECONDS, max(0.001, deadline - Clock.now)))
        chance = self._service.chance
        chance.shuffle(ready)
        received = []
        for stored in ready[: chance.randint(1, self.limits.max_call_messages)]:
            if stored.receives >= self.limits.max_receives:
                self._messages.remove(stored)
                self._service.dead[self._name].append(stored)
                continue
            stored.receives += 1
            stored.receipt = f"{stored.id}/{self._service.number()}"
            if not self._service.strikes():  # else another receiver gets it too
                stored.visible_at = Clock.now + visibility_seconds
            received.append(
                Message(
                    stored.id, stored.receipt, stored.sent.body, stored.receives, stored.sent_at,
                    dict(stored.sent.attributes), stored.sent.group,
                )
            )  # fmt: skip
        await self._return(is_lost)
        return received

    async def delete(self, messages: Sequence[Message]) -> list[Message]:
        def delete(stored: _Stored | None) -> bool:
            if stored is not None:  # else it was deleted before, or has been received again: no error either
                self._messages.remove(stored)
            return True

        return await self._each(messages, delete)

    async def extend(self, messages: Sequence[Message], seconds: int) -> list[Message]:
        def extend(stored: _Stored | None) -> bool:
            if stored is None or stored.visible_at <= Clock.now:
                return False
            stored.visible_at = Clock.now + seconds
            return True

        return await self._each(messages, extend)

    async def release(self, messages: Sequence[Message]) -> None:
        def release(stored: _Stored | None) -> bool:
            if stored is not None:
                stored.visible_at = Clock.now
            return True

        await self._each(messages, release)

    async def _each(self, messages: Sequence[Message], change: Callable[[_Stored | None], bool]) -> list[Message]:
        """Change messages by their latest receipts; returns those for which that failed, or seems to have failed."""
        is_lost = await self._reach()
        stored: Mapping[str, _Stored] = {one.receipt: one for one in self._messages}
        failed = []
        for message in messages:
            strikes = self._service.strikes()
            skipped = strikes and self._service.chance.random() < 0.5
            is_done = not skipped and change(stored.get(message.receipt))
            if strikes or not is_done:
                failed.append(message)
        await self._return(is_lost)
        return failed

    async def depth(self) -> Depth:
        await self._return(await self._reach())
        visible = sum(1 for one in self._messages if one.visible_at <= Clock.now)
        return Depth(visible, len(self._messages) - visible, 0)
