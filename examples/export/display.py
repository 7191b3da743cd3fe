"""How far a run of the demo is: bars on a terminal, a line a second elsewhere."""

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


@dataclass(frozen=True)
class Snapshot:
    """Counts at one moment. rejected: messages that were not understood."""

    states: Mapping[str, int]
    rejected: int

    @property
    def settled(self) -> int:
        return sum(self.states.get(state, 0) for state in FINAL)

    def __str__(self) -> str:
        parts = [f"{state}={count}" for state, count in sorted(self.states.items())]
        return " ".join(parts + ([f"rejected={self.rejected}"] if self.rejected else []))


class Display:
    """Progress of ``total`` tasks on standard output; use it as a context."""

    def __init__(self, total: int) -> None:
        self._total = total
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
        if self._progress is not None:
            self._progress.update(self._settled_bar, completed=snapshot.settled, detail=str(snapshot))
            return
        self._shown = snapshot
        if time.monotonic() - self._printed >= _LINE_EVERY_SECONDS:
            self._print(snapshot)

    def _print(self, snapshot: Snapshot) -> None:
        self._printed, self._shown = time.monotonic(), None
        seconds = self._printed - self._began
        done = f"enqueued {self._fed}/{self._total}  settled {snapshot.settled}/{self._total}"
        print(f"{seconds:5.0f} s  {done}  {snapshot}", flush=True)
