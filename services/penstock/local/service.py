"""What the embedded Postgres and SQS have in common: a child process on a loopback port, with a folder of its own."""

import asyncio
import contextlib
import ctypes
import itertools
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import IO, Any

from penstock.protocol.errors import StackError

HOST = "127.0.0.1"
LOG_KEPT_BYTES = 16 * 1024 * 1024
_STARTS = 8  # tried before a port or a lock that stays taken is reported
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Service(ABC):
    """One embedded service: ``prepare`` its folder, ``spawn`` it, wait until it is ready, ``stop`` it. data_dir: a
    folder of its own, created when missing. The port is a free one, the same at later starts from there if it is free.
    """

    name: str
    stop_signal: signal.Signals = signal.SIGTERM  # also what the child gets when this process is killed
    start_within_seconds: float = 60
    passing_problem: str | None = None  # in the log of a child that exited and may succeed a moment later

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir.absolute()
        self.log_path = self.data_dir / f"{self.name}.log"
        self.port = 0
        self._port_path = self.data_dir / "port"
        self.started = 0.0  # epoch seconds of the last start
        self.restarts = -1  # starts after the first
        self._child: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def prepare(self) -> None:
        """Bring the folder into a state to start from; blocks; callable from any thread."""

    @abstractmethod
    def launch(self) -> tuple[Sequence[str], dict[str, Any]]:
        """The command to run in the foreground, and Popen's arguments with its environment. Raises StackError."""

    @abstractmethod
    def is_ready(self) -> bool:
        """Whether the child that runs now serves requests; cheap, never raises."""

    @property
    def pid(self) -> int | None:
        """Process id while the child lives, else None."""
        return self._child.pid if self._child is not None and self._child.poll() is None else None

    @property
    def returncode(self) -> int | None:
        """Exit code of the last child; None while it lives or before the first start."""
        return None if self._child is None else self._child.poll()

    def start(self) -> None:
        """Start and wait until ready. Call it from the main thread: the child dies with the thread that made it. Raises
        StackError with the end of the service's log and the next step."""
        self.prepare()
        for tries_left in reversed(range(_STARTS)):
            self.spawn()
            if self.wait_ready(tries_left):
                return

    async def start_async(self) -> None:
        """As :meth:`start`, without blocking the loop."""
        await asyncio.to_thread(self.prepare)
        for tries_left in reversed(range(_STARTS)):
            self.spawn()
            if await asyncio.to_thread(self.wait_ready, tries_left):
                return

    def spawn(self) -> None:
        if not self.port:
            last = None
            with contextlib.suppress(OSError, ValueError):
                last = int(self._port_path.read_text("ascii"))
            self.port = free_port(last)
        command, options = self.launch()
        # In a session of its own: Ctrl-C must reach us alone, so that we stop things in order.
        options |= {"start_new_session": True, "preexec_fn": die_with_parent(self.stop_signal)}
        self._child = self.run_logged(command, options)
        self.started = time.time()

    def run_logged(self, command: Sequence[str], options: Mapping[str, Any]) -> subprocess.Popen[bytes]:
        """Start a command in the folder, its output going to the log. options: more arguments of Popen."""
        with open_log(self.log_path) as output:
            return subprocess.Popen(
                command, cwd=self.data_dir, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, **options
            )

    def wait_ready(self, tries_left: int = 0) -> bool:
        """Block until the child serves; False when it exited and another try may succeed. Raises StackError when it
        exits for another reason, or takes longer than its limit."""
        deadline = time.monotonic() + self.start_within_seconds
        while not self.is_ready():
            code = self.returncode
            if code is not None:
                words = tail(self.log_path)
                where = f"{self.name} exited with code {code} on port {self.port}; {self.log_path} ends:\n{words}"
                is_port_taken = "address already in use" in words.lower()
                may_pass = bool(self.passing_problem and self.passing_problem in words)
                if is_port_taken:
                    may_pass = self.restarts < 0  # its URL stays valid over restarts
                    where = f"port {self.port} is taken; stop what uses it. {where}"
                if not (tries_left and may_pass):
                    raise StackError(where)
                if is_port_taken:
                    self.port = 0
                time.sleep(0.5)
                return False
            if time.monotonic() > deadline:
                self.stop()
                raise StackError(
                    f"{self.name} was not ready after {self.start_within_seconds:g} s; "
                    f"see {self.log_path}, which ends:\n{tail(self.log_path)}"
                )
            time.sleep(0.02)
        self.restarts += 1
        self._port_path.write_text(str(self.port), "ascii")
        return True

    def stop(self, grace_seconds: float = 15) -> None:
        """Stop gracefully, by force after the grace; no error when it does not run."""
        child = self._child
        if child is None:
            return
        for number in (self.stop_signal, signal.SIGQUIT, signal.SIGKILL):
            if child.poll() is not None:
                break
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(grace_seconds)
            grace_seconds = min(grace_seconds, 5)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)  # what the child itself has started and left behind


