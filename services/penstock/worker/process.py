"""Worker: takes tasks from the outbound queue, runs their handlers, answers into the results queue.

It needs the two queues and nothing else. A message is deleted when the answers to all its tasks are in the results
queue; a slow task holds back neither the others of its message nor their answers.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from itertools import chain

from penstock.brokers.base import Message, Queue
from penstock.brokers.receiver import Receiver
from penstock.payloads.codec import PayloadCodec
from penstock.protocol.errors import RpcError
from penstock.protocol.reports import encode_progress
from penstock.protocol.requests import TIMEOUT_ATTRIBUTE, ClaimId, Invalid, Request, decode_body, parse_claim_id
from penstock.protocol.task_tenants import decode_tenants
from penstock.protocol.task_traces import CarriedTrace, decode_traces
from penstock.runtime.logs import get_logger
from penstock.runtime.loop import Service, SideTask
from penstock.runtime.tracing import active
from penstock.settings.model import Settings
from penstock.worker.attempt import Job
from penstock.worker.cancellation_poll import Control
from penstock.worker.handlers.actions import Registry
from penstock.worker.isolation import Isolation, is_suspect
from penstock.worker.leases import Held, Holder
from penstock.worker.naming import name_of_process
from penstock.worker.payload_io import seal_answer, seal_note
from penstock.worker.responses import no_task_answer, unknown_action_answer
from penstock.worker.result_sender import Outbox
from penstock.worker.runner import Runner, log_failure
from penstock.worker.threads import Threads
from penstock.worker.timings import Timings
from penstock.worker.watchdog import Watchdog

__all__ = ["Worker"]

_LAST_SECONDS = 2.0  # of the grace, for sending what there is and giving back what there is not

log = get_logger()


class Worker(Service):
    """One worker process; ``run_once`` receives once and starts what came, :meth:`settle` waits for it."""

    name = "worker"

    def __init__(self, *, outbound: Queue, results: Queue, settings: Settings, registry: Registry) -> None:
        self._codec = PayloadCodec(settings)
        self._outbound = outbound
        self._receiver = Receiver(outbound, settings)
        self._results = results
        self._settings = settings
        self._registry = registry
        self._holder = Holder(outbound, visibility_seconds=settings.visibility_timeout_seconds)
        self._timings = Timings()
        name = settings.worker_name or name_of_process()
        self._outbox = Outbox(results, sent=self._holder.answered, tell=self._timings.tell, worker=name)
        self._threads = Threads(settings.worker_threads)
        self._runner = Runner(
            concurrency=settings.worker_concurrency,
            threads=self._threads,
            timeout_seconds=settings.task_timeout_seconds,
            bad_params_attempts=settings.bad_params_attempts,
            log_details=settings.log_failure_details and not self._codec.encrypts,
            result_limit_bytes=settings.largest_result_bytes,
            result_compress_bytes=None if self._codec.is_on else settings.result_compress_bytes,
            codec=self._codec,
            timings=self._timings,
            answer=self._answer,
            progress=self._progress,
        )
        self._isolation = Isolation(self._runner, clear=self._clear)
        self._watchdog = Watchdog(self._runner.action_of)
        self._control = None if settings.control_url is None else self._control_at(settings.control_url)
        self._stopping = False
        self._giving_back: asyncio.Task[None] | None = None
        self.idle_seconds = 0.0 if settings.receive_wait_seconds else 0.1

    def _control_at(self, url: str) -> Control:
        key = self._settings.control_api_key
        return Control(
            url=url,
            api_key=key.get_secret_value() if key else None,
            poll_seconds=self._settings.cancel_poll_seconds,
            jobs=self._runner.jobs,
            lost=self._runner.lose,
        )

    async def open(self) -> None:
        await self._outbound.depth()
        await self._results.depth()

    def side_tasks(self) -> Mapping[str, SideTask]:
        asking = {} if self._control is None else {"ask for lost claims": self._control.run}
        return asking | {
            "send answers": self._outbox.run,
            "delete messages": self._holder.delete_finished,
            "extend visibility": self._holder.extend_held,
            "heartbeat": self._heartbeat,
            "watch threads": self._watch_threads,
            "watch loop": self._watchdog.run,
        }

    async def run_once(self) -> int:
        """Receive once, when there is room, and start what came; returns how many messages that was."""
        while not self._stopping and not self._runner.has_room:
            self._runner.changed.clear()
            await self._runner.changed.wait()
        if self._stopping:
            return 0
        return await self._receive()

    async def _receive(self) -> int:
        messages = await self._receiver.receive()
        if self._stopping:
            if messages:
                await self._outbound.release(messages)  # they came with a long poll that was under way
            return 0
        announced: list[Job] = []
        suspects: list[list[Job]] = []
        for message in messages:
            jobs = self._take(message)
            if not jobs:
                continue
            if is_suspect(message):
                suspects.append(jobs)
            elif message.receive_count > 1:
                announced += jobs
            else:
                await self._start(jobs)
        if announced or suspects:
            await self._announce([*announced, *chain.from_iterable(suspects)])
            await self._start(announced)
            for jobs in suspects:
                await self._start(jobs, alone=True)
        return len(messages)

    async def _start(self, jobs: Sequence[Job], *, alone: bool = False) -> None:
        started = await (self._isolation.add_alone(jobs) if alone else self._isolation.add(jobs))
        if not started:
            await self._holder.release(list({job.held: None for job in jobs if not job.held.begun}))

    async def settle(self) -> None:
        """Until every task received so far has its answer in the results queue and its message is deleted."""
        await self._runner.wait_empty()
        await self._outbox.wait_empty()
        await self._holder.wait_empty()

    async def _clear(self) -> None:
        await self._runner.wait_empty()
        await self._outbox.wait_empty()
        await self._holder.wait_deleted()

    # Taking

    def _take(self, message: Message) -> list[Job]:
        """Hold a message and make its jobs; what cannot become one is answered at once."""
        if self._holder.renew(message):
            return []
        try:
            entries = decode_body(message.body, batch_limit=self._settings.packed_limit, may_be_sealed=True).entries
        except RpcError as exc:
            # Nobody to answer to. Left alone, it goes to the dead-letter queue after its last delivery.
            log.error("message_unreadable", message_id=message.id, reason=exc.message)
            return []
        found, strays = [], []
        for entry in entries:
            task = _task_of(entry)
            if task is None:
                strays.append(entry)
            else:
                found.append(task)
        if not found:
            log.error("message_unreadable", message_id=message.id, reason="no entry is a request with a claim id")
            return []
        try:
            tenants = decode_tenants(message.attributes, (claim.task_id for _, _, claim in found))
        except ValueError as exc:
            # A handler must not take a task for another tenant's, or for none.
            log.error("message_unreadable", message_id=message.id, reason=f"its tenants: {exc}")
            return []
        held = self._holder.hold(message, len(found))
        for entry in strays:
            self._answer_stray(entry, message)
        limit = _limit_seconds(message)
        traces: Mapping[int, CarriedTrace] = {}
        if message.attributes and active.active() is not None:
            traces = decode_traces(message.attributes, (claim.task_id for _, _, claim in found))
        jobs = []
        for request, claim_id, claim in found:
            handler = self._registry.get(request.method)
            if handler is None:
                self._answer_unknown(request, claim_id, claim, held)
            else:
                job = Job(claim_id, claim, handler, request.params, held, limit, self._runner.report)
                if traces:
                    job.carried = traces.get(claim.task_id)
                if tenants:
                    job.tenant = tenants.get(claim.task_id)
                jobs.append(job)
        return jobs

    def _answer_stray(self, entry: Request | Invalid, message: Message) -> None:
        reason = entry.error.message if isinstance(entry, Invalid) else "its id is not <task id>:<claim>"
        log.error("entry_unreadable", message_id=message.id, reason=reason)
        self._outbox.answer(no_task_answer(entry, reason), None)

    def _answer_unknown(self, request: Request, claim_id: str, claim: ClaimId, held: Held) -> None:
        if not held.begun:
            held.begin()
        self._timings.add("unknown", "error", 0.0)
        attempts = self._settings.unknown_action_attempts
        answer, problem = unknown_action_answer(claim_id, request.method, self._registry, attempts)
        log_failure(claim, request.method[:200], problem, details=True)  # the action's name alone is in it
        self._outbox.answer(answer, held)

    async def _announce(self, jobs: Sequence[Job]) -> None:
        """Give a sign of life of each before any starts.

        The worker that had them before may have died of one. A task that kills its worker is so told from a task
        that nobody took.
        """
        messages = {job.held.message.id: job.held.message.receive_count for job in jobs}
        log.warning("messages_redelivered", messages=len(messages), tasks=len(jobs), deliveries=max(messages.values()))
        await self._outbox.send_now([encode_progress(job.claim_id) for job in jobs])
        now = time.monotonic()
        for job in jobs:
            job.seen_at = now

    def _answer(self, job: Job, text: str) -> None:
        if job.is_lost:
            self._holder.answered(job.held)  # nobody waits for it, and its message is of no more use
        else:
            sealed = seal_answer(self._codec, job.claim, text) if self._codec.encrypts else text
            self._outbox.answer(sealed, job.held)

    # Signs of life

    def _progress(self, job: Job, percent: float | None, note: str | None) -> None:
        sealed = seal_note(self._codec, job.claim, note)
        self._outbox.sign(job.claim_id, encode_progress(job.claim_id, percent, sealed), replace=True)

    async def _heartbeat(self) -> None:
        """Give a sign of every task that has been here for the interval, running or waiting; a side task."""
        interval = self._settings.heartbeat_seconds
        while True:
            await asyncio.sleep(interval / 4)
            # Those due before the next round count as due, so that the time between two signs stays below the interval.
            before = time.monotonic() - interval * 3 / 4
            for job in self._runner.jobs():
                if job.seen_at <= before:
                    job.seen_at = time.monotonic()
                    self._outbox.sign(job.claim_id, encode_progress(job.claim_id), replace=False)

    async def _watch_threads(self) -> None:
        """Take the process down when every thread is stuck, to be started again; a side task."""
        await self._threads.wait_exhausted()
        raise RuntimeError(
            f"all {self._threads.size} threads are stuck in handlers that ran over their time; "
            "give those handlers time limits of their own (of sockets, locks, queries)"
        )

    # Stopping

    def stop_taking(self) -> None:
        """Give back at once what has not started, for other workers to take."""
        self._stopping = True
        self._receiver.stop()
        self._isolation.stop()
        untouched = self._runner.take_back()
        self._giving_back = asyncio.get_running_loop().create_task(self._holder.release(untouched), name="give back")
        self._runner.changed.set()

    async def drain(self, seconds: float) -> None:
        """Finish what has started, save every answer there is, give the rest back, within so many seconds.

        A message is given back only as a whole. So what still waits of a message that was begun is started too, as
        long as half of the time is left: given back, those of its tasks that are done would be done again.
        """
        deadline = time.monotonic() + seconds
        if self._giving_back is None:
            self.stop_taking()
        asyncio.get_running_loop().call_later(seconds / 2, self._runner.stop_starting)
        if not await self._settled(seconds - min(_LAST_SECONDS, seconds / 4)):
            cut = await self._runner.cut(min(_LAST_SECONDS, seconds / 4) / 2)
            if cut:
                log.warning("tasks_cut", tasks=cut, hint="they run again elsewhere; PENSTOCK_GRACE_SECONDS is the time")
        await self._saved(deadline - time.monotonic())
        unfinished = self._holder.unfinished()
        if unfinished:
            log.warning("messages_given_back", messages=len(unfinished))
            await self._holder.release(unfinished)
        if self._giving_back is not None:
            await self._giving_back

    async def _settled(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                await self.settle()
        except TimeoutError:
            return False
        return True

    async def _saved(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(max(0.1, seconds)):
                await self._outbox.wait_empty()
                await self._holder.wait_deleted()
        except TimeoutError:
            log.warning("answers_not_saved", hint="their messages come again after the visibility timeout")

    async def close(self) -> None:
        self._runner.close()
        self._threads.close()
        await self._codec.close()


def _task_of(entry: Request | Invalid) -> tuple[Request, str, ClaimId] | None:
    if isinstance(entry, Invalid):
        return None
    raw = bytes(entry.id)
    if raw[:1] != b'"':
        return None
    claim_id = raw[1:-1].decode()
    claim = parse_claim_id(claim_id)
    return None if claim is None else (entry, claim_id, claim)


def _limit_seconds(message: Message) -> float | None:
    """The run time that a message gives its tasks."""
    given = message.attributes.get(TIMEOUT_ATTRIBUTE)
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if 0 < seconds < math.inf:
        return seconds
    log.warning("timeout_attribute_ignored", message_id=message.id, value=given[:50])
    return None
