"""Lease thread (decisions/039): receives, extends leases and sends heartbeats by an event loop and clients of its own.

A handler that blocks the worker's event loop delays none of them. Past its time limit, which a blocked loop cannot
enforce, this thread answers every task of the worker and ends the process.
"""

import asyncio
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from time import monotonic, process_time

from penstock.brokers.base import Message, Queue
from penstock.payloads.codec import PayloadCodec
from penstock.protocol.reports import encode_progress
from penstock.runtime import metrics
from penstock.runtime.logs import log
from penstock.runtime.loop_thread import LoopThread
from penstock.runtime.periodic import ends_within
from penstock.settings.model import Settings
from penstock.worker.attempt import Attempt
from penstock.worker.leases import Lease, Leases
from penstock.worker.payload_io import final_answer
from penstock.worker.responses import Refusal, failure_answer, timeout_of
from penstock.worker.result_sender import Entry, ResultSender, Timings
from penstock.worker.runner import Runner
from penstock.worker.threads import stack_of

_BLOCKED_AFTER_SECONDS = 1.0
_BLOCK_LOOK_SECONDS = _BLOCKED_AFTER_SECONDS / 4
_STUCK_SECONDS = 10.0  # past a time limit; a loop that turns has answered the task by then
_LOOKS = 3  # that find the loop stuck, one a second: a process that was suspended gets to answer its tasks

OpenQueues = Callable[[AsyncExitStack], Mapping[str, Queue]]


