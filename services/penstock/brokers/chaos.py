"""A queue whose calls fail on purpose."""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from penstock.brokers.base import Depth, Message, Outgoing, Queue, SendReport
from penstock.runtime.chaos import Edge, Faults

Call = Callable[[Sequence[Message]], Awaitable[list[Message] | None]]


class FaultyQueue:
    """A queue with injected faults. An entry that fails may have had its effect: SQS loses replies as well."""

    def __init__(self, queue: Queue, faults: Faults) -> None:
        self.label = queue.label
        self.limits = queue.limits
        self._queue = queue
        self._faults = faults
        self._again: list[Message] = []

    async def send(self, messages: Sequence[Outgoing]) -> SendReport:
        failed, tried = await self._draw("send", len(messages))
        going = [messages[position] for position in tried]
        report = await self._queue.send(going)
        if self._faults.strikes("duplicate"):
            await self._queue.send(going)
        really = {tried[position] for position in report.failed}
        refused = frozenset(tried[position] for position in report.refused)
        reason = report.reason or ("injected by PENSTOCK_CHAOS_SEND" if failed else None)
        return SendReport(sorted(really | failed), reason, refused)

    async def receive(self, *, wait_seconds: int, visibility_seconds: int) -> list[Message]:
        await self._faults.delay()
        reply_is_lost = self._faults.is_even()
        if not reply_is_lost:
            self._faults.fail("receive", "the queue is unavailable")
        again, self._again = self._again, []
        wait_seconds = 0 if again else wait_seconds
        messages = await self._queue.receive(wait_seconds=wait_seconds, visibility_seconds=visibility_seconds)
        if reply_is_lost:
            self._faults.fail("receive", "the reply of the queue is lost, its messages come again later")
        if messages and self._faults.strikes("duplicate"):
            self._again = list(messages)
        return again + messages

    async def delete(self, messages: Sequence[Message]) -> list[Message]:
        return await self._partly("delete", messages, self._queue.delete)

    async def extend(self, messages: Sequence[Message], seconds: int) -> list[Message]:
        return await self._partly("extend", messages, partial(self._queue.extend, seconds=seconds))

    async def release(self, messages: Sequence[Message]) -> None:
        await self._partly("extend", messages, self._queue.release)

    async def _partly(self, edge: Edge, messages: Sequence[Message], call: Call) -> list[Message]:
        """Call without the lost messages; returns those that failed."""
        failed, tried = await self._draw(edge, len(messages))
        really = (await call([messages[position] for position in tried]) if tried else None) or []
        return really + [messages[position] for position in sorted(failed) if messages[position] not in really]

    async def depth(self) -> Depth:
        await self._faults.delay()
        self._faults.fail("receive", "the queue is unavailable")
        return await self._queue.depth()

    async def _draw(self, edge: Edge, count: int) -> tuple[set[int], list[int]]:
        """Positions to report as failed, and those to try, which some of the failed are among."""
        await self._faults.delay()
        failed = set(self._faults.victims(count)) if count and self._faults.strikes(edge) else set()
        return failed, [position for position in range(count) if position not in failed or not self._faults.is_even()]
