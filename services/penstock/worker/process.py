"""Worker: receives tasks from the outbound queue, runs their handlers, sends responses to the results queue.

Suspects, which may crash the worker, start alone: messages delivered for the third time, and tasks that stopped
heartbeating before. Almost all are harmless, so each runs alone for a moment only: long enough for a task that crashes
at once, too short to delay others.
"""

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain

from penstock.brokers.base import Message, Queue
from penstock.brokers.receiving import Receiver
from penstock.payloads.codec import PayloadCodec, aad_of
from penstock.payloads.records import encrypt_note
from penstock.protocol import message_attributes
from penstock.protocol.errors import InvalidRequest, RpcError
from penstock.protocol.journal import encode_step
from penstock.protocol.output import encode_output
from penstock.protocol.reports import encode_progress, sole_result
from penstock.protocol.requests import ClaimId, Invalid, Request, TaskRequest, decode_task_requests, parse_claim_id
from penstock.runtime import metrics
from penstock.runtime.logs import log
from penstock.runtime.loop import Service, SideTask
from penstock.runtime.periodic import ends_within
from penstock.runtime.tracing import active
from penstock.settings.model import Settings
from penstock.worker.announcing import announce
from penstock.worker.attempt import Attempt
from penstock.worker.cancellation_poll import CancellationPoll
from penstock.worker.handlers.actions import Registry
from penstock.worker.handlers.lifespan import Resources
from penstock.worker.lease_thread import LeaseThread, OpenQueues, due_heartbeats
from penstock.worker.leases import Lease, Leases
from penstock.worker.payload_io import final_answer
from penstock.worker.processes.pool import ProcessPool
from penstock.worker.responses import failure_answer, no_task_answer, unknown_action
from penstock.worker.result_sender import Entry, ResultSender, Timings
from penstock.worker.runner import Runner, log_failure
from penstock.worker.threads import Threads

_ALONE_SECONDS = 1.0  # for which a suspect waits for the others to end, and then runs alone
_LAST_SECONDS = 2.0  # of the grace period, for sending responses and releasing messages
_PARTS_OF_RUN, _MOST_RUNS = 1_000_000, 2000  # of output: their product is a number of Postgres