def python_path() -> str:
    """PYTHONPATH for our own children: the package that runs now, however it came to be importable."""
    here = str(Path(__file__).resolve().parents[2])
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join([here, *(path for path in inherited if path and path != here)])


_PORTS = range(20_000, 32_768)  # below those that Linux and macOS give to connections
_start = random.randrange(len(_PORTS))  # two stacks that start at once begin at different places
_ports: Iterator[int] = itertools.cycle((*_PORTS[_start:], *_PORTS[:_start]))


def free_port(preferred: int | None = None) -> int:
    """A TCP port of the loopback address without a listener; ``preferred`` if that one is free. It is none that a
    connection gets for its own end, nor one that was given out here before: between this call and the listening, which
    is another process's, a third one could take it."""
    if preferred and is_free(preferred):
        return preferred
    return next(port for port in itertools.islice(_ports, len(_PORTS)) if is_free(port))


def is_free(port: int, host: str = HOST) -> bool:
    """Whether ``port`` can be listened on now; ports in TIME_WAIT count as free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.suppress(OSError), socket.create_server((host, port), family=family):
        return True
    return False


def answers(url: str, **headers: str) -> bool:
    """Whether a GET of the URL is answered with 200 within two seconds; blocks."""
    request = urllib.request.Request(url, headers=headers)
    with contextlib.suppress(OSError, HTTPException), _direct.open(request, timeout=2) as response:
        return bool(response.status == 200)
    return False


def die_with_parent(number: signal.Signals) -> Callable[[], None] | None:
    """A ``preexec_fn`` after which the child gets signal ``number`` when this thread's process is killed. Linux only;
    None elsewhere, where `penstock up` ends leftovers at its next start instead."""
    if _libc is None:
        return None
    prctl, parent = _libc.prctl, os.getpid()

    def set_death_signal() -> None:
        prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
        if os.getppid() != parent:  # it died before the call above
            os._exit(1)

    return set_death_signal


def plain_environment() -> dict[str, str]:
    """What an embedded service is given of the caller's environment: no keys, passwords or settings of others."""
    passed_on = ("PATH", "HOME", "TMPDIR", "TZ", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
    return {name: os.environ[name] for name in passed_on if name in os.environ}


def open_log(path: Path) -> IO[bytes]:
    """A log to append to, which its owner alone may read; one that has grown over the limit is moved aside."""
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_size > LOG_KEPT_BYTES:
            path.replace(path.with_name(path.name + ".1"))
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab")


def write_private(path: Path, text: str) -> None:
    """Write a new file that its owner alone may read, instead of one of that name."""
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)


def make_private(folder: Path) -> None:
    """Make a folder that others can at most pass through, as root for the user that Postgres runs as."""
    folder.mkdir(mode=0o711 if os.geteuid() == 0 else 0o700, parents=True, exist_ok=True)


def tail(path: Path, lines: int = 12, *, since: int = 0) -> str:
    """The last lines of a log file behind byte ``since``, for an error message."""
    try:
        text = path.read_bytes()[since:][-8192:].decode("utf-8", "replace")
    except OSError:
        return "(no log)"
    return "\n".join("  " + line for line in text.splitlines()[-lines:]) or "(empty)"
