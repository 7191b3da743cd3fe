"""Shifts the wall clock of chosen Penstock processes: `CHAOS_CLOCK="scheduler=86400,worker=-3600"`, in seconds.

On PYTHONPATH it is imported before anything else. `time.time` and `datetime.now` are what Python code reads; the
monotonic clock stays right, as it does when a real clock jumps.
"""

from __future__ import annotations

import datetime
import os
import sys
import time


def _shift_seconds() -> float:
    asked = dict(pair.split("=") for pair in os.environ.get("CHAOS_CLOCK", "").split(",") if pair)
    words = sys.orig_argv
    name = words[words.index("penstock") + 1] if "penstock" in words[:-1] else ""
    return float(asked.get(name, 0))


def _shift(seconds: float) -> None:
    real = time.time

    def shifted() -> float:
        return real() + seconds

    class Shifted(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Shifted:
            return cls.fromtimestamp(shifted(), tz)

        @classmethod
        def utcnow(cls) -> Shifted:
            return cls.fromtimestamp(shifted(), datetime.UTC).replace(tzinfo=None)

    time.time = shifted
    time.time_ns = lambda: int(shifted() * 1e9)
    datetime.datetime = Shifted  # type: ignore[misc]


if _seconds := _shift_seconds():
    _shift(_seconds)
