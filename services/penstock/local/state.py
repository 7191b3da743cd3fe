"""What is known of a stack from outside: its folder, the lock on it, and `state.json` with URLs and process ids."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from penstock.local.service import make_private
from penstock.protocol.errors import StackError
from penstock.runtime.logs import get_logger

log = get_logger()

DEFAULT_FOLDER = Path(".penstock")


@dataclass(frozen=True)
class DataDir:
    """The folder of one stack and the names in it."""

    path: Path

    @classmethod
    def of(cls, path: Path | None) -> DataDir:
        return cls((path or DEFAULT_FOLDER).expanduser().absolute())

    @property
    def state(self) -> Path:
        return self.path / "state.json"

    @property
    def lock(self) -> Path:
        return self.path / "lock"

    @property
    def log(self) -> Path:
        return self.path / "penstock.log"

    def holder(self) -> int | None:
        """Process id of the stack that has this folder now, None when there is none."""
        try:
            with self.lock.open("rb") as file:
                try:
                    # Shared: two askers must not see each other as the holder.
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return int(file.read() or b"0")
        except FileNotFoundError:
            pass
        return None

    def read_state(self) -> dict[str, Any] | None:
        """The state file of a stack that runs and is ready, else None."""
        return self.read_any_state() if self.holder() is not None else None

    def read_any_state(self) -> dict[str, Any] | None:
        """The state file, be its stack alive or not."""
        try:
            state = json.loads(self.state.read_text("utf-8"))
        except (OSError, ValueError):
            return None
        return state if isinstance(state, dict) else None

    def write_state(self, state: dict[str, Any]) -> None:
        """Replace the state file whole; 0600, since it holds the database's password."""
        new = self.state.with_name("state.json.new")
        new.unlink(missing_ok=True)
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            json.dump(state, file, indent=2)
            file.write("\n")
        new.replace(self.state)

    def remove_state(self) -> None:
        self.state.unlink(missing_ok=True)

    def prepare(self) -> None:
        """Make the folder; raises StackError when that cannot be."""
        try:
            make_private(self.path)
            with contextlib.suppress(FileExistsError), (self.path / ".gitignore").open("x") as file:
                file.write("*\n")
        except OSError as exc:
            raise StackError(f"{self.path} cannot be used as data folder ({exc.strerror}): choose --data-dir") from exc

    def describe_holder(self) -> str:
        """One sentence on the stack that runs here, and what to do."""
        state = self.read_any_state()
        where = f": api {state['api']}" if state else " and is starting"
        return (
            f"a stack runs already in {self.path} (process {self.holder()}){where}. "
            "`penstock ps` shows it, `penstock down` stops it, --data-dir starts another one"
        )


class Lock:
    """Exclusive use of a data folder, held as long as this process lives or until the block ends.

    left_behind: the state file of a stack that was killed; it is removed, so that a state file is always the holder's.
    """

    def __init__(self, data_dir: DataDir) -> None:
        self._data_dir = data_dir
        self._file: IO[str] | None = None
        self.left_behind: dict[str, Any] | None = None

    def __enter__(self) -> Lock:
        file = self._data_dir.lock.open("a+", encoding="ascii")
        for attempt in range(20):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if attempt == 19 or self._data_dir.read_state() is not None:
                    file.close()
                    raise StackError(self._data_dir.describe_holder()) from None
                time.sleep(0.05)  # another process may only be asking, see holder()
        self.left_behind = self._data_dir.read_any_state()
        self._data_dir.remove_state()
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        self._file = file
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._data_dir.remove_state()
            self._file.truncate(0)
            self._file.close()


def processes() -> Any:
    """psutil, which comes with `penstock[local]`. Raises StackError where that is not installed."""
    try:
        import psutil
    except ImportError as exc:
        raise StackError("psutil is not installed, which a local stack needs: pip install 'penstock[local]'") from exc
    return psutil


def end_leftovers(state: dict[str, Any], wait_seconds: float = 10) -> None:
    """End processes of a stack that was killed. On Linux they end automatically, perhaps a little later.

    A process is ours when it has the id and the start time that the state file names.
    """
    psutil = processes()
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
