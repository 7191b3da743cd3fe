"""What every process shares: passes of a :class:`Service`, with pauses while Postgres or SQS is unavailable, up to a
signal: the first lets the passes under way finish within the grace, the second leaves at once."""

import asyncio
import gc
import os
import random
import signal
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any

from penstock.protocol.errors import Locked, Unavailable
from penstock.runtime import metrics
from penstock.runtime.health import Health, serve_health
from penstock.runtime.logs import bind_process, log
from penstock.runtime.loop_thread import new_loop, run_whole
from penstock.runtime.periodic import Pauses, is_set_within
from penstock.settings.model import Settings

_LOCKED_PAUSE_SECONDS = 0.3  # one transaction may hold up one task, and other work comes
_OUTAGE_PAUSE_SECONDS = 2.0  # at most, so that work goes on soon after a failover

SideTask = Callable[[], Coroutine[Any, Any, None]]


class Service:
    """One process's work; subclasses fill in what they need.

    idle_seconds: pause after a pass that found nothing, 0 where the pass itself waits (a long poll). has_found_all: the
    last pass found work, and another would find none.
    """

    name = "service"
    idle_seconds = 0.0
    has_found_all = False

    async def open(self) -> None:
        """Reach what the work needs. Raises Unavailable to be called again later."""

    async def run_once(self) -> int:
        """Do one bounded pass; returns how much was done, 0 for nothing. Raises Unavailable to be backed off."""
        raise NotImplementedError  # abstract

    async def wait_for_work(self) -> None:
        """Wait after an idle pass; cancelled when the process stops."""
        await asyncio.sleep(self.idle_seconds * random.uniform(0.8, 1.2))

    def saturation(self) -> str | None:
        """What there is too little of, in words, if anything; called from any thread."""
        return None

    def ends_stalls(self) -> bool:
        """Whether what keeps the event loop from turning now is ended by the service itself; called from any thread."""
        return False

    def side_tasks(self) -> Mapping[str, SideTask]:
        """What runs beside the passes until the end, by name."""
        return {}

    def stop_taking(self) -> None:
        """The process is stopping: take no new work."""

    async def drain(self, seconds: float) -> None:
        """Finish or give back work, within so many seconds."""

    async def close(self) -> None:
        """Close what the service opened itself; its arguments are closed by the caller."""