@dataclass(slots=True)
class LeaseThread:
    """The thread of one worker; :meth:`run` is a side task. open_queues: called in the thread, once."""

    open_queues: OpenQueues
    settings: Settings
    leases: Leases
    runner: Runner
    sender: ResultSender
    codec: PayloadCodec
    _loop: asyncio.AbstractEventLoop = field(init=False, default_factory=asyncio.get_running_loop)
    _loop_thread: int = field(init=False, default_factory=threading.get_ident)
    _opened: asyncio.Future[tuple[LoopThread, Queue]] = field(init=False, default_factory=asyncio.Future)

    async def run(self) -> None:
        """Start the thread, and stop it when cancelled; raises what ended it before."""
        thread = LoopThread("leases")
        try:
            await thread.call(self._work(thread))
        finally:
            await asyncio.to_thread(thread.stop, 1.0)

    async def receive(self, *, wait_seconds: int, visibility_seconds: int) -> list[Message]:
        """Receive in the thread, once it runs; the messages are leased until they are taken."""
        thread, outbound = await asyncio.shield(self._opened)

        async def receive() -> list[Message]:
            messages = await outbound.receive(wait_seconds=wait_seconds, visibility_seconds=visibility_seconds)
            self.leases.arrive(messages)
            return messages

        return await thread.call(receive())

    async def _work(self, thread: LoopThread) -> None:
        async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
            queues = self.open_queues(stack)
            outbound = queues["outbound"]
            self._loop.call_soon_threadsafe(self._opened.set_result, (thread, outbound))
            sender = ResultSender(queues["results"], self.settings, sent=lambda lease: None, timings=Timings())
            group.create_task(self.leases.extend_unfinished(outbound))
            group.create_task(self._heartbeat(sender))
            group.create_task(self._watch_stuck(sender, outbound))
            group.create_task(self._watch_loop())

    async def _heartbeat(self, sender: ResultSender) -> None:
        """Send heartbeats, and responses that a blocked event loop holds up: their tasks would count as silent."""
        interval = self.settings.heartbeat_seconds
        turned = threading.Event()
        turned.set()
        sent: set[str] = set()
        while True:
            await asyncio.sleep(interval / 4)
            entries = [Entry(encode_progress(attempt.claim_id)) for attempt in due_heartbeats(self.runner, interval)]
            if turned.is_set():
                turned.clear()
                sent.clear()
                self._loop.call_soon_threadsafe(turned.set)
            else:
                entries += [Entry(entry.text) for entry in self.sender.unsent() if entry.text not in sent]
            if await ends_within(interval, sender.send_now(entries)):  # else the next round sends newer ones
                sent.update(entry.text for entry in entries)

    async def _watch_loop(self) -> None:
        """Count the time for which the worker's loop is blocked; log each action's first block, while it lasts."""
        logged: set[str | None] = set()
        looked_at, used = monotonic(), process_time()
        turned_at = counted_until = looked_at

        def turn() -> None:
            nonlocal turned_at
            turned_at = monotonic()

        while True:
            self._loop.call_soon_threadsafe(turn)
            await asyncio.sleep(_BLOCK_LOOK_SECONDS)
            now, now_used = monotonic(), process_time()
            gap, gap_used = now - looked_at, now_used - used
            looked_at, used = now, now_used
            if gap > 2 * _BLOCK_LOOK_SECONDS and gap_used < gap / 2:  # the whole process was suspended or had no CPU
                turned_at = counted_until = now
            blocked = now - turned_at
            if blocked < _BLOCKED_AFTER_SECONDS:
                continue
            metrics.LOOP_BLOCKED_SECONDS.inc(now - max(turned_at, counted_until))
            counted_until = now
            attempts = self.runner.attempts_of(asyncio.current_task(self._loop))
            action = attempts[0].handler.name if attempts else None
            if action not in logged:
                logged.add(action)
                log.warning(
                    "event_loop_blocked", action=action, seconds=round(blocked, 1),
                    hint="no other handler runs and no result goes out meanwhile: make the handler a plain def, which "
                    "runs in a thread, or put what computes into asyncio.to_thread",
                    stack=stack_of(self._loop_thread, entries=12),
                )  # fmt: skip

    async def _watch_stuck(self, sender: ResultSender, outbound: Queue) -> None:
        """Once the loop is stuck, fail the tasks whose handler blocks it, give the others back uncounted, and exit."""
        looks = 0
        while looks < _LOOKS:
            await asyncio.sleep(1.0)
            looks = looks + 1 if self.runner.stuck(_STUCK_SECONDS) else 0
        # A handler may block in a task of its own, whose owner is unknown here: then all that are over their time.
        culprits = self.runner.attempts_of(asyncio.current_task(self._loop)) or self.runner.stuck(_STUCK_SECONDS)
        stack = stack_of(self._loop_thread)
        try:
            async with asyncio.timeout(10.0):
                entries = self.sender.unsent()
                for attempt in dict.fromkeys(self.runner.attempts()):
                    if attempt in culprits:
                        refusal = timeout_of(monotonic() - attempt.started_at, attempt.limit_seconds, stack)
                    else:
                        problem = "another task's handler blocked this worker past its time limit, so the worker ended"
                        refusal = Refusal("WorkerStuck", problem, data={"not_begun": True})
                    text = failure_answer(attempt.claim_id, attempt.handler, refusal)[0]
                    entries.append(Entry(final_answer(self.codec, attempt, text), attempt.lease))
                await sender.send_now(entries)  # with their leases, one that the queue refuses is replaced by an error
                answered: Counter[Lease] = Counter()
                for entry in entries:
                    if entry.lease is not None:
                        answered[entry.lease] += entry.tasks
                whole = [lease for lease, count in answered.items() if count == lease.unanswered]
                await outbound.delete([lease.message for lease in (*whole, *self.leases.finished())])
        finally:
            action = culprits[0].handler.name if culprits else None
            log.error(
                "worker_stuck", action=action, tasks=[attempt.claim.task_id for attempt in culprits], stack=stack,
                hint="the handler blocks the event loop past its time limit; make it a plain def, or process=True",
            )  # fmt: skip
            os._exit(1)


def due_heartbeats(runner: Runner, interval: float) -> list[Attempt]:
    """Attempts that need a heartbeat before the next look, a quarter of the interval later; each is noted as sent."""
    now = monotonic()
    due = [attempt for attempt in runner.attempts() if attempt.seen_at <= now - interval * 3 / 4]
    for attempt in due:
        attempt.seen_at = now
    return due
