"""Progress of a run of the demo: bars on a terminal, a line a second elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

FINAL = ("SUCCESS", "CRITICAL_ERROR", "CANCELLED")
_LINE_EVERY_SECONDS = 1.0
_STILL_SECONDS = 5.0  # without a task that settles, before the display says what it waits for


@dataclass(frozen=True)
class Snapshot:
    """Counts at one moment. rejected: malformed messages."""

    states: Mapping[str, int]
    rejected: int

    @property
    def settled(self) -> int:
        return sum(self.states.get(state, 0) for state in FINAL)

    def __str__(self) -> str:
        parts = [f"{state}={count}" for state, count in sorted(self.states.items())]
        return " ".join(parts + ([f"rejected={self.rejected}"] if self.rejected else []))

    def waits_for(self, stale_seconds: float) -> str:
        """Why no task settles, as text."""
        if sent := self.states.get("ACQUIRED", 0):
            whose = "task is" if sent == 1 else "tasks are"
            return f"{sent} {whose} with a worker; one that died is given up {stale_seconds:g} s after its last sign"
        if self.states.get("ERROR", 0):
            return "failed tasks wait for their next attempt"
        if self.states.get("SCHEDULED", 0):
            return "tasks wait for the scheduler"
        return "messages wait for the submitter"


class Display:
    """Progress of ``total`` tasks on standard output; use it as a context.

    stale_seconds: a sent task without a heartbeat for this long is retried.
    """

    def __init__(self, total: int, stale_seconds: float) -> None:
        self._total = total
        self._stale_seconds = stale_seconds
        self._settled = 0
        self._settled_at = time.monotonic()
        self._fed = 0
        self._began = time.monotonic()
        self._printed = float("-inf")
        self._shown: Snapshot | None = None
        self._progress: Progress | None = None
        if sys.stdout.isatty():
            self._progress = Progress(
                TextColumn("{task.description:<9}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                TextColumn("{task.fields[detail]}"), console=Console(),
            )  # fmt: skip
            self._fed_bar = self._progress.add_task("enqueued", total=total, detail="")
            self._settled_bar = self._progress.add_task("settled", total=total, detail="")

    def __enter__(self) -> Display:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
        elif self._shown is not None:
            self._print(self._shown)

    def fed(self, count: int) -> None:
        """So many more tasks were enqueued."""
        self._fed += count
        if self._progress is not None:
            self._progress.update(self._fed_bar, completed=self._fed)

    def show(self, snapshot: Snapshot) -> None:
        """The newest counts."""
        if snapshot.settled != self._settled:
            self._settled, self._settled_at = snapshot.settled, time.monotonic()
        if self._progress is not None:
            self._progress.update(self._settled_bar, completed=snapshot.settled, detail=self._detail(snapshot))
            return
        self._shown = snapshot
        if time.monotonic() - self._printed >= _LINE_EVERY_SECONDS:
            self._print(snapshot)

    def _print(self, snapshot: Snapshot) -> None:
        self._printed, self._shown = time.monotonic(), None
        seconds = self._printed - self._began
        done = f"enqueued {self._fed}/{self._total}  settled {snapshot.settled}/{self._total}"
        print(f"{seconds:5.0f} s  {done}  {self._detail(snapshot)}", flush=True)

    def _detail(self, snapshot: Snapshot) -> str:
        is_still = snapshot.settled < self._total and time.monotonic() - self._settled_at >= _STILL_SECONDS
        return f"{snapshot}  ({snapshot.waits_for(self._stale_seconds)})" if is_still else str(snapshot)