class Loop:
    """Runs a service until a stop is requested. passes: how many may be under way at once (``--loops``)."""

    def __init__(self, service: Service, *, passes: int, grace_seconds: float) -> None:
        self._service = service
        self._passes = passes
        self._grace_seconds = grace_seconds
        self.health = Health(service.name, service.saturation, service.ends_stalls)
        for outcome in ("worked", "idle", "failed"):  # an alert on none of them needs the series
            metrics.PASSES.labels(service.name, outcome)
        self._stop = asyncio.Event()
        self._exit_code = 0
        self._waits: set[asyncio.Future[None]] = set()  # cut off by the stop

    def stop(self) -> None:
        """Take no new work, finish what is under way, return from :meth:`run`."""
        if not self._stop.is_set():
            self._stop.set()
            for waiting in self._waits:
                waiting.cancel()
            self._service.stop_taking()

    async def run(self) -> int:
        """Run until stopped; returns the exit code: 0, or 1 when a side task died."""
        bind_process(self._service.name)
        log.info("process_started", pid=os.getpid(), passes=self._passes)
        pulse = asyncio.create_task(self.health.pulse(), name="pulse")
        try:
            if await self._open():
                await self._repeat_until_stopped()
        finally:
            pulse.cancel()
            await self._service.close()
        log.info("process_stopped", exit_code=self._exit_code)
        return self._exit_code

    async def _open(self) -> bool:
        pauses = Pauses()
        while not self._stop.is_set():
            failure = await self._until_stopped(self._service.open())
            if isinstance(failure, Unavailable):
                self.health.failed(str(failure))
                if pauses.is_reported:
                    log.warning("waiting_to_start", reason=str(failure), failures=pauses.failures + 1)
                await is_set_within(self._stop, min(pauses.next_seconds(), _OUTAGE_PAUSE_SECONDS))
            elif failure is not None:
                raise failure
            elif not self._stop.is_set():
                self.health.succeeded()
                return True
        return False

    async def _repeat_until_stopped(self) -> None:
        loop = asyncio.get_running_loop()
        repeats = [loop.create_task(self._repeat(), name=f"pass-{i}") for i in range(self._passes)]
        sides = [loop.create_task(run(), name=name) for name, run in self._service.side_tasks().items()]
        for task in (*repeats, *sides):
            task.add_done_callback(self._watch)
        await self._stop.wait()
        deadline = loop.time() + self._grace_seconds
        _, late = await asyncio.wait(repeats, timeout=self._grace_seconds)
        try:
            await self._service.drain(max(0.0, deadline - loop.time()))
        except Unavailable as exc:
            log.warning("drain_failed", reason=str(exc))
        except asyncio.CancelledError:
            pass
        except Exception:
            log.exception("drain_failed")
        if late:
            log.warning("grace_exceeded", grace_seconds=self._grace_seconds, passes_cut=len(late))
        for task in (*late, *sides):
            task.cancel()
        await asyncio.gather(*late, *sides, return_exceptions=True)

    async def _repeat(self) -> None:
        pauses = Pauses()
        service = self._service
        passes = metrics.PASSES
        while not self._stop.is_set():
            try:
                worked = await service.run_once()
            except Exception as exc:  # a mistake of ours must not become a crash loop; it stays loud
                is_unavailable = isinstance(exc, Unavailable)
                self.health.failed(str(exc) if is_unavailable else type(exc).__name__)
                passes.labels(service.name, "failed").inc()
                if not is_unavailable:
                    log.exception("pass_failed", error=type(exc).__name__)
                elif pauses.is_reported:
                    log.warning("backing_off", reason=str(exc), failures=pauses.failures + 1)
                seconds = pauses.next_seconds()
                if is_unavailable:
                    seconds = min(seconds, _LOCKED_PAUSE_SECONDS if isinstance(exc, Locked) else _OUTAGE_PAUSE_SECONDS)
                await is_set_within(self._stop, seconds)
                continue
            if pauses.failures:
                log.info("recovered", after_failures=pauses.failures)
                pauses.reset()
            self.health.succeeded()
            passes.labels(service.name, "worked" if worked else "idle").inc()
            if not worked or service.has_found_all:
                failure = await self._until_stopped(service.wait_for_work())
                if failure is not None:
                    log.warning("wait_failed", error=repr(failure))
                    await is_set_within(self._stop, Pauses().next_seconds())

    async def _until_stopped(self, wait: Awaitable[None]) -> BaseException | None:
        """Wait for it, or until the stop, which cuts it off; returns what it raised."""
        waiting = asyncio.ensure_future(wait)
        self._waits.add(waiting)
        if self._stop.is_set():
            waiting.cancel()
        try:
            await asyncio.wait((waiting,))
        finally:
            self._waits.discard(waiting)
            if not waiting.done():
                waiting.cancel()
                await asyncio.wait((waiting,))
        return None if waiting.cancelled() else waiting.exception()

    def _watch(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or self._stop.is_set():
            return
        exc = task.exception()
        log.error("task_died", task=task.get_name(), error=repr(exc) if exc else "it returned")
        self._exit_code = 1
        self.stop()


MakeService = Callable[[AsyncExitStack], Service]


def run_services(makes: Sequence[tuple[MakeService, int]], settings: Settings) -> int:
    """Run services in this process until a signal, or until one of them ends; returns the highest exit code.

    makes: each builds a service inside the event loop, with the number of passes that may be under way at once; what it
    pushes on the stack is closed at the end. Raises SettingsError for an unusable metrics port.
    """

    async def main() -> int:
        async with AsyncExitStack() as stack:
            services = [(make(stack), passes) for make, passes in makes]
            # The cycle collector is to run rarely and never scan what exists at the start. Tasks come and go by the
            # thousand and none is part of a cycle; at the usual thresholds a worker spends an eighth of its time on it.
            gc.collect()
            gc.freeze()
            gc.set_threshold(20_000, 50, 100)
            loops = [Loop(service, passes=n, grace_seconds=settings.grace_seconds) for service, n in services]
            server = serve_health([each.health for each in loops], settings.metrics_host, settings.metrics_port)
            stack.callback(server.close)
            log.info("metrics_listening", url=server.url)
            return await _run_all(loops, settings.grace_seconds)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        return run_whole(runner, main())


async def _run_all(loops: Sequence[Loop], grace_seconds: float) -> int:
    signals = 0

    def stop() -> None:
        for each in loops:
            each.stop()

    def signalled(number: int) -> None:
        nonlocal signals
        signals += 1
        if signals == 1:
            log.info("stopping", signal=signal.Signals(number).name, grace_seconds=grace_seconds)
            stop()
        else:
            log.warning("leaving_at_once", signal=signal.Signals(number).name)
            os._exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT):
        with suppress(NotImplementedError, RuntimeError, ValueError):  # not the main thread
            asyncio.get_running_loop().add_signal_handler(number, signalled, number)
    running = [asyncio.create_task(each.run()) for each in loops]
    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    stop()
    await asyncio.wait(running)
    return max(each.result() for each in running)
