"""A stack from outside: its folder, the lock on it, its `state.json`; a start in the background, and a stop."""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.local.service import make_private, open_log, python_path, tail, write_private
from penstock.protocol.errors import StackError
from penstock.runtime.logs import log

DEFAULT_FOLDER = Path(".penstock")
STOP_WITHIN_SECONDS = 120.0


class DataDir:
    """The folder of one stack, `.penstock` in the current folder when None, and the names in it."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = (path or DEFAULT_FOLDER).expanduser().absolute()
        self.state = self.path / "state.json"
        self.lock = self.path / "lock"
        self.log = self.path / "penstock.log"

    @property
    def option(self) -> str:
        """How a command names this folder; empty for the usual one."""
        return "" if self.path == DEFAULT_FOLDER.absolute() else f" --data-dir {str(self.path)!r}"

    def holder(self) -> int | None:
        """Process id of the stack that has this folder now, 0 until it has said so, None when there is none."""
        with self.using(), contextlib.suppress(FileNotFoundError), self.lock.open("rb") as file:
            try:
                # Shared: two askers must not see each other as the holder.
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return int(file.read() or b"0")
        return None

    def read_state(self) -> dict[str, Any] | None:
        """The state file of a stack that runs and is ready, else None."""
        return self.read_any_state() if self.holder() is not None else None

    def running_state(self) -> dict[str, Any]:
        """The state file of a stack that runs and is ready. Raises StackError without one."""
        state = self.read_state()
        if state is None:
            pid = self.holder()
            if pid is not None:
                raise StackError(f"the stack in {self.path} (process {pid}) is starting or stopping")
            raise StackError(f"nothing runs in {self.path}; `penstock up{self.option} --detach` starts it")
        return state

    def read_any_state(self) -> dict[str, Any] | None:
        """The state file, be its stack alive or not."""
        with self.using(), contextlib.suppress(FileNotFoundError, ValueError):
            state = json.loads(self.state.read_text("utf-8"))
            return state if isinstance(state, dict) else None
        return None

    def write_state(self, state: dict[str, Any]) -> None:
        """Replace the state file whole; 0600, since it holds the database's password."""
        new = self.state.with_name("state.json.new")
        write_private(new, json.dumps(state, indent=2) + "\n")
        new.replace(self.state)

    @contextlib.contextmanager
    def using(self) -> Iterator[None]:
        """Raises StackError where the block may not use the folder, such as one of another user."""
        try:
            yield
        except OSError as exc:
            raise StackError(f"{self.path} cannot be used as data folder ({exc.strerror}): choose --data-dir") from exc

    def prepare(self) -> None:
        with self.using():
            make_private(self.path)
            with contextlib.suppress(FileExistsError), (self.path / ".gitignore").open("x") as file:
                file.write("*\n")

    def describe_holder(self) -> str:
        """One sentence on the stack that runs here, and what to do."""
        state = self.read_any_state()
        where = f": api {state['api']}" if state else " and is starting"
        return (
            f"a stack runs already in {self.path} (process {self.holder()}){where}. "
            "`penstock ps` shows it, `penstock down` stops it, --data-dir starts another one"
        )

    @contextlib.contextmanager
    def held(self) -> Iterator[dict[str, Any] | None]:
        """Exclusive use of the folder, as long as this process lives or until the block ends. Yields the state file of
        a stack that was killed; it is removed, so that a state file is always the holder's."""
        with self.using():
            file = self.lock.open("a+", encoding="ascii")
        with file:
            for tries_left in reversed(range(20)):
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if not tries_left or self.read_state() is not None:
                        raise StackError(self.describe_holder()) from None
                    time.sleep(0.05)  # another process may only be asking, see holder()
            left_behind = self.read_any_state()
            try:
                self.state.unlink(missing_ok=True)
                file.truncate(0)
                file.write(str(os.getpid()))
                file.flush()
                yield left_behind
            finally:
                self.state.unlink(missing_ok=True)
                file.truncate(0)


def end_leftovers(state: dict[str, Any], wait_seconds: float = 10) -> None:
    """End processes of a stack that was killed; on Linux they end automatically, perhaps a little later. A process is
    ours when it has the id and the start time that the state file names."""
    import psutil

    leftovers = []
    for entry in state.get("processes", ()):
        with contextlib.suppress(psutil.Error, KeyError, TypeError):
            process = psutil.Process(entry["pid"])
            # Postgres is its own folder's business: it must be stopped its own way.
            if abs(process.create_time() - entry["started"]) < 1 and entry["name"] != "postgres":
                leftovers.append(process)
    for process in leftovers:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    for process in psutil.wait_procs(leftovers, timeout=wait_seconds)[1]:
        log.warning("leftover_killed", pid=process.pid)
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(leftovers, timeout=5)


def start_detached(data_dir: DataDir, arguments: Sequence[str], variables: Mapping[str, str]) -> dict[str, Any]:
    """Run `penstock up` with ``arguments`` in a session of its own, output to `penstock.log`; returns its state.
    variables: for its environment. Raises StackError with the end of the log when it exits, or if one runs already."""
    data_dir.prepare()
    if data_dir.holder() is not None:
        raise StackError(data_dir.describe_holder())
    with open_log(data_dir.log) as output:
        began_at = output.tell()
        child = subprocess.Popen(
            [sys.executable, "-m", "penstock", "up", *arguments],
            env=os.environ | variables | {"PYTHONPATH": python_path(), "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        while True:
            code = child.poll()
            if code is not None:
                words = tail(data_dir.log, 25, since=began_at)
                raise StackError(f"the stack did not start (exit code {code}); {data_dir.log} ends:\n{words}")
            if data_dir.holder() == child.pid and (state := data_dir.read_state()) is not None:
                return state
            time.sleep(0.05)
    except KeyboardInterrupt:
        child.terminate()
        child.wait()
        raise


def stop_detached(data_dir: DataDir) -> int | None:
    """Stop the stack of a folder and wait until it is gone; returns its process id, None when there was none."""
    while (pid := data_dir.holder()) == 0:  # it has just taken the folder
        time.sleep(0.05)
    if pid is None:
        return None
    import psutil

    try:
        process = psutil.Process(pid)
        os.kill(pid, signal.SIGTERM)
    except (ProcessLookupError, psutil.NoSuchProcess):
        return pid
    except PermissionError as exc:
        raise StackError(f"process {pid} belongs to another user: stop it as that user") from exc
    deadline = time.monotonic() + STOP_WITHIN_SECONDS
    while data_dir.holder() == pid:
        if time.monotonic() > deadline:
            raise StackError(f"process {pid} still stops after {STOP_WITHIN_SECONDS:g} s; see {data_dir.log}")
        time.sleep(0.05)
    with contextlib.suppress(psutil.Error):
        # It holds nothing any more; a zombie waits only for init, which in a container may take its time.
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
            time.sleep(0.02)
    return pid