@dataclass(eq=False, kw_only=True)
class Worker(Service):
    """One worker process; ``run_once`` receives once and starts the tasks, :meth:`settle` waits for them.

    own_queues: opens queues for the thread that receives, extends and sends heartbeats; None: the event loop does.
    apps: modules that register the handlers in child processes; none: handlers with ``process=True`` run in this one.
    """

    name = "worker"
    outbound: Queue
    results: Queue
    settings: Settings
    registry: Registry
    own_queues: OpenQueues | None = None
    apps: Sequence[str] = ()

    def __post_init__(self) -> None:
        settings = self.settings
        self._codec = PayloadCodec(settings)
        self._leases = Leases(self.outbound, settings)
        self._timings = Timings()
        self._sender = ResultSender(self.results, settings, sent=self._leases.answered, timings=self._timings)
        self._threads = Threads(settings.worker_threads)
        wants_processes = bool(self.apps) and any(handler.process for handler in self.registry.values())
        self._processes = ProcessPool(settings, self.apps) if wants_processes else None
        self._resources = Resources(in_child=False)
        self._runner = Runner(
            settings=settings, threads=self._threads, codec=self._codec, timings=self._timings, answer=self._answer,
            send_step=lambda attempt, entry: self._sender.step(encode_step(attempt.claim_id, entry)),
            progress=self._progress, send_output=self._send_output,
            processes=self._processes, resources=self._resources,
        )  # fmt: skip
        self._lease_thread: LeaseThread | None = None
        if (queues := self.own_queues) is not None:
            self._lease_thread = LeaseThread(queues, settings, self._leases, self._runner, self._sender, self._codec)
        self._receiver = Receiver(self._lease_thread or self.outbound, settings)
        self._starting = asyncio.Lock()
        self._stopping = False
        self._releasing: asyncio.Task[None] | None = None
        self.idle_seconds = 0.0 if settings.receive_wait_seconds else 0.1

    async def open(self) -> None:
        await self.outbound.depth()
        await self.results.depth()
        await self._resources.open()
        for handler in self.registry.values():
            if not (handler.process and self._processes is not None):
                self._resources.check(handler.name, handler.injected)

    def side_tasks(self) -> Mapping[str, SideTask]:
        tasks: dict[str, SideTask] = {
            "send responses": self._sender.run,
            "delete messages": self._leases.deleter.run,
            "watch threads": self._watch_threads,
            "watch lifespans": self._resources.watch,
        }
        if self._lease_thread is None:
            tasks["heartbeat"] = self._heartbeat
            tasks["extend visibility"] = partial(self._leases.extend_unfinished, self.outbound)
        else:
            tasks["leases and heartbeats"] = self._lease_thread.run
        if self._processes is not None:
            tasks["child processes"] = self._processes.run
        if self.settings.announce_actions:
            tasks["announce"] = partial(announce, self.registry, self._sender, self.settings.worker_version)
        url = self.settings.control_url
        if url is not None:
            poll = CancellationPoll(self.settings, url, self._runner.attempts, self._runner.lose)
            tasks["poll for lost claims"] = poll.run
        return tasks

    def saturation(self) -> str | None:
        return self._runner.saturation()

    def ends_stalls(self) -> bool:
        # The thread of leases keeps the tasks, and ends the worker once a handler blocks the loop past its time limit.
        return self._lease_thread is not None and bool(self._runner.stuck(-math.inf))

    async def run_once(self) -> int:
        """Receive once, when there is room, and start the tasks; returns the number of messages."""
        while not self._stopping and not self._runner.has_room:
            self._runner.changed.clear()
            await self._runner.changed.wait()
        messages = [] if self._stopping else await self._receiver.receive()
        if self._stopping:
            await self._leases.release([*filter(None, map(self._leases.take, messages))])  # of a poll still open
            return 0
        announced: list[Attempt] = []
        suspects: list[list[Attempt]] = []
        for message in messages:
            attempts = self._take(message)
            if not attempts:
                continue
            if message_attributes.SUSPECT_ATTRIBUTE in message.attributes or message.receive_count >= 3:
                suspects.append(attempts)
            elif message.receive_count > 1:
                announced += attempts
            else:
                await self._start(attempts)
        if announced or suspects:
            redelivered = [*announced, *chain.from_iterable(suspects)]
            self._runner.held |= dict.fromkeys(redelivered)
            await self._announce(redelivered)
            await self._start(announced)
            for attempts in suspects:
                await self._start(attempts, alone=True)
        return len(messages)

    async def _start(self, attempts: Sequence[Attempt], *, alone: bool = False) -> None:
        """Start attempts beside others. ``alone``: of one suspect, once the others have ended and been answered."""
        async with self._starting:
            if alone:
                await ends_within(_ALONE_SECONDS, self.settle())
            if self._stopping:
                self._runner.drop(attempts)
                await self._leases.release({attempt.lease: None for attempt in attempts if not attempt.lease.begun})
                return
            if alone:
                sent, tasks = attempts[0].lease.message, len(attempts)
                log.warning("suspect_started_alone", message_id=sent.id, tasks=tasks, deliveries=sent.receive_count)
            self._runner.add(attempts, alone=alone)
            if alone:
                await ends_within(_ALONE_SECONDS, self.settle())

    def run_until(self, at: float, *, held_until: float) -> asyncio.TimerHandle:
        """Stop every call at this time of the monotonic clock; none starts after it, unless the handle is cancelled.

        held_until: when the leases of messages that are received from now on end, which others hold for this worker.
        """
        self._leases.held_until = held_until
        return self._runner.run_until(at)

    async def settle(self) -> None:
        """Wait until every response is in the results queue and every message deleted."""
        await self._runner.wait_empty()
        await self._wait_saved()

    async def _wait_saved(self) -> None:
        await self._sender.wait_empty()
        await self._leases.deleter.flush()

    def _take(self, message: Message) -> list[Attempt]:
        """Lease a message and return its attempts; invalid entries and unknown actions are answered at once."""
        lease = self._leases.take(message)
        if lease is None:
            return []
        try:
            entries = decode_task_requests(message.body, batch_limit=self.settings.packed_limit)
            claims, lease.pack_id = _claims_of(message, entries)
            tasks = [claim.task_id for _, claim in claims if claim is not None]
            if not tasks:
                raise InvalidRequest("no entry is a request with a claim id")
            tenants = message_attributes.decode_tenants(message.attributes, tasks)
        except (RpcError, ValueError) as exc:
            # There is no claim id to respond to, or no certain tenant, for whom alone a handler may run a task. The
            # broker moves the message to the dead-letter queue after its last delivery.
            reason = f"its tenants: {exc}" if isinstance(exc, ValueError) else str(exc)
            log.error("message_unreadable", message_id=message.id, reason=reason)
            return []
        self._leases.add(lease, len(tasks))
        own_limit = _limit_seconds(message)
        traces = {} if active.active() is None else message_attributes.decode_traces(message.attributes, tasks)
        attempts = []
        for place, (entry, (claim_id, claim)) in enumerate(zip(entries, claims, strict=True)):
            if claim is None or not isinstance(entry, TaskRequest):
                answer, reason = no_task_answer(entry)
                log.error("entry_unreadable", message_id=message.id, reason=reason)
                self._sender.answer(Entry(answer))
            elif (handler := self.registry.get(entry.method)) is None:
                self._answer_unknown(entry, claim_id, claim, lease)
            else:
                limit = own_limit or handler.timeout or self.settings.task_timeout_seconds
                received_at = lease.received_at
                attempt = Attempt(handler, limit, received_at, claim_id, claim, entry.params, lease, received_at, place)
                attempt.carried = traces.get(claim.task_id)
                attempt.tenant = tenants.get(claim.task_id)
                if steps := bytes(entry.steps):
                    attempt.journal, attempt.journal_bytes = steps.decode(), len(steps)
                attempts.append(attempt)
        return attempts

    def _answer_unknown(self, request: TaskRequest, claim_id: str, claim: ClaimId, lease: Lease) -> None:
        lease.begin()
        metrics.RUN_SECONDS.labels("unknown", "error").observe(0.0)  # no run time of an action: not for the scheduler
        answer, problem = failure_answer(claim_id, None, unknown_action(request.method, self.registry))
        log_failure(claim, request.method[:200], problem, details=True)  # the action's name alone is in it
        self._sender.answer(Entry(answer, lease))

    async def _announce(self, attempts: Sequence[Attempt]) -> None:
        """Send a heartbeat of each before any starts, so that a task that crashes the worker is known to have run."""
        messages = {attempt.lease.message.id: attempt.lease.message.receive_count for attempt in attempts}
        most = max(messages.values())
        log.warning("messages_redelivered", messages=len(messages), tasks=len(attempts), deliveries=most)
        await self._sender.send_now(Entry(encode_progress(attempt.claim_id)) for attempt in attempts)
        now = time.monotonic()
        for attempt in attempts:
            attempt.seen_at = now

    def _answer(self, attempt: Attempt, text: str) -> None:
        if attempt.is_lost or not text:
            self._leases.answered(attempt.lease)  # a response would be ignored; the message can be deleted
        else:
            answer = final_answer(self._codec, attempt, text)
            result = None if attempt.lease.pack_id is None else sole_result(answer, attempt.claim_id)
            self._sender.answer(Entry(answer, attempt.lease, None, result, attempt.place))

    def _send_output(self, attempt: Attempt, entries: str, dropped: int) -> None:
        if attempt.is_lost:
            return
        attempt.output_parts += 1
        # A message that comes again is another run of the same claim, which may add to what the first one gave out.
        run = min(attempt.lease.message.receive_count, _MOST_RUNS)
        sealed = self._codec.encode(entries, aad_of("output", attempt.claim.task_id))
        number = run * _PARTS_OF_RUN + attempt.output_parts
        self._sender.output(encode_output(attempt.claim_id, number, sealed, dropped))

    def _progress(self, attempt: Attempt, percent: float | None, note: str | None) -> None:
        self._sender.progress(attempt.claim_id, percent, encrypt_note(self._codec, attempt.claim.task_id, note))

    async def _heartbeat(self) -> None:
        """Send a heartbeat of every task without one for the interval, running or waiting; a side task."""
        interval = self.settings.heartbeat_seconds
        while True:
            await asyncio.sleep(interval / 4)
            for attempt in due_heartbeats(self._runner, interval):
                self._sender.progress(attempt.claim_id)

    async def _watch_threads(self) -> None:
        """End the process when every thread is stuck, to be restarted; a side task."""
        await self._threads.exhausted.wait()
        raise RuntimeError(
            f"all {self._threads.size} threads are stuck in handlers that ran over their time; "
            "give those handlers time limits of their own (of sockets, locks, queries)"
        )

    def stop_taking(self) -> None:
        """Stop receiving, and release messages that have not started."""
        self._stopping = True
        self._receiver.stop()
        self._releasing = asyncio.create_task(self._leases.release(self._runner.take_back()), name="release messages")
        self._runner.changed.set()

    async def drain(self, seconds: float) -> None:
        """Finish running tasks, send every response and release the rest, within so many seconds.

        Messages are released whole: waiting tasks of a message that has begun start too while half of the time is
        left, because the release repeats the finished ones.
        """
        deadline = time.monotonic() + seconds
        if self._releasing is None:
            self.stop_taking()
        asyncio.get_running_loop().call_later(seconds / 2, self._runner.stop_starting)
        if not await ends_within(max(0.0, seconds - min(_LAST_SECONDS, seconds / 4)), self.settle()):
            cut = await self._runner.cut(min(_LAST_SECONDS, seconds / 4) / 2)
            if cut:
                log.warning("tasks_cut", tasks=cut, hint="they run again elsewhere; PENSTOCK_GRACE_SECONDS is the time")
        if not await ends_within(max(0.1, deadline - time.monotonic()), self._wait_saved()):
            log.warning("answers_not_saved", hint="their messages come again after the visibility timeout")
        unfinished = self._leases.unfinished()
        if unfinished:
            log.warning("messages_given_back", messages=len(unfinished))
            await self._leases.release(unfinished)
        if self._releasing is not None:
            await self._releasing
        if self._processes is not None:
            await self._processes.stop()

    async def close(self) -> None:
        self._runner.close()
        self._threads.close()
        await self._resources.close()
        await self._codec.close()


