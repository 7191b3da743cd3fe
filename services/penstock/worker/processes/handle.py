"""A child process as the worker knows it."""

import asyncio
import signal
import socket
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from penstock.worker.processes import channel


@dataclass(frozen=True, slots=True)
class Ended:
    """How a child ended. code: as of ``subprocess``, negative for a signal; None: unknown, as its server ended too."""

    code: int | None = None
    peak_bytes: int = 0

    @property
    def signal(self) -> str | None:
        if self.code is None or self.code >= 0:
            return None
        with suppress(ValueError):
            return signal.Signals(-self.code).name
        return f"SIG{-self.code}"

    @property
    def data(self) -> dict[str, Any]:
        """For the error of a task."""
        exit_code = None if self.signal is not None else self.code
        return {"signal": self.signal, "exit_code": exit_code, "peak_rss_bytes": self.peak_bytes or None}

    @property
    def text(self) -> str:
        how = "its exit code is unknown" if self.code is None else self.signal or f"exit code {self.code}"
        return f"{how}, peak RSS {self.peak_bytes / 2**20:.0f} MiB" if self.peak_bytes else how


@dataclass(slots=True, eq=False)
class Child:
    """A child; it has a process id, reader and writer once it is forked. reason: why it is to end.

    is_ready: its lifespans are open.
    """

    connection: socket.socket
    ended: asyncio.Future[Ended]
    pid: int = 0
    calls: int = 0
    reason: str | None = None
    is_ready: bool = False
    reader: asyncio.StreamReader = field(init=False)
    writer: asyncio.StreamWriter = field(init=False)

    def send(self, *message: Any) -> None:
        self.writer.write(channel.frame(message))
