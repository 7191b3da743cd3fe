"""The time of a test: the real time, moved on by `advance`, in this process and in Postgres."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path


class Clock:
    """moved: called with the whole offset from the real time whenever it changes."""

    def __init__(self, moved: Callable[[timedelta], None] = lambda offset: None) -> None:
        self.offset = timedelta()
        self._moved = moved

    def now(self) -> datetime:
        return datetime.now(UTC) + self.offset

    def seconds(self) -> float:
        """Epoch seconds."""
        return self.now().timestamp()

    def advance(self, *, days: float = 0, hours: float = 0, minutes: float = 0, seconds: float = 0) -> None:
        """Let time pass: delays, backoff, waits and schedules see it at the next drain. Raises ValueError."""
        step = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
        if step < timedelta():
            raise ValueError(f"the clock of a test moves on, never back: {step.total_seconds():g} s")
        self.offset += step
        self._moved(self.offset)

    def advance_to(self, instant: datetime) -> None:
        """Let time pass until an instant with a zone, if it lies ahead."""
        self.advance(seconds=max(0.0, (instant - self.now()).total_seconds()))


def clock_statements(schema: str, now: str, clock: str) -> str:
    """SQL that has the statements of a migrated database take the time from expressions, by a schema of this name."""
    text = Path(__file__).with_name("clock.sql").read_text("utf-8")
    return text.replace("{schema}", schema).replace("{now}", f"select {now}").replace("{clock}", f"select {clock}")
