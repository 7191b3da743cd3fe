"""One child: runs one call at a time as a worker does; outcomes and progress go to the worker by one channel."""

import asyncio
import os
import resource
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec

from penstock.brokers.base import Message
from penstock.payloads.codec import PayloadCodec
from penstock.protocol import trace_context
from penstock.protocol.requests import ClaimId, parse_claim_id
from penstock.runtime.chaos import faults_of
from penstock.runtime.loop_thread import new_loop
from penstock.runtime.tracing import active
from penstock.settings.model import Settings
from penstock.worker.attempt import Attempt, Unit
from penstock.worker.handlers.actions import REGISTRY, Registry
from penstock.worker.handlers.lifespan import Resources
from penstock.worker.handlers.steps import Suspend
from penstock.worker.leases import Lease
from penstock.worker.processes.channel import Channel
from penstock.worker.responses import Refusal, Unfit
from penstock.worker.result_sender import Timings
from penstock.worker.runner import Answer, Runner
from penstock.worker.threads import Threads

MAXRSS_UNIT = 1 if sys.platform == "darwin" else 1024


def run(connection: socket.socket, settings: Settings) -> None:
    """Serve the worker until it sends a stop."""
    if settings.process_max_memory_bytes is not None:
        limit = 2 * settings.process_max_memory_bytes  # there allocations fail, before the kernel kills something
        with suppress(ValueError, OSError):  # the kernel does not know it
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    active.setup_tracing("worker", settings)
    faults = faults_of(settings, f"child {os.getpid()} of a worker")
    registry = REGISTRY if faults is None else REGISTRY.inside(faults.around)
    try:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(_live(Channel(connection), settings, registry))
    finally:
        active.stop_tracing()


async def _live(channel: Channel, settings: Settings, registry: Registry) -> None:
    resources, loop, stop = Resources(in_child=True), asyncio.get_running_loop(), asyncio.Event()
    try:
        await resources.open()
        for handler in registry.values():
            if handler.process:
                resources.check(handler.name, handler.injected)
        runner = _ChildRunner(settings, channel, resources, registry)
        on = dict[str, Callable[..., Any]](call=runner.call, lost=runner.note, recorded=runner.recorded, stop=stop.set)

        def read() -> None:
            while (message := channel.read()) is not None:
                loop.call_soon_threadsafe(on[message[0]], *message[1:])
            os._exit(0)  # the worker has ended; a handler may block the event loop

        threading.Thread(target=read, name="channel", daemon=True).start()
        channel.send("ready")
        watching = asyncio.create_task(resources.watch())
        watching.add_done_callback(lambda _: stop.set())
        await stop.wait()
        if watching.done():
            watching.result()
    finally:
        await resources.close()


class _ChildRunner(Runner):
    """A runner whose outcomes go to the channel."""

    def __init__(self, settings: Settings, channel: Channel, resources: Resources, registry: Registry) -> None:
        self._channel = channel
        self._registry = registry
        super().__init__(
            settings=settings, threads=Threads(1), codec=PayloadCodec(settings), timings=Timings(),
            resources=resources, send_step=self._send_step,
            # Of a task whose claim was lost before its start: the worker counts the answers of a call.
            answer=lambda attempt, text: channel.send("answer", attempt.claim_id, text, None, None),
            progress=lambda attempt, *report: channel.send("progress", attempt.claim_id, *report),
            send_output=lambda attempt, *part: channel.send("output", attempt.claim_id, *part),
        )  # fmt: skip
        self._outputs.flush_seconds = 0.05  # what a handler logs within it is lost when its process dies
        self.codec = PayloadCodec()  # the worker opens payloads, and stores results
        self._sent: dict[tuple[str, int], asyncio.Future[None]] = {}  # steps by claim id and number
        self._spans = None  # the worker's are the parents of the handler's own
        self._attempts: dict[str, Attempt] = {}
        self._trace: trace_context.TraceContext | None = None
        self._ignored_cancel = False

    def call(self, action: str, limit_seconds: float, tasks: Sequence[Any], trace: Mapping[str, str] | None) -> None:
        """Begin a call. tasks: of a batched handler several."""
        self._trace = trace_context.of_headers(trace or {})
        handler, now = self._registry[action], monotonic()
        self._attempts = {}
        for claim_id, params, tenant, is_redelivered, journal, until in tasks:
            claim = parse_claim_id(claim_id) or ClaimId(0, 0)
            lease = Lease(Message("", "", "", 2 if is_redelivered else 1, None, {}), 1, now, until)
            attempt = Attempt(handler, limit_seconds, now, claim_id, claim, msgspec.Raw(params), lease, now)
            attempt.tenant, attempt.journal = tenant, journal
            self._attempts[claim_id] = attempt
        self.add([*self._attempts.values()])
        self._calling = self._loop.create_task(self._end_call())

    async def _end_call(self) -> None:
        await self.wait_empty()  # a batch does not wait for more tasks
        for attempt in self._attempts.values():
            if attempt.output is not None:
                attempt.output.left_bytes = 0  # what is left running has no reader between calls
        self._channel.send("done", resident_bytes(), self._ignored_cancel or self.threads.left > 0)

    def note(self, claim_id: str, is_cancelled: bool, lease_is_lost: bool, until: float) -> None:
        """Note whether the claim and the lease of a task are lost, and when the lease ends: a host has one clock."""
        attempt = self._attempts.get(claim_id)
        if attempt is not None:
            attempt.lease.lost, attempt.lease.until = lease_is_lost, until
            if is_cancelled:
                attempt.cancellation.set()

    async def _run(self, unit: Unit) -> None:
        spans = active.active()
        if self._trace is not None and spans is not None:
            spans.continue_from(self._trace)
        await super()._run(unit)

    def _settle(self, unit: Unit | None, attempt: Attempt, answer: Answer) -> None:
        attempt.answered = True
        self._outputs.end(attempt.output)
        text, problem = answer
        self._channel.send("answer", attempt.claim_id, "" if attempt.is_lost else text, problem, attempt.sleep)

    def _finish_overdue(self, unit: Unit) -> None:
        self._ignored_cancel = self._ignored_cancel or unit.task is not asyncio.current_task()
        super()._finish_overdue(unit)

    async def _send_step(self, attempt: Attempt, entry: str) -> None:
        number = len(attempt.reported)
        sent = self._sent[attempt.claim_id, number] = self._loop.create_future()
        self._channel.send("step", attempt.claim_id, number, entry)
        await sent

    def recorded(self, claim_id: str, number: int, problem: Sequence[Any] | None) -> None:
        """A report is in the results queue or refused. problem: kind, text, code, is final; empty: the lease ended."""
        sent = self._sent.pop((claim_id, number))
        if sent.done():
            return
        if problem is None:
            sent.set_result(None)
        elif not problem:
            sent.set_exception(Suspend(is_redelivered=True))
        else:
            kind, text, code, is_final = problem
            sent.set_exception((Unfit if is_final else Refusal)(kind, text, code=code))


def resident_bytes() -> int:
    """The memory of this process now; where the system does not say, at its highest."""
    with suppress(OSError):
        return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * MAXRSS_UNIT