def _claims_of(
    message: Message, entries: Sequence[TaskRequest | Request | Invalid]
) -> tuple[Sequence[tuple[str, ClaimId | None]], str | None]:
    """Text and numbers of the entries' claim ids, and the message's pack id.

    The pack id only if it names just these tasks: a replayed message may hold some of them. It is read in less time.
    """
    pack_id = message.attributes.get(message_attributes.PACK_ATTRIBUTE)
    if pack_id is not None:
        with suppress(ValueError):
            claim, task_ids = message_attributes.parse_pack_id(pack_id)
            names = [entry.id for entry in entries if isinstance(entry, TaskRequest)]
            starts = [f"{task_id}:{claim}:" for task_id in task_ids]
            if len(names) == len(starts) == len(entries) and all(map(str.startswith, names, starts)):
                return [(name, ClaimId(task_id, claim)) for name, task_id in zip(names, task_ids, strict=True)], pack_id
    return [(one.id, parse_claim_id(one.id)) if isinstance(one, TaskRequest) else ("", None) for one in entries], None


def _limit_seconds(message: Message) -> float | None:
    """The time limit in a message's attributes; None: the handler's or the settings'."""
    given = message.attributes.get(message_attributes.TIMEOUT_ATTRIBUTE)
    if given is None:
        return None
    with suppress(ValueError):
        if 0 < float(given) < math.inf:
            return float(given)
    log.warning("timeout_attribute_ignored", message_id=message.id, value=given[:50])
    return None
