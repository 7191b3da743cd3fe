"""Child processes of `penstock up`: started, watched, restarted when they die, output merged, stopped together."""

import asyncio
import contextlib
import os
import signal
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO

from penstock.local.service import Service, die_with_parent, free_port, tail
from penstock.protocol.errors import PenstockError, StackError
from penstock.runtime.logs import log
from penstock.runtime.periodic import Pauses, is_set_within

FIRST_PAUSE_SECONDS = 0.5
HEALTHY_AFTER_SECONDS = 30.0
LINE_LIMIT_BYTES = 256 * 1024
_COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)


def restart_pause(lived_seconds: float, pauses: Pauses) -> float:
    """Seconds before a restart; short again after HEALTHY_AFTER_SECONDS of life."""
    if lived_seconds >= HEALTHY_AFTER_SECONDS:
        pauses.reset()
    return round(pauses.next_seconds(), 1)


class Output:
    """Writes whole lines, each behind the name of its process; names are coloured on a terminal."""

    def __init__(self, stream: IO[bytes], *, colour: bool, width: int = 12) -> None:
        self._stream = stream
        self._colour = colour
        self._width = width
        self._names: dict[str, bytes] = {}
        self._recent: defaultdict[str, deque[bytes]] = defaultdict(lambda: deque(maxlen=12))

    def recent(self, name: str) -> str:
        return "\n".join("  " + line.decode("utf-8", "replace") for line in self._recent[name])

    def line(self, name: str, text: bytes) -> None:
        prefix = self._names.get(name)
        if prefix is None:
            label = f"{name:<{self._width}}| "
            if self._colour:
                label = f"\x1b[{_COLOURS[len(self._names) % len(_COLOURS)]}m{label}\x1b[0m"
            prefix = self._names[name] = label.encode()
        self._recent[name].append(text)
        # A reader that went away must not take the stack with it.
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(prefix + text.rstrip(b"\r") + b"\n")
            self._stream.flush()

    async def copy(self, name: str, reader: asyncio.StreamReader) -> None:
        """Copy lines until the end; a line over the limit is broken, not lost."""
        rest = b""
        while chunk := await reader.read(65536):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self.line(name, line)
            if len(rest) > LINE_LIMIT_BYTES:
                self.line(name, rest)
                rest = b""
        if rest:
            self.line(name, rest)


@dataclass
class Child:
    """One of our own processes. command: as for exec. env: its environment; more_env: called at each start for what may
    differ between starts. metrics_port: chosen at each start, the last one when it is still free."""

    name: str
    command: Sequence[str]
    env: Mapping[str, str]
    metrics_port: int
    metrics_host: str = "127.0.0.1"
    more_env: Callable[[], Mapping[str, str]] = dict
    restarts: int = 0
    pid: int | None = None
    started: float = 0.0  # epoch seconds
    exit_codes: list[int] = field(default_factory=list)
    _process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return f"http://{self.metrics_host}:{self.metrics_port}"

    async def run_once(self, output: Output, on_start: Callable[[], None]) -> int:
        """Start it and wait for its end; returns the exit code (negative: the signal)."""
        self.metrics_port = free_port(self.metrics_port)
        # A pipe of our own: asyncio's wait() also waits for the end of its pipes, which a grandchild may hold open.
        ours, theirs = os.pipe()
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                *self.command,
                env={**self.env, **self.more_env(), "PENSTOCK_METRICS_PORT": str(self.metrics_port)},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=theirs,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C must reach us alone, so that we stop things in order
                preexec_fn=die_with_parent(signal.SIGKILL),
            )
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        self.pid, self.started = process.pid, time.time()
        on_start()
        reader = asyncio.StreamReader()
        pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(ours, "rb")
        )
        copying = asyncio.create_task(output.copy(self.name, reader), name=f"output-{self.name}")
        code = await process.wait()
        self.pid = None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # what it has started and left behind
        await asyncio.wait([copying], timeout=1)  # unless that has left the group and holds the pipe
        copying.cancel()
        pipe.close()
        self.exit_codes.append(code)
        return code

    def signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)


class Children:
    """Keeps processes and services alive until :meth:`stop`, after which services still run: their owner stops them.
    on_change: called after every start and restart, so that process ids can be published."""

    def __init__(self, output: Output, on_change: Callable[[], None]) -> None:
        self.children: list[Child] = []
        self._output = output
        self._on_change = on_change
        self._stopping = asyncio.Event()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def keep_service(self, service: Service, after_restart: Callable[[], Awaitable[None]] | None = None) -> None:
        """Watch a service that runs already; ``after_restart`` brings back what a crash of it may have lost."""
        self._tasks[service.name] = asyncio.create_task(self._watch(service, after_restart), name=service.name)

    def keep(self, child: Child) -> None:
        """Start a process and restart it whenever it ends."""
        self.children.append(child)
        self._tasks[child.name] = asyncio.create_task(self._run(child), name=child.name)

    def check(self) -> None:
        """Raises StackError when a watcher itself broke, which is a bug: its process would not be restarted."""
        for task in self._tasks.values():
            if task.done() and not task.cancelled() and (broken := task.exception()) is not None:
                raise StackError(f"watching the processes failed: {broken!r}") from broken

    async def _run(self, child: Child) -> None:
        pauses = Pauses(FIRST_PAUSE_SECONDS)
        while not self._stopping.is_set():
            began = time.monotonic()
            try:
                code: int | str = await child.run_once(self._output, self._on_change)
            except OSError as exc:  # no memory or no process slot: may pass
                code = str(exc)
            if self._stopping.is_set():
                return
            wait = restart_pause(time.monotonic() - began, pauses)
            child.restarts += 1
            log.warning("process_died", name=child.name, code=code, restart_in_seconds=wait)
            await is_set_within(self._stopping, wait)

    async def _watch(self, service: Service, after_restart: Callable[[], Awaitable[None]] | None) -> None:
        pauses, began, incomplete = Pauses(FIRST_PAUSE_SECONDS), time.monotonic(), False
        while not await is_set_within(self._stopping, 0.1):
            if service.pid is not None and not incomplete:
                continue
            wait = restart_pause(time.monotonic() - began, pauses)
            log.warning("service_died", name=service.name, code=service.returncode, restart_in_seconds=wait)
            for line in tail(service.log_path).splitlines():
                self._output.line(service.name, line.encode())
            if await is_set_within(self._stopping, wait):
                return
            began = time.monotonic()
            try:
                incomplete = True
                if service.pid is None:
                    await service.start_async()
                if after_restart is not None:
                    await after_restart()
            except (PenstockError, OSError) as exc:
                log.error("service_restart_failed", name=service.name, error=str(exc).splitlines()[0])
                continue
            incomplete = False
            log.info("service_restarted", name=service.name, pid=service.pid)
            self._on_change()

    async def stop(self, grace_seconds: float) -> None:
        """SIGTERM to all processes together, SIGKILL to those left after the grace."""
        self._stopping.set()
        for child in self.children:
            child.signal(signal.SIGTERM)
        running = {self._tasks[child.name]: child for child in self.children}
        if running:
            _, late = await asyncio.wait(running, timeout=grace_seconds)
            for task in late:
                log.warning("process_killed", name=task.get_name(), after_seconds=grace_seconds)
                running[task].signal(signal.SIGKILL)
            if late:
                await asyncio.wait(late, timeout=5)
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
