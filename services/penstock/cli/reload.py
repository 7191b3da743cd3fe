"""`--reload`: a worker that is stopped and started again when a Python file changes."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType

from penstock.local.service import die_with_parent
from penstock.runtime.logs import log

_LOOK_SECONDS = 0.5
_SKIPPED = {"__pycache__", "node_modules", "site-packages", "venv"}


def run_reloading(arguments: Sequence[str]) -> int:
    """Run `penstock` with these arguments, again after each change of a Python file below the current folder, even if
    it has ended by then. Returns the exit code of the last one, after SIGTERM, SIGINT or SIGHUP."""
    stopped = threading.Event()
    command = [sys.executable, "-m", "penstock", *arguments]
    seen = _python_files()
    child = _start(command)

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.set()
        child.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, stop)
    while not stopped.wait(_LOOK_SECONDS):
        before, seen = seen, _python_files()
        changed = sorted({path for path, _ in before.items() ^ seen.items()})
        if not changed:
            continue
        log.info("reloading", files=",".join(changed[:5]), changed=len(changed))
        child.terminate()
        child.wait()
        if not stopped.is_set():
            child = _start(command)
            if stopped.is_set():  # the signal came meanwhile, and went to the one before
                child.terminate()
    return child.wait()


def _start(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start it in a session of its own, so that Ctrl-C reaches it once, from here; it ends with this process."""
    return subprocess.Popen(command, start_new_session=True, preexec_fn=die_with_parent(signal.SIGKILL))


def _python_files() -> dict[str, int]:
    """Python files below the current folder, with the time of their last change; hidden folders are left out."""
    found = {}
    for folder, folders, names in os.walk("."):
        folders[:] = [name for name in folders if name not in _SKIPPED and not name.startswith(".")]
        for name in names:
            path = os.path.join(folder, name)
            with suppress(FileNotFoundError):  # it is being replaced
                if name.endswith(".py"):
                    found[os.path.relpath(path)] = os.stat(path).st_mtime_ns
    return found
