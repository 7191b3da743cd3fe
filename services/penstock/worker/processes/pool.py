"""Process pool: warm children, one call at a time in each. The worker keeps messages, leases and results."""

import asyncio
import os
import pickle
import socket
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from subprocess import PIPE

from penstock.runtime import metrics
from penstock.runtime.logs import log
from penstock.runtime.periodic import Pauses, ends_within
from penstock.settings.model import Settings
from penstock.worker.attempt import Attempt, Unit
from penstock.worker.processes import channel
from penstock.worker.processes.channel import Child, Ended
from penstock.worker.responses import Refusal

_DEATH_SECONDS = 5.0  # in which the fork server reports the end of a child that was killed
_STOP_SECONDS = 2.0  # for children to end when the worker stops


class ProcessDied(Refusal):
    """The child ended before it answered."""

    def __init__(self, ended: Ended) -> None:
        super().__init__("ProcessDied", f"its process ended: {ended.text}", data=ended.data)


class ProcessPool:
    """``size`` children of a fork server; :meth:`run` is a side task. apps: modules that register the handlers."""

    def __init__(self, settings: Settings, apps: Sequence[str]) -> None:
        self.size = settings.worker_processes or os.cpu_count() or 1
        self._settings = settings
        self._apps = tuple(apps)
        self.idle: deque[Child] = deque()  # what is taken runs one call, or is given back
        self._forking: deque[Child] = deque()
        self._children: dict[int, Child] = {}
        self._orders: socket.socket | None = None
        self._stopping = False
        self.on_idle: Callable[[], None] = lambda: None  # called when there is another child
        self._pauses = Pauses()
        self._welcoming: set[asyncio.Task[None]] = set()
        metrics.PROCESSES.labels("busy").set_function(lambda: len(self._children) - len(self.idle))
        metrics.PROCESSES.labels("idle").set_function(lambda: len(self.idle))

    def give_back(self, child: Child) -> None:
        if not child.ended.done():
            self.idle.append(child)

    async def call(self, child: Child, unit: Unit, receive: Callable[..., None]) -> None:
        """Run a call in a child, killed if it is cancelled. receive: gets the child's messages. Raises ProcessDied."""
        action = unit.handler.name
        reporting = asyncio.create_task(_report_losses(child, unit.attempts))
        try:
            trace = unit.span and unit.span.context
            tasks = [
                (one.claim_id, bytes(one.params), one.tenant, one.is_redelivered, one.journal, _until(one))
                for one in unit.attempts
            ]
            child.send("call", action, unit.limit_seconds, tasks, trace and trace.headers)
            while (message := await channel.read(child.reader)) is not None and message[0] != "done":
                receive(*message)
            if message is None:
                raise ProcessDied(await self._end_of(child))
        except BaseException as exc:
            self._kill(child, "timeout")
            if isinstance(exc, asyncio.CancelledError):
                unit.ended = await self._end_of(child)
            raise
        finally:
            reporting.cancel()
        _, resident, is_left = message  # the child's memory, and whether a handler goes on
        child.calls += 1
        most, after = self._settings.process_max_memory_bytes, self._settings.process_recycle_after
        if is_left:
            self._kill(child, "timeout")
        elif most is not None and resident > most:
            log.info("process_above_memory", pid=child.pid, bytes=resident, limit=most, action=action)
            self._retire(child, "memory")
        elif after is not None and child.calls >= after:
            self._retire(child, "recycled")
        else:
            self.give_back(child)

    async def _end_of(self, child: Child) -> Ended:
        await asyncio.wait([child.ended], timeout=_DEATH_SECONDS)
        return child.ended.result() if child.ended.done() else Ended()

    def _fork(self) -> None:
        if self._orders is None or self._stopping:
            return
        ours, theirs = socket.socketpair()
        with theirs:
            self._forking.append(Child(ours, asyncio.get_running_loop().create_future()))
            with suppress(BrokenPipeError):  # the fork server has ended, and is started again
                socket.send_fds(self._orders, [channel.ORDER.pack(0)], [theirs.fileno()])

    def _kill(self, child: Child, reason: str) -> None:
        self._replace(child, reason)
        if self._orders is not None and not child.ended.done():
            with suppress(BrokenPipeError):
                self._orders.sendall(channel.ORDER.pack(child.pid))

    def _retire(self, child: Child, reason: str) -> None:
        """Let a child end in its own time, and fork another meanwhile."""
        self._replace(child, reason)
        child.send("stop")

    def _replace(self, child: Child, reason: str) -> None:
        if child.reason is None and not child.ended.done():
            child.reason = reason
            if child.is_ready:  # else another is forked after a pause
                self._fork()

    async def run(self) -> None:
        """Run the fork server, again should it end; a side task. Raises RuntimeError if it cannot start."""
        pauses = Pauses()
        while True:
            await self._serve()
            log.error("fork_server_ended", hint="its children ended with it; another is started")
            await asyncio.sleep(pauses.next_seconds())

    async def _serve(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            server = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "penstock.worker.processes.fork_server", str(theirs.fileno()),
                stdin=PIPE, pass_fds=(theirs.fileno(),), start_new_session=True,
            )  # fmt: skip
        assert server.stdin is not None
        server.stdin.write(pickle.dumps((self._settings, self._apps, os.getpid())))
        server.stdin.close()
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        self._orders = ours.dup()
        try:
            if await channel.read(reader) is None:
                code = await server.wait()
                raise RuntimeError(f"the fork server of --processes ended with code {code}; its log lines say why")
            for _ in range(self.size):
                self._fork()
            while (message := await channel.read(reader)) is not None:
                await self._note(*message)
        except asyncio.CancelledError:
            self._stopping = True
            raise
        finally:
            self._orders.close()
            self._orders = None
            writer.close()
            left = [*self._forking, *self._children.values()]
            self._forking.clear()
            for child in left:
                self._has_ended(child, Ended())
            await ends_within(_STOP_SECONDS, server.wait())

    async def _note(self, kind: str, pid: int, code: int = 0, peak_bytes: int = 0) -> None:
        if kind == "forked":
            child = self._forking[0]
            child.reader, child.writer = await asyncio.open_unix_connection(sock=child.connection)
            child.pid = pid
            self._children[pid] = self._forking.popleft()
            if self._stopping:
                child.send("stop")
            task = asyncio.create_task(self._welcome(child))
            self._welcoming.add(task)
            task.add_done_callback(self._welcoming.discard)
        else:
            self._has_ended(self._children[pid], Ended(code, peak_bytes))

    async def _welcome(self, child: Child) -> None:
        """Give a child calls once its lifespans are open; fork another after a pause if that fails."""
        orders = self._orders
        if await channel.read(child.reader) is not None and not child.ended.done():
            child.is_ready = True
            self._pauses.reset()
            self.give_back(child)
            self.on_idle()
        elif not self._stopping:
            seconds = self._pauses.next_seconds()
            log.error("process_not_started", pid=child.pid, next_try_seconds=round(seconds, 1))
            await asyncio.sleep(seconds)
            if self._orders is orders:  # another fork server has made all its children
                self._fork()

    def _has_ended(self, child: Child, ended: Ended) -> None:
        self._children.pop(child.pid, None)
        if child in self.idle:
            self.idle.remove(child)
        reason = child.reason or ("stopped" if self._stopping else "died")
        metrics.PROCESS_ENDS.labels(reason).inc()
        if ended.peak_bytes:
            metrics.PROCESS_PEAK_BYTES.observe(ended.peak_bytes)
        if reason in ("died", "timeout"):
            log.warning("process_ended", pid=child.pid, reason=reason, ended=ended.text, calls=child.calls)
        if child.pid:
            child.writer.close()
        self._replace(child, reason)
        child.ended.set_result(ended)

    async def stop(self) -> None:
        """Let the children end, which no call needs any more."""
        self._stopping = True
        for child in self._children.values():
            child.send("stop")
        ends = [child.ended for child in (*self._children.values(), *self._forking)]
        if ends:
            await asyncio.wait(ends, timeout=_STOP_SECONDS)


async def _report_losses(child: Child, attempts: Sequence[Attempt]) -> None:
    """Report to a child which claims and leases of its tasks are lost, and until when the leases hold."""
    known = {attempt: (False, False, _until(attempt)) for attempt in attempts}
    while True:
        await asyncio.sleep(0.5)
        for attempt in attempts:
            lost = attempt.is_lost, attempt.lease.lost, _until(attempt)
            if lost != known[attempt]:
                known[attempt] = lost
                child.send("lost", attempt.claim_id, *lost)


def _until(attempt: Attempt) -> float:
    """When the lease ends; 0 once it has lapsed, also if it was extended since: a child begins no step then."""
    return attempt.lease.until if attempt.lease.is_unbroken() else 0.0
