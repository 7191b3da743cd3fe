"""Fork server: has loaded the application's modules, and forks a warm child within milliseconds when asked to.

It runs no thread and no event loop, so that a fork copies no lock that another thread holds. It reaps the children, and
reports how each ended. Started by the pool as ``python -m penstock.worker.processes.fork_server FD``.
"""

import ctypes
import faulthandler
import gc
import os
import pickle
import select
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from penstock.runtime.logs import log, setup_logging, setup_root
from penstock.runtime.periodic import Pauses
from penstock.settings.model import Settings
from penstock.worker.handlers.actions import load_app
from penstock.worker.processes import channel, child

_PR_SET_PDEATHSIG = 1
# Often sent to the whole group of processes, as by systemd: the worker lets the children end after their tasks.
_FOR_WORKER: dict[signal.Signals, Callable[..., Any] | signal.Handlers] = {
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGINT: signal.default_int_handler,
}


class ForkServer:
    def __init__(self, control: socket.socket, settings: Settings) -> None:
        self._control = control
        self._settings = settings
        self._alive: set[int] = set()
        self._ordered: deque[int] = deque()  # the sockets of children that are not forked yet
        self._pauses = Pauses()
        self._woken, self._waker = os.pipe()
        for end in (self._woken, self._waker):
            os.set_blocking(end, False)
        for number in (signal.SIGCHLD, *_FOR_WORKER):
            signal.signal(number, _note)  # not SIG_IGN, which what a handler starts would inherit
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)

    def serve(self) -> None:
        """Fork and reap until the worker hangs up; then kill every child."""
        self._send("ready")
        pause: float | None = None
        while True:
            control = self._control.fileno()
            readable, _, _ = select.select([control, self._woken], [], [], pause)
            if self._woken in readable:
                with suppress(BlockingIOError):
                    os.read(self._woken, 4096)
                self._reap()
            if control in readable:
                order, descriptors, _, _ = socket.recv_fds(self._control, channel.ORDER.size, 1)
                if not order:
                    break
                (pid,) = channel.ORDER.unpack(order)
                if not pid:
                    self._ordered.append(descriptors[0])
                elif pid in self._alive:  # its process id is not reused before it is reaped here
                    os.kill(pid, signal.SIGKILL)
            pause = self._fork_ordered()
        for pid in self._alive:
            os.kill(pid, signal.SIGKILL)

    def _fork_ordered(self) -> float | None:
        """Fork the children that are ordered; returns the seconds until the next try if the system refuses one."""
        server = os.getpid()
        while self._ordered:
            try:
                pid = os.fork()
            except OSError as exc:
                is_reported, seconds = self._pauses.is_reported, self._pauses.next_seconds()
                if is_reported:
                    log.warning("fork_failed", reason=str(exc), next_try_seconds=round(seconds, 1))
                return seconds
            descriptor = self._ordered.popleft()
            if pid == 0:
                self._become_child(descriptor, server)
            self._pauses.reset()
            os.close(descriptor)
            self._alive.add(pid)
            self._send("forked", pid)
        return None

    def _become_child(self, descriptor: int, server: int) -> NoReturn:
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            die_with(server)
            os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_heed)
            for end in (self._woken, self._waker, *self._ordered):
                os.close(end)
            self._control.close()
            with suppress(OSError):  # the kernel kills a child, not the worker, when memory runs out
                Path("/proc/self/oom_score_adj").write_text("1000", "ascii")
            child.run(socket.socket(fileno=descriptor), self._settings)
            code = 0
        except BaseException:
            log.exception("process_failed")
        finally:
            for stream in (sys.stdout, sys.stderr):
                with suppress(Exception):
                    stream.flush()
            os._exit(code)

    def _reap(self) -> None:
        with suppress(ChildProcessError):
            while self._alive:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid in self._alive:
                    self._alive.remove(pid)
                    self._send("ended", pid, os.waitstatus_to_exitcode(status), usage.ru_maxrss * child.MAXRSS_UNIT)

    def _send(self, *message: object) -> None:
        with suppress(BrokenPipeError):  # the worker has ended, and the next look finds it
            self._control.sendall(channel.frame(message))


_forking = threading.local()


def _note(number: int, frame: FrameType | None) -> None:
    """A signal has come: it wakes the fork server, and ends nothing."""


def _block() -> None:
    """Have a process that a handler forks get no signal before it heeds it."""
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_WORKER)


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _heed() -> None:
    """In a process that a handler forked, which ends it by these signals, as multiprocessing does."""
    for number, usual in _FOR_WORKER.items():
        if signal.getsignal(number) is _note:
            signal.signal(number, usual)
    _unblock()


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies; elsewhere than on Linux the closed socket ends it."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it died before


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    settings, apps, parent = pickle.load(sys.stdin.buffer)  # from the worker that started this process
    die_with(parent)
    faulthandler.enable()
    setup_logging("worker", level=settings.log_level, form=settings.log_format)
    for app in apps:
        load_app(app)
    setup_root("worker", level=settings.log_level, form=settings.log_format)
    threads = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if threads:
        log.warning(
            "threads_before_fork", threads=",".join(threads),
            hint="a module of --app starts threads when it is imported, which children do not have; start them later",
        )  # fmt: skip
    gc.collect()
    gc.freeze()  # the children share this memory as long as it is not written
    ForkServer(control, settings).serve()


if __name__ == "__main__":
    main()
