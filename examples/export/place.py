"""Where a demo runs: a folder that is its own, and the real commands, `penstock up`, `ps` and `down`, in it."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.local.service import python_path
from penstock.local.state import DataDir

APP = "examples.export"
_ROOT = Path(__file__).resolve().parents[2]
_LOCK = ".demo"  # in every folder of a demo, and in no other: that is how we know which ones may be emptied
_KEPT = ".kept"
_DOWN_WITHIN_SECONDS = 150.0
_INTERRUPTED_WITHIN_SECONDS = 90.0


class PlaceError(Exception):
    """The stack could not be started, or the folder not be used."""


class Place:
    """One stack in one folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.log = DataDir(path).log

    def up(self, env: Mapping[str, str], *, workers: int, within_seconds: float) -> dict[str, Any]:
        """Start a stack with the example's workers on a free port; returns its state. Raises PlaceError."""
        command = ("up", "--detach", "--port", "0", "--workers", str(workers), "--app", APP)
        self._run(command, within_seconds=within_seconds, env=env)
        state = self.state()
        if state is None:
            raise PlaceError(f"the stack came up and went away at once; see {self.log}")
        return state

    def state(self) -> dict[str, Any] | None:
        """What `penstock ps --json` prints, None when nothing runs."""
        try:
            state: dict[str, Any] = json.loads(self._run(("ps", "--json"), within_seconds=30))
        except PlaceError:
            return None
        return state

    def down(self) -> None:
        """Stop the stack, and wait until it is gone; fine when there is none."""
        self._run(("down",), within_seconds=_DOWN_WITHIN_SECONDS)

    def is_kept(self) -> bool:
        """Whether the stack that runs here was left running on purpose."""
        return self.is_running() and (self.path / _KEPT).exists()

    def keep(self) -> None:
        """Leave the stack to its user: no later demo will stop it."""
        (self.path / _KEPT).touch()

    def clear(self) -> None:
        """Empty the folder but for its lock; a stack that runs in it is one whose demo was killed, and is stopped."""
        if self.is_running():
            self.down()
        for entry in self.path.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif entry.name != _LOCK:
                entry.unlink()

    def is_running(self) -> bool:
        """Whether there is a stack, if only a starting or a stopping one."""
        return DataDir(self.path).holder() is not None

    def log_tail(self, lines: int = 30) -> str:
        """The last lines of the stack's log."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, self.log.stat().st_size - 65536))
                text = file.read().decode("utf-8", "replace")
        except OSError:
            return "  (there is none)"
        return "\n".join(f"  {line[:400]}" for line in text.splitlines()[-lines:])

    def next_steps(self, *, kept: bool) -> Iterator[str]:
        """Where to look now, one line each."""
        where = f"--data-dir {str(self.path)!r}"
        if kept:
            yield f"{'running':<12}penstock ps {where}"
            yield f"{'look':<12}penstock stats {where}; penstock tasks {where}"
            yield f"{'stop':<12}penstock down {where}"
        else:
            yield f"{'look':<12}penstock up {where} brings it back with its data"
            yield f"{'log':<12}{self.log}"

    def _run(self, command: tuple[str, ...], *, within_seconds: float, env: Mapping[str, str] | None = None) -> str:
        given = os.environ if env is None else env
        process = subprocess.Popen(
            [sys.executable, "-m", "penstock", *command, "--data-dir", str(self.path)],
            cwd=_ROOT,
            env={**given, "PYTHONPATH": os.pathsep.join((python_path(), str(_ROOT)))},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a Ctrl-C is for the demo, which then stops things in order
        )
        try:
            output, errors = process.communicate(timeout=within_seconds)
        except subprocess.TimeoutExpired as exc:
            self._interrupt(process)
            raise PlaceError(f"penstock {command[0]} took longer than {within_seconds:g} s; see {self.log}") from exc
        except BaseException:
            if command[0] != "down":
                self._interrupt(process)
            raise
        if process.returncode != 0:
            raise PlaceError(f"penstock {command[0]} exited with {process.returncode}: {(errors or output).strip()}")
        return output

    @staticmethod
    def _interrupt(process: subprocess.Popen[str]) -> None:
        """End a command the gentle way: an `up` then stops what it has started."""
        process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=_INTERRUPTED_WITHIN_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


@contextmanager
def own_place(wanted: Path) -> Iterator[Place]:
    """An empty folder that no other demo has, ``wanted`` if possible, else the first free of wanted-2, wanted-3, ...

    Raises PlaceError for a folder that holds something and was not made by a demo: that one is not emptied.
    """
    for number in itertools.count(1):
        place = Place(wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}"))
        with _locked(place.path) as is_ours:
            if is_ours and not place.is_kept():
                place.clear()
                yield place
                return


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Hold the folder's lock, or find that another demo holds it."""
    lock = folder / _LOCK
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not lock.exists() and any(folder.iterdir()):
            raise PlaceError(f"{folder} is not empty and no demo made it: name another folder by --data-dir")
        file = lock.open("a")
    except OSError as exc:
        raise PlaceError(f"{folder} cannot be used ({exc.strerror}): name another one by --data-dir") from exc
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
