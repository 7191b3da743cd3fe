"""Output of handlers: what they log, print and emit, collected by attempt and reported several times a second."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import deque
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from time import time
from typing import Any, TextIO, cast

import msgspec

from penstock.protocol.json_text import utf8_size
from penstock.protocol.output import MODES, PRINT, OutputEntry, OutputMode, encode_entries
from penstock.protocol.requests import pack
from penstock.runtime import metrics
from penstock.runtime.logs import message_of
from penstock.settings.model import Settings

_TEXT_CHARS = 8192  # of one line; the rest is cut
_PART_BYTES = 32_768  # of one report; six times as much if all of it is escaped, which a message still takes
_CHUNK_BYTES = 131_072
_ENTRY_BYTES = 80  # what surrounds a text

_LOGS, _PRINTS = MODES.index("logs"), MODES.index("prints")
_collecting: ContextVar[AttemptOutput | None] = ContextVar("output", default=None)


@dataclass(slots=True, eq=False)
class AttemptOutput:
    """Output of one attempt, its owner, which is added from any thread."""

    owner: Any
    left_bytes: int
    has_prints: bool
    changed: Callable[[AttemptOutput], None]
    dropped: int = 0
    reported_dropped: int = 0
    entries: deque[OutputEntry] = field(default_factory=deque)
    is_noted: bool = False
    line: str = ""

    def log(self, record: logging.LogRecord) -> None:
        text = message_of(record)
        if record.exc_info:
            text += "\n" + logging.Formatter().formatException(record.exc_info)
        text = _bounded(text)
        self.add(utf8_size(text), OutputEntry(
            at=record.created, level=record.levelname.lower()[:20], logger=record.name[:200], text=text
        ))  # fmt: skip

    def print(self, text: str) -> None:
        """Add the lines that end in a written text."""
        *lines, line = (self.line + text).split("\n")
        self.line = line[:_TEXT_CHARS]
        for line in map(_bounded, lines):
            self.add(utf8_size(line), OutputEntry(at=time(), level=PRINT, text=line))

    def emit(self, chunk: bytes) -> None:
        if len(chunk) > _CHUNK_BYTES:
            raise ValueError(f"a chunk has at most {_CHUNK_BYTES} bytes as JSON, not {len(chunk)}")
        self.add(len(chunk), OutputEntry(at=time(), chunk=msgspec.Raw(chunk)))

    def add(self, size: int, entry: OutputEntry) -> None:
        size += _ENTRY_BYTES
        if size > self.left_bytes:
            self.dropped += 1
            return
        self.left_bytes -= size
        self.entries.append(entry)
        if not self.is_noted:
            self.is_noted = True
            self.changed(self)


def _bounded(text: str) -> str:
    return text[:_TEXT_CHARS].replace("\0", "\ufffd")  # whose escape takes six bytes


class Outputs:
    """The output of a runner's attempts. send: takes an attempt, entries as JSON text, and the drops until now."""

    flush_seconds = 0.2

    def __init__(self, settings: Settings, send: Callable[[Any, str, int], None], on_loop: Callable[..., None]) -> None:
        self._settings = settings
        self._send = send
        self._note_change = partial(on_loop, self._later)
        self._changed: dict[AttemptOutput, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, owner: Any, mode: OutputMode | None, *, is_alone: bool = True) -> AttemptOutput | None:
        """Collect what the current context gives out for an attempt. is_alone: False in a batch, which has chunks."""
        level = MODES.index(mode or self._settings.task_output)
        if not level:
            return None
        has_prints = level >= _PRINTS
        output = AttemptOutput(owner, self._settings.output_limit_bytes, has_prints, self._note_change)
        if is_alone and level >= _LOGS:
            # All of these stay in place. The lines of penstock.task do not reach the root logger.
            logging.getLogger().addHandler(_all)
            logging.getLogger("penstock.task").addHandler(_own)
            if has_prints and not isinstance(sys.stdout, _Prints):
                sys.stdout = cast(TextIO, _Prints(sys.stdout))
            _collecting.set(output)
        return output

    def end(self, output: AttemptOutput | None) -> None:
        """Send what is left of an attempt's output."""
        if output is not None:
            self._changed.pop(output, None)
            if output.line:
                output.print("\n")
            self._flush(output)

    def _later(self, output: AttemptOutput) -> None:
        self._changed[output] = None
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self.flush_seconds, self._flush_changed)

    def _flush_changed(self) -> None:
        self._timer = None
        changed, self._changed = self._changed, {}
        for output in changed:
            self._flush(output)

    def _flush(self, output: AttemptOutput) -> None:
        output.is_noted = False
        entries: list[OutputEntry] = []
        while output.entries:  # a thread may add some meanwhile
            entries.append(output.entries.popleft())
        sizes = [len(entry.text or bytes(entry.chunk)) + _ENTRY_BYTES for entry in entries]
        parts = [entries[start:end] for start, end in pack(sizes, max_bytes=_PART_BYTES, max_items=len(entries))]
        dropped = output.dropped
        if not parts and dropped > output.reported_dropped:
            parts = [[]]
        for part in parts:
            self._send(output.owner, encode_entries(part), dropped)
            metrics.OUTPUT_ENTRIES.labels("reported").inc(len(part))
        if dropped > output.reported_dropped:
            metrics.OUTPUT_ENTRIES.labels("dropped").inc(dropped - output.reported_dropped)
            output.reported_dropped = dropped

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class _Collector(logging.Handler):
    """Adds records to the output of the attempt in whose context they are logged, but no lines of the worker itself."""

    def handle(self, record: logging.LogRecord) -> bool:
        output = _collecting.get()
        if output is not None and (self is _own or not f"{record.name}.".startswith("penstock.")):
            try:
                output.log(record)
            except Exception:  # as of any handler: a line with wrong arguments fails no task
                self.handleError(record)
        return True


class _Prints:
    """Standard output, whose lines are added to the output of the attempt in whose context they are written."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str, /) -> int:
        output = _collecting.get()
        if output is not None and output.has_prints:
            output.print(text)
        return self._stream.write(text)

    def writelines(self, lines: Iterable[str], /) -> None:
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


_all, _own = _Collector(), _Collector()
